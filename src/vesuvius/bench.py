"""`python -m vesuvius.bench`: the same as `vesuvius bench`."""

from vesuvius.commands.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
