"""`python -m spindle` is the command `spindle`."""

import sys

from spindle.cli.main import main

sys.exit(main())
