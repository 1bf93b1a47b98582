"""Inspects a run or the machine from outside, for `memory_table.py`.  Reads only.

The run's own records give everything about its memory, steps and verdict.  The system is asked whether the process is
alive and, if the run's monitor is silent, what it uses now and how close its limits are.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vesuvius.errors import EXIT_MEMORY_CRITICAL, EXIT_MEMORY_KILL, EXIT_MEMORY_WARN, EXIT_OK
from vesuvius.monitor.memory.limits import MemoryLimit, MemoryPolicy
from vesuvius.monitor.memory.risk import Level, RiskWatch
from vesuvius.monitor.post_mortem import Death, KillCounts, death_line, deaths_of, is_of_session
from vesuvius.monitor.probes.gpus import Gpus, GpuUse
from vesuvius.monitor.probes.processes import ProcessUse, read_process
from vesuvius.monitor.probes.system_sample import SystemSample, Watcher, sample_system
from vesuvius.monitor.samples import MemorySample, read_recent, spreads
from vesuvius.monitor.session import SessionRecord, is_alive, read_session
from vesuvius.runlog.records import Record, Tail, is_number, naming_wrong_values
from vesuvius.runlog.units import format_count, format_duration, format_time, quantile

State = Literal["running", "hung", "ended", "died", "elsewhere", "unknown"]

_HUNG_AFTER_S = 60.0
_HUNG_AFTER_P95 = 10.0
_SYSTEM_BYTES = 2**20  # some hours of records
_RECENT_STEPS = 200
_FRESH_S = 30.0
_MONITOR_LATE_S = 15.0


class Part(NamedTuple):
    part: str  # "root" (the trainer), "workers" (all), "worker" (one), "others", "store", "total" or "vram"
    name: str  # for people
    pid: int | None  # of a reader
    now_bytes: int
    peak_bytes: float | None


@dataclass(frozen=True)
class Inspection:
    time: float  # of the inspection, seconds since 1970
    what: Literal["run", "machine"]
    name: str  # of the run or the machine, for people
    state: State = "running"  # of the run; `elsewhere` = on another machine, where only its files are visible
    state_text: str = ""  # the same for people, with evidence
    stalled: bool = False  # the run hangs, according to its watchdog or for lack of signs of life
    sample: MemorySample | None = None  # the run's own last one or, if it is silent, as seen from outside
    is_live: bool = False  # whether the sample is of a living run
    peaks: Mapping[str, float] = field(default_factory=dict)  # the largest recorded figures, by the names of `spreads`
    peaks_since: float | None = None  # when the run began to record its memory, seconds since 1970
    # level, reason: the risk; None = unknown
    level: Level | None = None
    reason: str = ""
    limits: tuple[MemoryLimit, ...] = ()  # first the one that would be reached first
    # of a run: the last `step`, its `age_s`, `step_s_p95` of recent steps, and the last `verdict`
    steps: Mapping[str, Any] | None = None
    # evidence, a line each: of kills because memory ran out, and of deaths of another or an unknown cause
    kills: tuple[str, ...] = ()
    deaths: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()  # further notes, a line each
    machine: SystemSample | None = None  # without a run
    no_gpus: str | None = None  # why no GPU of the machine is seen

    @property
    def exit_code(self) -> int:
        """0 ok, 10 warning, hung or a death of another cause, 11 critical, 12 an OOM kill; the highest that applies."""
        if self.kills:
            return EXIT_MEMORY_KILL
        if self.level is Level.CRITICAL:
            return EXIT_MEMORY_CRITICAL
        return EXIT_MEMORY_WARN if self.deaths or self.stalled or self.level is Level.WARN else EXIT_OK

    @property
    def limit_bytes(self) -> int | None:
        return min((limit.total_bytes for limit in self.limits), default=None)

    @property
    def gpus(self) -> tuple[GpuUse, ...]:
        return self.machine.gpus if self.machine else self.sample.gpus if self.sample else ()

    def as_json(self) -> dict[str, Any]:
        """Return an object for scripts; null is unknown.  No key matches a grep for kills."""
        own = ("sample", "machine", "peaks", "limits", "level")  # in another form below
        machine = asdict(self.machine.machine) if self.machine else {}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in own} | {
            "exit_code": self.exit_code,
            "level": self.level.name if self.level is not None else None,
            "parts": [part._asdict() for part in self.parts()],
            "limit_bytes": self.limit_bytes,
            "limits": [asdict(each) | {"left_bytes": each.left_bytes} for each in self.limits],
            "vram": asdict(self.sample.vram) if self.sample and self.sample.vram else None,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "machine": {name: value for name, value in machine.items() if name != "oom_kills"} or None,
        }

    def parts(self) -> list[Part]:
        """Return the parts of a run's memory, the largest readers first, then the total, to which they add up."""
        if (of := self.sample) is None:
            return []
        readers = sorted(of.readers.items(), key=lambda reader: -reader[1])
        in_readers = sum(of.readers.values())
        known = of.trainer_bytes + in_readers + of.shared_bytes  # the run's own figure lacks readers on other machines
        peaks = self.peaks

        def part(key: str, name: str, now: int, peak: str, pid: int | None = None) -> Part:
            return Part(key, name, pid, now, max(now, peaks.get(peak, 0.0)))

        found = [
            part("root", "trainer", of.trainer_bytes, "trainer_bytes"),
            part("workers", f"workers ({len(readers)})", in_readers, "workers"),
            *(part("worker", f"worker {pid}", size, f"worker {pid}", pid) for pid, size in readers),
            part(
                "others", "Ray's own" if of.readers or of.workers else "others", max(of.used_bytes - known, 0), "others"
            ),
            part("store", "shared memory", of.shared_bytes, "shared_bytes"),
            part("total", "total", max(of.used_bytes, known), "used_bytes"),
        ]
        if of.vram is not None:
            found.append(part("vram", "VRAM of the trainer", of.vram.reserved_bytes, "vram"))
        return [each for each in found if each.now_bytes or each.part in ("store", "total", "vram")]


