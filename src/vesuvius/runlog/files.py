"""Files that survive a crash: appended to, replaced as a whole, locked, written late; and the room on their disk."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from vesuvius.errors import StorageError

log = logging.getLogger(__name__)

_KEPT_LINES = 10_000  # that may wait; what comes beyond is lost
_KEPT_CALLS = 1000
# What file systems without flock say: NFS without its lock service, Lustre without the mount option, some of FUSE.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def write_atomically(path: Path, data: bytes, check: Callable[[BinaryIO], None] = lambda file: None) -> None:
    """Through a file beside it, so that who reads at any moment finds the old one or the new one whole.

    Args:
        check: given the flushed file before it gets its name.

    Raises OSError, and leaves nothing behind then.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w+b") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            check(file)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Flush a file or the names in a directory to disk.  Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendFile:
    """An append-only text file that outlives a full disk.

    A line is handed to the system at once.  What the disk does not take is kept in memory, the rest of a half-written
    line first, and tried again with the next line: once there is room, the file holds every line whole and in order.
    The log says when lines begin to wait, when they are written, and how many were lost.  Threads and signal handlers
    may write.

    Args:
        path: the file; a last line that a crash has torn is closed.

    Raises:
        OSError: on opening, where the file cannot be opened.  Nothing else raises it.
    """

    def __init__(self, path: Path) -> None:
        self._waiting = deque([b"\n"] if _is_torn(path) else [])
        self._path = path
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._failing, self._lost = False, 0
        self._writing = threading.Lock()

    def write_line(self, text: str) -> None:
        """Append a text and a newline; nothing once it is closed."""
        if self._descriptor is None:
            return
        self._waiting.append(text.encode("utf-8", "backslashreplace") + b"\n")
        # Where the lock is taken, a thread or the code below this signal handler is writing, and takes this line along.
        while self._waiting and self._descriptor is not None and self._writing.acquire(blocking=False):
            try:
                error = self._write_waiting()
            finally:
                self._writing.release()
            self._say_if_changed(error)
            if error is not None:
                return

    def close(self) -> None:
        """Write what waits, if the disk takes it now, and close the file."""
        with self._writing:
            if self._descriptor is None:
                return
            error, descriptor, self._descriptor = self._write_waiting(), self._descriptor, None
            try:
                os.close(descriptor)
            except OSError as late:  # network file systems say only now that the disk is full
                error = error or late
        if error is None:
            self._say_if_changed(None)
        else:
            lost = self._lost + len(self._waiting)
            log.error("%s must be writable; got %s; free some space: %d lines are lost", self._path, error, lost)

    def _write_waiting(self) -> OSError | None:
        """Write until nothing waits, or no more than may wait: then returns what the system said."""
        while self._waiting and self._descriptor is not None:
            line = self._waiting[0]
            try:
                written = os.write(self._descriptor, line)
            except OSError as error:
                while len(self._waiting) > _KEPT_LINES:  # the newest, as the first may be the rest of a torn line
                    self._waiting.pop()
                    self._lost += 1
                return error
            if written < len(line):  # the disk is full now: the next write says so
                self._waiting[0] = line[written:]
            else:
                self._waiting.popleft()
        return None

    def _say_if_changed(self, error: OSError | None) -> None:
        """Called without the lock, and sets the state first: a message about the run's log is a line of that log."""
        if self._failing == (error is not None):
            return
        self._failing = error is not None
        if error is not None:
            what = f"its next {_KEPT_LINES} lines are kept in memory until then"
            log.error("%s must be writable; got %s; free some space: %s", self._path, error, what)
        else:
            lost, self._lost = self._lost, 0
            level = logging.ERROR if lost else logging.INFO
            log.log(level, "%s is writable again; %d lines were lost", self._path, lost)


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end.  Reads one byte: the file of a long run is long."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class AsyncWriter:
    """Calls what it is given, in order, on a thread of its own: a disk or server that hangs holds up nobody else.

    Args:
        name: of the thread.
        on_error: called in place of an exception, which ends nothing.
    """

    def __init__(self, name: str, on_error: Callable[[], None]) -> None:
        self._name, self._on_error = name, on_error
        self._lost = 0  # a message about it may miss one of two threads' at once
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(_KEPT_CALLS)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> bool:
        """Any thread may call.  Returns whether it was taken: where 1000 calls wait the next are lost, and counted."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._lost += 1
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Finish what waits; returns whether that was done in time."""
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._calls.put(None, timeout=timeout_s)
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        self._say_lost()
        return not self._thread.is_alive()

    def _say_lost(self) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            log.error(
                "%s: at most %d writes may wait for a disk or server that does not answer; %d more are "
                "lost: records, or lines of this log",
                *(self._name, _KEPT_CALLS, lost),
            )

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._say_lost()
            try:
                call()
            except Exception:
                self._on_error()


def take_lock(descriptor: int, path: Path) -> bool:
    """Lock an open file (flock), without waiting; returns whether it was free.

    The lock is held until the file is closed, and the kernel frees it when its holder dies.

    Raises:
        StorageError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise StorageError(
            f"a folder that only one process may write needs a file system with flock; got {error} for {path}; "
            "put it on another disk (VESUVIUS_RUNS for runs), or mount this one with locks (Lustre: -o flock; NFS: "
            "start its lock service)"
        ) from error
    return True


def directory_bytes(path: Path) -> int:
    """Bytes of all files in it and below; links are not followed, and what vanishes meanwhile is not counted."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest one above it, where something is."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def free_disk_bytes(path: Path) -> int:
    """Free bytes of the disk that a path lies on, or will.  Raises OSError."""
    return shutil.disk_usage(nearest_existing(path)).free


def boot_id() -> str:
    """Which start of which machine this is; empty where the system does not tell."""
    try:
        return Path(psutil.PROCFS_PATH, "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
