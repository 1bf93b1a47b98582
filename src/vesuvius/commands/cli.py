"""`vesuvius <command> ...`: finds the command.  Imports nothing heavy, so `vesuvius --help` answers at once."""

from __future__ import annotations

import faulthandler
import importlib
import sys
from contextlib import suppress

from vesuvius import __version__
from vesuvius.errors import EXIT_CONFIG, EXIT_OK

COMMANDS = {
    "init": "write a first config for a volume on this machine",
    "train": "train a model from a config file, or resume training",
    "tune": "find the fastest settings of a config on this machine",
    "sample": "draw samples from a trained model",
    "evaluate": "compare samples of a trained model with real patches",
    "volume": "describe, copy, list, verify or make volumes",
    "quarantine": "list what a run could not read, retry it, or clear it",
    "doctor": "check whether this machine is fit for a run, and say how to fix it",
    "profile": "train some steps; say where their time goes and what to try",
    "bench": "measure settings, loaders or numbers of ranks side by side",
    "report": "write what runs recorded as a page with curves, and as Markdown",
    "memcheck": "show a run's memory, its limits and how close it is to being killed; also of dead runs",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command.  Returns the exit code.

    Args:
        argv: arguments; None = those of this process, which is then about to end.
    """
    with suppress(RuntimeError, ValueError):  # no standard error, or none with a descriptor
        faulthandler.enable(all_threads=False)  # a codec or a driver that crashes says where
    exit_code = _main(sys.argv[1:] if argv is None else argv)
    if argv is None and "vesuvius.commands.command" in sys.modules:
        from vesuvius.commands.command import end_soon

        end_soon(exit_code)
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
        print(f"{command!r} is none of the commands {', '.join(COMMANDS)}; see `vesuvius --help`", file=sys.stderr)
        return EXIT_CONFIG
    exit_code: int = importlib.import_module(f"vesuvius.commands.{command}").main(rest)
    return exit_code


def _help() -> str:
    lines = [f"  {name:10} {meaning}" for name, meaning in COMMANDS.items()]
    return (
        "usage: vesuvius <command> [options]\n\ncommands:\n"
        + "\n".join(lines)
        + "\n\nvesuvius <command> --help says more"
    )