def inspect_machine(gpus: Gpus, remarks: tuple[str, ...] = ()) -> Inspection:
    """Inspect the machine and the limits of processes started from here."""
    name, machine = f"machine {os.uname().nodename}", sample_system(os.getpid(), gpus)
    risk = RiskWatch(MemoryPolicy()).add(machine)
    found = Inspection(time.time(), "machine", name, machine=machine, no_gpus=gpus.reason, remarks=remarks)
    return replace(found, level=risk.level, reason=risk.reason, limits=risk.limits)


def inspect_run(directory: Path) -> Inspection:
    """Inspect the latest session of a run.  Raises VesuviusError: a record has a value of the wrong type."""
    with naming_wrong_values(directory):
        run = RunFiles(directory)
        if (trainer := run.trainer()) is None:
            run = RunFiles(directory)  # it may have ended since the files were read
        return run.inspection(trainer, deaths_of(directory), time.time())


class RunFiles:
    """The files of the latest session, as they are now."""

    def __init__(self, directory: Path) -> None:
        self._name = directory.name
        self.session = read_session(directory / "session.json")
        begin = self.session.begin_time if self.session else -math.inf
        self._metrics = [r for r in Tail(directory / "metrics.jsonl").new() if r["time"] >= begin]
        self._system = [r for r in Tail(directory / "system.jsonl", _SYSTEM_BYTES).new() if r["time"] >= begin]
        self._recent = [sample for sample in read_recent(directory / "recent.jsonl") if sample.time >= begin]
        self.last = self._recent[-1] if self._recent else None
        steps = [r for r in self._metrics if r["kind"] == "step" and is_number(r.get("step"))]
        recent = [r for r in steps[-_RECENT_STEPS:] if is_number(r.get("step_s"))]
        work_s = [r["step_s"] - (r.get("pause_s") or 0.0) for r in recent]
        self._step_s_p95 = quantile(work_s, 0.95) if work_s else None
        self._step = steps[-1] if steps else None
        self._watchdog = _watchdog(self._metrics)

    def trainer(self) -> ProcessUse | None:
        """Return the trainer of a session in progress; None if it is dead, or cannot be seen from here."""
        session = self.session
        if session is None or session.end_time is not None or not is_alive(session):
            return None
        return read_process(session.pid)

    def inspection(self, trainer: ProcessUse | None, all_deaths: Sequence[Death], now: float) -> Inspection:
        session, sample, remarks = self.session, self.last, list[str]()
        state, text = self._state(trainer, now)
        if trainer is not None and session is not None:
            silent_s = now - (sample.time if sample else session.begin_time)
            if silent_s > _MONITOR_LATE_S:
                remarks.append(f"the run's own monitor has been silent for {format_duration(silent_s)}")
            if sample is None or remarks:
                sample = _seen_from_outside(session)
        elif sample is not None:
            remarks.append(f"figures from {format_time(sample.time)}")
        is_fresh = trainer is not None or (state == "elsewhere" and sample and abs(now - sample.time) <= _FRESH_S)
        deaths = [death for death in all_deaths if session is not None and is_of_session(death, session)]
        times = [r["time"] for r in self._system] + [sample.time for sample in self._recent]
        found = Inspection(
            now,
            "run",
            f"run {self._name}",
            state,
            text,
            stalled=state == "hung" or (state == "elsewhere" and self._watchdog is not None),
            sample=sample,
            is_live=trainer is not None,
            peaks=self.peaks(),
            peaks_since=min(times, default=None),
            level=Level[sample.risk] if sample and is_fresh else None,
            reason=sample.reason if sample and is_fresh else "",
            limits=sample.limits if sample else (),
            steps=self.steps_at(now),
            kills=self._kills(sample, state, deaths),
            deaths=tuple(death_line(each) for each in deaths if each.cause != "guard" and not each.is_for_memory),
            remarks=tuple(remarks),
        )
        guard = next((d for d in deaths if d.cause == "guard" and session and session.end_time is not None), None)
        if guard is None:
            return found
        text += "" if self._end_cause() else ": ended by the memory guard"
        found = replace(found, state_text=text, remarks=(guard.remedy, *found.remarks))
        return replace(found, level=Level.CRITICAL, reason=" ".join(guard.evidence[:1]))

    def steps_at(self, now: float) -> dict[str, Any]:
        verdicts = [str(r["text"]) for r in self._metrics if r["kind"] == "verdict" and r.get("text")]
        return {
            "step": int(self._step["step"]) if self._step else None,
            "age_s": max(now - self._step["time"], 0.0) if self._step else None,
            "step_s_p95": self._step_s_p95,
            "verdict": verdicts[-1] if verdicts else None,
        }

    def _end_cause(self) -> str:
        end = self._metrics[-1] if self._metrics else None
        return str(end.get("cause") or "") if end and end["kind"] == "run_end" else ""

    def _state(self, trainer: ProcessUse | None, now: float) -> tuple[State, str]:
        """Return the state and a text for people; `trainer` is None if the run has ended or is elsewhere."""
        session = self.session
        if session is None:
            return "unknown", "no session.json: the run has not started, or an older version wrote it"
        if session.end_time is not None:
            cause = f": {self._end_cause()}" if session.exit_code and self._end_cause() else ""
            return "ended", f"ended {format_time(session.end_time)} with exit code {session.exit_code}{cause}"
        if trainer is not None:
            if hung := self._hung(trainer, now):
                return "hung", hung
            return "running", f"process {trainer.pid} is running" + ("" if self._step else ", no step yet")
        if is_alive(session) is False:
            seen = f"; last seen {format_time(self.last.time)}" if self.last else ""
            return "died", f"died: process {session.pid} is gone and recorded no end{seen}"
        where = "another machine or container, or this machine before a restart"
        return "elsewhere", f"on {session.host}: {where}; from its files"

    def _hung(self, trainer: ProcessUse, now: float) -> str:
        if trainer.is_stopped:
            return f"process {trainer.pid} is stopped (SIGSTOP or a debugger); kill -CONT resumes it"
        if self._watchdog is not None:
            return f"{self._watchdog[0]}, since {format_time(self._watchdog[1])}"
        if not self._metrics or self._step_s_p95 is None:
            return ""
        # Of any record: validation takes longer than a step.
        what, silent_s = silence(self.last, self._metrics[-1]["time"], now)
        if silent_s <= max(_HUNG_AFTER_S, _HUNG_AFTER_P95 * self._step_s_p95):
            return ""
        usual = f"95 % of the steps take less than {format_duration(self._step_s_p95)}"
        return f"no {what} for {format_duration(silent_s)}, although {usual}"

    def _kills(self, sample: MemorySample | None, state: State, deaths: Sequence[Death]) -> tuple[str, ...]:
        """Return the evidence of OOM kills in this session, a line each.

        The cgroup's count is preferred, as the machine's includes other users' processes.
        """
        lines = tuple(death_line(death) for death in deaths if death.is_for_memory)
        if self.session is None or sample is None or state == "died":  # its post-mortem says: later kills are of others
            return lines
        rise = KillCounts.of(sample).since(KillCounts.of(self.session))
        count, where = (rise.machine, "of the machine") if rise.cgroup is None else (rise.cgroup, "of the run's cgroup")
        counted = f"out of memory: the kernel killed {format_count(count or 0, 'process')} {where} in this session"
        return (*lines, counted) if count else lines

    def peaks(self) -> dict[str, float]:
        """Return the largest recorded value of each figure, by the names of `spreads`."""
        seen = [(name, size) for r in self._system for name, sizes in spreads(r).items() for size in sizes[2:]]
        for sample in self._recent:
            seen += [(name, getattr(sample, name)) for name in ("used_bytes", "trainer_bytes", "shared_bytes")]
            seen += [(f"worker {pid}", size) for pid, size in sample.readers.items()]
            in_readers, vram = sum(sample.readers.values()), sample.vram and sample.vram.reserved_bytes
            others = sample.used_bytes - sample.trainer_bytes - sample.shared_bytes - in_readers
            seen += [("workers", in_readers), ("others", others), ("vram", vram)]
        peaks: dict[str, float] = {}
        for name, size in seen:
            if is_number(size):
                peaks[name] = max(peaks.get(name, 0.0), size)
        return peaks


def _seen_from_outside(session: SessionRecord) -> MemorySample | None:
    """Sample a living run whose monitor is silent; None if it has just ended."""
    try:
        system = Watcher(session.pid).sample()
    except ProcessLookupError:
        return None
    readers = {each.pid: each.anon_bytes for each in system.processes[1:] if each.is_reader}
    return MemorySample.of(system, RiskWatch(session.limits).add(system), readers)


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
