"""`python -m vesuvius.sample`: the same as `vesuvius sample`."""

from vesuvius.commands.sample import main

if __name__ == "__main__":
    raise SystemExit(main())
