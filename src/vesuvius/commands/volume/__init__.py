"""`vesuvius volume`: make, import, look at, copy, list and verify volumes."""

from __future__ import annotations

import argparse

from vesuvius.commands.cli import as_command
from vesuvius.commands.volume.look import add_info, add_occupancy, add_verify
from vesuvius.commands.volume.make import add_copy, add_import, add_synth


@as_command
def main(argv: list[str]) -> int:
    """Run `vesuvius volume ARGV`; the exit code.  A wrong command line raises SystemExit(2), as argparse does."""
    parser = argparse.ArgumentParser(
        prog="vesuvius volume", description="Make, import, look at, copy, list and verify volumes."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_synth, add_info, add_copy, add_import, add_occupancy, add_verify):
        add(commands)
    arguments = parser.parse_args(argv)
    exit_code: int = arguments.run(arguments)
    return exit_code
