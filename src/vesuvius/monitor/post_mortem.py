"""Who died, what killed it, the last minute of its memory, and what to change: `post_mortem.jsonl` of a run.

The evidence is the kernel's counts of kills, Ray's account, the boot id and the last samples; what these do not say is
unknown.  A reader is examined while its run continues; a run that was killed, by the next session or from outside.
"""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from vesuvius.monitor.probes.cgroup import read_cgroup
from vesuvius.monitor.probes.processes import read_process
from vesuvius.monitor.probes.system_sample import read_machine
from vesuvius.monitor.recent import MemorySample, read_recent
from vesuvius.monitor.session import SessionRecord, is_alive, pid_namespace, read_session
from vesuvius.runlog.files import boot_id
from vesuvius.runlog.records import JsonLines, Tail, read_dataclasses
from vesuvius.runlog.units import format_count, format_gib, format_size, format_time

Moments = Sequence[MemorySample]
Victim = Literal["reader", "run"]
Cause = Literal["cgroup", "machine", "ray", "gpu", "guard", "signal", "restart", "unknown"]

_LAST_S = 60.0
_NEARLY_FULL = 0.9
_AT_ONCE_S = 60.0  # kills counted for longer than this may be those of other programs, later
_NOTICED_S = 1.0  # Ray and the monitor notice an end this late
_EVENTS_SHOWN = 2
_LONGEST = 300  # characters of a line of evidence
_EVERY_S = 10.0
_NAME_THE_VICTIM = "the kernel's log names the victim; as root: dmesg | grep -i killed"

# Each kill has one of the words that operators search logs for: killed, oom, out of memory.
_HEADLINES: Mapping[Cause, str] = {
    "cgroup": "was killed: out of memory: its cgroup was at its limit, and the kernel chose this process",
    "machine": "was killed: out of memory: the machine had none left, and the kernel chose this process",
    "ray": "was killed: out of memory: Ray's memory monitor chose this process",
    "gpu": "ended: out of memory on the GPU",
    "guard": "was ended by the memory guard before it was out of memory",
    "signal": "was killed from outside, or crashed",
    "restart": "ended when the machine was restarted or lost its power",
    "unknown": "was killed or died; cause unknown",
}


@dataclass(frozen=True)
class Death:
    """The end of a reader or of a run."""

    time: float  # when it was noticed, seconds since 1970
    victim: Victim
    pid: int
    step: int  # optimizer steps done
    # what killed it: the kernel for a limit of the cgroup, or for want of memory on the machine; Ray's memory monitor;
    # GPU memory; our own guard; a signal from outside; a restart of the machine; or it is not known
    cause: Cause
    evidence: tuple[str, ...]  # what says so, a line each
    moments: tuple[MemorySample, ...]  # the last 60 seconds
    remedy: str  # what to change, overrides included


def headline(death: Death) -> str:
    """Victim and cause in one sentence.  Pure."""
    who = f"reader {death.pid}" if death.victim == "reader" else f"the run (pid {death.pid})"
    return f"{who} {_HEADLINES[death.cause]}"


def append_death(path: Path, death: Death) -> None:
    """Append it to `post_mortem.jsonl`; a full disk is only logged.  Raises OSError: the file cannot be opened."""
    with closing(JsonLines(path)) as lines:
        lines.write("death", **asdict(death))


def read_deaths(path: Path) -> list[Death]:
    """All deaths of a run, oldest first; records that are torn are passed over.  Empty without a file."""
    return read_dataclasses(Death, path)


def death_lines(death: Death) -> list[str]:
    """For people, a line each."""
    return [
        headline(death),
        f"  noticed {format_time(death.time)}, after step {death.step}",
        *(f"  - {textwrap.shorten(line, _LONGEST, placeholder=' ...')}" for line in death.evidence),
        *_table(death.moments),
        f"  what to change: {death.remedy}",
    ]


