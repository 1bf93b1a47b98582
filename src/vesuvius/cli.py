"""`vesuvius <command> ...`: finds the door of a command.  Imports nothing heavy: `vesuvius --help` answers at once."""

from __future__ import annotations

import importlib
import sys

from vesuvius import __version__
from vesuvius.errors import EXIT_CONFIG, EXIT_OK

COMMANDS = {
    "train": "train a model from a config file, or go on training it",
    "tune": "find out by short runs how a config trains fastest on this machine",
    "sample": "draw samples of a trained model",
    "volume": "describe, copy, list, verify or make volumes",
    "quarantine": "list what a run could not read, try it again, or forget it",
    "memcheck": "show the memory of a run, what limits it and how near a kill is; also of a dead one",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command.  Returns the exit code.

    Args:
        argv: arguments; None = those of this process, which is then about to end.
    """
    exit_code = _main(sys.argv[1:] if argv is None else argv)
    if argv is None and "vesuvius.door" in sys.modules:
        importlib.import_module("vesuvius.door").end_soon(exit_code)
    return exit_code


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(_help())
        return EXIT_OK if arguments else EXIT_CONFIG
    if arguments[0] == "--version":
        print(f"vesuvius {__version__}")
        return EXIT_OK
    command, *rest = arguments
    if command not in COMMANDS:
        print(
            f"a command must be one of {', '.join(COMMANDS)}; got {command!r}; see `vesuvius --help`", file=sys.stderr
        )
        return EXIT_CONFIG
    exit_code: int = importlib.import_module(f"vesuvius.{command}").main(rest)
    return exit_code


def _help() -> str:
    lines = [f"  {name:10} {meaning}" for name, meaning in COMMANDS.items()]
    return (
        "usage: vesuvius <command> [options]\n\ncommands:\n"
        + "\n".join(lines)
        + "\n\nvesuvius <command> --help says more"
    )
