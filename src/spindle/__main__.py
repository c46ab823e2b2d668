"""`python -m spindle` is the command `spindle`."""

from spindle.cli.main import main

main()
