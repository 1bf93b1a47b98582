"""Watches the cluster from the trainer: which readers died, which stores they wait for, and whether Ray spills."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from vesuvius.errors import one_line
from vesuvius.stream.ray import private
from vesuvius.stream.ray.deaths import ReaderDeath, exit_of
from vesuvius.stream.reading.notes import Note, read_notes
from vesuvius.volumes.store.retry import Outage

log = logging.getLogger(__name__)

_JOIN_S = 3.0
# Shorter outages end with the next retry.
_SAID_AFTER_S = 10.0
_SAID_EVERY_S = 60.0


class OutageLog:
    """Logs, once a minute, each store that the readers wait for: nobody sees their own logs."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[Outage, float]] = {}

    def take(self, outages: Sequence[Outage], now: float) -> None:
        """Log what is due.

        Args:
            outages: of all readers, now.
            now: seconds since 1970.
        """
        oldest: dict[str, Outage] = {}
        for outage in sorted(outages, key=lambda outage: outage.since):
            oldest.setdefault(outage.address, outage)
        for address, outage in oldest.items():
            _, said = self._said.get(address, (outage, 0.0))
            if now - outage.since >= _SAID_AFTER_S and now - said >= _SAID_EVERY_S:
                self._said[address] = outage, now
                log.warning("%s (for %.0f s); the readers retry", outage, now - outage.since)
        for address in self._said.keys() - oldest.keys():
            outage, _ = self._said.pop(address)
            log.info("%s answers again after %.0f s", address, now - outage.since)


