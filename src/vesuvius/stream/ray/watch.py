"""Watches the readers from the trainer: which died and why, which stores they wait for, and whether Ray spills."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from vesuvius.errors import one_line
from vesuvius.stream.ray import private
from vesuvius.stream.reading.notes import Note, read_note, read_notes
from vesuvius.volumes.store.retry import Outage

log = logging.getLogger(__name__)

_EVERY_S, _SPILLS_EVERY_S = 0.5, 1.0
_JOIN_S = 3.0
_LAG_S = 1.0  # Ray's table of processes lags behind that of its actors
# Shorter outages end with the next retry.
_SAID_AFTER_S, _SAID_EVERY_S = 10.0, 60.0


@dataclass(frozen=True)
class ReaderDeath:
    """A reader process that has ended, and was not asked to."""

    pid: int  # 0 where it is not known: the reader died before it was seen in Ray's table
    node: str  # host name of its machine
    exit: private.WorkerExit | None  # how Ray says that it ended; None where Ray does not say
    note: Note | None  # what it left behind on this machine

    def __str__(self) -> str:
        why = [f"{self.note.crash}, by its own account"] if self.note and self.note.crash else []
        by = {"NODE_OUT_OF_MEMORY": "out of memory: Ray's memory monitor"}
        told = f"{by.get(self.exit.exit_type, self.exit.exit_type)}: {self._detail}" if self.exit else ""
        why.append((told or "Ray does not say why").rstrip("."))
        reading = f" while it read {self.note.place}" if self.note and self.note.place else ""
        return f"reader {self.pid or '?'} on {self.node} was killed or died ({'; '.join(why)}){reading}"

    def fields(self, other_pid: int | None) -> dict[str, Any]:
        """As data, for `ReaderEnd`; `other_pid`: a living reader of the same machine."""
        note, ended = self.note, self.exit
        return {
            "pid": self.pid,
            "node": self.node,
            "new_pid": other_pid,
            "exit_type": ended.exit_type if ended else None,
            "exit_detail": self._detail,
            "exit_time": ended.time if ended else None,
            "signal": note.crash if note else None,
            "volume": note.volume if note else None,
            "box": note.box if note else None,
            "chunk": note.chunk if note else None,
        }

    @property
    def _detail(self) -> str:
        """Ray's words without its guesses, its advice and the memory of other processes."""
        text = self.exit.detail if self.exit else ""
        if "OOM kill reason: " in text:
            return one_line(text.split("OOM kill reason: ")[1].split("\n")[0])
        return one_line(text.split(" Some common causes include")[0])


