"""What every door does around its own main: log to the terminal, turn errors into one message and an exit code."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from vesuvius.errors import EXIT_ERROR, EXIT_GUARD, EXIT_INTERRUPTED, EXIT_STOPPED, StorageError, VesuviusError
from vesuvius.observe.logfile import close_logs, log_to_terminal, silence

log = logging.getLogger(__name__)

_END_WITHIN_S = 0.5


def run_door(door: Callable[[list[str]], int], argv: list[str] | None, *, check_install: bool = True) -> int:
    """Run a command's own main with the log on the terminal, its errors as one message and their exit code.

    Args:
        argv: arguments; None = those of this process, which is then about to end.
        check_install: warn of another distribution of the same name; costs some hundredths of a second.
    """
    exit_code = _run_door(door, sys.argv[1:] if argv is None else argv, check_install)
    if argv is None:
        end_soon(exit_code)
    return exit_code


def end_soon(exit_code: int) -> None:
    """Have the process end with this code although threads or exit handlers hold it up, and behind a stop at once.

    Python would wait for threads that read from a store, which may not answer for minutes: half a second is enough.
    Once it frees its modules no other thread runs: that takes as long as it takes.
    """

    def end() -> None:
        time.sleep(_END_WITHIN_S)
        os._exit(exit_code)

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    if exit_code in (EXIT_STOPPED, EXIT_INTERRUPTED, EXIT_GUARD):
        os._exit(exit_code)
    threading.Thread(target=end, name="end-soon", daemon=True).start()


def _run_door(door: Callable[[list[str]], int], argv: list[str], check_install: bool) -> int:
    log_to_terminal()
    if check_install:
        warn_of_namesake()
    try:
        try:
            return door(argv)
        finally:
            say("", end="")  # what argparse has printed is still to be flushed
    except VesuviusError as error:
        log.error("%s", error)
        return error.exit_code
    except KeyboardInterrupt:
        log.error("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        log.error(
            "a defect of vesuvius, please report it: %s: %s\n%s", type(error).__name__, error, traceback.format_exc()
        )
        return EXIT_ERROR
    finally:
        close_logs()


def say(text: str, end: str = "\n") -> None:
    """Print what was asked for.  A reader that leaves before the end, as `| head` does, is no error.

    Raises:
        StorageError: the output is a file on a full disk.
    """
    if sys.stdout is None:  # the process was started with it closed
        return
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        silence(sys.stdout)
    except OSError as error:
        silence(sys.stdout)  # else Python tries again when it exits
        raise StorageError(
            f"the output must be writable; got {error}; free some space or write it elsewhere"
        ) from error


def positive_number(text: str) -> float:
    """An argument of argparse that is a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0; got {text}")
    return number


def warn_of_namesake() -> None:
    """Another distribution owns the import name `vesuvius`; with both installed, one overwrites files of the other."""
    import importlib.metadata  # takes as long as the rest of what memcheck needs

    try:
        version = importlib.metadata.version("vesuvius")
    except importlib.metadata.PackageNotFoundError:
        return
    log.warning(
        "the distribution 'vesuvius' %s is installed beside ours ('vesuvius-diffusion') and both own the import name "
        "vesuvius; uninstall it and reinstall ours, or use a fresh virtual environment",
        version,
    )
