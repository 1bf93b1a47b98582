"""Lines appended to a file whose disk may be full for a while: records, the run's log and the monitor's."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from pathlib import Path

log = logging.getLogger(__name__)

KEPT_LINES = 10_000


class AppendFile:
    """An append-only text file that outlives a full disk.

    A line is handed to the system at once.  What the disk does not take is kept in memory, the rest of a half-written
    line first, and tried again with the next line: once there is room, the file holds every line whole and in order.
    The log says when lines begin to wait, when they are written, and how many were lost.  Threads and signal handlers
    may write.

    Args:
        path: the file; a last line that a crash has torn is closed.
        keep: lines that may wait; what comes beyond is lost.

    Raises:
        OSError: on opening, where the file cannot be opened.  Nothing else raises it.
    """

    def __init__(self, path: Path, keep: int = KEPT_LINES) -> None:
        self._waiting = deque([b"\n"] if _is_torn(path) else [])
        self._path, self._keep = path, keep
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

    @property
    def is_waiting(self) -> bool:
        """Whether the disk has not taken all lines yet."""
        return bool(self._waiting)

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
                while len(self._waiting) > self._keep:  # the newest, as the first may be the rest of a torn line
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
            what = f"its next {self._keep} lines are kept in memory until then"
            log.error("%s must be writable; got %s; free some space: %s", self._path, error, what)
        else:
            lost, self._lost = self._lost, 0
            level = logging.ERROR if lost else logging.INFO
            log.log(level, "%s is writable again; %d lines were lost", self._path, lost)


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end.  Reads one byte: the file of a long run is long."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
