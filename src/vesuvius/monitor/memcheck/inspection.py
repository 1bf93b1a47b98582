"""Inspects a run or the machine from outside, for `memory_table.py`.  Reads only.

The run's records give memory by part, risk, steps and verdict.  For dead, hung or remote runs the system is asked, too:
whether the process is alive, what it uses now, whether something was killed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from vesuvius.errors import EXIT_MEMORY_CRITICAL, EXIT_MEMORY_KILL, EXIT_MEMORY_WARN, EXIT_OK, VesuviusError
from vesuvius.monitor.memory.limits import MemoryLimit, MemoryPolicy, tightest
from vesuvius.monitor.memory.risk import Level, RiskWatch
from vesuvius.monitor.post_mortem import Death, KillCounts, death_line, deaths_of, is_of_session
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.probes.processes import ProcessUse
from vesuvius.monitor.probes.system_sample import Rates, SystemSample, Watcher, rates_between, sample_system
from vesuvius.monitor.recent import MemorySample, read_recent
from vesuvius.monitor.session import SessionRecord, is_alive, read_session
from vesuvius.runlog.records import Record, Tail, is_number
from vesuvius.runlog.units import format_count, format_duration, format_size, format_time, quantile

State = Literal["running", "hung", "ended", "died", "elsewhere", "unknown"]

_HUNG_AFTER_S = 60.0
_HUNG_AFTER_P95 = 10.0
_SYSTEM_BYTES = 2**20  # some hours of records
_RECENT_STEPS = 200
_FRESH_S = 30.0
_MONITOR_LATE_S = 15.0
_PROCESS_STATES = {
    psutil.STATUS_STOPPED: "; it is stopped (SIGSTOP); kill -CONT resumes it",
    psutil.STATUS_TRACING_STOP: "; a debugger has stopped it",
    psutil.STATUS_DISK_SLEEP: "; it waits for a disk",
}


@dataclass(frozen=True)
class Row:
    """Memory of one part of a run."""

    # "root" (the trainer), "readers" (all), "reader" (one), "others", "store", "total", or "vram"
    part: str
    name: str  # for people
    pid: int | None = None  # of a single process
    # now_bytes, peak_bytes: None = unknown
    now_bytes: float | None = None
    peak_bytes: float | None = None


@dataclass(frozen=True)
class Inspection:
    """Result of an inspection."""

    time: float  # of the inspection, seconds since 1970
    what: Literal["run", "machine"]
    name: str  # of the run or the machine, for people
    state: State = "running"  # of the run; `elsewhere` = on another machine, where only its files are visible
    state_text: str = ""  # the same for people, with evidence
    stalled: bool = False  # the run hangs, according to its watchdog or for lack of signs of life
    rows: tuple[Row, ...] = ()  # the parts, then the total
    peaks_since: float | None = None  # when the run began to record its memory, seconds since 1970
    limit_bytes: int | None = None  # the smallest limit
    # reclaimable file pages; not part of the total
    page_cache_bytes: int | None = None
    # level, reason: the risk; None = unknown
    level: Level | None = None
    reason: str = ""
    limits: tuple[MemoryLimit, ...] = ()  # first the one that would be reached first
    vram: Row | None = None  # memory reserved by the trainer; None without a GPU
    vram_limit_bytes: int | None = None  # of its GPU
    no_gpus: str | None = None  # why no GPU is seen
    # of a run: the last `step`, its `age_s`, `step_s_p95` of recent steps, and the last `verdict`
    steps: Mapping[str, Any] | None = None
    # evidence, a line each: of kills because memory ran out, and of deaths of another or an unknown cause
    kills: tuple[str, ...] = ()
    deaths: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()  # further notes, a line each
    # sample, rates: what the system reports; None if it was not sampled
    sample: SystemSample | None = None
    rates: Rates | None = None
    cores: float | None = None  # that the run may use: its cpuset and CPU quotas

    @property
    def exit_code(self) -> int:
        """Exit code: 0 ok, 10 warning, hung or a death of another cause, 11 critical, 12 an OOM kill; the highest that
        applies."""
        if self.kills:
            return EXIT_MEMORY_KILL
        if self.level is Level.CRITICAL:
            return EXIT_MEMORY_CRITICAL
        return EXIT_MEMORY_WARN if self.deaths or self.stalled or self.level is Level.WARN else EXIT_OK

    def as_json(self) -> dict[str, Any]:
        """Return an object for scripts; null is unknown.  No key matches a grep for kills."""
        found, sample = asdict(self), self.sample
        del found["limits"]  # under another key below
        seen, rates, machine = found.pop("sample") or {}, found.pop("rates"), None
        if sample is not None:
            machine = seen["machine"] | {
                "kernel_kills": seen["machine"].pop("oom_kills"),
                "cgroup_kernel_kills": sample.cgroup.oom_kills if sample.cgroup else None,
                "core_busy": rates and rates["core_busy"],
            }
        return found | {
            "exit_code": self.exit_code,
            "level": self.level.name if self.level is not None else None,
            "parts": found.pop("rows"),
            "limits": [asdict(each) | {"left_bytes": each.left_bytes} for each in self.limits],
            "processes": seen.get("processes"),
            "machine": machine,
            "gpus": seen.get("gpus"),
        }


class Watch:
    """Samples a run (`pid`: its trainer) or, without one, the machine alone."""

    def __init__(self, limits: MemoryPolicy, gpus: Gpus, pid: int | None = None) -> None:
        self._limits, self._gpus = limits, gpus
        self._watcher = Watcher(pid, gpus) if pid is not None else None
        self._watch = RiskWatch(limits, warmup_s=0.0)
        self._before: SystemSample | None = None

    def sample(self) -> SystemSample:
        """Take a sample.  Raises ProcessLookupError: the process has ended."""
        return self._watcher.sample() if self._watcher else sample_system(os.getpid(), self._gpus)

    def add_to(self, found: Inspection, sample: SystemSample) -> Inspection:
        """Add to `found` what follows from a sample; a known risk is kept."""
        risk = self._watch.add(sample)
        stopped = ", ".join(str(process.pid) for process in sample.processes if process.is_stopped)
        remark = f"stopped by a signal (SIGSTOP) or a debugger: process {stopped}; kill -CONT resumes it"
        cgroup = sample.cgroup if self._watcher else None
        before, self._before = self._before, sample
        return replace(
            found,
            remarks=(*found.remarks, *([remark] if stopped else [])),
            limit_bytes=tightest(sample, self._limits).total_bytes,
            page_cache_bytes=cgroup.file_bytes if cgroup else sample.machine.page_cache_bytes,
            level=risk.level if found.level is None else found.level,
            reason=found.reason or risk.reason,
            limits=risk.limits,
            sample=sample,
            rates=rates_between(before, sample) if before else None,
            cores=_cores_of(sample),
        )


def _cores_of(sample: SystemSample) -> float | None:
    try:
        return usable_cores(sample.processes[0].pid if sample.processes else os.getpid())
    except OSError:  # it has ended
        return None


def machine_inspector(gpus: Gpus, remarks: tuple[str, ...] = ()) -> Callable[[], Inspection]:
    """Return a function that inspects the machine and the limits of processes started from here."""
    watch, name = Watch(MemoryPolicy(), gpus), f"machine {os.uname().nodename}"

    def inspect() -> Inspection:
        found = Inspection(time.time(), "machine", name, no_gpus=gpus.reason, remarks=remarks)
        return watch.add_to(found, watch.sample())

    return inspect


class RunInspector:
    """Inspects the latest session of a run, also when a new one begins."""

    def __init__(self, directory: Path, gpus: Gpus) -> None:
        self._directory = directory
        self._gpus = gpus
        self._session: SessionRecord | None = None
        self._watch: Watch | None = None

    def inspect(self) -> Inspection:
        """Inspect the run's files and, if it runs on this machine, its processes.

        Raises VesuviusError: a record has a value of the wrong type.
        """
        try:
            return self._inspect()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise VesuviusError(
                f"cannot read the records of {self._directory}: a line of its .jsonl files has a wrong value "
                f"({type(error).__name__}: {error}); remove that line"
            ) from error

    def _inspect(self) -> Inspection:
        run = RunFiles(self._directory)
        if (sample := self._sample(run.session)) is None:
            run = RunFiles(self._directory)  # it may have ended since the files were read
        now, session, last = time.time(), run.session, run.last
        vram = last.vram_used_bytes if last else None
        deaths = [d for d in deaths_of(self._directory) if session is not None and is_of_session(d, session)]
        guard = next((d for d in deaths if d.cause == "guard" and session and session.end_time is not None), None)
        state, text = run.state(sample, now)
        others, peaks = "Ray's own" if session and session.workers else "others", run.peaks()
        found = Inspection(
            now,
            "run",
            f"run {self._directory.name}",
            state,
            f"{text}: ended by the memory guard" if guard and not run.end_cause else text,
            stalled=state == "hung" or (state == "elsewhere" and run.watchdog is not None),
            no_gpus=self._gpus.reason,
            steps=run.steps_at(now),
            kills=run.kills(sample, state, deaths),
            deaths=tuple(death_line(each) for each in deaths if each.cause != "guard" and not each.is_for_memory),
            remarks=(*([guard.remedy] if guard else []), *(run.remarks(sample, now) if sample else [])),
            peaks_since=run.since,
            vram=Row("vram", "VRAM of the trainer", None, vram, peaks["vram"]) if vram is not None else None,
            vram_limit_bytes=last.vram_limit_bytes if last else None,
        )
        if sample is not None and self._watch is not None:
            if last is not None and now - last.time <= _MONITOR_LATE_S and last.reason:
                found = replace(found, level=Level[last.level], reason=last.reason)  # it has more samples
            rows = rows_of(sizes_in(sample, last.reader_bytes if last else ()), peaks, others)
            return self._watch.add_to(replace(found, rows=rows), sample)
        if last is not None:  # it is dead or on another machine: use its last sample
            fresh = state == "elsewhere" and abs(now - last.time) <= _FRESH_S
            used, most = format_size(last.binding_used_bytes), format_size(last.limit_bytes)
            found = replace(
                found,
                rows=rows_of(_recorded_sizes(last), peaks, others),
                level=Level[last.level] if fresh else None,
                reason=f"{last.binding_limit}: {used} in use; kills at {most}" if last.binding_limit else "",
                remarks=(*found.remarks, f"figures from {format_time(last.time)}"),
            )
        return replace(found, level=Level.CRITICAL, reason=" ".join(guard.evidence[:1])) if guard else found

    def _sample(self, session: SessionRecord | None) -> SystemSample | None:
        """Sample the run; None if it has ended or runs elsewhere."""
        if session is None or session.end_time is not None:
            return None
        if session != self._session:
            self._session = session
            self._watch = Watch(session.limits, self._gpus, session.pid) if is_alive(session) else None
        try:
            return self._watch.sample() if self._watch else None
        except ProcessLookupError:
            self._watch = None
            return None


class RunFiles:
    """The files of the latest session, as they are now."""

    def __init__(self, directory: Path) -> None:
        self.session = read_session(directory / "session.json")
        begin = self.session.begin_time if self.session else -math.inf
        self._metrics = [r for r in Tail(directory / "metrics.jsonl").new() if r["time"] >= begin]
        self._system = [r for r in Tail(directory / "system.jsonl", _SYSTEM_BYTES).new() if r["time"] >= begin]
        self._recent = [sample for sample in read_recent(directory / "recent.jsonl") if sample.time >= begin]
        self.last = self._recent[-1] if self._recent else None  # memory sample
        steps = [r for r in self._metrics if r["kind"] == "step" and is_number(r.get("step"))]
        recent = [r for r in steps[-_RECENT_STEPS:] if is_number(r.get("step_s"))]
        work_s = [r["step_s"] - (r.get("pause_s") or 0.0) for r in recent]
        self._step_s_p95 = quantile(work_s, 0.95) if work_s else None
        self._step = steps[-1] if steps else None
        end = self._metrics[-1] if self._metrics else None
        self._sign_time = end["time"] if end else None  # of any record: validation takes longer than a step
        # Of the first memory record.
        self.since = min([r["time"] for r in self._system] + [sample.time for sample in self._recent], default=None)
        # Why the session ended, as it recorded; what it hangs in according to its watchdog, and since when.
        self.end_cause = str(end.get("cause") or "") if end and end["kind"] == "run_end" else ""
        self.watchdog = _watchdog(self._metrics)

    def steps_at(self, now: float) -> dict[str, Any]:
        """Progress of the run, for `Inspection.steps`."""
        verdicts = [str(r["text"]) for r in self._metrics if r["kind"] == "verdict" and r.get("text")]
        return {
            "step": int(self._step["step"]) if self._step else None,
            "age_s": max(now - self._step["time"], 0.0) if self._step else None,
            "step_s_p95": self._step_s_p95,
            "verdict": verdicts[-1] if verdicts else None,
        }

    def state(self, sample: SystemSample | None, now: float) -> tuple[State, str]:
        """Return the state and a text for people; `sample` is None if the run has ended or is elsewhere."""
        session = self.session
        if session is None:
            return "unknown", "no session.json: the run has not started, or an older version wrote it"
        if session.end_time is not None:
            cause = f": {self.end_cause}" if session.exit_code and self.end_cause else ""
            return "ended", f"ended {format_time(session.end_time)} with exit code {session.exit_code}{cause}"
        if sample is not None:
            root = sample.processes[0]
            if hung := self._hung(root, now):
                return "hung", hung + _PROCESS_STATES.get(root.status, "")
            return "running", f"process {root.pid} is running" + ("" if self._step else ", no step yet")
        if is_alive(session) is False:
            seen = f"; last seen {format_time(self.last.time)}" if self.last else ""
            return "died", f"died: process {session.pid} is gone and recorded no end{seen}"
        where = "another machine or container, or this machine before a restart"
        return "elsewhere", f"on {session.host}: {where}; from its files"

    def _hung(self, trainer: ProcessUse, now: float) -> str:
        """Return why a living run counts as hung; '' if it does not."""
        if self.watchdog is not None:
            return f"{self.watchdog[0]}, since {format_time(self.watchdog[1])}"
        if trainer.is_stopped:
            return f"process {trainer.pid} is stopped"
        if self._sign_time is None or self._step_s_p95 is None:
            return ""
        what, silent_s = silence(self.last, self._sign_time, now)
        if silent_s <= max(_HUNG_AFTER_S, _HUNG_AFTER_P95 * self._step_s_p95):
            return ""
        usual = f"95 % of the steps take less than {format_duration(self._step_s_p95)}"
        return f"no {what} for {format_duration(silent_s)}, although {usual}"

    def kills(self, sample: SystemSample | None, state: State, deaths: Sequence[Death]) -> tuple[str, ...]:
        """Return the evidence of OOM kills in this session, a line each.

        The cgroup's count is preferred, as the machine's includes other users' processes.
        """
        if (session := self.session) is None:
            return ()
        lines = tuple(death_line(death) for death in deaths if death.is_for_memory)
        if state == "died":  # judged by its post-mortem: later kills are of other processes
            return lines
        # Without paths: they differ inside and outside of a container.
        now = KillCounts() if self.last is None else KillCounts.of(self.last)
        if sample is not None:
            now = KillCounts(sample.cgroup.oom_kills if sample.cgroup else None, sample.machine.oom_kills)
        rise = now.since(KillCounts.of(session))
        count, where = (rise.machine, "of the machine") if rise.cgroup is None else (rise.cgroup, "of the run's cgroup")
        counted = f"out of memory: the kernel killed {format_count(count or 0, 'process')} {where} in this session"
        return (*lines, counted) if count else lines

    def remarks(self, sample: SystemSample, now: float) -> Iterator[str]:
        """Return notes about a run on this machine."""
        last, began = self.last, self.session.begin_time if self.session else now
        if (silent_s := now - (last.time if last else began)) > _MONITOR_LATE_S:
            yield f"the run's own monitor has been silent for {format_duration(silent_s)}"
        if last and last.reader_bytes and not any(process.pid in last.reader_bytes for process in sample.processes):
            yield "the readers are not child processes of the run (Ray cluster): their memory is not in the table"

    def peaks(self) -> dict[str | int, float]:
        """Return the largest recorded size of each part, by name or, for readers, by pid."""
        seen: list[tuple[str | int, Any]] = []
        for record in self._system:
            vram, readers = record.get("vram") or {}, record.get("readers") or {}
            seen += [("total", record.get("used_bytes")), ("store", record.get("shared_bytes"))]
            seen += [("root", record.get("trainer_bytes")), ("vram", vram.get("reserved_bytes"))]
            seen += [(int(pid), size) for pid, size in readers.items() if pid.isdecimal()]
        for sample in self._recent:
            seen += [("vram", sample.vram_used_bytes), *_recorded_sizes(sample).items()]
        peaks: dict[str | int, float] = {}
        for name, size in seen:
            most = size[-1] if isinstance(size, list) and size else size  # [min, mean, max]
            if is_number(most):
                peaks[name] = max(peaks.get(name, 0.0), most)
        return peaks


def silence(last: MemorySample | None, sign_time: float, now: float) -> tuple[str, float]:
    """Return what the run waited for last and the seconds since the last sign of life: a record, or the run's own
    report, which covers progress within a validation.  Pure."""
    since_s = max(now - sign_time, 0.0)
    if last is None or last.silent_s is None:
        return "step", since_s
    return last.awaits, min(last.silent_s + max(now - last.time, 0.0), since_s)


def _watchdog(metrics: Sequence[Record]) -> tuple[str, float] | None:
    """Return text and time of the last `hung` event, unless the run has continued since."""
    for record in reversed(metrics):
        if record["kind"] == "step" or record.get("event") == "recovered":
            return None
        if record.get("event") == "hung" and record.get("text"):
            return str(record["text"]), record["time"] - (record.get("seconds") or 0.0)
    return None


def sizes_in(sample: SystemSample, reported: Collection[int] = ()) -> dict[str | int, int]:
    """Return the sizes of a living run; `reported`: pids of the readers it has reported.  Pure."""
    trainer, *rest = sample.processes
    readers = {each.pid: each.anon_bytes for each in rest if each.pid in reported or each.is_reader}
    return _sizes_of(trainer.anon_bytes, readers, sample.shared_bytes, sample.used_bytes)


def _recorded_sizes(sample: MemorySample) -> dict[str | int, int]:
    return _sizes_of(sample.trainer_bytes, sample.reader_bytes, sample.shared_bytes, sample.used_bytes)


def _sizes_of(root: int, readers: Mapping[int, int], shared: int, used: int) -> dict[str | int, int]:
    """Return memory by part, and by pid for readers; parts add up to "total".  `used` lacks remote readers."""
    known = root + sum(readers.values()) + shared
    parts: dict[str | int, int] = {"root": root, "readers": sum(readers.values()), "store": shared}
    return parts | {"others": max(used - known, 0), "total": max(used, known)} | dict(readers)


def rows_of(sizes: Mapping[str | int, int], peaks: Mapping[str | int, float], others: str) -> tuple[Row, ...]:
    """Return a row for each part, readers by size, and the total last.  Pure."""
    pids = sorted((name for name in sizes if isinstance(name, int)), key=lambda pid: -sizes[pid])
    names: dict[str | int, str] = {"root": "trainer", "readers": f"readers ({len(pids)})"}
    names |= {pid: f"reader {pid}" for pid in pids} | {"others": others, "store": "shared memory", "total": "total"}
    rows = []
    for key, name in names.items():
        if sizes.get(key) or key in ("store", "total"):
            part, pid = ("reader", key) if isinstance(key, int) else (key, None)
            rows.append(Row(part, name, pid, sizes[key], max(sizes[key], peaks.get(key, 0.0))))
    return tuple(rows)