class Poller(ABC):
    """Calls `_poll` every so often on a thread that its `__init__` starts, and continues where that raises."""

    _every_s: float  # the pause between two calls
    _blind: str  # logged, with the error, when the first of several calls fails
    _seeing: str  # logged when one succeeds again

    def __init__(self) -> None:
        self._stop = threading.Event()
        # Daemon: Ray waits for ever for a cluster whose head is gone.
        self._thread = threading.Thread(target=self._run, name="ray-poller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for a call under way, but not for ever."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    @abstractmethod
    def _poll(self) -> None:
        """Look once."""

    def _run(self) -> None:
        failing = False
        while not self._stop.is_set():
            try:
                self._poll()
            except Exception as error:  # a watch must not end the run that it watches; the log says that it is blind
                if not failing and not self._stop.is_set():
                    log.warning("%s: %s", self._blind, one_line(error))
                failing = True
            else:
                if failing:
                    log.info("%s", self._seeing)
                failing = False
            self._stop.wait(self._every_s)


class ReaderWatch(Poller):
    """Polls Ray's table of actors and the readers' notes, twice a second.

    Args:
        reader_class: what the names of the actors' class contain; of this stream's readers alone.
        notes: folder of the notes.
        on_death: called on the watch's thread.
        say_nodes_of: the log says on which nodes so many readers run; 0 = it does not.

    Attributes:
        outages: of the stores that readers on this machine wait for at the moment.
        alive: readers that have a process, on any machine; twice as many while one execution hands over to the next.
    """

    _every_s = 0.5
    _blind = "Ray does not say which readers are alive; retrying"
    _seeing = "Ray says again which readers are alive"

    def __init__(
        self, reader_class: str, notes: Path, on_death: Callable[[ReaderDeath], None], say_nodes_of: int = 0
    ) -> None:
        self._say_nodes_of = say_nodes_of
        self._nodes = Counter[str]()
        self._reader_class = reader_class
        self._notes = notes
        self._ended: set[Path] = set()
        self._on_death = on_death
        self._seen: dict[str, private.ActorRow] = {}
        self.outages: list[Outage] = []
        self.alive = 0
        self._outage_log = OutageLog()
        super().__init__()

    def _poll(self) -> None:
        # Before Ray is asked, which may hang.
        self.outages = [note.outage for note in read_notes(self._notes) if note.outage is not None and note.is_alive()]
        self._outage_log.take(self.outages, time.time())
        rows = private.actor_rows()
        living = [row.node_id.hex() for row in rows if row.state == "ALIVE" and self._is_mine(row)]
        self.alive = len(living)
        self._say_nodes(Counter(living))
        for row in rows:
            if self._is_mine(row):
                before = self._seen.get(row.actor)
                gone = before is not None and not row.pid  # between two processes: remember the last one
                self._seen[row.actor] = replace(row, pid=before.pid, node_id=before.node_id) if gone and before else row
                deaths = row.restarts - (before.restarts if before else 0)
                deaths += row.worker_died and not (before and before.worker_died)
                for _ in range(deaths):
                    self._died(row, before)
        ended = {note.path: note for note in read_notes(self._notes) if self._is_done_with(note)}
        for path in ended.keys() & self._ended:  # twice: it may have crashed after its note was read
            ended[path].remove()
        self._ended = set(ended)

    def _is_mine(self, row: private.ActorRow) -> bool:
        return self._reader_class in row.class_name

    def _say_nodes(self, nodes: Counter[str]) -> None:
        """Log where the readers run, once all do, and again where that has changed."""
        if self._say_nodes_of and nodes.total() == self._say_nodes_of and nodes != self._nodes:
            self._nodes = nodes
            if len(cluster := ray.nodes()) > 1:  # type: ignore[no-untyped-call]
                log.info("readers: %s", placement(nodes, cluster))

    def _is_done_with(self, note: Note) -> bool:
        """Whether a note tells nothing any more: its reader ended without a crash, and its death is counted or wanted.

        Ray's table lags behind: until it shows another process at work, or none to come, the death is not counted.
        """
        if not note.actor or note.crash is not None or not note.is_here or note.is_alive():
            return False
        row = self._seen.get(note.actor)  # None: a reader of an earlier stream
        return row is None or row.state == "DEAD" or (row.state == "ALIVE" and row.pid != note.pid)

    def _died(self, row: private.ActorRow, before: private.ActorRow | None) -> None:
        pid, node_id = (before.pid if before else 0), (before or row).node_id
        left = [note for note in read_notes(self._notes) if note.actor == row.actor]
        # A process that Ray calls dead may be in the table of processes for a moment longer.
        note = next((note for note in reversed(left) if note.pid == pid or (not pid and not note.is_alive())), None)
        pid, node = (note.pid, note.node) if note else (pid, _host_name(node_id))
        self._on_death(ReaderDeath(pid, node, exit_of(pid, node_id) if pid else None, note))


def placement(counts: Mapping[str, int], cluster: Sequence[Mapping[str, Any]]) -> str:
    """On which nodes of a cluster how many readers run, by their identities, for people.  Pure."""
    known = {node["NodeID"]: node for node in cluster}
    found = [(count, known[node]) for node, count in counts.items() if node in known]
    gpus = [int(node["Resources"].get("GPU", 0)) or "no" for _, node in found]
    return ", ".join(
        f"{count} on {node['NodeManagerHostname']} ({gpu} GPU)" for (count, node), gpu in zip(found, gpus, strict=True)
    )


def _host_name(node_id: bytes) -> str:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next((node["NodeManagerHostname"] for node in nodes if node["NodeID"] == node_id.hex()), "")


class StoreWatch(Poller):
    """Polls the object stores of the cluster every second: whether Ray spilled to disk.

    What Ray spilled before this was made does not count.

    Args:
        on_spill: called on the watch's thread with a line and figures.
    """

    _every_s = 1.0
    _blind = "Ray's object store cannot be watched for spills; retrying every second"
    _seeing = "Ray's object store is watched for spills again"

    def __init__(self, on_spill: Callable[[str, dict[str, Any]], None]) -> None:
        self._on_spill = on_spill
        self._spilled_bytes: int | None = None
        self._state: Any = None
        super().__init__()

    def _poll(self) -> None:
        state, self._state = self._state or private.cluster_state(), None  # reconnects after an error
        stats = private.store_stats(state, timeout_s=5)
        self._state = state
        before, self._spilled_bytes = self._spilled_bytes, stats.spilled_bytes
        if before is not None and stats.spilled_bytes > before:
            spilled = stats.spilled_bytes - before
            self._on_spill(
                f"Ray's object store was out of memory and spilled {spilled / 2**20:.0f} MiB to disk; lower "
                "data.regions_in_flight, data.reader_mib or training.workers, or raise cluster.object_store_gib",
                {"spilled_bytes": spilled, "capacity_bytes": stats.capacity_bytes},
            )
