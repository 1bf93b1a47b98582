"""Explains the death of a reader or run: the cause, the last minute of its memory, and what to change.

Written to `post_mortem.jsonl`.  The evidence is the kernel's kill counts, Ray's report and the last samples.  A reader
is examined while its run continues, a killed run by the next session or from outside.
"""

import os
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from vesuvius.monitor.probes.cgroup import read_cgroup
from vesuvius.monitor.probes.processes import read_process
from vesuvius.monitor.probes.system_sample import read_machine
from vesuvius.monitor.samples import MemorySample, read_recent
from vesuvius.monitor.session import SessionRecord, is_alive, pid_namespace, read_session
from vesuvius.runlog.files import boot_id
from vesuvius.runlog.records import JsonLines, Tail, read_dataclasses
from vesuvius.runlog.units import format_count, format_gib, format_size, format_time

Samples = Sequence[MemorySample]
Victim = Literal["worker", "run"]
Cause = Literal["kernel", "ray", "gpu", "guard", "signal", "unknown"]

_LAST_S = 60.0
_NEARLY_FULL = 0.9
_AT_ONCE_S = 60.0  # kills counted over a longer time may be later ones, of other programs
_NOTICED_S = 1.0  # delay with which Ray and the monitor notice an end
_LONGEST = 300  # characters of a line of evidence
_EVERY_S = 10.0
_LOG_BYTES, _BAD = 2**14, (" WARNING ", " ERROR ", " CRITICAL ")  # in the run's log, at its end
_NAME_THE_VICTIM = "the kernel's log names the victim; as root: dmesg | grep -i killed"

# Each kill contains a phrase that operators grep logs for: killed, oom, out of memory.
_HEADLINES: Mapping[Cause, str] = {
    "kernel": "was killed: out of memory: the kernel chose this process",
    "ray": "was killed: out of memory: Ray's memory monitor chose this process",
    "gpu": "ended: out of memory on the GPU",
    "guard": "was stopped by the memory guard to avoid an out of memory kill",
    "signal": "was killed from outside, or crashed",
    "unknown": "was killed or died; cause unknown",
}


@dataclass(frozen=True)
class Death:
    time: float  # when it was noticed, seconds since 1970
    victim: Victim
    pid: int
    step: int  # optimizer steps done
    cause: Cause
    evidence: tuple[str, ...]  # a line each
    moments: tuple[MemorySample, ...]  # samples of the last 60 seconds
    remedy: str  # what to change, with overrides

    @property
    def is_for_memory(self) -> bool:
        """Whether it was killed, or ended, because memory ran out, according to evidence."""
        return self.cause in ("kernel", "ray", "gpu")


def headline(death: Death) -> str:
    """Victim and cause in one sentence.  Pure."""
    who = f"worker {death.pid}" if death.victim == "worker" else f"the run (pid {death.pid})"
    return f"{who} {_HEADLINES[death.cause]}"


def death_line(death: Death) -> str:
    return f"{headline(death)}, detected {format_time(death.time)}"


def append_death(path: Path, death: Death) -> None:
    """Append to `post_mortem.jsonl`, once; a full disk is only logged.  Raises OSError: the file cannot be opened."""
    if death not in read_deaths(path):
        with closing(JsonLines(path)) as lines:
            lines.write("death", **asdict(death))


def read_deaths(path: Path) -> list[Death]:
    """Return all recorded deaths of a run, oldest first; empty without a file."""
    return read_dataclasses(Death, path)


def death_lines(death: Death) -> list[str]:
    return [
        headline(death),
        f"  detected {format_time(death.time)}, after step {death.step}",
        *(f"  - {textwrap.shorten(line, _LONGEST, placeholder=' ...')}" for line in death.evidence),
        *_table(death.moments),
        f"  what to change: {death.remedy}",
    ]


