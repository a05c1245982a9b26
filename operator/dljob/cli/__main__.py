"""``python -m dljob.cli``."""

import sys

from dljob.cli.entry import main

sys.exit(main())
