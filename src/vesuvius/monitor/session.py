"""`session.json` identifies the process of a run, so that others can watch it and notice its death.

Written when a session begins and again when it ends.  A session without an end whose process is gone has died.
"""

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

# The kernel records process starts in ticks of 10 ms; starts closer than this are the same.
_SAME_START_S = 0.005
_LAST_TIME = 2.0**37  # far beyond what the calendar can say; NaN is not below it


@dataclass(frozen=True)
class SessionRecord:
    name: str  # of the run
    # host, boot_id: the machine, and which boot of it; empty if unknown
    host: str
    boot_id: str
    pid: int  # of the trainer
    started_s: float  # seconds after boot; identifies the process together with the pid
    begin_time: float  # seconds since 1970
    workers: int  # reader processes at the start
    limits: MemoryPolicy
    # cgroup_oom_kills, machine_oom_kills: the kernel's counters at the beginning; None if it does not count
    cgroup_oom_kills: int | None = None
    machine_oom_kills: int | None = None
    # end_time, exit_code: of its end; None while it runs, and if it died
    end_time: float | None = None
    exit_code: int | None = None
    pid_namespace: str = ""  # of `pid` (each container has its own); empty if unknown
    cgroup: str = ""  # path of its memory cgroup; empty without one


def begin_session(path: Path, name: str, workers: int, limits: MemoryPolicy) -> SessionRecord:
    """Record that this process has begun a session, and return the record.  Raises OSError."""
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
    _write(path, replace(record, end_time=time(), exit_code=exit_code))


def read_session(path: Path) -> SessionRecord | None:
    """Return the last session of a run; None if there is none or the file is damaged."""
    try:
        record = from_dict(SessionRecord, json.loads(path.read_bytes()))
        return record if record.pid > 0 and 0 < record.begin_time < _LAST_TIME else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_alive(record: SessionRecord) -> bool | None:
    """Whether the session's process is alive (a zombie is not); None if that cannot be seen from here: it runs on
    another machine, on this one before a restart, or in another PID namespace."""
    if not record.boot_id or record.boot_id != boot_id() or record.pid_namespace != pid_namespace():
        return None
    process = read_process(record.pid)
    return process is not None and abs(process.started_s - record.started_s) < _SAME_START_S


def pid_namespace() -> str:
    try:
        return os.readlink(f"{psutil.PROCFS_PATH}/self/ns/pid")
    except OSError:
        return ""


def _write(path: Path, record: SessionRecord) -> None:
    write_atomically(path, (json.dumps(asdict(record), indent=1) + "\n").encode())
