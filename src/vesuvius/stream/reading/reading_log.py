"""The reading log of each reader: the chunk that it decodes, in a small file that outlives the process.

The file begins with a memory-mapped JSON object, so that logging a chunk takes no system call.  On a fatal signal
(SIGABRT, SIGSEGV, ...) Python's faulthandler appends to the file, which distinguishes a crash from a SIGKILL.  A chunk
that crashed two readers is not decoded again.  The trainer watches the logs for crashes and outages.
"""

import faulthandler
import json
import logging
import mmap
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from vesuvius.config import Triple
from vesuvius.errors import one_line
from vesuvius.runlog.records import from_dict
from vesuvius.volumes.errors import Outage

log = logging.getLogger(__name__)

_CRASHES_MAX = 2  # per chunk; a single crash may have another cause
_SIZE = 2**14  # of the object, padded with blanks
_FATAL = "Fatal Python error: "
_EVERY_S = 0.5
_JOIN_S = 3.0
_LAG_S = 1.0  # of Ray's table of processes
_LOG_AFTER_S, _LOG_EVERY_S = 10.0, 60.0  # shorter outages end with the next retry
_NEARLY_FULL = 0.75  # Ray spills from 0.8 on
_STORE_REMEDY = (
    "lower data.regions_in_flight or training.workers, or give the nodes of a cluster more (`ray start "
    "--object-store-memory=BYTES`)"
)

Callback = Callable[[str, dict[str, Any]], Any]
"""Takes a log line and its data."""
Exits = Callable[[int, str], list[dict[str, Any]]]

_node = [socket.gethostname()]


def node_name(name: str = "") -> str:
    """Name of this machine, which tells local readers from others; sets it if given: host names may be equal."""
    _node[0] = name or _node[0]
    return _node[0]


@dataclass(frozen=True)
class ReadingLog:
    """State of a reader when it last wrote its log."""

    pid: int
    node: str  # `node_name` of its machine
    actor: str  # id of its Ray actor
    volume: str | None = None  # being decoded, with its chunk; None between two regions
    chunk: Triple | None = None
    outage: Outage | None = None  # that it waits for
    crash: str | None = None  # fatal signal as faulthandler describes it; None after a SIGKILL
    path: Path = Path()  # the file


class ReadingLogWriter:
    """Writes the reading log of this process into a local folder, and redirects its faulthandler to it.

    Raises OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, actor: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # A pid would not be unique: the first process of every container has pid 1.
        self._file = (folder / f"{time.time_ns()}-{uuid.uuid4().hex}.note").open("w+b", buffering=0)
        self._file.write(b" " * _SIZE)  # allocates the space on disk; a full disk would kill a write to the mapping
        self._page = mmap.mmap(self._file.fileno(), _SIZE)
        self._fields = asdict(ReadingLog(os.getpid(), node_name(), actor))
        del self._fields["path"], self._fields["crash"]
        self._lock = threading.Lock()  # two threads log chunks and outages
        self._write()
        faulthandler.enable(self._file, all_threads=False)

    def chunk(self, volume: str | None, chunk: Triple | None) -> None:
        """Log the chunk that is decoded next; None between two regions, so that a crash is blamed on no chunk."""
        self._write(volume=volume, chunk=chunk)

    def outage(self, outage: Outage | None) -> None:
        """Log a storage outage, or None once it is over.  Any thread may call it."""
        self._write(outage=asdict(outage) if outage else None)

    def _write(self, **changes: Any) -> None:
        with self._lock:
            self._fields |= changes
            self._page[:] = json.dumps(self._fields).encode().ljust(_SIZE)[:_SIZE]


class TrainerReadingMarker:
    """A file that exists while the trainer of a run with readers reads volumes itself.

    A chunk that crashes the trainer would do so at every start, whereas one that crashes readers is replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "trainer-reads"
        self.was_interrupted = self._file.exists()  # whether an earlier trainer died in this context
        if self.was_interrupted:
            self.__exit__()
            log.warning(
                "The last session died while the trainer itself read the volumes, perhaps from a corrupt chunk; this "
                "time the workers read from the start"
            )

    def __enter__(self) -> None:
        with suppress(OSError):  # the readers report it
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


def open_reading_log(folder: Path, actor: str) -> ReadingLogWriter | None:
    """Open the reading log of this process; None, with a warning, if the folder cannot be written."""
    try:
        return ReadingLogWriter(folder, actor)
    except OSError as error:
        log.warning("Cannot write the reading log in %s: %s; the worker continues without it", folder, one_line(error))
        return None


def read_logs(folder: Path) -> list[ReadingLog]:
    """Return the reading logs in a folder, oldest first, without those being written; none if there is no folder."""
    logs = []
    for path in sorted(folder.glob("*.note")):
        try:
            content = path.read_bytes()
            reading = from_dict(ReadingLog, json.loads(content[:_SIZE]))
        except (OSError, ValueError):
            continue
        _, crashed, reason = content[_SIZE:].decode(errors="replace").partition(_FATAL)
        logs.append(replace(reading, crash=reason.splitlines()[0] if crashed else None, path=path))
    return logs


def crashed_chunks(folder: Path) -> dict[tuple[str | None, Triple | None], str]:
    """Return volume and chunk of those that crashed two readers and are not decoded again, with the last signal."""
    crashes = [((each.volume, each.chunk), each.crash) for each in read_logs(folder) if each.crash and each.chunk]
    counts = Counter(chunk for chunk, _ in crashes)
    return {chunk: signal for chunk, signal in crashes if counts[chunk] >= _CRASHES_MAX}


