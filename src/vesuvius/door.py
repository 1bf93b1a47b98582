"""What every door does around its own main: log to the terminal, turn errors into one message and an exit code."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import traceback
from collections.abc import Callable

from vesuvius.errors import EXIT_ERROR, EXIT_INTERRUPTED, VesuviusError
from vesuvius.observe.logfile import close_logs, log_to_terminal

log = logging.getLogger(__name__)


def run_door(door: Callable[[list[str]], int], argv: list[str] | None) -> int:
    """Run a command's own main with the log on the terminal, its errors as one message and their exit code."""
    log_to_terminal()
    warn_of_namesake()
    try:
        return door(sys.argv[1:] if argv is None else argv)
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


def warn_of_namesake() -> None:
    """Another distribution owns the import name `vesuvius`; with both installed, one overwrites files of the other."""
    try:
        version = importlib.metadata.version("vesuvius")
    except importlib.metadata.PackageNotFoundError:
        return
    log.warning(
        "the distribution 'vesuvius' %s is installed beside ours ('vesuvius-diffusion') and both own the import name "
        "vesuvius; uninstall it and reinstall ours, or use a fresh virtual environment",
        version,
    )
