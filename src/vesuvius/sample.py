"""`python -m vesuvius.sample`: the same as `vesuvius sample`."""

import sys

from vesuvius.commands.sample import main

if __name__ == "__main__":
    sys.exit(main())
