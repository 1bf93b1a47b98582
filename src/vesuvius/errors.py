"""Errors a user can cause, and the exit codes of the process.

A message leads with what failed, then the value, then the remedy.
"""

import copyreg
import errno
import importlib.util
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_GPU_MEMORY = 3
EXIT_GUARD = 4
EXIT_NONFINITE = 5
EXIT_DATA = 6
EXIT_NO_RESULT = 7  # a check of `doctor` failed; `tune` or `bench` could measure nothing
# Only for `vesuvius memcheck`.
EXIT_MEMORY_WARN = 10
EXIT_MEMORY_CRITICAL = 11
EXIT_MEMORY_KILL = 12
EXIT_NO_RUN = 13
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130

STOP_SIGNALS = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM,
    signal.SIGPROF, signal.SIGPWR,
)  # fmt: skip
"""Signals that end a process unless it handles them, and that schedulers send to all processes of a job."""

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class VesuviusError(Exception):
    """Base of all errors with a message for the user; the process exits with `exit_code`."""

    exit_code = EXIT_ERROR

    def __reduce__(self) -> Any:
        """Pickle even if the constructor takes other parameters than the message."""
        return copyreg.__newobj__, (type(self), str(self)), vars(self)  # type: ignore[attr-defined]


class ConfigError(VesuviusError, ValueError):
    """The command line, the config file or their combination is wrong."""

    exit_code = EXIT_CONFIG


class GpuMemoryError(VesuviusError):
    """The GPU has less memory than the step needs; `remedy`, part of the message, says what to change."""

    exit_code = EXIT_GPU_MEMORY

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class NoRunError(VesuviusError):
    exit_code = EXIT_NO_RUN


class NonFiniteError(VesuviusError):
    """A loss, gradient or sample was infinite or NaN; `step`: the last such one in training, from 1; 0 = none."""

    exit_code = EXIT_NONFINITE

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


class DataError(VesuviusError):
    """A volume is missing, malformed, unreadable or too small."""

    exit_code = EXIT_DATA


class StorageError(DataError):
    """A file cannot be written, or a file in the run directory is damaged."""


class RunMovedError(StorageError, OSError):
    """The run directory was moved, deleted or replaced while the run was using it."""


_TRAIN = (
    "boto3 botocore grpc jinja2 matplotlib PIL prometheus_client pyarrow pynvml ray rich safetensors scipy tensorboard"
)
_IMPORT = "h5py imagecodecs nibabel pydicom tensorstore tifffile"
_EXTRAS = {"train": _TRAIN.split(), "import": _IMPORT.split()}  # of the distribution: modules that they bring


@contextmanager
def needs_extra(what: str, module: str = "") -> Iterator[None]:
    """Raise ConfigError if the body, or `what` at once, needs a module of an extra that is not installed."""
    try:
        if module and sys.modules.get(module) is None and importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        for extra in (extra for extra, modules in _EXTRAS.items() if name in modules):
            remedy = f"pip install 'vesuvius-diffusion[{extra}]'"
            raise ConfigError(f"{what} needs {name}, which is not installed; {remedy}") from None
        raise


FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_FREE = "free some space"
_REMEDIES = {
    **dict.fromkeys(FULL_DISK, _FREE),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "correct the permissions"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit on open files (`ulimit -n`)"),
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`)",
    errno.EROFS: "remount the disk with write access (the system log says why it is read-only)",
    errno.ENAMETOOLONG: "choose a shorter name",
    **dict.fromkeys((errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR), "move away what is in its place"),
    errno.ENOENT: "check that the folder exists and its disk is mounted",
}


def broken_link(path: Path) -> str:
    """Name a link in a path that leads nowhere, with its target; '' if there is none.  Reads the links."""
    for each in (path, *path.parents):
        if os.path.islink(each) and not os.path.exists(each):
            return f"{each} is a link to {os.readlink(each)}, which does not exist: mount its disk or change the link"
    return ""


def disk_remedy(error: BaseException) -> str:
    """Remedy for an OSError of a write: space only for a full disk; a link to nowhere is named."""
    named, of_rust = getattr(error, "filename", None), re.search(r"\(os error (\d+)\)", str(error))
    number = getattr(error, "errno", None) or (int(of_rust[1]) if of_rust else errno.ENOSPC)
    if isinstance(named, str) and (link := broken_link(Path(named))):
        return link
    return _REMEDIES.get(number, "check the disk and its mount")


def disk_path(text: str | os.PathLike[str], of: str = "") -> Path:
    """Return the full path of a file or folder on a disk; expands `~`, accepts file://.  `of` precedes it in messages.

    Raises ConfigError: it is another address, which would become a folder `s3:`; it has a `~name` or `$NAME` that
    nothing has replaced; or the working directory is gone.
    """
    path = without_file_scheme(os.fsdecode(text))
    if re.match(r"[a-z][a-z0-9+.-]+:/", path) or not path:  # pathlib makes one slash of two
        raise ConfigError(f"{of}{path!r} is not a path on a disk; give a path (of a mount, or to copy from)")
    path = os.path.expanduser(path)
    for above in re.finditer(rf"(?<![^/])[~$][^/]*(?=/{'|$' if of else ''})", path):  # `of` a variable: of a folder
        if not os.path.lexists(path[: above.end()]):
            text = "is no folder, and names no home directory or variable that is known here"
            raise ConfigError(f"{of}{path!r}: {above[0]!r} {text}; write out the path, or make a folder of that name")
    try:
        return Path(path).absolute()
    except FileNotFoundError as error:
        raise system_error(error) or error from None


def without_file_scheme(text: str) -> str:
    """Return a path in place of its file:// address; other texts as they are."""
    return unquote("/" + text.removeprefix("file://").partition("/")[2]) if text.startswith("file://") else text


def system_error(error: Exception) -> VesuviusError | None:
    """Return the error to report for one of the system that nothing has translated; None for a defect of the program.

    If a relative path was not found, asks for the working directory.
    """
    refused = re.search(r"(can't|Cannot|Unable to) allocate|bad_alloc|can't start new thread", str(error))
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and refused):
        remedy = "lower the batch size, the patch size or the workers, or raise the limits (`ulimit -v`, `ulimit -u`)"
        return VesuviusError(f"The system gives this process no more memory or threads: {one_line(error)}; {remedy}")
    if not isinstance(error, OSError):
        return None
    if isinstance(error, FileNotFoundError) and not os.path.isabs(error.filename or ""):
        try:
            os.getcwd()
        except OSError:
            return ConfigError("The working directory no longer exists; change to another folder, repeat the command")
    frames = traceback.extract_tb(error.__traceback__)
    ours = [at for at in frames if at.filename.startswith(os.path.dirname(__file__))] or frames
    where = "".join(f" ({Path(at.filename).name}:{at.lineno})" for at in ours[-1:])
    return VesuviusError(f"System error: {error}{where}" + (f"; {disk_remedy(error)}" if error.filename else ""))


@contextmanager
def storage_errors(target: str, remedy: str, but: tuple[type[OSError], ...] = ()) -> Iterator[None]:
    """Raise an OSError of the body, except `but`, as a StorageError: `Cannot write TARGET: ERROR; REMEDY`.

    The remedy is that of a full disk; other errors have their own in place of "free some space".
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, (*but, RunMovedError)):
            raise
        remedy = remedy.replace(_FREE, disk_remedy(error))
        raise StorageError(f"Cannot write {target}: {error}; {remedy}") from error


def one_line(error: BaseException | str, limit: int = 200) -> str:
    """The text of an error on one line, without terminal colors, shortened."""
    text = " ".join(_ANSI.sub("", str(error)).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


_warned = set[tuple[str, object]]()


def warn_once(text: str, subject: object, *arguments: object) -> None:
    """Log a warning about a subject (an address, a volume or a folder) once per process."""
    if (text, subject) not in _warned:
        _warned.add((text, subject))
        logging.getLogger(__name__).warning(text, subject, *arguments)
