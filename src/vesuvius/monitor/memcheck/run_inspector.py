"""Looks at a run from outside by its directory: while it trains, hangs, is dead, or runs on another machine."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import psutil

from vesuvius.monitor.memcheck.history import History, LiveHistory, is_reader, sizes_then
from vesuvius.monitor.memcheck.inspection import Inspection, Row, State, Steps
from vesuvius.monitor.memory.risk import Level
from vesuvius.monitor.postmortem.cause import KillCounts
from vesuvius.monitor.postmortem.death import Death, headline, read_deaths
from vesuvius.monitor.postmortem.post_mortem import examine_run, is_of_session
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.probes.system_sample import SystemSample, Watcher
from vesuvius.monitor.recent import MemorySample
from vesuvius.monitor.run_files import RunFiles, RunState
from vesuvius.monitor.session import SessionRecord, find_pid, is_alive
from vesuvius.runlog.units import format_duration, format_time, size_text

HUNG_AFTER_S = 60.0
HUNG_AFTER_P95 = 10.0
_FRESH_S = 30.0
_MONITOR_LATE_S = 15.0
_PROCESS_STATES = {
    psutil.STATUS_STOPPED: "it is stopped (SIGSTOP); kill -CONT resumes it",
    psutil.STATUS_TRACING_STOP: "a debugger has stopped it",
    psutil.STATUS_DISK_SLEEP: "it waits for a disk",
}


class RunInspector:
    """Inspects the last session of a run; a new session is found by itself."""

    def __init__(self, directory: Path, gpus: Gpus) -> None:
        self._directory = directory
        self._gpus = gpus
        self._files = RunFiles(directory)
        self._session: SessionRecord | None = None
        self._watcher: Watcher | None = None
        self._history: LiveHistory | None = None

    def inspect(self) -> Inspection:
        """What its files say, and the system where the run lives on it."""
        notes = self._files.read()
        if (sample := self._look(notes)) is None:
            notes = self._files.read()  # it may have written its end, and then ended, since it was read
        now, guard = time.time(), self._guard_exit(notes.session)
        state, text = self._state(notes, sample, now)
        text += ": the memory guard ended it" if guard and not notes.end_cause else ""
        found = Inspection(
            now,
            "run",
            f"run {self._directory.name}",
            state,
            text,
            stalled=state == "hung" or (state == "elsewhere" and notes.hung is not None),
            no_gpus=self._gpus.reason,
            steps=_steps(notes, now),
            kills=self._kills(notes, sample, state),
            remarks=(*([guard.remedy] if guard else []), *_remarks(notes, sample, now), *notes.ranks),
            peaks_since=notes.peaks_since,
            vram=_vram(notes),
            vram_limit_bytes=notes.moments[-1].vram_limit_bytes if notes.moments else None,
        )
        if sample is not None and self._history is not None:
            readers = {process.pid for process in sample.processes if is_reader(process)}
            readers.update(notes.moments[-1].reader_bytes if notes.moments else ())
            return self._history.add(found, sample, readers, notes.moments, notes.peaks)
        found = _from_moments(found, notes, now) if notes.moments else found
        return replace(found, level=Level.CRITICAL, reason=" ".join(guard.evidence[:1])) if guard else found

    def _look(self, notes: RunState) -> SystemSample | None:
        """None where it does not live, or not here."""
        session = notes.session
        if session is None or session.end_time is not None:
            return None
        if self._session is None or _identity(session) != _identity(self._session):
            self._session = session
            pid = find_pid(session)
            self._watcher = Watcher(pid, self._gpus) if pid is not None else None
            first_s = notes.moments[0].time if notes.moments else time.time()
            self._history = LiveHistory(session.limits, pid, first_s - session.begin_time, _labels(session))
        try:
            return self._watcher.sample() if self._watcher else None
        except ProcessLookupError:
            self._watcher = None
            return None

    def _state(self, notes: RunState, sample: SystemSample | None, now: float) -> tuple[State, str]:
        session = notes.session
        if session is None:
            return "unknown", (
                "no session.json: it has not started, or an older version wrote it; --pid watches its process"
            )
        if session.end_time is not None:
            cause = f": {notes.end_cause}" if session.exit_code and notes.end_cause else ""
            return "ended", f"ended {format_time(session.end_time)} with exit code {session.exit_code}{cause}"
        if sample is not None:
            return _living_state(notes, sample, now)
        if is_alive(session) is False:
            last = notes.moments[-1].time if notes.moments else None
            seen = f"; last seen {format_time(last)}" if last is not None else ""
            return "killed", f"killed: process {session.pid} is gone and recorded no end{seen}"
        return "elsewhere", f"on {session.host}, which is not visible from here; its files say"

    def _kills(self, notes: RunState, sample: SystemSample | None, state: State) -> tuple[str, ...]:
        """What says that something was killed in this session."""
        session = notes.session
        if session is None:
            return ()
        deaths = [death for death in self._kept_deaths() if is_of_session(death, session) and death.cause != "guard"]
        if state == "killed" and not any(death.victim == "run" for death in deaths):
            died = examine_run(self._directory)
            deaths += [died] if died else []
        lines = [f"{headline(death)}, noticed {format_time(death.time)}" for death in deaths]
        if state == "killed" and not lines:
            lines.append(f"process {session.pid} is gone and recorded no end")
        return (*lines, *([] if state == "killed" else _counted_kills(session, notes, sample)))

    def _guard_exit(self, session: SessionRecord | None) -> Death | None:
        """How the guard ended the last session, if it did."""
        if session is None or session.end_time is None:
            return None
        deaths = (death for death in self._kept_deaths() if is_of_session(death, session))
        return next((death for death in deaths if death.cause == "guard"), None)

    def _kept_deaths(self) -> list[Death]:
        return read_deaths(self._directory / "post_mortem.jsonl")


def _living_state(notes: RunState, sample: SystemSample, now: float) -> tuple[State, str]:
    root = sample.processes[0]
    why = f"; {_PROCESS_STATES[root.status]}" if root.status in _PROCESS_STATES else ""
    if notes.hung is not None:
        text, since = notes.hung
        return "hung", f"{text}, since {format_time(since)}{why}"
    if root.is_stopped:
        return "hung", f"process {root.pid} does nothing{why}"
    if notes.sign_time is None or notes.step is None or notes.step_s_p95 is None:
        return "running", f"process {root.pid} is running" + (", no step yet" if notes.step is None else "")
    what, silent_s = _silence(notes, now)
    if silent_s <= max(HUNG_AFTER_S, HUNG_AFTER_P95 * notes.step_s_p95):
        return "running", f"process {root.pid} is running"
    usual = f"95 % of the steps take less than {notes.step_s_p95:.2f} s"
    return "hung", f"no {what} for {format_duration(silent_s)}, where {usual}{why}"


def _silence(notes: RunState, now: float) -> tuple[str, float]:
    """What was awaited last, and for how long there was no sign of life: by the run's own account, which knows of
    progress within a validation; an older version has none, there it is since the last record."""
    assert notes.sign_time is not None
    last = notes.moments[-1] if notes.moments else None
    if last is None or last.silent_s is None:
        return "step", now - notes.sign_time
    # Where sampling itself has stalled, newer records are signs of life, too.
    return last.awaits, min(last.silent_s + max(now - last.time, 0.0), max(now - notes.sign_time, 0.0))


def _steps(notes: RunState, now: float) -> Steps:
    age_s = None if notes.step_time is None else max(now - notes.step_time, 0.0)
    return Steps(notes.step, age_s, notes.step_s_p95, notes.verdict)


def _vram(notes: RunState) -> Row | None:
    known = [moment.vram_used_bytes for moment in notes.moments if moment.vram_used_bytes is not None]
    return Row("vram", "VRAM", None, known[-1], notes.peaks.get("vram", max(known))) if known else None


def _remarks(notes: RunState, sample: SystemSample | None, now: float) -> tuple[str, ...]:
    if sample is None or notes.session is None:
        return ()
    remarks = []
    last = notes.moments[-1].time if notes.moments else notes.session.begin_time
    if now - last > _MONITOR_LATE_S:
        remarks.append(f"the run's own monitor is silent for {format_duration(now - last)}")
    if notes.moments and notes.session.workers and not _seen_readers(notes.moments[-1], sample):
        remarks.append("its readers are not children of its process (a Ray cluster): their memory is not in the table")
    return tuple(remarks)


def _seen_readers(moment: MemorySample, sample: SystemSample) -> bool:
    return not moment.reader_bytes or any(process.pid in moment.reader_bytes for process in sample.processes)


def _counted_kills(session: SessionRecord, notes: RunState, sample: SystemSample | None) -> list[str]:
    """By the kernel's counters since the session's start: the cgroup's where it counts, else the machine's.

    The machine's counts other people's processes too, so it speaks only where the run's own counter is silent.
    """
    # Without paths: a container's cgroup is called otherwise from outside, and these are all of the run's own.
    if sample is not None:
        counts = KillCounts(sample.cgroup.oom_kills if sample.cgroup else None, sample.machine.oom_kills)
    elif notes.moments:
        counts = KillCounts(notes.moments[-1].cgroup_oom_kills, notes.moments[-1].machine_oom_kills)
    else:
        return []
    rise = counts.since(KillCounts(session.cgroup_oom_kills, session.machine_oom_kills))
    count, where = (rise.machine, "of the machine") if rise.cgroup is None else (rise.cgroup, "of the run's cgroup")
    if not count:
        return []
    return [f"out of memory: the kernel's count of killed processes {where} rose by {count} in this session"]


def _from_moments(found: Inspection, notes: RunState, now: float) -> Inspection:
    """The last minutes as the run itself saw them: of a dead run, or one on another machine."""
    last = notes.moments[-1]
    begun_s = notes.moments[0].time - notes.session.begin_time if notes.session else 0.0
    history = History(begun_s)
    for moment in notes.moments:
        history.add(moment.time, sizes_then(moment))
    fresh = found.state == "elsewhere" and abs(now - last.time) <= _FRESH_S
    reason = f"{last.killer}: {size_text(last.killer_used_bytes)} in use; kills at {size_text(last.kills_at_bytes)}"
    return replace(
        found,
        rows=history.rows(notes.peaks, *_labels(notes.session), {}),
        level=Level[last.level] if fresh else None,
        reason=reason if last.killer else "",
        remarks=(*found.remarks, f"figures from {format_time(last.time)}"),
    )


def _labels(session: SessionRecord | None) -> tuple[str, str, str]:
    """What the parts of a run are called: the root, single processes, and the rest."""
    return "trainer", "reader", "Ray's own" if session and session.workers else "others"


def _identity(session: SessionRecord) -> tuple[str, int, float, float]:
    return session.boot_id, session.pid, session.started_s, session.begin_time
