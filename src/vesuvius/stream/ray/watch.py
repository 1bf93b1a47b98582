"""Watches the readers from the trainer: how they died, which stores they wait for, and whether Ray spills."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vesuvius.errors import one_line
from vesuvius.stream.ray import private
from vesuvius.stream.reading.reading_log import ReadingLog, read_logs, remove_ended_logs
from vesuvius.volumes.store.retry import Outage

log = logging.getLogger(__name__)

_EVERY_S = 0.5
_JOIN_S = 3.0
_LAG_S = 1.0  # Ray's table of processes lags behind
_SAID_AFTER_S, _SAID_EVERY_S = 10.0, 60.0  # shorter outages end with the next retry

Told = Callable[[str, dict[str, Any]], Any]
"""Takes a line for people, and the same as data."""


class ReaderWatch:
    """Looks at the readers' notes, and for spills, twice a second, on a thread of its own.

    Args:
        notes: folder of the notes.
        on_death: called for each reader that ended and was not asked to, on any thread.
        on_spill: called on the watch's thread where Ray wrote objects to disk since the last look.

    Attributes:
        outages: of the stores that readers on this machine wait for at the moment.
    """

    def __init__(self, notes: Path, on_death: Told, on_spill: Told) -> None:
        self._notes, self._on_death, self._on_spill = notes, on_death, on_spill
        self._known = {(note.actor, note.pid) for note in read_logs(notes)}  # of earlier sessions, or reported
        self._lock = threading.Lock()
        self._spilled_bytes: int | None = None
        self._said: dict[str, float] = {}  # when each store that does not answer was last logged
        self.outages: list[Outage] = []
        self._stop = threading.Event()
        # Daemon: Ray waits for ever for a cluster whose head is gone.
        self._thread = threading.Thread(target=self._run, name="ray-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; waits for a look under way, but not for ever."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def look_for_crashes(self) -> None:
        """Report readers that say in their note that they crashed."""
        for note in read_logs(self._notes):
            if note.crash is not None:
                self.died(note.actor, note.pid, note.node)

    def died(self, actor: str, pid: int, node: str) -> None:
        """Report that the process of an actor has died, once: with the note that it left, if any, and Ray's account."""
        with self._lock:
            if (actor, pid) in self._known:
                return
            self._known.add((actor, pid))
        note = next((note for note in read_logs(self._notes) if (note.actor, note.pid) == (actor, pid)), None)
        self._on_death(*describe_death(pid, node, exit_of(pid, node), note))

    def _run(self) -> None:
        failing = False
        while not self._stop.is_set():
            try:
                self.look_for_crashes()
                self.outages = [note.outage for note in remove_ended_logs(self._notes) if note.outage]
                self._say_outages(time.time())
                self._look_for_spills()
                failing = False
            except Exception as error:  # a watch must not end the run that it watches; the log says that it is blind
                if not failing and not self._stop.is_set():
                    log.warning("Ray does not say whether it spills; retrying: %s", one_line(error))
                failing = True
            self._stop.wait(_EVERY_S)

    def _say_outages(self, now: float) -> None:
        """Log, once a minute, each store that the readers wait for: nobody sees their own logs."""
        for outage in sorted(self.outages, key=lambda outage: outage.since):
            if now - outage.since >= _SAID_AFTER_S and now - self._said.get(outage.address, 0.0) >= _SAID_EVERY_S:
                self._said[outage.address] = now
                log.warning("%s (for %.0f s); the readers retry", outage, now - outage.since)
        for address in self._said.keys() - {outage.address for outage in self.outages}:
            del self._said[address]
            log.info("%s answers again", address)

    def _look_for_spills(self) -> None:
        """What Ray spilled before the first look does not count."""
        before, self._spilled_bytes = self._spilled_bytes, private.spilled_bytes()
        if before is not None and (spilled := self._spilled_bytes - before) > 0:
            self._on_spill(
                f"Ray's object store was out of memory and spilled {spilled / 2**20:.0f} MiB to disk; lower "
                "data.regions_in_flight or training.workers",
                {"spilled_bytes": spilled},
            )


def describe_death(pid: int, node: str, ended: dict[str, Any], note: ReadingLog | None) -> tuple[str, dict[str, Any]]:
    """A death in one line, and as data for a post-mortem.  Pure.

    Args:
        ended: Ray's account, as of `exit_of`.
        note: what it left behind on this machine.
    """
    fields = {"pid": pid, "node": node, "exit_type": None, "exit_detail": "", "exit_time": None} | ended
    crash, volume, chunk = (note.crash, note.volume, note.chunk) if note else (None, None, None)
    why = f"{fields['exit_type']}: {fields['exit_detail']}".rstrip(".") if ended else "Ray does not say why"
    why = f"{crash}, by its own account; {why}" if crash else why
    decoding = f" while it decoded chunk {list(chunk)} of volume {volume}" if chunk else ""
    text = f"reader {pid} on {node} was killed or died ({why}){decoding}"
    return text, fields | {"signal": crash, "volume": volume, "chunk": chunk}


def exit_of(pid: int, node: str) -> dict[str, Any]:
    """How Ray says that a process ended, as `private.worker_exits`; empty where it does not say within a second.

    Never raises.
    """
    deadline = time.monotonic() + _LAG_S
    try:
        while True:
            found = private.worker_exits(pid, node)
            if found or time.monotonic() >= deadline:
                return max(found, key=lambda ended: ended["exit_time"], default={})
            time.sleep(0.1)
    except Exception as error:  # only one line of a report depends on it
        log.debug("Ray does not say how reader %d ended: %s", pid, one_line(error))
        return {}
