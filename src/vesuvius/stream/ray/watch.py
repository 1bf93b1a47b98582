"""Monitors the readers from the trainer: deaths, storage outages, and spills of Ray's object store."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vesuvius.errors import one_line
from vesuvius.stream.ray import private
from vesuvius.stream.reading.reading_log import ReadingLog, node_name, read_logs, remove_ended_logs
from vesuvius.volumes.store.retry import Outage

log = logging.getLogger(__name__)

_EVERY_S = 0.5
_JOIN_S = 3.0
_LAG_S = 1.0  # of Ray's table of processes
_LOG_AFTER_S, _LOG_EVERY_S = 10.0, 60.0  # shorter outages end with the next retry

Callback = Callable[[str, dict[str, Any]], Any]
"""Takes a log line and its data."""


class ReaderWatch:
    """Checks the readers' logs in a folder and Ray's spills twice a second on its own thread.

    `on_death` is called for each reader that died, on any thread; `on_spill` after Ray spilled objects to disk.
    """

    def __init__(self, log_dir: Path, on_death: Callback, on_spill: Callback) -> None:
        self._log_dir, self._on_death, self._on_spill = log_dir, on_death, on_spill
        self._known = {(each.actor, each.pid) for each in read_logs(log_dir)}  # from earlier sessions, or reported
        self._lock = threading.Lock()
        self._spilled_bytes: int | None = None
        self._logged: dict[str, float] = {}  # time of the last log line per outage
        self.outages: list[Outage] = []  # that readers on this machine wait for
        self._stop = threading.Event()
        # Daemon: Ray waits forever for a cluster whose head is gone.
        self._thread = threading.Thread(target=self._run, name="ray-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, waiting for a check under way for at most three seconds."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def report_crashes(self) -> None:
        """Report readers that crashed according to their logs."""
        for each in read_logs(self._log_dir):
            if each.crash is not None:
                self.report_death(each.actor, each.pid, each.node)

    def report_death(self, actor: str, pid: int, node: str) -> None:
        """Report the death of an actor's process, once, with its reading log, if any, and Ray's account."""
        with self._lock:
            if (actor, pid) in self._known:
                return
            self._known.add((actor, pid))
        reading = next((each for each in read_logs(self._log_dir) if (each.actor, each.pid) == (actor, pid)), None)
        host = socket.gethostname() if node == node_name() else node  # post-mortems query this machine by its host name
        self._on_death(*describe_death(pid, host, exit_of(pid, node), reading))

    def _run(self) -> None:
        failing = False
        while not self._stop.is_set():
            try:
                self.report_crashes()
                self.outages = [each.outage for each in remove_ended_logs(self._log_dir) if each.outage]
                self._log_outages(time.time())
                self._check_spills()
                failing = False
            except Exception as error:  # a failing watch must not end the run
                if not failing and not self._stop.is_set():
                    log.warning("Cannot check the readers and the spills of Ray: %s; retrying", one_line(error))
                failing = True
            self._stop.wait(_EVERY_S)

    def _log_outages(self, now: float) -> None:
        """Log each outage once a minute: the readers' own logs are not shown."""
        for outage in sorted(self.outages, key=lambda outage: outage.since):
            if now - outage.since >= _LOG_AFTER_S and now - self._logged.get(outage.address, 0.0) >= _LOG_EVERY_S:
                self._logged[outage.address] = now
                log.warning("%s (for %.0f s); the readers retry", outage, now - outage.since)
        for address in self._logged.keys() - {outage.address for outage in self.outages}:
            del self._logged[address]
            log.info("%s responds again", address)

    def _check_spills(self) -> None:
        """Report bytes spilled since the last check; those before the first one do not count."""
        before, self._spilled_bytes = self._spilled_bytes, private.spilled_bytes()
        if before is not None and (spilled := self._spilled_bytes - before) > 0:
            self._on_spill(
                f"Ray's object store ran out of memory and spilled {spilled / 2**20:.0f} MiB to disk; lower "
                "data.regions_in_flight or training.workers",
                {"spilled_bytes": spilled},
            )


def describe_death(
    pid: int, node: str, exit_record: dict[str, Any], reading: ReadingLog | None
) -> tuple[str, dict[str, Any]]:
    """Describe a death in one line, and as data for a post-mortem, from `exit_of` and a reading log.  Pure."""
    fields = {"pid": pid, "node": node, "exit_type": None, "exit_detail": "", "exit_time": None} | exit_record
    crash, volume, chunk = (reading.crash, reading.volume, reading.chunk) if reading else (None, None, None)
    cause = f"{fields['exit_type']}: {fields['exit_detail']}".rstrip(".") if exit_record else "Ray reports no cause"
    cause = f"{crash}; {cause}" if crash else cause
    decoding = f" while decoding chunk {list(chunk)} of volume {volume}" if chunk else ""
    text = f"Reader {pid} on {node} was killed or died ({cause}){decoding}"
    return text, fields | {"signal": crash, "volume": volume, "chunk": chunk}


def exit_of(pid: int, node: str) -> dict[str, Any]:
    """Return how a process ended (see `private.worker_exits`); empty if Ray does not know within a second.

    Never raises.
    """
    deadline = time.monotonic() + _LAG_S
    try:
        while True:
            exits = private.worker_exits(pid, node)
            if exits or time.monotonic() >= deadline:
                return max(exits, key=lambda each: each["exit_time"], default={})
            time.sleep(0.1)
    except Exception as error:  # only one line of a report depends on it
        log.debug("Ray does not report how reader %d ended: %s", pid, one_line(error))
        return {}
