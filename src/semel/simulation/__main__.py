"""`python -m semel.simulation --seeds N [--first-seed S] [--json] [--trace]`."""

import sys

from semel.simulation.run import main

sys.exit(main())
