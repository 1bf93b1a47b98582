"""`session.json`: who is at work in a run directory, so that it can be watched, and its death noticed, from outside.

Written when a session begins and once more when it ends.  A session without an end whose process is gone was killed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import time

import psutil

from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.probes.cgroup import read_cgroup
from vesuvius.monitor.probes.processes import read_process
from vesuvius.monitor.probes.system_sample import read_machine
from vesuvius.runlog.files import boot_id, write_atomically
from vesuvius.runlog.records import from_dict

# The kernel counts starts in ticks of 10 ms; two that are nearer than this are the same.
_SAME_START_S = 0.005


@dataclass(frozen=True)
class SessionRecord:
    """One session of a run."""

    name: str  # of the run
    # host, boot_id: where it runs, and which start of that machine; empty where the system does not tell
    host: str
    boot_id: str
    pid: int  # of the trainer
    started_s: float  # seconds after boot: with the pid, its identity
    begin_time: float  # seconds since 1970
    workers: int  # reader processes at the start
    limits: MemoryPolicy  # what the session's memory is held against
    # cgroup_oom_kills, machine_oom_kills: the kernel's counters at the beginning; None where it does not count
    cgroup_oom_kills: int | None = None
    machine_oom_kills: int | None = None
    # end_time, exit_code: of its end; None while it lives, and for ever where it was killed
    end_time: float | None = None
    exit_code: int | None = None
    pid_namespace: str = ""  # in which `pid` counts (each container has its own); empty where the system does not tell
    cgroup: str = ""  # path of its memory cgroup, whose count of kills `cgroup_oom_kills` is; empty without one


def begin_session(path: Path, name: str, workers: int, limits: MemoryPolicy) -> SessionRecord:
    """Write down that this process is at work; returns what was written.  Raises OSError: it cannot be written."""
    pid = os.getpid()
    process, cgroup = read_process(pid), read_cgroup(pid)
    record = SessionRecord(
        name=name,
        host=os.uname().nodename,
        boot_id=boot_id(),
        pid=pid,
        started_s=process.started_s if process else 0.0,
        begin_time=time(),
        workers=workers,
        limits=limits,
        cgroup_oom_kills=cgroup.oom_kills if cgroup else None,
        machine_oom_kills=read_machine().oom_kills,
        pid_namespace=pid_namespace(),
        cgroup=cgroup.path if cgroup else "",
    )
    _write(path, record)
    return record


def end_session(path: Path, record: SessionRecord, exit_code: int) -> None:
    """Write down that it has ended.  Raises OSError: it cannot be written."""
    _write(path, replace(record, end_time=time(), exit_code=exit_code))


def read_session(path: Path) -> SessionRecord | None:
    """The last session of a run; None where none was written or the file is damaged."""
    try:
        return from_dict(SessionRecord, json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_alive(record: SessionRecord) -> bool | None:
    """Whether its process lives (a zombie does not); None where that cannot be seen from here: on another machine, from
    another container than the run's or outside of it, or where the system does not tell which machine this is."""
    here = boot_id()
    if not here or not record.boot_id:
        return None
    if here != record.boot_id:  # the same machine under its name, restarted: nothing has survived that
        return False if record.host == os.uname().nodename else None
    return find_pid(record) is not None if record.pid_namespace == pid_namespace() else None


def find_pid(record: SessionRecord) -> int | None:
    """The session's process; None where it is not there, or is called otherwise here (in another container)."""
    if not record.boot_id or boot_id() != record.boot_id or record.pid_namespace != pid_namespace():
        return None
    process = read_process(record.pid)
    return record.pid if process and abs(process.started_s - record.started_s) < _SAME_START_S else None


def pid_namespace() -> str:
    try:
        return os.readlink(f"{psutil.PROCFS_PATH}/self/ns/pid")
    except OSError:
        return ""


def _write(path: Path, record: SessionRecord) -> None:
    write_atomically(path, (json.dumps(asdict(record), indent=1) + "\n").encode())
