"""`python -m vesuvius.train`: the same as `vesuvius train`."""

import sys

from vesuvius_diffusion import main

if __name__ == "__main__":
    sys.exit(main("vesuvius.commands.train"))