def remove_ended_logs(folder: Path) -> list[ReadingLog]:
    """Remove the logs of ended readers of this machine, but not of crashes; returns the others.  Raises OSError."""
    local = [each for each in read_logs(folder) if each.node == node_name()]
    ended = {each.path for each in local if not psutil.pid_exists(each.pid)}
    for each in read_logs(folder):  # their final state
        if each.path in ended and each.crash is None:
            each.path.unlink(missing_ok=True)
    return [each for each in local if each.path not in ended]


def remove_logs(folder: Path, *, crashes: bool) -> None:
    """Remove the logs of crashes, so that their chunks are read again, or all other logs.  Raises OSError."""
    for each in read_logs(folder):
        if crashes == (each.crash is not None):
            each.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class ObjectStore:
    """The object store of a node of Ray: shared memory, then the disk (`spilled_bytes`, in total since its start)."""

    node: str
    used_bytes: int
    size_bytes: int
    spilled_bytes: int


@dataclass(eq=False)
class ReaderWatch:
    """Checks the readers' logs in a folder, and Ray's object stores, twice a second on its own thread."""

    log_dir: Path
    on_death: Callback  # called for each reader that died, on any thread
    on_spill: Callback  # called after Ray spilled objects to disk
    exits_of: Exits  # `private.worker_exits`
    stores_of: Callable[[], list[ObjectStore]]  # `private.object_stores`
    check_nodes: Callable[[], None] = lambda: None  # called each time
    on_cluster: bool = False  # the stores are not made for this run, so one that is nearly full is reported

    def __post_init__(self) -> None:
        self._stores_at = 0.0
        self._full: set[str] = set()  # nodes with a store that was reported as nearly full
        self._known = {(each.actor, each.pid) for each in read_logs(self.log_dir)}  # of earlier sessions, or reported
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
        for each in read_logs(self.log_dir):
            if each.crash is not None:
                self.report_death(each.actor, each.pid, each.node)

    def report_death(self, actor: str, pid: int, node: str) -> None:
        """Report the death of an actor's process, once, with its reading log, if any, and Ray's account."""
        with self._lock:
            if (actor, pid) in self._known:
                return
            self._known.add((actor, pid))
        reading = next((each for each in read_logs(self.log_dir) if (each.actor, each.pid) == (actor, pid)), None)
        host = socket.gethostname() if node == node_name() else node  # post-mortems query this machine by its host name
        self.on_death(*describe_death(pid, host, exit_of(self.exits_of, pid, node), reading))

    def _run(self) -> None:
        failing = False
        while not self._stop.is_set():
            try:
                self.report_crashes()
                self.outages = [each.outage for each in remove_ended_logs(self.log_dir) if each.outage]
                self._log_outages(time.time())
                self.check_nodes()
                self._check_stores()
                failing = False
            except Exception as error:  # a failing watch must not end the run
                if not failing and not self._stop.is_set():
                    log.warning("Cannot check the workers and the spills of Ray: %s; retrying", one_line(error))
                failing = True
            self._stop.wait(_EVERY_S)

    def _log_outages(self, now: float) -> None:
        """Log each outage once a minute: the readers' own logs are not shown."""
        for outage in sorted(self.outages, key=lambda outage: outage.since):
            if now - outage.since >= _LOG_AFTER_S and now - self._logged.get(outage.address, 0.0) >= _LOG_EVERY_S:
                self._logged[outage.address] = now
                log.warning("%s (for %.0f s); the workers retry", outage, now - outage.since)
        for address in self._logged.keys() - {outage.address for outage in self.outages}:
            del self._logged[address]
            log.info("%s responds again", address)

    def _check_stores(self) -> None:
        """Report stores that are nearly full, and bytes spilled since the last check; those before do not count."""
        if (now := time.monotonic()) < self._stores_at:
            return
        stores = self.stores_of()
        self._stores_at = now + (len(stores) - 1) * _EVERY_S  # each takes 12 ms, and each of many ranks asks
        for store in stores if self.on_cluster else ():
            if store.used_bytes > _NEARLY_FULL * store.size_bytes and store.node not in self._full:
                self._full.add(store.node)
                log.warning(
                    "Ray's object store on node %s is nearly full (%.2f of %.2f GiB); from 80 %% on it spills to disk, "
                    "which is slow; %s",
                    *(store.node, store.used_bytes / 2**30, store.size_bytes / 2**30, _STORE_REMEDY),
                )
        before, self._spilled_bytes = self._spilled_bytes, sum(store.spilled_bytes for store in stores)
        if before is not None and (spilled := self._spilled_bytes - before) > 0:
            self.on_spill(
                f"Ray's object store ran out of memory and spilled {spilled / 2**20:.0f} MiB to disk; {_STORE_REMEDY}",
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
    text = f"Worker {pid} on {node} was killed or died ({cause}){decoding}"
    return text, fields | {"signal": crash, "volume": volume, "chunk": chunk}


def exit_of(exits_of: Exits, pid: int, node: str) -> dict[str, Any]:
    """How a process ended (`private.worker_exits`); empty if Ray does not know within a second.  Never raises."""
    deadline = time.monotonic() + _LAG_S
    try:
        while True:
            exits = exits_of(pid, node)
            if exits or time.monotonic() >= deadline:
                return max(exits, key=lambda each: each["exit_time"], default={})
            time.sleep(0.1)
    except Exception as error:  # only one line of a report depends on it
        log.debug("Ray does not report how worker %d ended: %s", pid, one_line(error))
        return {}
