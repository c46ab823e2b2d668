"""How is it called? One verb in each file. Verbs import other packages when they run, so that `--help` is quick."""
