"""`python -m vesuvius.profile`: the same as `vesuvius profile`."""

from vesuvius.commands.profile import main

if __name__ == "__main__":
    raise SystemExit(main())
