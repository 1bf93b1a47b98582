"""`python -m vesuvius.bench`: the same as `vesuvius bench`."""

import sys

from vesuvius.commands.bench import main

if __name__ == "__main__":
    sys.exit(main())
