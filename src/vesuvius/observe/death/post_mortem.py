"""Who died, what killed it, the last minute of its memory, and what to change: `post_mortem.jsonl` of a run.

A reader is examined while its run goes on; a run that was killed, by the next session or from outside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vesuvius.observe.death.cause import Case, judge
from vesuvius.observe.death.death import (
    LAST_S,
    Cause,
    Death,
    Victim,
    append_death,
    death_lines,
    headline,
    read_deaths,
    share_of,
)
from vesuvius.observe.death.kill_evidence import (
    KERNEL_PIDS,
    KMSG,
    KillCounts,
    read_counts_of,
    read_kernel_log,
    rise,
)
from vesuvius.observe.death.remedy import remedy_of
from vesuvius.observe.recent import Moment, read_recent
from vesuvius.observe.run_files import Tail
from vesuvius.observe.session import SessionRecord, boot_id, is_alive, read_session
from vesuvius.observe.system.cgroup import read_cgroup
from vesuvius.observe.system.roots import Roots

__all__ = [
    "Cause",
    "Death",
    "ReaderEnd",
    "Victim",
    "append_death",
    "death_lines",
    "ended_run",
    "examine_reader",
    "examine_run",
    "headline",
    "read_deaths",
    "record_run_death",
]

_GIB = 2**30
# Ray and the monitor notice an end this late.
_NOTICED_S = 1.0
_METRICS_BYTES = 2**18
_EVENTS_SHOWN = 2


@dataclass(frozen=True)
class ReaderEnd:
    """What is known of a reader that has died.

    Attributes:
        pid, node: which it was, and the host name of its machine; '' = this one.
        exit_type, exit_detail: Ray's account; None and '' where Ray does not tell.
        time: when Ray noticed, seconds since 1970; None where it does not tell.
        new_pid: the reader in its place.
    """

    pid: int
    node: str = ""
    exit_type: str | None = None
    exit_detail: str = ""
    time: float | None = None
    new_pid: int | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ReaderEnd:
        """From the fields of the stream's event `reader_died`."""
        return cls(
            pid=fields["pid"],
            node=fields.get("node", ""),
            exit_type=fields.get("exit_type"),
            exit_detail=fields.get("exit_detail", ""),
            time=fields.get("exit_time"),
            new_pid=fields.get("new_pid"),
        )


def examine_reader(
    end: ReaderEnd,
    step: int,
    session: SessionRecord,
    moments: Sequence[Moment],
    roots: Roots = Roots(),
    kmsg: Path = KMSG,
) -> Death:
    """Why a reader died, to be asked in the trainer once another has taken its place.

    Does I/O: the kernel's counts and log.

    Args:
        end: what the stream says.
        step: optimizer steps done.
        session: the present one.
        moments: the looks of the last two minutes.
    """
    now = time.time()
    ended = now if end.time is None else end.time
    last_minute = _last_minute(moments, ended)
    account = [f"Ray: {end.exit_type}: {end.exit_detail}" if end.exit_type else "Ray does not say how it ended"]
    if end.exit_type == "NODE_OUT_OF_MEMORY":
        cause: Cause = "ray"
        evidence = account
    elif end.node not in ("", os.uname().nodename):
        cause = "unknown"
        evidence = [*account, f"it ran on {end.node}, whose kernel cannot be asked from here"]
    elif end.exit_type not in (None, "SYSTEM_ERROR"):
        cause, evidence = "unknown", account
    else:
        cause, evidence = judge(_reader_case(end, session, last_minute, ended, roots, kmsg))
        evidence = [*evidence, *account]
    return Death(
        time=now,
        victim="reader",
        pid=end.pid,
        step=step,
        cause=cause,
        evidence=(*evidence, *_memory_evidence(last_minute, end.pid)),
        moments=last_minute,
        remedy=remedy_of(cause, "reader", session.workers, last_minute, session.limits.ray_share),
    )


def _reader_case(
    end: ReaderEnd, session: SessionRecord, moments: Sequence[Moment], ended: float, roots: Roots, kmsg: Path
) -> Case:
    # The monitor goes on looking while the new reader starts: a look behind the death has counted it already.
    before = [moment for moment in moments if end.time is not None and moment.time < ended - _NOTICED_S]
    looked = before[-1] if before else (moments[0] if moments else None)
    counts = read_counts_of(os.getpid(), roots)
    own, new = read_cgroup(os.getpid(), roots), read_cgroup(end.new_pid, roots) if end.new_pid else None
    if own is not None and new is not None and own.path != new.path:
        counts = KillCounts(None, counts.machine)  # readers of a Ray that somebody else has started
    return _case(end.pid, session, looked, moments[-1] if moments else None, counts, roots, kmsg)


def examine_run(run_dir: Path, roots: Roots = Roots(), kmsg: Path = KMSG) -> Death | None:
    """Why the last session of a run died; None where it did not: it has ended as it should, lives, runs on another
    machine, or there was none.

    Reads only.  A death that `post_mortem.jsonl` already has is returned as it was written.

    Args:
        run_dir: the run directory.
    """
    session = read_session(run_dir / "session.json")
    if session is None or session.end_time is not None or is_alive(session, roots) is not False:
        return None
    return _recorded(run_dir, session) or _examine(run_dir, session, roots, kmsg)


