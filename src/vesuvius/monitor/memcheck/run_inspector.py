"""A run seen from outside by its directory: while it trains, hangs, is dead, or runs on another machine.  Reads only.

Its records say what it saw: memory by part, risk, steps, verdict.  What a dead, hung or distant run cannot have said is
looked up: whether its process lives, what it holds now, whether something was killed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from vesuvius.monitor.memcheck.inspection import Inspection, Living, Row, State, is_reader, rows_of, sizes_of
from vesuvius.monitor.memory.risk import Level
from vesuvius.monitor.post_mortem import Death, KillCounts, deaths_of, headline, is_of_session
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.monitor.recent import MemorySample, read_recent
from vesuvius.monitor.run_files import Tail, is_number
from vesuvius.monitor.session import SessionRecord, find_pid, is_alive, read_session
from vesuvius.runlog.records import Record
from vesuvius.runlog.units import format_duration, format_time, quantile, size_text

HUNG_AFTER_S = 60.0
HUNG_AFTER_P95 = 10.0
_SYSTEM_BYTES = 2**20  # some hours of records
_RECENT_STEPS = 200
_FRESH_S = 30.0
_MONITOR_LATE_S = 15.0
_PROCESS_STATES = {
    psutil.STATUS_STOPPED: "; it is stopped (SIGSTOP); kill -CONT resumes it",
    psutil.STATUS_TRACING_STOP: "; a debugger has stopped it",
    psutil.STATUS_DISK_SLEEP: "; it waits for a disk",
}


class RunInspector:
    """Inspects the last session of a run; a new session is found by itself."""

    def __init__(self, directory: Path, gpus: Gpus) -> None:
        self._directory = directory
        self._gpus = gpus
        self._session: SessionRecord | None = None
        self._living: Living | None = None

    def inspect(self) -> Inspection:
        """What its files say, and the system where the run lives on it."""
        run = RunState(self._directory)
        if (sample := self._sample(run.session)) is None:
            run = RunState(self._directory)  # it may have written its end, and then ended, since it was read
        now, session, last = time.time(), run.session, run.last
        deaths = [d for d in deaths_of(self._directory) if session is not None and is_of_session(d, session)]
        guard = next((d for d in deaths if d.cause == "guard" and session and session.end_time is not None), None)
        state, text = run.state(sample, now)
        if guard and not run.end_cause:
            text += ": the memory guard ended it"
        found = Inspection(
            now,
            "run",
            f"run {self._directory.name}",
            state,
            text,
            stalled=state == "hung" or (state == "elsewhere" and run.watchdog is not None),
            no_gpus=self._gpus.reason,
            steps=run.steps_at(now),
            kills=run.kills(sample, state, deaths),
            remarks=(*([guard.remedy] if guard else []), *run.remarks(sample, now)),
            peaks_since=run.since,
            vram=run.vram(),
            vram_limit_bytes=last.vram_limit_bytes if last else None,
        )
        if sample is not None and self._living is not None:
            readers = {p.pid for p in sample.processes if is_reader(p)}.union(last.reader_bytes if last else ())
            if last is not None and now - last.time <= _MONITOR_LATE_S and last.reason:
                found = replace(found, level=Level[last.level], reason=last.reason)  # it has seen more than we have
            return self._living.add_to(found, sample, readers, run.peaks())
        if last is not None:
            found = _from_moment(found, run, last)
        return replace(found, level=Level.CRITICAL, reason=" ".join(guard.evidence[:1])) if guard else found

    def _sample(self, session: SessionRecord | None) -> SystemSample | None:
        """None where it does not live, or not here."""
        if session is None or session.end_time is not None:
            return None
        if session != self._session:
            self._session, self._living = session, None
            if (pid := find_pid(session)) is not None:
                age_s = time.time() - session.begin_time
                self._living = Living(session.limits, pid, self._gpus, age_s, _others(session))
        try:
            return self._living.sample() if self._living else None
        except ProcessLookupError:
            self._living = None
            return None


class RunState:
    """What the files say of the last session now.

    Attributes:
        session: None where none was written: a run of an older version, or one that has not begun.
        moments, last: its samples of the last two minutes, oldest first, and the last of them.
        metrics, system: its last records.
        step_s_p95: of the last steps, without their pauses; None without steps.
        sign_time: when anything was last recorded: a validation takes longer than a step.
        since: from when on memory was recorded.
        end_cause: why the session ended, as it has recorded itself.
        watchdog: what the run's own watchdog says it hangs in, and since when.
    """

    def __init__(self, directory: Path) -> None:
        self.session = read_session(directory / "session.json")
        begin = self.session.begin_time if self.session else -math.inf

        def present(records: Iterable[Record]) -> list[Record]:
            return [record for record in records if record["time"] >= begin]

        self.metrics = present(Tail(directory / "metrics.jsonl").new())
        self.system = present(Tail(directory / "system.jsonl", _SYSTEM_BYTES).new())
        self.moments = [moment for moment in read_recent(directory / "recent.jsonl") if moment.time >= begin]
        self.last = self.moments[-1] if self.moments else None
        steps = [r for r in self.metrics if r["kind"] == "step" and is_number(r.get("step"))]
        recent = [r for r in steps[-_RECENT_STEPS:] if is_number(r.get("step_s"))]
        work_s = [r["step_s"] - (r.get("pause_s") or 0.0) for r in recent]
        self.step_s_p95 = quantile(work_s, 0.95) if work_s else None
        self._step = steps[-1] if steps else None
        self.sign_time: float | None = self.metrics[-1]["time"] if self.metrics else None
        self.since = min([r["time"] for r in self.system] + [m.time for m in self.moments], default=None)
        ended = self.metrics and self.metrics[-1]["kind"] == "run_end"
        self.end_cause = str(self.metrics[-1].get("cause") or "") if ended else ""
        self.watchdog = _watchdog(self.metrics)

    def steps_at(self, now: float) -> dict[str, Any]:
        """How the run gets on: `Inspection.steps`."""
        verdicts = [r["text"] for r in self.metrics if r["kind"] == "verdict" and r.get("text")]
        return {
            "step": int(self._step["step"]) if self._step else None,
            "age_s": max(now - self._step["time"], 0.0) if self._step else None,
            "step_s_p95": self.step_s_p95,
            "verdict": verdicts[-1] if verdicts else None,
        }

    def state(self, sample: SystemSample | None, now: float) -> tuple[State, str]:
        """What it does, also for people; `sample`: None where it does not live, or not here."""
        session = self.session
        if session is None:
            return "unknown", "no session.json: it has not started, or an older version wrote it"
        if session.end_time is not None:
            cause = f": {self.end_cause}" if session.exit_code and self.end_cause else ""
            return "ended", f"ended {format_time(session.end_time)} with exit code {session.exit_code}{cause}"
        if sample is not None:
            root = sample.processes[0]
            if hung := self._hung(sample, now):
                return "hung", hung + _PROCESS_STATES.get(root.status, "")
            return "running", f"process {root.pid} is running" + ("" if self._step else ", no step yet")
        if is_alive(session) is False:
            seen = f"; last seen {format_time(self.last.time)}" if self.last else ""
            return "killed", f"killed: process {session.pid} is gone and recorded no end{seen}"
        return "elsewhere", f"on {session.host}, which is not visible from here; its files say"

    def _hung(self, sample: SystemSample, now: float) -> str:
        """Why a living run is taken for one that hangs; '' = it is at work."""
        if self.watchdog is not None:
            return f"{self.watchdog[0]}, since {format_time(self.watchdog[1])}"
        if sample.processes[0].is_stopped:
            return f"process {sample.processes[0].pid} does nothing"
        if self.sign_time is None or self.step_s_p95 is None:
            return ""
        what, silent_s = silence(self.last, self.sign_time, now)
        if silent_s <= max(HUNG_AFTER_S, HUNG_AFTER_P95 * self.step_s_p95):
            return ""
        usual = f"95 % of the steps take less than {self.step_s_p95:.2f} s"
        return f"no {what} for {format_duration(silent_s)}, where {usual}"

    def kills(self, sample: SystemSample | None, state: State, deaths: Sequence[Death]) -> tuple[str, ...]:
        """What says that something was killed in this session, a line each.

        The kernel's count of the cgroup where there is one, else the machine's: it counts other people's processes too.
        """
        if (session := self.session) is None:
            return ()
        lines = [f"{headline(death)}, noticed {format_time(death.time)}" for death in deaths if death.cause != "guard"]
        if state == "killed":
            return tuple(lines or [f"process {session.pid} is gone and recorded no end"])
        # Without paths: a container's cgroup is called otherwise from outside, and these are all of the run's own.
        counts = KillCounts()
        if sample is not None:
            counts = KillCounts(sample.cgroup.oom_kills if sample.cgroup else None, sample.machine.oom_kills)
        elif self.last is not None:
            counts = KillCounts(self.last.cgroup_oom_kills, self.last.machine_oom_kills)
        rise = counts.since(KillCounts(session.cgroup_oom_kills, session.machine_oom_kills))
        count, where = (rise.machine, "of the machine") if rise.cgroup is None else (rise.cgroup, "of the run's cgroup")
        if count:
            counted = f"the kernel's count of killed processes {where} rose by {count} in this session"
            lines.append(f"out of memory: {counted}")
        return tuple(lines)

    def remarks(self, sample: SystemSample | None, now: float) -> list[str]:
        """What else one should know of a run that lives here."""
        if sample is None or self.session is None:
            return []
        remarks, silent_s = [], now - (self.last.time if self.last else self.session.begin_time)
        if silent_s > _MONITOR_LATE_S:
            remarks.append(f"the run's own monitor is silent for {format_duration(silent_s)}")
        readers = self.last.reader_bytes if self.last else {}
        if readers and not any(process.pid in readers for process in sample.processes):
            where = "are not children of its process (a Ray cluster): their memory is not in the table"
            remarks.append(f"its readers {where}")
        return remarks

    def vram(self) -> Row | None:
        """What the trainer has reserved of its GPU; None without one."""
        known = [moment.vram_used_bytes for moment in self.moments if moment.vram_used_bytes is not None]
        return Row("vram", "VRAM", None, known[-1], self.peaks().get("vram", known[-1])) if known else None

    def peaks(self) -> dict[str | int, float]:
        """The most bytes that were recorded of each part, by its name or, of a reader, by its pid."""
        seen: list[tuple[str | int, Any]] = []
        for record in self.system:
            vram, readers = record.get("vram") or {}, record.get("readers") or {}
            seen += [("total", record.get("used_bytes")), ("store", record.get("shared_bytes"))]
            seen += [("root", record.get("trainer_bytes")), ("vram", vram.get("reserved_bytes"))]
            seen += [(int(pid), size) for pid, size in readers.items() if pid.isdecimal()]
        for moment in self.moments:
            seen += [("vram", moment.vram_used_bytes), *_sizes_then(moment).items()]
        peaks: dict[str | int, float] = {}
        for name, size in seen:
            most = size[-1] if isinstance(size, list) and size else size  # [min, mean, max]
            if is_number(most):
                peaks[name] = max(peaks.get(name, 0.0), most)
        return peaks


def silence(last: MemorySample | None, sign_time: float, now: float) -> tuple[str, float]:
    """What was awaited last, and for how long there was no sign of life.  Pure.

    A record is one, and so is what the run itself knows of progress within a validation; the sampling may have stalled.
    """
    since_s = max(now - sign_time, 0.0)
    if last is None or last.silent_s is None:
        return "step", since_s
    return last.awaits, min(last.silent_s + max(now - last.time, 0.0), since_s)


def _watchdog(metrics: Sequence[Record]) -> tuple[str, float] | None:
    """Its last event, unless something has come since."""
    for record in reversed(metrics):
        if record["kind"] == "step" or record.get("event") == "recovered":
            return None
        if record.get("event") == "hung" and record.get("text"):
            return str(record["text"]), record["time"] - (record.get("seconds") or 0.0)
    return None


def _sizes_then(moment: MemorySample) -> dict[str | int, int]:
    return sizes_of(moment.trainer_bytes, moment.reader_bytes, moment.shared_bytes, moment.used_bytes)


def _from_moment(found: Inspection, run: RunState, last: MemorySample) -> Inspection:
    """The last moment as the run itself saw it: of a dead run, or one on another machine."""
    fresh = found.state == "elsewhere" and abs(found.time - last.time) <= _FRESH_S
    reason = f"{last.killer}: {size_text(last.killer_used_bytes)} in use; kills at {size_text(last.kills_at_bytes)}"
    return replace(
        found,
        rows=rows_of(_sizes_then(last), run.peaks(), _others(run.session)),
        level=Level[last.level] if fresh else None,
        reason=reason if last.killer else "",
        remarks=(*found.remarks, f"figures from {format_time(last.time)}"),
    )


def _others(session: SessionRecord | None) -> str:
    return "Ray's own" if session and session.workers else "others"
