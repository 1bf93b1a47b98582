"""The death of a reader: which process, why, and what it was reading."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from vesuvius.errors import one_line
from vesuvius.stream.ray import private
from vesuvius.stream.reading.notes import Note, Place
from vesuvius.threads import on_thread

log = logging.getLogger(__name__)

_ASK_S = 2.0
# Ray's table of processes lags behind that of its actors.
_LAG_S = 1.0


@dataclass(frozen=True)
class ReaderDeath:
    """A reader process that has ended, and was not asked to."""

    pid: int  # 0 where it is not known: the reader died before it was seen in Ray's table
    node: str  # host name of its machine
    exit: private.WorkerExit | None  # how Ray says that it ended; None where Ray does not say
    note: Note | None  # what it left behind on this machine

    def __str__(self) -> str:
        crash, place = self._left
        why = [f"{crash}, by its own account"] if crash else []
        by = {"NODE_OUT_OF_MEMORY": "out of memory: Ray's memory monitor"}
        told = f"{by.get(self.exit.exit_type, self.exit.exit_type)}: {self._detail}" if self.exit else ""
        why.append((told or "Ray does not say why").rstrip("."))
        reading = f" while it read {place}" if place else ""
        return f"reader {self.pid or '?'} on {self.node} was killed or died ({'; '.join(why)}){reading}"

    def fields(self, other_pid: int | None) -> dict[str, Any]:
        """As data, for `ReaderEnd`; `other_pid`: a living reader of the same machine."""
        crash, place = self._left
        return {
            "pid": self.pid,
            "node": self.node,
            "new_pid": other_pid,
            "exit_type": self.exit.exit_type if self.exit else None,
            "exit_detail": self._detail,
            "exit_time": self.exit.time if self.exit else None,
            "signal": crash,
            "volume": place.volume if place else None,
            "box": place.box if place else None,
            "chunk": place.chunk if place else None,
        }

    @property
    def _left(self) -> tuple[str | None, Place | None]:
        """The fatal signal and what was read, where the reader left them."""
        return (self.note.crash, self.note.place) if self.note else (None, None)

    @property
    def _detail(self) -> str:
        """Ray's words without its guesses, its advice and the memory of other processes."""
        text = self.exit.detail if self.exit else ""
        if "OOM kill reason: " in text:
            return one_line(text.split("OOM kill reason: ")[1].split("\n")[0])
        return one_line(text.split(" Some common causes include")[0])


def exit_of(pid: int, node_id: bytes) -> private.WorkerExit | None:
    """How Ray says that a process ended; None where it does not say within two seconds.  Never raises."""
    try:
        return on_thread(_last_exit, pid, node_id, name="ray-exit").result(_ASK_S)
    except Exception as error:  # only one line of a report depends on it
        log.debug("Ray does not say how reader %d ended: %s", pid, one_line(error))
        return None


def _last_exit(pid: int, node_id: bytes) -> private.WorkerExit | None:
    deadline = time.monotonic() + _LAG_S
    while True:
        found = [row for row in private.worker_exits() if (row.pid, row.node_id) == (pid, node_id)]
        if found or time.monotonic() >= deadline:
            return max(found, key=lambda row: row.time, default=None)
        time.sleep(0.1)