def record_run_death(run_dir: Path, roots: Roots = Roots(), kmsg: Path = KMSG) -> Death | None:
    """As `examine_run`, and the death is in `post_mortem.jsonl` afterwards, once.  Needs the run's lock.

    Raises:
        OSError: `post_mortem.jsonl` cannot be opened.
    """
    death = examine_run(run_dir, roots, kmsg)
    if death is not None and death not in read_deaths(run_dir / "post_mortem.jsonl"):
        append_death(run_dir / "post_mortem.jsonl", death)
    return death


def ended_run(cause: Literal["gpu", "guard"], step: int, reason: str, moments: Sequence[Moment], remedy: str) -> Death:
    """The end that this process chose itself for want of memory; `reason`: the figures that made it necessary."""
    now = time.time()
    last_minute = _last_minute(moments, now)
    evidence = (reason, *_memory_evidence(last_minute))
    return Death(now, "run", os.getpid(), step, cause, evidence, last_minute, remedy)


def _recorded(run_dir: Path, session: SessionRecord) -> Death | None:
    for death in reversed(read_deaths(run_dir / "post_mortem.jsonl")):
        if death.victim == "run" and death.pid == session.pid and death.time >= session.begin_time:
            return death
    return None


def _examine(run_dir: Path, session: SessionRecord, roots: Roots, kmsg: Path) -> Death:
    moments = [moment for moment in read_recent(run_dir / "recent.jsonl") if moment.time >= session.begin_time]
    records = [r for r in Tail(run_dir / "metrics.jsonl", _METRICS_BYTES).new() if _time_of(r) >= session.begin_time]
    seen = max([session.begin_time, *(m.time for m in moments[-1:]), *(_time_of(r) for r in records[-1:])])
    step = next((int(r["step"]) for r in reversed(records) if isinstance(r.get("step"), int)), None)
    if step is None:
        step = moments[-1].step if moments else 0
    last_minute = _last_minute(moments, seen)
    here = boot_id(roots)
    if here != session.boot_id:
        cause: Cause = "restart"
        evidence = [f"the machine has been started anew since: its boot id was {session.boot_id} and is {here}"]
    else:
        last = moments[-1] if moments else None
        counts = _counts_of_session(session, roots)
        cause, evidence = judge(_case(session.pid, session, last, last, counts, roots, kmsg))
    evidence += [f"last sign of life {_clock(seen)}, after step {step}"]
    return Death(
        time=time.time(),
        victim="run",
        pid=session.pid,
        step=step,
        cause=cause,
        evidence=(*evidence, *_memory_evidence(last_minute), *_event_evidence(records, seen)),
        moments=last_minute,
        remedy=remedy_of(cause, "run", session.workers, last_minute, session.limits.ray_share),
    )


def _case(
    pid: int,
    session: SessionRecord,
    looked: Moment | None,
    last: Moment | None,
    counts: KillCounts,
    roots: Roots,
    kmsg: Path,
) -> Case:
    """`looked`: the look whose counts are those before the death."""
    before = KillCounts(session.cgroup_oom_kills, session.machine_oom_kills)
    if looked is not None:
        before = KillCounts(looked.cgroup_oom_kills, looked.machine_oom_kills)
    return Case(
        pid=pid,
        cgroup_rise=rise(before.cgroup, counts.cgroup),
        machine_rise=rise(before.machine, counts.machine),
        log=read_kernel_log(looked.time if looked else session.begin_time, kmsg),
        pids_match=session.pid_namespace == KERNEL_PIDS,
        last=last,
        since=f"the look at {_clock(looked.time)}" if looked else "the session began",
    )


def _counts_of_session(session: SessionRecord, roots: Roots) -> KillCounts:
    """The counts now; that of the cgroup only where this process is in the one that the session was in."""
    counts = read_counts_of(os.getpid(), roots)
    own = read_cgroup(os.getpid(), roots)
    if session.cgroup and own is not None and own.path != session.cgroup:
        return KillCounts(None, counts.machine)
    return counts


def _last_minute(moments: Sequence[Moment], end: float) -> tuple[Moment, ...]:
    return tuple(moment for moment in moments if end - LAST_S - _NOTICED_S <= moment.time <= end)


def _memory_evidence(moments: Sequence[Moment], reader: int | None = None) -> list[str]:
    """How full memory was at the last look, and what the dead reader held."""
    if not moments:
        return []
    last, lines = moments[-1], []
    if (share := share_of(last)) is not None:
        used, kills_at = last.killer_used_bytes / _GIB, last.kills_at_bytes / _GIB
        lines.append(
            f"memory stood at {100 * share:.1f} % of where {last.killer or 'the first killer'} kills "
            f"({used:.2f} of {kills_at:.2f} GiB) at {_clock(last.time)}"
        )
    if reader is not None and reader in last.reader_bytes:
        lines.append(f"the reader itself held {last.reader_bytes[reader] / _GIB:.2f} GiB")
    return lines


def _event_evidence(records: Sequence[dict[str, Any]], end: float) -> list[str]:
    recent = [r for r in records if r.get("kind") == "event" and _time_of(r) >= end - LAST_S]
    return [f"{end - _time_of(r):.0f} s before: {r.get('text') or r.get('event')}" for r in recent[-_EVENTS_SHOWN:]]


def _time_of(record: dict[str, Any]) -> float:
    return float(record["time"])


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
