"""Who died, what killed it, the last minute of its memory, and what to change: `post_mortem.jsonl` of a run.

A reader is examined while its run continues; a run that was killed, by the next session or from outside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vesuvius.monitor.postmortem.cause import KillCounts, judge, read_counts_of, remedy_of
from vesuvius.monitor.postmortem.death import LAST_S, Cause, Death, append_death, read_deaths, share_of
from vesuvius.monitor.probes.processes import read_process
from vesuvius.monitor.recent import MemorySample, read_recent
from vesuvius.monitor.run_files import METRICS_BYTES, Tail
from vesuvius.monitor.session import SessionRecord, is_alive, pid_namespace, read_session
from vesuvius.runlog.proc import boot_id
from vesuvius.runlog.units import format_time, gib, size_text

# Ray and the monitor notice an end this late.
_NOTICED_S = 1.0
_EVENTS_SHOWN = 2


@dataclass(frozen=True)
class ReaderEnd:
    """What is known of a reader that has died: the fields of the stream's event `reader_died`."""

    # pid, node: which it was, and the host name of its machine; '' = this one
    pid: int
    node: str = ""
    # exit_type, exit_detail: Ray's account; None and '' where Ray does not tell
    exit_type: str | None = None
    exit_detail: str = ""
    exit_time: float | None = None  # when Ray noticed, seconds since 1970; None where it does not tell
    new_pid: int | None = None  # another reader on that machine
    signal: str | None = None  # the fatal signal by which it crashed, as its own note says; None where it left none
    volume: str | None = None  # that it read


def examine_reader(end: ReaderEnd, step: int, session: SessionRecord, moments: Sequence[MemorySample]) -> Death:
    """Why a reader died; called in the trainer once another has taken its place.  Reads the kernel's counts.

    Args:
        end: what the stream says.
        step: optimizer steps done.
        session: the present one.
        moments: the samples of the last two minutes.
    """
    now = time.time()
    ended = now if end.exit_time is None else end.exit_time
    last_minute = _last_minute(moments, ended)
    account = [f"Ray: {end.exit_type}: {end.exit_detail}" if end.exit_type else "Ray does not say how it ended"]
    if end.signal is not None:
        cause: Cause = "signal"
        evidence = [
            f"it crashed with {end.signal}, as its own note says, while it read {end.volume or 'nothing'}",
            *account,
        ]
    elif end.exit_type == "NODE_OUT_OF_MEMORY":
        cause, evidence = "ray", account
    elif end.node not in ("", os.uname().nodename):
        cause = "unknown"
        evidence = [*account, f"it ran on {end.node}, whose kernel cannot be queried from here"]
    elif end.exit_type not in (None, "SYSTEM_ERROR"):
        cause, evidence = "unknown", account
    else:
        # The monitor goes on while the new reader starts: a sample taken after the death has counted it already.
        before = [moment for moment in last_minute if end.exit_time is not None and moment.time < ended - _NOTICED_S]
        sampled = next(iter([*before[-1:], *last_minute[:1]]), None)
        # Readers of a Ray that somebody else has started live in another cgroup than the trainer, who has counted.
        counts = read_counts_of(end.new_pid) if end.new_pid else KillCounts()
        counts = counts if counts.path else read_counts_of(os.getpid())
        cause, evidence = _judge(session, sampled, last_minute[-1] if last_minute else None, counts)
        evidence = [*evidence, *account]
    return Death(
        time=now,
        victim="reader",
        pid=end.pid,
        step=step,
        cause=cause,
        evidence=(*evidence, *_memory_evidence(last_minute, end.pid)),
        moments=last_minute,
        remedy=remedy_of(
            cause, "reader", session.workers, next(iter(last_minute[-1:]), None), session.limits.ray_share
        ),
    )


def examine_run(run_dir: Path) -> Death | None:
    """Why the last session of a run died; None where it did not: it has ended as it should, lives, runs on another
    machine, or there was none.

    Reads only.  A death that `post_mortem.jsonl` already has is returned as it was written.

    Args:
        run_dir: the run directory.
    """
    session = _killed_session(run_dir)
    return None if session is None else _recorded(run_dir, session) or _examine(run_dir, session)


def record_run_death(run_dir: Path) -> Death | None:
    """As `examine_run`, and the death is in `post_mortem.jsonl` afterwards, once.  Needs the run's lock.

    Raises OSError: `post_mortem.jsonl` cannot be opened.
    """
    session = _killed_session(run_dir, locked=True)
    if session is None:
        return None
    death = _recorded(run_dir, session)
    if death is None:
        death = _examine(run_dir, session)
        append_death(run_dir / "post_mortem.jsonl", death)
    return death


def deaths_of(run_dir: Path) -> list[Death]:
    """All deaths that are known of a run, and that of its last session if it was killed and nobody has noticed yet."""
    deaths, last = read_deaths(run_dir / "post_mortem.jsonl"), examine_run(run_dir)
    return deaths if last is None or last in deaths else [*deaths, last]


def is_of_session(death: Death, session: SessionRecord) -> bool:
    """Whether it happened in a session.  A run's own death may be noticed only when the next session begins.  Pure."""
    return death.time >= session.begin_time and (death.victim == "reader" or death.pid == session.pid)


