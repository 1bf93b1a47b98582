"""`python -m vesuvius.train`: the same as `vesuvius train`."""

from vesuvius.commands.train import main

if __name__ == "__main__":
    raise SystemExit(main())