def _table(moments: Sequence[MemorySample]) -> list[str]:
    """The memory of the last minute, a line for every ten seconds."""
    if not moments:
        return ["  no sample of its memory was kept"]
    end = moments[-1].time
    rows = [f"  {'seconds':>9}{'run GiB':>10}{'trainer':>10}{'largest reader':>24}   share of the limit"]
    for moment in {(end - moment.time) // _EVERY_S: moment for moment in moments}.values():
        pid, size = max(moment.reader_bytes.items(), key=lambda item: item[1], default=(0, 0))
        reader, share = f"{format_gib(size)} (pid {pid})" if pid else "-", _share_of(moment)
        rows.append(
            f"  {moment.time - end:>9.0f}{format_gib(moment.used_bytes):>10}{format_gib(moment.trainer_bytes):>10}"
            f"{reader:>24}   {'-' if share is None else f'{100 * share:.1f} %'}"
        )
    return rows


def _share_of(moment: MemorySample | None) -> float | None:
    """What the first killer counted, as a share of where it kills."""
    return moment.killer_used_bytes / moment.kills_at_bytes if moment and moment.kills_at_bytes > 0 else None


@dataclass(frozen=True)
class KillCounts:
    """How many processes the kernel has killed for lack of memory; None where it does not count."""

    cgroup: int | None = None  # of those in a cgroup, whoever's limit it was
    machine: int | None = None  # on the whole machine since boot; containers see it too
    path: str = ""  # of that cgroup; '' = not known

    @classmethod
    def noted(cls, by: MemorySample | SessionRecord, path: str = "") -> KillCounts:
        """As a sample, or the begin of a session, has them."""
        return cls(by.cgroup_oom_kills, by.machine_oom_kills, path)

    def since(self, before: KillCounts) -> KillCounts:
        """How many more than before; None where that is not known, it is another cgroup, or the count fell.  Pure."""

        def rise(was: int | None, now: int | None) -> int | None:
            return None if was is None or now is None or now < was else now - was

        same = self.path == before.path or not (self.path and before.path)
        return KillCounts(rise(before.cgroup, self.cgroup) if same else None, rise(before.machine, self.machine))


def read_counts_of(pid: int) -> KillCounts:
    """The counts now, of the machine and of the cgroup that a living process is in."""
    cgroup, machine = read_cgroup(pid), read_machine().oom_kills
    return KillCounts(cgroup.oom_kills, machine, cgroup.path) if cgroup else KillCounts(machine=machine)


def examine_reader(
    end: Mapping[str, Any], step: int, session: SessionRecord, moments: Moments, readers: Iterable[int] = ()
) -> Death:
    """Why a reader died; called in the trainer once another has taken its place.  Reads the kernel's counts.

    Args:
        end: the fields of the stream's event `reader_died`.
        step: optimizer steps done.
        moments: the samples of the last two minutes.
        readers: pids of those that live on this machine, as the one that has taken its place.
    """
    ended = time.time() if end["exit_time"] is None else end["exit_time"]
    moments = _last_minute(moments, ended)
    exit_type, node = end["exit_type"], end["node"]
    evidence = [f"Ray: {exit_type}: {end['exit_detail']}" if exit_type else "Ray does not say how it ended"]
    cause: Cause = "unknown"
    if end["signal"] is not None:
        cause, reading = "signal", end["volume"] or "nothing"
        evidence.insert(0, f"it crashed with {end['signal']}, as its own note says, while it read {reading}")
    elif exit_type == "NODE_OUT_OF_MEMORY":
        cause = "ray"
    elif node not in ("", os.uname().nodename):
        evidence.append(f"it ran on {node}, whose kernel cannot be queried from here")
    elif exit_type in (None, "SYSTEM_ERROR"):
        # The monitor goes on while the new reader starts: a sample taken after the death has counted it already.
        before = [moment for moment in moments if end["exit_time"] is not None and moment.time < ended - _NOTICED_S]
        sampled = next(iter([*before[-1:], *moments[:1]]), None)
        # Readers of a Ray that somebody else has started live in another cgroup than the trainer: another one tells.
        known = (counts for pid in readers if (counts := read_counts_of(pid)).path)
        counts = next(known, None) or read_counts_of(os.getpid())
        cause, counted = _judge_counts(session, sampled, moments[-1] if moments else None, counts)
        evidence = [*counted, *evidence]
    remedy = remedy_of(cause, "reader", session.workers, moments[-1] if moments else None, session.limits.ray_share)
    return _death("reader", end["pid"], step, cause, evidence, moments, remedy)


def death_of_this_run(cause: Literal["gpu", "guard"], step: int, reason: str, moments: Moments, remedy: str) -> Death:
    """The end that this process chose itself for want of memory; `reason`: the figures that made it necessary."""
    return _death("run", os.getpid(), step, cause, [reason], _last_minute(moments, time.time()), remedy)


def examine_run(run_dir: Path, locked: bool = False) -> Death | None:
    """Why the last session of a run died; None where it did not: it has ended as it should, lives, runs on another
    machine, or there was none.  Reads only; a death that `post_mortem.jsonl` has is returned as it was written.

    Args:
        locked: this process holds the run's lock, so nobody else is at work, also where that cannot be seen: in another
            container, or on another machine.
    """
    session = read_session(run_dir / "session.json")
    if session is None or session.end_time is not None:
        return None
    alive = is_alive(session)
    if alive or (alive is None and not locked):
        return None
    known = reversed(read_deaths(run_dir / "post_mortem.jsonl"))
    recorded = next((death for death in known if death.victim == "run" and is_of_session(death, session)), None)
    return recorded or _examine(run_dir, session)


def record_run_death(run_dir: Path) -> Death | None:
    """As `examine_run`, and `append_death`, once.  Needs the run's lock.  Raises OSError, as that does."""
    path, death = run_dir / "post_mortem.jsonl", examine_run(run_dir, locked=True)
    if death is not None and death not in read_deaths(path):
        append_death(path, death)
    return death


def deaths_of(run_dir: Path) -> list[Death]:
    """All deaths that are known of a run, and that of its last session if it was killed and nobody has noticed yet."""
    deaths, last = read_deaths(run_dir / "post_mortem.jsonl"), examine_run(run_dir)
    return deaths if last is None or last in deaths else [*deaths, last]


def is_of_session(death: Death, session: SessionRecord) -> bool:
    """Whether it happened in a session.  A run's own death may be noticed only when the next session begins.  Pure."""
    return death.time >= session.begin_time and (death.victim == "reader" or death.pid == session.pid)


def _examine(run_dir: Path, session: SessionRecord) -> Death:
    moments = [moment for moment in read_recent(run_dir / "recent.jsonl") if moment.time >= session.begin_time]
    records = [r for r in Tail(run_dir / "metrics.jsonl").new() if r["time"] >= session.begin_time]
    last = moments[-1] if moments else None
    seen = max(session.begin_time, last.time if last else 0.0, records[-1]["time"] if records else 0.0)
    step = next((int(r["step"]) for r in reversed(records) if isinstance(r.get("step"), int)), last.step if last else 0)
    here = boot_id()
    cause: Cause = "unknown"
    if here and here == session.boot_id:
        cause, evidence = _judge_counts(session, last, last, _counts_for(session))
    elif is_alive(session) is None:
        where = "on another machine, whose kernel cannot be queried from here"
        evidence = [f"it ran {where}; it recorded no end, and its lock on the run is gone"]
    else:
        cause = "restart"
        evidence = [f"the machine has been restarted since: its boot id was {session.boot_id} and is {here}"]
    evidence.append(f"last sign of life {format_time(seen)}, after step {step}")
    events = [r for r in records if r["kind"] == "event" and r["time"] >= seen - _LAST_S]
    said = [f"{seen - r['time']:.0f} s before: {r.get('text') or r.get('event')}" for r in events[-_EVENTS_SHOWN:]]
    workers = session.workers if last is None or last.workers is None else last.workers  # the guard may have cut some
    remedy = remedy_of(cause, "run", workers, last, session.limits.ray_share)
    return _death("run", session.pid, step, cause, [*evidence, *said], _last_minute(moments, seen), remedy)


def _death(
    victim: Victim, pid: int, step: int, cause: Cause, evidence: Sequence[str], moments: Moments, remedy: str
) -> Death:
    """Adds how full memory was at the last sample, and what a dead reader held."""
    memory, last = [], moments[-1] if moments else None
    if last is not None and (share := _share_of(last)) is not None:
        figures = (
            f"({format_size(last.killer_used_bytes)} of {format_size(last.kills_at_bytes)}) at {format_time(last.time)}"
        )
        killer = last.killer or "the first killer"
        memory.append(f"memory stood at {100 * share:.1f} % of where {killer} kills {figures}")
    if last is not None and pid in last.reader_bytes:
        memory.append(f"the reader itself held {format_size(last.reader_bytes[pid])}")
    return Death(time.time(), victim, pid, step, cause, (*evidence, *memory), tuple(moments), remedy)


def _counts_for(session: SessionRecord) -> KillCounts:
    """The counts to hold against the session's.  A container that was restarted has a new cgroup under the old name,
    whose count begins at 0: only the machine's goes on."""
    counts, first = read_counts_of(os.getpid()), read_process(1)
    # The number of a namespace is given out again; the first process of a container is as old as the container.
    restarted = first is not None and first.started_s > session.started_s
    same_container = session.pid_namespace == pid_namespace() and not restarted
    return counts if same_container else KillCounts(machine=counts.machine)


def _judge_counts(
    session: SessionRecord, sampled: MemorySample | None, last: MemorySample | None, counts: KillCounts
) -> tuple[Cause, list[str]]:
    """`sampled`: the sample whose counts are those before the death; `last`: the last one before it."""
    rise = counts.since(KillCounts.noted(sampled or session, session.cgroup))
    since = f"the sample at {format_time(sampled.time)}" if sampled else "the session began"
    return judge(rise, last, since, time.time() - (sampled.time if sampled else session.begin_time))


def judge(rise: KillCounts, last: MemorySample | None, since: str, counted_s: float = 0.0) -> tuple[Cause, list[str]]:
    """What killed a process, and the evidence.  Pure.

    Args:
        rise: kills counted since the last sample before the death.
        last: the last sample of the run's memory; None without one.
        since, counted_s: from when on kills were counted, for people, and for how many seconds.
    """
    share = _share_of(last)
    full = share is not None and share >= _NEARLY_FULL
    likely: Cause = "machine" if last is not None and last.killer == "the machine" else "cgroup"
    count, where = (rise.machine, "this machine") if rise.cgroup is None else (rise.cgroup, "this cgroup")
    if count is None:
        return "unknown", ["the kernel's counts of kills cannot be read here"]
    if count == 0:
        return "signal", [f"the kernel counted no kill for memory in {where} since {since}"]
    counted = f"the kernel killed {format_count(count, 'process')} of {where} for memory since {since}"
    if rise.cgroup is None and not full:
        return "unknown", [f"{counted}: which ones is unknown", _NAME_THE_VICTIM]
    if share is not None and not full and counted_s > _AT_ONCE_S:
        return "unknown", [f"{counted}, when memory was not nearly full: which ones is not known", _NAME_THE_VICTIM]
    return likely, [f"{counted}: {'memory was nearly full, ' if full else ''}most likely this one", _NAME_THE_VICTIM]


def remedy_of(
    cause: Cause, victim: Victim, workers: int, last: MemorySample | None, ray_share: float | None = None
) -> str:
    """What to do about a death.

    Args:
        workers: readers that there were.
        last: the last sample before it.
        ray_share: share of the machine's memory at which Ray kills; None = not known.
    """
    less = "Start it with --resume and a smaller data.regions_in_flight or training.train_batch_size."
    if workers:  # never 0: what readers leak, or hold, the trainer would
        keys, what = "training.prefetch_factor=1", "fewer batches ahead"
        if workers > 1:
            keys, what = f"training.workers={workers - 1} {keys}", f"fewer readers, {what}"
        less = f"Start it with --resume {keys} ({what}), or a smaller data.regions_in_flight."
    again = "start again with --resume"
    if victim == "reader":
        again = "the run continues with a new reader"
        less = f"The run continues with a new reader; if it happens again, stop it first. {less}"
    if cause == "ray":
        at = "" if ray_share is None else f" at {100 * ray_share:.0f} % of it"
        counts = f"Ray counts the memory of the whole machine, including other users', and kills{at}"
        return f"{less} {counts} (RAY_memory_usage_threshold)."
    if cause in ("cgroup", "machine"):
        return less
    if cause in ("signal", "unknown") and (_share_of(last) or 0.0) >= _NEARLY_FULL:
        ends = "a container runtime, a scheduler, systemd-oomd or earlyoom ends processes like this"
        return f"memory was nearly used up: {ends}. {less}"
    if cause in ("signal", "restart"):
        return f"nothing of the configuration; {again}."
    return f"{again}; if it happens again, watch it: vesuvius memcheck --watch 2."


def _last_minute(moments: Moments, end: float) -> Moments:
    return [moment for moment in moments if end - _LAST_S - _NOTICED_S <= moment.time <= end]