def ended_run(
    cause: Literal["gpu", "guard"], step: int, reason: str, moments: Sequence[MemorySample], remedy: str
) -> Death:
    """The end that this process chose itself for want of memory; `reason`: the figures that made it necessary."""
    now = time.time()
    last_minute = _last_minute(moments, now)
    evidence = (reason, *_memory_evidence(last_minute))
    return Death(now, "run", os.getpid(), step, cause, evidence, last_minute, remedy)


def _killed_session(run_dir: Path, locked: bool = False) -> SessionRecord | None:
    """The last session, if it has no end and its process is gone.

    `locked`: this process holds the run's lock, so nobody else is at work, also where that cannot be seen: in another
    container, or on another machine.
    """
    session = read_session(run_dir / "session.json")
    if session is None or session.end_time is not None:
        return None
    alive = is_alive(session)
    return session if alive is False or (alive is None and locked) else None


def _recorded(run_dir: Path, session: SessionRecord) -> Death | None:
    deaths = reversed(read_deaths(run_dir / "post_mortem.jsonl"))
    return next((death for death in deaths if death.victim == "run" and is_of_session(death, session)), None)


def _examine(run_dir: Path, session: SessionRecord) -> Death:
    moments = [moment for moment in read_recent(run_dir / "recent.jsonl") if moment.time >= session.begin_time]
    records = [r for r in Tail(run_dir / "metrics.jsonl", METRICS_BYTES).new() if r["time"] >= session.begin_time]
    seen = max([session.begin_time, *(m.time for m in moments[-1:]), *(r["time"] for r in records[-1:])])
    last = moments[-1] if moments else None
    step = next((int(r["step"]) for r in reversed(records) if isinstance(r.get("step"), int)), last.step if last else 0)
    last_minute = _last_minute(moments, seen)
    here = boot_id()
    if here and here == session.boot_id:
        cause, evidence = _judge(session, last, last, _counts_for(session))
    elif is_alive(session) is None:
        cause = "unknown"
        evidence = [
            "it ran on another machine, whose kernel cannot be queried from here; it recorded no end, and its "
            "lock on the run is gone"
        ]
    else:
        cause = "restart"
        evidence = [f"the machine has been restarted since: its boot id was {session.boot_id} and is {here}"]
    evidence += [f"last sign of life {format_time(seen)}, after step {step}"]
    workers = session.workers if last is None or last.workers is None else last.workers  # the guard may have cut some
    return Death(
        time=time.time(),
        victim="run",
        pid=session.pid,
        step=step,
        cause=cause,
        evidence=(*evidence, *_memory_evidence(last_minute), *_event_evidence(records, seen)),
        moments=last_minute,
        remedy=remedy_of(cause, "run", workers, next(iter(last_minute[-1:]), None), session.limits.ray_share),
    )


def _counts_for(session: SessionRecord) -> KillCounts:
    """The counts to hold against the session's.  A container that was restarted has a new cgroup under the old name,
    whose count begins at 0: only the machine's goes on."""
    counts, first = read_counts_of(os.getpid()), read_process(1)
    # The number of a namespace is given out again; the first process of a container is as old as the container.
    restarted = first is not None and first.started_s > session.started_s
    same_container = session.pid_namespace == pid_namespace() and not restarted
    return counts if same_container else KillCounts(machine=counts.machine)


def _judge(
    session: SessionRecord, sampled: MemorySample | None, last: MemorySample | None, counts: KillCounts
) -> tuple[Cause, list[str]]:
    """`sampled`: the sample whose counts are those before the death; `last`: the last one before it."""
    first = sampled or session
    rise = counts.since(KillCounts(first.cgroup_oom_kills, first.machine_oom_kills, session.cgroup))
    since = f"the sample at {format_time(sampled.time)}" if sampled else "the session began"
    return judge(rise, last, since, time.time() - (sampled.time if sampled else session.begin_time))


def _last_minute(moments: Sequence[MemorySample], end: float) -> tuple[MemorySample, ...]:
    return tuple(moment for moment in moments if end - LAST_S - _NOTICED_S <= moment.time <= end)


def _memory_evidence(moments: Sequence[MemorySample], reader: int | None = None) -> list[str]:
    """How full memory was at the last sample, and what the dead reader held."""
    if not moments:
        return []
    last, lines = moments[-1], []
    if (share := share_of(last)) is not None:
        lines.append(
            f"memory stood at {100 * share:.1f} % of where {last.killer or 'the first killer'} kills "
            f"({gib(last.killer_used_bytes)} of {gib(last.kills_at_bytes)} GiB) at {format_time(last.time)}"
        )
    if reader is not None and reader in last.reader_bytes:
        lines.append(f"the reader itself held {size_text(last.reader_bytes[reader])}")
    return lines


def _event_evidence(records: Sequence[dict[str, Any]], end: float) -> list[str]:
    recent = [r for r in records if r.get("kind") == "event" and r["time"] >= end - LAST_S]
    return [f"{end - r['time']:.0f} s before: {r.get('text') or r.get('event')}" for r in recent[-_EVENTS_SHOWN:]]
