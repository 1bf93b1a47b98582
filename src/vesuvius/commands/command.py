"""Runs a command: logs to the terminal, turns errors into one message and an exit code."""

from __future__ import annotations

import errno
import functools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from vesuvius.errors import EXIT_ERROR, EXIT_GUARD, EXIT_INTERRUPTED, EXIT_STOPPED, StorageError, VesuviusError
from vesuvius.runlog.logfile import close_logs, is_lost_terminal, log_to_terminal, silence
from vesuvius.runlog.redact import redact

log = logging.getLogger(__name__)

_END_WITHIN_S = 0.5


def as_command(body: Callable[[list[str]], int]) -> Callable[..., int]:
    """Make a `main` of it: the log on the terminal, errors as one message and their exit code.

    Args:
        body: takes the arguments; where `main` is called without, those of this process, which is then about to end.
    """

    @functools.wraps(body)
    def main(argv: list[str] | None = None) -> int:
        exit_code = _run_command(body, sys.argv[1:] if argv is None else argv)
        if argv is None:
            end_soon(exit_code)
        return exit_code

    return main


def end_soon(exit_code: int) -> None:
    """End the process with this code even if threads or exit handlers block; after a stop, at once.

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
    if exit_code in (EXIT_STOPPED, EXIT_INTERRUPTED, EXIT_GUARD):
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
        log.error(
            "a bug in vesuvius, please report it: %s: %s\n%s", type(error).__name__, error, traceback.format_exc()
        )
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
