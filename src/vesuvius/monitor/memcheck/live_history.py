"""Living processes, sampled again and again: their parts over time, and how near a kill is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from vesuvius.monitor.memcheck.inspection import Inspection
from vesuvius.monitor.memcheck.parts import WARMUP_S, Figure, History, Labels, is_reader, sizes_of, sizes_then
from vesuvius.monitor.memory.limits import Limits, MemoryLimit, killers_of, limit_of
from vesuvius.monitor.memory.risk import RiskWatch
from vesuvius.monitor.probes.processes import ProcessUse
from vesuvius.monitor.probes.system_sample import SystemSample, rates_between
from vesuvius.monitor.recent import MemorySample
from vesuvius.monitor.run_files import Peak

_RISK_WARMUP_S = 30.0


class LiveHistory:
    """What was seen of one run, from the first sample on and, where the run has kept moments, from before it.

    Args:
        limits: what memory is held against.
        labels: what the parts are called.
        root_pid: the process at the top; None = there is none.
        age_s: how long they had been at work at the first sample or moment: at the beginning growth says nothing.
        is_single: which processes below the top have a row each, beside those that the run calls its readers.
    """

    def __init__(
        self,
        limits: Limits,
        labels: Labels,
        root_pid: int | None,
        age_s: float,
        is_single: Callable[[ProcessUse], bool] = is_reader,
    ) -> None:
        self._limits = limits
        self._labels = labels
        self._root_pid = root_pid
        self._is_single = is_single
        self._parts = History(max(WARMUP_S - age_s, 0.0))
        self._watch = RiskWatch(limits, max(_RISK_WARMUP_S - age_s, 0.0))
        self._cache = Figure()
        self._before: SystemSample | None = None

    def add(
        self,
        found: Inspection,
        sample: SystemSample,
        readers: Collection[int] = (),
        moments: Sequence[MemorySample] = (),
        peaks: Mapping[str | int, Peak] | None = None,
        names: Mapping[int, str] | None = None,
    ) -> Inspection:
        """Take a sample in.

        Args:
            found: what is known without it.
            sample: later than those before.
            readers: pids that the run itself calls its readers.
            moments: what the run kept; taken in before the first sample, ignored later.
            peaks: what the run's own records say.
            names: what single processes are called besides their pid.

        Returns:
            `found` with what follows from the sample.
        """
        if self._before is None:
            for moment in moments:
                if moment.time < sample.time:
                    self._parts.add(moment.time, sizes_then(moment))
                    then = killers_then(moment, sample, self._limits)
                    self._watch.judge(moment.time, then, _private_then(moment, sample))
        singles = {process.pid for process in sample.processes if self._is_single(process)}
        self._parts.add(sample.time, sizes_of(sample, self._root_pid, singles.union(readers)))
        risk = self._watch.add(sample)
        before, self._before = self._before, sample
        cache_bytes = sample.cgroup.file_bytes if sample.cgroup else sample.machine.page_cache_bytes
        self._cache.add(sample.time, cache_bytes)
        stopped = ", ".join(str(process.pid) for process in sample.processes if process.is_stopped)
        remark = f"stopped by a signal (SIGSTOP) or a debugger: process {stopped}; kill -CONT resumes it"
        return replace(
            found,
            remarks=(*found.remarks, *([remark] if stopped else [])),
            rows=self._parts.rows(self._labels, peaks or {}, names),
            limit_bytes=limit_of(sample, self._limits),
            page_cache_bytes=cache_bytes,
            page_cache=self._cache.row("cache", "page cache, not in the total"),
            level=risk.level,
            reason=risk.reason,
            killers=risk.killers,
            trend=risk.trend,
            exhaustion=risk.exhaustion,
            growing=risk.growing,
            sample=sample,
            rates=rates_between(before, sample) if before else None,
        )


def killers_then(moment: MemorySample, now: SystemSample, limits: Limits) -> list[MemoryLimit]:
    """What the killers counted at a moment, which has the first one's count.

    The others' are taken to have differed from now by as much; all of them by as much as the run's own use did, where
    another one was first then.  Pure.
    """
    killers = killers_of(now, limits)
    change = moment.used_bytes - now.used_bytes
    if moment.killer == killers[0].name:
        change = moment.killer_used_bytes - killers[0].used_bytes
    return [replace(killer, used_bytes=max(killer.used_bytes + change, 0)) for killer in killers]


def _private_then(moment: MemorySample, now: SystemSample) -> dict[tuple[int, float], int]:
    """Of the trainer and those readers that still live."""
    root = now.processes[0]
    sizes = {root.pid: moment.trainer_bytes, **moment.reader_bytes}
    return {(p.pid, p.started_s): sizes[p.pid] for p in now.processes if p.pid in sizes}
