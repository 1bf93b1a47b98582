"""`python -m vesuvius.profile`: the same as `vesuvius profile`."""

import sys

from vesuvius.commands.profile import main

if __name__ == "__main__":
    sys.exit(main())
