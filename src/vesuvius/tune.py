"""`python -m vesuvius.tune`: the same as `vesuvius tune`."""

from vesuvius.commands.tune import main

if __name__ == "__main__":
    raise SystemExit(main())
