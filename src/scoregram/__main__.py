"""`python -m scoregram`: the command line, where no script is installed."""

import sys

from scoregram.cli import main

sys.exit(main())
