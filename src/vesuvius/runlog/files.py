"""Crash-safe files: append, atomic replacement, locks, asynchronous writes; and free disk space."""

import errno
import fcntl
import logging
import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from vesuvius.errors import FULL_DISK, StorageError, disk_path, disk_remedy
from vesuvius.runlog.held import is_at, where

log = logging.getLogger(__name__)

_KEPT_LINES = 10_000  # that may wait; further lines are lost
_KEPT_CALLS = 1000
# Errors of file systems without flock: NFS without its lock service, Lustre without -o flock, some FUSE systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def write_atomically(path: Path, data: bytes, check: Callable[[BinaryIO], None] = lambda file: None) -> None:
    """Write through a temporary file, so that readers see either the old or the new content.

    `check` is called with the flushed file before it is renamed.  Raises OSError; the temporary file is removed then.
    """
    path = where(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w+b") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            check(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AppendFile:
    """An append-only text file that survives a full disk, a log rotation and a disk that was away.

    Lines that the disk does not take are kept in memory and retried with the next line, in order.  If the path leads to
    another file or to none, or the open file fails for another reason than space, the path is opened again.  The log
    reports when lines begin to wait and how many were lost.  Threads and signal handlers may write.

    Raises OSError: the file cannot be opened; nothing else raises it.
    """

    def __init__(self, path: Path) -> None:
        self._waiting = deque[bytes]()
        self._path = path
        self._descriptor: int | None = None
        self._failing, self._lost = False, 0
        self._written = 0  # bytes of the first waiting line
        self._writing = threading.Lock()
        self._open()

    def write_line(self, text: str) -> None:
        """Append a line; ignored once the file is closed."""
        if self._descriptor is None:
            return
        self._waiting.append(text.encode("utf-8", "backslashreplace") + b"\n")
        # If the lock is taken, another thread or the interrupted code is writing, and writes this line, too.
        while self._waiting and self._descriptor is not None and self._writing.acquire(blocking=False):
            try:
                error = self._write_waiting()
            finally:
                self._writing.release()
            self._report_changes(error)
            if error is not None:
                return

    def close(self) -> None:
        """Write pending lines if the disk takes them, and close the file."""
        with self._writing:
            if self._descriptor is None:
                return
            error, descriptor, self._descriptor = self._write_waiting(), self._descriptor, None
            try:
                if self._is_own(descriptor):
                    os.close(descriptor)
            except OSError as late:  # network file systems report a full disk only now
                error = error or late
        if error is None:
            self._report_changes(None)
        else:
            lost = self._lost + len(self._waiting)
            log.error("cannot write %s: %s; %d lines are lost; %s", self._path, error, lost, disk_remedy(error))

    def _write_waiting(self) -> OSError | None:
        """Write pending lines; on an error, drop those beyond the limit and return the error."""
        is_retry = False
        while self._waiting and self._descriptor is not None:
            try:
                if not self._is_current():
                    self._open()
                line = self._waiting[0]
                self._written += os.write(self._descriptor, line[self._written :])
            except OSError as error:
                if error.errno not in FULL_DISK and not is_retry:
                    is_retry, self._is_stale = True, True
                    continue
                while len(self._waiting) > _KEPT_LINES:  # the newest: the first may have been written in part
                    self._waiting.pop()
                    self._lost += 1
                return error
            if self._written >= len(line):  # otherwise the disk is full: the next write raises
                self._written = 0
                self._waiting.popleft()
        return None

    def _open(self) -> None:
        path, before = where(self._path), self._descriptor
        if before is not None:
            path.parent.mkdir(exist_ok=True)
        is_torn, closes = _is_torn(path), before is not None and self._is_own(before)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if before is not None:
            if closes:
                with suppress(OSError):
                    os.close(before)
            if self._is_own(descriptor):  # the same file: a line written in part is completed
                is_torn = False
            else:
                self._written = 0
                log.info("%s was moved, deleted or on a disk that went away: continuing in a new file", path)
        self._descriptor, self._opened, self._is_stale = descriptor, os.fstat(descriptor), False
        self._has_inodes = is_at(path, self._opened)  # not on some FUSE file systems
        if is_torn:
            self._waiting.appendleft(b"\n")

    def _is_own(self, descriptor: int) -> bool:
        """Whether the descriptor is still that of the opened file: other code may have closed it."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._opened)
        except OSError as error:
            return error.errno != errno.EBADF

    def _is_current(self) -> bool:
        """Whether lines still go to the file at the path.  Raises RunMovedError: its directory was deleted."""
        assert self._descriptor is not None
        if self._is_stale or not self._is_own(self._descriptor):
            return False
        return not self._has_inodes or is_at(self._path, self._opened) or is_at(where(self._path), self._opened)

    def _report_changes(self, error: OSError | None) -> None:
        """Log if writing began to fail or works again.  Called without the lock: the message may go to this file."""
        if self._failing == (error is not None):
            return
        self._failing = error is not None
        if error is not None:
            kept = f"the next {_KEPT_LINES} lines are kept in memory"
            log.error("cannot write %s: %s; %s; %s until then", self._path, error, disk_remedy(error), kept)
        else:
            lost, self._lost = self._lost, 0
            level = logging.ERROR if lost else logging.INFO
            log.log(level, "%s is writable again; %d lines were lost", self._path, lost)


def _is_torn(path: Path) -> bool:
    """Whether a crash left the last line incomplete.  Reads one byte."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class AsyncWriter:
    """Runs calls in order on a thread, so that a hung disk or server blocks nobody; errors go to `on_error`."""

    def __init__(self, name: str, on_error: Callable[[], None]) -> None:
        self._name, self._on_error = name, on_error
        self._lost = 0  # approximate: not locked
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(_KEPT_CALLS)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> bool:
        """Queue a call; returns False if it is dropped because 1000 calls wait already.  Thread-safe."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._lost += 1
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Finish the queued calls; returns whether that was done in time."""
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
                "%s: the disk or server does not respond; %d writes are waiting, %d more were lost (records "
                "or log lines)",
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
    """Lock an open file (flock) without waiting; returns whether it was free.  Raises StorageError: no locks here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise StorageError(
            f"cannot lock {path}: {error}: the file system does not support flock; use another disk (VESUVIUS_RUNS for "
            "runs), or mount this one with locks (Lustre: -o flock; NFS: start its lock service)"
        ) from error
    return True


@contextmanager
def named_in_utf8(path: Path) -> Iterator[str]:
    """Another name of a file whose own is not UTF-8, which safetensors and torch's mmap require.  Raises OSError."""
    with path.open("rb") as file:
        named = os.fsencode(path).decode(errors="replace")
        yield named if named == str(path) else f"/proc/self/fd/{file.fileno()}"


def cache_folder() -> Path:
    """Return the folder of this user for what can be made again.  Raises ConfigError: no home directory is known."""
    return disk_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME=") / "vesuvius"


def directory_bytes(path: Path) -> int:
    """Return the total size of all files in a directory tree, without following links."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def nearest_existing(path: Path) -> Path:
    path = path.absolute()
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def free_disk_bytes(path: Path) -> int:
    """Return the free bytes of the disk of a path, which need not exist; 2**62 if it has no size, as some FUSE systems.

    Raises OSError.
    """
    usage = shutil.disk_usage(nearest_existing(path))
    return usage.free if usage.total else 2**62


def boot_id() -> str:
    """Return an id of this boot of this machine; empty if unknown."""
    try:
        return Path(psutil.PROCFS_PATH, "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