class ReaderWatch:
    """Polls Ray's tables and the readers' notes twice a second, on a thread of its own.

    Args:
        reader_class: what the names of the actors' class contain; of this stream's readers alone.
        notes: folder of the notes.
        on_death: called on the watch's thread.
        on_spill: the same, with a line and figures, where Ray wrote objects to disk since the last look.

    Attributes:
        outages: of the stores that readers on this machine wait for at the moment.
        alive: readers that have a process, on any machine; twice as many while one execution hands over to the next.
    """

    def __init__(
        self,
        reader_class: str,
        notes: Path,
        on_death: Callable[[ReaderDeath], None],
        on_spill: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._reader_class, self._notes = reader_class, notes
        self._on_death, self._on_spill = on_death, on_spill
        self._seen: dict[str, private.ActorRow] = {}
        self._spilled_bytes: int | None = None
        self._spills_due = 0.0
        self._said: dict[str, float] = {}  # when each store that does not answer was last told of
        self.outages: list[Outage] = []
        self.alive = 0
        self._stop = threading.Event()
        # Daemon: Ray waits for ever for a cluster whose head is gone.
        self._thread = threading.Thread(target=self._run, name="ray-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for a look under way, but not for ever."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        failing = False
        while not self._stop.is_set():
            try:
                self._look()
            except Exception as error:  # a watch must not end the run that it watches; the log says that it is blind
                if not failing and not self._stop.is_set():
                    log.warning("Ray does not say how the readers are; retrying: %s", one_line(error))
                failing = True
            else:
                if failing:
                    log.info("Ray says again how the readers are")
                failing = False
            self._stop.wait(_EVERY_S)

    def _look(self) -> None:
        notes = read_notes(self._notes)
        # Before Ray is asked, which may hang.
        self.outages = [note.outage for note in notes if note.outage is not None and note.is_alive()]
        self._say_outages(time.time())
        rows = [row for row in private.actor_rows() if self._reader_class in row.class_name]
        self.alive = sum(row.state == "ALIVE" for row in rows)
        for row in rows:
            before = self._seen.get(row.actor)
            gone = before is not None and not row.pid  # between two processes: remember the last one
            self._seen[row.actor] = replace(row, pid=before.pid, node_id=before.node_id) if gone and before else row
            deaths = row.restarts - (before.restarts if before else 0)
            deaths += row.worker_died and not (before and before.worker_died)
            for _ in range(deaths):
                self._died(row, before)
        over = {row.actor for row in rows if row.state == "DEAD"}
        for note in notes:
            if note.actor in over and not note.is_alive():
                left = read_note(note.path)  # as it was when the process ended
                if left is not None and left.crash is None:
                    left.remove()
        if time.monotonic() >= self._spills_due:
            self._spills_due = time.monotonic() + _SPILLS_EVERY_S
            self._look_for_spills()

    def _say_outages(self, now: float) -> None:
        """Log, once a minute, each store that the readers wait for: nobody sees their own logs."""
        oldest: dict[str, Outage] = {}
        for outage in sorted(self.outages, key=lambda outage: outage.since):
            oldest.setdefault(outage.address, outage)
        for address, outage in oldest.items():
            if now - outage.since >= _SAID_AFTER_S and now - self._said.get(address, 0.0) >= _SAID_EVERY_S:
                self._said[address] = now
                log.warning("%s (for %.0f s); the readers retry", outage, now - outage.since)
        for address in self._said.keys() - oldest.keys():
            del self._said[address]
            log.info("%s answers again", address)

    def _died(self, row: private.ActorRow, before: private.ActorRow | None) -> None:
        pid, node_id = (before.pid if before else 0), (before or row).node_id
        left = [note for note in read_notes(self._notes) if note.actor == row.actor]
        # A process that Ray calls dead may be in the table of processes for a moment longer.
        note = next((note for note in reversed(left) if note.pid == pid or (not pid and not note.is_alive())), None)
        pid, node = (note.pid, note.node) if note else (pid, _host_name(node_id))
        self._on_death(ReaderDeath(pid, node, exit_of(pid, node_id) if pid else None, note))

    def _look_for_spills(self) -> None:
        """What Ray spilled before the first look does not count."""
        before, self._spilled_bytes = self._spilled_bytes, private.spilled_bytes()
        if before is not None and self._spilled_bytes > before:
            spilled = self._spilled_bytes - before
            self._on_spill(
                f"Ray's object store was out of memory and spilled {spilled / 2**20:.0f} MiB to disk; lower "
                "data.regions_in_flight, data.reader_mib or training.workers, or raise cluster.object_store_gib",
                {"spilled_bytes": spilled},
            )


def exit_of(pid: int, node_id: bytes) -> private.WorkerExit | None:
    """How Ray says that a process ended; None where it does not say within a second.  Never raises."""
    deadline = time.monotonic() + _LAG_S
    try:
        while True:
            found = [row for row in private.worker_exits() if (row.pid, row.node_id) == (pid, node_id)]
            if found or time.monotonic() >= deadline:
                return max(found, key=lambda row: row.time, default=None)
            time.sleep(0.1)
    except Exception as error:  # only one line of a report depends on it
        log.debug("Ray does not say how reader %d ended: %s", pid, one_line(error))
        return None


def _host_name(node_id: bytes) -> str:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next((node["NodeManagerHostname"] for node in nodes if node["NodeID"] == node_id.hex()), "")
