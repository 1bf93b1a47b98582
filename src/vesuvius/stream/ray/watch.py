"""Watches the readers of one stream from the trainer: which of them died, and which stores they wait for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from vesuvius.errors import one_line
from vesuvius.stream.notes import Note, NoteFolder, Place, read_notes
from vesuvius.stream.outage_log import OutageLog
from vesuvius.stream.ray import private
from vesuvius.stream.ray.deaths import RayCause, reader_death_cause
from vesuvius.volumes.retry import Outage

log = logging.getLogger(__name__)

_LOOK_S = 0.5
# Ray's table of processes lags behind that of its actors.
_CAUSE_S = 1.0
_JOIN_S = 3.0


@dataclass(frozen=True)
class ReaderDeath:
    """A reader process that has ended, and not by our wish.

    Attributes:
        pid: 0 where it is not known: the reader died before Ray's table was looked at.
        node: host name of its machine.
        cause: Ray's account.
        note: what it left behind on this machine.
    """

    pid: int
    node: str
    cause: RayCause | None
    note: Note | None

    def __str__(self) -> str:
        crash, place = self._left
        why = [f"{crash}, by its own account"] if crash else []
        why.append(str(self.cause or "Ray does not say why").rstrip("."))
        reading = f" while it read {place}" if place else ""
        return f"reader {self.pid or '?'} on {self.node} was killed or died ({'; '.join(why)}){reading}"

    def fields(self, other_pid: int | None) -> dict[str, Any]:
        """As data, for `ReaderEnd`; `other_pid`: a living reader of the same machine."""
        (crash, place), cause = self._left, self.cause
        return {
            "pid": self.pid,
            "node": self.node,
            "new_pid": other_pid,
            "exit_type": cause.exit_type if cause else None,
            "exit_detail": cause.detail if cause else "",
            "exit_time": cause.time if cause else None,
            "signal": crash,
            "volume": place.volume if place else None,
            "box": place.box if place else None,
            "chunk": place.chunk if place else None,
        }

    @property
    def _left(self) -> tuple[str | None, Place | None]:
        """The fatal signal and what was read, where the reader has left them."""
        return (self.note.crash, self.note.place) if self.note else (None, None)


class ReaderWatch:
    """Looks at Ray's table of actors, and at the readers' notes, twice a second.

    Args:
        reader_class: what the names of the actors' class contain; of this stream's readers alone.
        notes: folder of the notes.
        on_death: called on the watch's thread.

    Attributes:
        outages: of the stores that readers on this machine wait for at the moment.
    """

    def __init__(self, reader_class: str, notes: Path, on_death: Callable[[ReaderDeath], None]) -> None:
        self._reader_class = reader_class
        self._notes = notes
        self._folder = NoteFolder(notes)
        self._ended: set[Path] = set()
        self._on_death = on_death
        self._seen: dict[str, private.ActorRow] = {}
        self.outages: list[Outage] = []
        self._outage_log = OutageLog()
        self._blind = False
        self._stop = threading.Event()
        # Daemon: Ray waits for ever for a cluster whose head is gone.
        self._thread = threading.Thread(target=self._run, name="reader-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            try:
                self._look()
            except Exception as error:  # a watch must not end the run it watches; the log says that it is blind
                if not self._blind and not self._stop.is_set():
                    log.warning("Ray does not say which readers live, and is asked again: %s", one_line(error))
                self._blind = True
            else:
                if self._blind:
                    log.info("Ray says again which readers live")
                self._blind = False

    def _look(self) -> None:
        # Before Ray is asked, which may hang.
        self.outages = [note.outage for note in self._folder.read() if note.outage is not None and note.is_alive()]
        self._outage_log.take(self.outages, time.time())
        for row in private.actor_rows():
            if self._reader_class in row.class_name:
                before = self._seen.get(row.actor)
                self._seen[row.actor] = row if row.pid or before is None else _with_process_of(row, before)
                deaths = row.restarts - (before.restarts if before else 0)
                deaths += row.worker_died and not (before and before.worker_died)
                for _ in range(deaths):
                    self._died(row, before)
        notes = self._folder.read()
        ended = {note.path: note for note in notes if self._is_done_with(note)}
        for path in ended.keys() & self._ended:  # twice: it may have crashed after its note was read
            ended[path].remove()
        self._ended = set(ended)

    def _is_done_with(self, note: Note) -> bool:
        """Whether a note tells nothing any more: its reader has ended without a crash, and that is counted or wanted.

        Ray's table lags behind: until it shows another process at work, or none to come, the death is not counted.
        """
        if not note.actor or note.crash is not None or not note.is_here or note.is_alive():
            return False
        row = self._seen.get(note.actor)  # None: a reader of a stream that was here before
        return row is None or row.state == "DEAD" or (row.state == "ALIVE" and row.pid != note.pid)

    def _died(self, row: private.ActorRow, before: private.ActorRow | None) -> None:
        pid = before.pid if before else 0
        left = [note for note in read_notes(self._notes) if note.actor == row.actor]
        # What Ray calls dead may be in the table of processes for a moment longer.
        note = next((note for note in reversed(left) if note.pid == pid or (not pid and not note.is_alive())), None)
        pid, node = (note.pid, note.node) if note else (pid, _host_name((before or row).node_id))
        cause, deadline = None, time.monotonic() + _CAUSE_S
        while pid and cause is None and time.monotonic() < deadline:
            cause = reader_death_cause(pid, node)
            time.sleep(0 if cause else 0.1)
        self._on_death(ReaderDeath(pid, node, cause, note))


def _with_process_of(row: private.ActorRow, before: private.ActorRow) -> private.ActorRow:
    return private.ActorRow(**{**vars(row), "pid": before.pid, "node_id": before.node_id})


def _host_name(node_id: bytes) -> str:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next((node["NodeManagerHostname"] for node in nodes if node["NodeID"] == node_id.hex()), "")