def _table(samples: Samples) -> list[str]:
    if not samples:
        return ["  no memory samples were kept"]
    end = samples[-1].time
    rows = [f"  {'seconds':>9}{'run GiB':>10}{'trainer':>10}{'largest worker':>24}   share of the limit"]
    for each in {(end - sample.time) // _EVERY_S: sample for sample in samples}.values():
        pid, size = max(each.readers.items(), key=lambda item: item[1], default=(0, 0))
        reader, share = f"{format_gib(size)} (pid {pid})" if pid else "-", each.limit_share
        rows.append(
            f"  {each.time - end:>9.0f}{format_gib(each.used_bytes):>10}{format_gib(each.trainer_bytes):>10}"
            f"{reader:>24}   {'-' if share is None else f'{100 * share:.1f} %'}"
        )
    return rows


@dataclass(frozen=True)
class KillCounts:
    """Numbers of processes that the kernel has killed for lack of memory; None if it does not count."""

    cgroup: int | None = None  # processes in the cgroup, whichever limit was reached
    machine: int | None = None  # on the whole machine since boot; containers see it too
    path: str = ""  # of that cgroup; '' = unknown

    @classmethod
    def of(cls, record: MemorySample | SessionRecord, path: str = "") -> Self:
        return cls(record.cgroup_oom_kills, record.machine_oom_kills, path)

    def since(self, before: Self) -> Self:
        """Return the increase; None if it is unknown, the cgroup differs, or the count fell.  Pure."""

        def rise(was: int | None, now: int | None) -> int | None:
            return None if was is None or now is None or now < was else now - was

        same = self.path == before.path or not (self.path and before.path)
        return type(self)(rise(before.cgroup, self.cgroup) if same else None, rise(before.machine, self.machine))


def read_counts_of(pid: int) -> KillCounts:
    """Read the current counts of the machine and of the cgroup of a living process."""
    cgroup, machine = read_cgroup(pid), read_machine().oom_kills
    return KillCounts(cgroup.oom_kills, machine, cgroup.path) if cgroup else KillCounts(machine=machine)


def examine_reader(
    end: Mapping[str, Any], step: int, session: SessionRecord, samples: Samples, readers: Iterable[int] = ()
) -> Death:
    """Explain why a reader died; called in the trainer once it has been replaced.  Reads the kernel's counts.

    Args:
        end: fields of the stream's event `worker_died`.
        step: optimizer steps done.
        samples: memory of the last two minutes.
        readers: pids of the living readers on this machine.
    """
    ended = time.time() if end["exit_time"] is None else end["exit_time"]
    samples = _last_minute(samples, ended)
    last = samples[-1] if samples else None
    exit_type, node = end["exit_type"], end["node"]
    evidence = [f"Ray: {exit_type}: {end['exit_detail']}" if exit_type else "Ray did not report how it ended"]
    cause: Cause = "unknown"
    if end["signal"] is not None:
        cause, reading = "signal", end["volume"] or "nothing"
        evidence.insert(0, f"it crashed with {end['signal']} while reading {reading}, according to its reading log")
    elif exit_type == "NODE_OUT_OF_MEMORY":
        cause = "ray"
    elif node not in ("", os.uname().nodename):
        evidence.append(f"it ran on {node}, whose kernel cannot be queried from here")
    elif exit_type in (None, "SYSTEM_ERROR"):
        # The monitor continues while the new reader starts: samples taken after the death have counted it already.
        before = [sample for sample in samples if end["exit_time"] is not None and sample.time < ended - _NOTICED_S]
        sampled = next(iter([*before[-1:], *samples[:1]]), None)
        # Readers of a shared Ray are in another cgroup than the trainer: use that of a living reader.
        known = (counts for pid in readers if (counts := read_counts_of(pid)).path)
        counts = next(known, None) or read_counts_of(os.getpid())
        cause, counted = _classify(session, sampled, last, counts)
        evidence = [*counted, *evidence]
    remedy = remedy_of(cause, "worker", session.workers, last, session.limits.ray_share)
    return _death("worker", end["pid"], step, cause, evidence, samples, remedy)


def death_of_this_run(cause: Literal["gpu", "guard"], step: int, reason: str, samples: Samples, remedy: str) -> Death:
    """Record that this run ended itself because memory ran out; `reason`: the figures behind it."""
    return _death("run", os.getpid(), step, cause, [reason], _last_minute(samples, time.time()), remedy)


def examine_run(run_dir: Path, locked: bool = False) -> Death | None:
    """Explain why the last session of a run died; None if it ended properly, is alive, may be alive elsewhere, or there
    was none.  Reads only; a death recorded in `post_mortem.jsonl` is returned as it is.

    Args:
        locked: this process holds the run's lock, so no process of it is alive, in other containers or machines either.
    """
    session = read_session(run_dir / "session.json")
    if session is None or session.end_time is not None:
        return None
    alive = is_alive(session)
    if alive or (alive is None and not locked):
        return None
    for death in reversed(read_deaths(run_dir / "post_mortem.jsonl")):
        if death.victim == "run" and is_of_session(death, session):
            return death
    samples = [sample for sample in read_recent(run_dir / "recent.jsonl") if sample.time >= session.begin_time]
    records = [r for r in Tail(run_dir / "metrics.jsonl").new() if r["time"] >= session.begin_time]
    last = samples[-1] if samples else None
    seen = max(session.begin_time, last.time if last else 0.0, records[-1]["time"] if records else 0.0)
    step = next((int(r["step"]) for r in reversed(records) if isinstance(r.get("step"), int)), last.step if last else 0)
    cause: Cause = "unknown"
    evidence = ["it ran on another machine, or on this one before a restart; it recorded no end and is gone"]
    if session.boot_id and session.boot_id == boot_id():
        cause, evidence = _classify(session, last, last, _counts_for(session))
    evidence.append(f"last sign of life {format_time(seen)}, after step {step}")
    events = [r for r in records if r["kind"] == "event" and r["time"] >= seen - _LAST_S]
    said = [f"{seen - r['time']:.0f} s before: {r.get('text') or r.get('event')}" for r in events[-2:]]
    lines = Tail(run_dir / "logs/train_full.log", _LOG_BYTES).lines().decode("utf-8", errors="replace").splitlines()
    since, until = (format_time(at) for at in (max(seen - _LAST_S, session.begin_time), seen + _NOTICED_S))
    bad = [line for line in lines if since <= line[: len(until)] <= until and any(level in line for level in _BAD)]
    said += [f"the log's last warning: {line}" for line in bad[-1:]]
    workers = session.workers if last is None or last.workers is None else last.workers  # the guard may have cut some
    remedy = remedy_of(cause, "run", workers, last, session.limits.ray_share)
    return _death("run", session.pid, step, cause, [*evidence, *said], _last_minute(samples, seen), remedy)


def record_run_death(run_dir: Path) -> Death | None:
    """Examine a run and append its death, if any, once.  Needs the run's lock.  Raises OSError."""
    if (death := examine_run(run_dir, locked=True)) is not None:
        append_death(run_dir / "post_mortem.jsonl", death)
    return death


def deaths_of(run_dir: Path) -> list[Death]:
    """Return all deaths of a run, including an unrecorded one of its last session."""
    deaths, last = read_deaths(run_dir / "post_mortem.jsonl"), examine_run(run_dir)
    return deaths if last is None or last in deaths else [*deaths, last]


def is_of_session(death: Death, session: SessionRecord) -> bool:
    """Whether a death belongs to a session.  A run's own death may be noticed only by the next session.  Pure."""
    return death.time >= session.begin_time and (death.victim == "worker" or death.pid == session.pid)


def _death(
    victim: Victim, pid: int, step: int, cause: Cause, evidence: Sequence[str], samples: Samples, remedy: str
) -> Death:
    memory, last = [], samples[-1] if samples else None
    if last is not None and (share := last.limit_share) is not None:
        limit = last.limits[0]
        figures = f"({format_size(limit.used_bytes)} of {format_size(limit.limit_bytes)}) at {format_time(last.time)}"
        memory.append(f"memory was at {100 * share:.1f} % of the point where {limit.name} kills {figures}")
    if last is not None and pid in last.readers:
        memory.append(f"the worker itself used {format_size(last.readers[pid])}")
    return Death(time.time(), victim, pid, step, cause, (*evidence, *memory), tuple(samples), remedy)


def _counts_for(session: SessionRecord) -> KillCounts:
    """Return the counts to compare with the session's.  A restarted container has a new cgroup under the old path,
    whose count begins at 0; then only the machine's count is used."""
    counts, first = read_counts_of(os.getpid()), read_process(1)
    # Namespace numbers are reused; the first process of a container is as old as the container.
    restarted = first is not None and first.started_s > session.started_s
    same_container = session.pid_namespace == pid_namespace() and not restarted
    return counts if same_container else KillCounts(machine=counts.machine)


def _classify(
    session: SessionRecord, sampled: MemorySample | None, last: MemorySample | None, counts: KillCounts
) -> tuple[Cause, list[str]]:
    """`sampled`: sample with the counts before the death; `last`: last sample before it."""
    rise = counts.since(KillCounts.of(sampled or session, session.cgroup))
    since = f"the sample at {format_time(sampled.time)}" if sampled else "the session began"
    counted_s = time.time() - (sampled.time if sampled else session.begin_time)
    return classify_death(rise, last.limit_share if last else None, since, counted_s)


def classify_death(rise: KillCounts, share: float | None, since: str, counted_s: float) -> tuple[Cause, list[str]]:
    """Return the cause of a death and the evidence.  Pure.

    Args:
        rise: kills counted since the last sample before the death.
        share: how far memory was to the first limit in the last sample.
        since, counted_s: start of the count, as text, and its length in seconds.
    """
    full = share is not None and share >= _NEARLY_FULL
    count, where = (rise.machine, "this machine") if rise.cgroup is None else (rise.cgroup, "this cgroup")
    if count is None:
        return "unknown", ["the kernel's kill counts cannot be read here"]
    if count == 0:
        return "signal", [f"the kernel OOM-killed no process of {where} since {since}"]
    counted = f"the kernel OOM-killed {format_count(count, 'process')} of {where} since {since}"
    if full or (rise.cgroup is not None and (share is None or counted_s <= _AT_ONCE_S)):
        return "kernel", [
            f"{counted}; {'memory was nearly full, ' if full else ''}most likely this one",
            _NAME_THE_VICTIM,
        ]
    return "unknown", [f"{counted}; which ones is unknown", _NAME_THE_VICTIM]


def remedy_of(cause: Cause, victim: Victim, workers: int, last: MemorySample | None, ray_share: float | None) -> str:
    """Return what to do about a death, after the sample `last`; `ray_share`: share of memory at which Ray kills."""
    less = "Start it with --resume and a smaller data.regions_in_flight or training.train_batch_size."
    if workers:  # never suggests 0: the trainer would use that memory instead
        keys, what = "training.prefetch_factor=1", "fewer prefetched batches"
        if workers > 1:
            keys, what = f"training.workers={workers - 1} {keys}", f"fewer workers, {what}"
        less = f"Start it with --resume {keys} ({what}), or a smaller data.regions_in_flight."
    again = "start again with --resume"
    if victim == "worker":
        again = "the run continues with a new worker"
        less = f"The run continues with a new worker; if it happens again, stop the run. {less}"
    if cause == "ray":
        at = "" if ray_share is None else f" at {100 * ray_share:.0f} % of it"
        counts = f"Ray counts the memory of the whole machine, including other users', and kills{at}"
        return f"{less} {counts} (RAY_memory_usage_threshold)."
    if cause == "kernel":
        return less
    if ((last and last.limit_share) or 0.0) >= _NEARLY_FULL:
        ends = "a container runtime, a scheduler, systemd-oomd or earlyoom may have killed it"
        return f"memory was nearly full: {ends}. {less}"
    if cause == "signal":
        return f"nothing in the configuration; {again}."
    return f"{again}; if it happens again, watch it with vesuvius memcheck --watch 2."


def _last_minute(samples: Samples, end: float) -> Samples:
    return [sample for sample in samples if end - _LAST_S - _NOTICED_S <= sample.time <= end]
