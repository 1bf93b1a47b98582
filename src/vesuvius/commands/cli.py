"""`vesuvius <command> ...`: finds the command and runs it: log on the terminal, errors as one message and an exit code.

Also what all commands share: printing, and types of arguments.  Imports nothing heavy, so `vesuvius --help` answers at
once.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import functools
import importlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from vesuvius import __version__
from vesuvius.errors import (
    EXIT_CONFIG,
    EXIT_ERROR,
    EXIT_GUARD,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STOPPED,
    StorageError,
    VesuviusError,
)
from vesuvius.runlog.logfile import close_logs, is_lost_terminal, log_to_terminal, silence
from vesuvius.runlog.redact import redact

log = logging.getLogger(__name__)

_END_WITHIN_S = 0.5

COMMANDS = {
    "demo": "write a synthetic scroll and train a tiny model on it, in minutes",
    "init": "write a first config for a volume on this machine",
    "train": "train a model from a config file, or resume training",
    "tune": "find the fastest settings of a config on this machine",
    "sample": "draw samples from a trained model",
    "evaluate": "compare samples of a trained model with real patches",
    "volume": "import, describe, copy, list, verify or make volumes",
    "quarantine": "list what a run could not read, or clear it",
    "doctor": "check whether this machine is fit for a run, and say how to fix it",
    "profile": "train some steps; say where their time goes and what to try",
    "bench": "measure settings, loaders or numbers of ranks side by side",
    "report": "write what runs recorded as a page with curves",
    "memcheck": "show a run's memory, its limits and how close it is to being killed; also of dead runs",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command.  Returns the exit code.

    Args:
        argv: arguments; None = those of this process, which is then about to end.
    """
    with suppress(RuntimeError, ValueError):  # no standard error, or none with a descriptor
        faulthandler.enable(all_threads=False)  # a codec or a driver that crashes says where
    return _ended(_main, argv)


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
    shared = command in ("quarantine", "report")
    module = importlib.import_module(f"vesuvius.commands.{'runs' if shared else command}")
    exit_code: int = getattr(module, command if shared else "main")(rest)
    return exit_code


def _help() -> str:
    lines = "\n".join(f"  {name:10} {meaning}" for name, meaning in COMMANDS.items())
    return f"usage: vesuvius <command> [options]\n\ncommands:\n{lines}\n\nvesuvius <command> --help says more"


# ---- a command


def as_command(body: Callable[[list[str]], int]) -> Callable[..., int]:
    """Make a `main` of it: the log on the terminal, errors as one message and their exit code.

    Args:
        body: takes the arguments; where `main` is called without, those of this process, which is then about to end.
    """

    @functools.wraps(body)
    def main(argv: list[str] | None = None) -> int:
        return _ended(functools.partial(_run_command, body), argv)

    return main


def _ended(body: Callable[[list[str]], int], argv: list[str] | None) -> int:
    exit_code = body(sys.argv[1:] if argv is None else argv)
    if argv is None:
        end_soon(exit_code)
    return exit_code


def end_soon(exit_code: int) -> None:
    """End the process with this code even if threads or exit handlers block; at once after a stop, and where one of
    several ranks has failed: its GPU may not come to an end.

    Python waits for threads at exit, and one that reads from a store may block for minutes: it gets half a second.
    Once Python frees its modules no other thread runs, so that part cannot be cut short.
    """

    def end() -> None:
        time.sleep(_END_WITHIN_S)
        os._exit(exit_code)

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                silence(stream)  # else Python tries again at exit, and ends with 120
    if exit_code in (EXIT_STOPPED, EXIT_INTERRUPTED, EXIT_GUARD) or (exit_code and "RANK" in os.environ):
        os._exit(exit_code)
    threading.Thread(target=end, name="end-soon", daemon=True).start()


def _run_command(main: Callable[[list[str]], int], argv: list[str]) -> int:
    log_to_terminal()
    # Before torch loads its OpenMP: threads that spin for a partner which is not running hold the core it needs.
    # docs/performance.md has the figures.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        try:
            return main(argv)
        finally:
            say("", end="")  # flushes what argparse has printed
    except VesuviusError as error:
        log.error("%s", error)
        return error.exit_code
    except KeyboardInterrupt:
        log.error("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        log.exception("a bug in vesuvius, please report it: %s: %s", type(error).__name__, error)
        return EXIT_ERROR
    finally:
        close_logs()


def say(text: str, end: str = "\n", *, exact: bool = False) -> None:
    """Print a command's output, without secrets.  A reader that closes the pipe early, as `| head`, or a
    terminal that has closed, is not an error.

    Args:
        exact: print secrets too: what is read back needs them.

    Raises:
        StorageError: the output is a file on a full disk.
    """
    if sys.stdout is None:  # closed when the process started
        return
    try:
        print(text if exact else redact(text), end=end, flush=True)
    except OSError as error:
        lost = isinstance(error, BrokenPipeError) or (error.errno == errno.EIO and is_lost_terminal(sys.stdout))
        silence(sys.stdout)  # else Python tries to flush it again at exit
        if lost:
            return
        raise StorageError(
            f"the output must be writable; got {error}; free some space or write it elsewhere"
        ) from error


# ---- types of arguments: each raises argparse's error with the value and what is needed


def whole(least: int) -> Callable[[str], int]:
    """A whole number of at least so much."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


natural, positive = whole(0), whole(1)


def naturals(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    return tuple(natural(part.strip()) for part in text.split(","))


def triple(least: int, example: str) -> Callable[[str], tuple[int, int, int]]:
    """Three whole numbers z,y,x of at least so much."""

    def parse(text: str) -> tuple[int, int, int]:
        sizes = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
        if len(sizes) != 3 or min(sizes) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not three whole numbers z,y,x of at least {least}; try {example}"
            )
        z, y, x = sizes
        return z, y, x

    return parse


def lengths(text: str) -> tuple[float, float, float]:
    """Three numbers z,y,x above 0."""
    try:
        z, y, x = (positive_number(part.strip()) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers z,y,x above 0; try 7.91,7.91,7.91") from None
    return z, y, x


def positive_number(text: str) -> float:
    """A number above 0."""
    if (number := number_from_0(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def number_from_0(text: str) -> float:
    """A number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number
