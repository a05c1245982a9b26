"""Run the command line ``dljob`` if Python is started with ``python -m dljob.cli``."""

import sys

from dljob.cli.entry import main

sys.exit(main())
