"""What can go wrong for a user, and the exit code of the process that each kind ends in.

A message has three parts: the rule, the value received, what to change.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_GPU_MEMORY = 3
EXIT_GUARD = 4
EXIT_NONFINITE = 5
EXIT_DATA = 6
# Of `vesuvius memcheck` alone.
EXIT_MEMORY_WARN = 10
EXIT_MEMORY_CRITICAL = 11
EXIT_MEMORY_KILL = 12
EXIT_NO_RUN = 13
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class VesuviusError(Exception):
    """Base of all errors with a message for the user; ends the process with `exit_code`."""

    exit_code = EXIT_ERROR

    def __reduce__(self) -> Any:
        """Pickles also where the constructor takes other parameters than the message."""
        return _unpickled, (type(self), str(self), vars(self))


def _unpickled(kind: type[VesuviusError], message: str, attributes: dict[str, Any]) -> VesuviusError:
    error = kind.__new__(kind, message)
    Exception.__init__(error, message)
    vars(error).update(attributes)
    return error


class ConfigError(VesuviusError, ValueError):
    """The command line, the config file or their combination is wrong."""

    exit_code = EXIT_CONFIG


class GpuMemoryError(VesuviusError):
    """The GPU has less memory than the step needs.

    Attributes:
        remedy: what to change, overrides included; part of the message.
    """

    exit_code = EXIT_GPU_MEMORY

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class NoRunError(VesuviusError):
    """There is no such run, or process, to look at."""

    exit_code = EXIT_NO_RUN


class NonFiniteError(VesuviusError):
    """A loss, a gradient or a sample was infinite or NaN, in training `training.max_nonfinite` times in a row.

    Attributes:
        step: the training step that was the last of them, counted from 1; 0 elsewhere.
    """

    exit_code = EXIT_NONFINITE

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


class DataError(VesuviusError):
    """A volume is missing, malformed, unreadable or too small for what is asked of it."""

    exit_code = EXIT_DATA


class StorageError(DataError):
    """The run directory cannot be written, or what lies in it is damaged."""


@contextmanager
def storage_errors(target: str, remedy: str, but: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Raise an OSError of the body as a StorageError: `Cannot write TARGET: ERROR; REMEDY`.

    Args:
        but: errors passed on unchanged.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, but):
            raise
        raise StorageError(f"Cannot write {target}: {error}; {remedy}") from error


def one_line(error: BaseException | str, limit: int = 200) -> str:
    """The text of an error without line breaks and terminal colours, shortened."""
    text = " ".join(_ANSI.sub("", str(error)).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


_warned = set[tuple[str, object]]()


def warn_once(text: str, subject: object, *arguments: object) -> None:
    """Log a warning about an address, a volume or a folder, unless this process has."""
    if (text, subject) not in _warned:
        _warned.add((text, subject))
        logging.getLogger(__name__).warning(text, subject, *arguments)
