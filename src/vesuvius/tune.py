"""`python -m vesuvius.tune`: the same as `vesuvius tune`."""

import sys

from vesuvius.commands.tune import main

if __name__ == "__main__":
    sys.exit(main())
