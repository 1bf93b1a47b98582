"""`python -m vesuvius <command> ...`: the same as `vesuvius <command> ...`."""

import sys

from vesuvius_diffusion import main

if __name__ == "__main__":
    sys.exit(main())
