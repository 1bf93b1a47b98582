"""`python -m vesuvius.bench`: the same as `vesuvius bench`."""

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module("vesuvius.commands.bench").main())  # commands stand above this package
