"""``python -m inloop.cli``."""

import sys

from inloop.cli import main

sys.exit(main())
