"""How is it called? One verb in each file. Verbs load their rooms when they run, so that `--help` is quick."""
