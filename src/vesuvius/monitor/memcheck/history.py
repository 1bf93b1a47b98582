"""Memory by part (root, readers, Ray's own, object store) over time: rows of a table, and how near a kill is.  No I/O.

In: samples of living processes, and what a run has kept of itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from vesuvius.monitor.memcheck.inspection import Inspection, Row
from vesuvius.monitor.memory.limits import Limits, MemoryLimit, killers_of, limit_of
from vesuvius.monitor.memory.risk import RiskWatch
from vesuvius.monitor.memory.trend import MIN_POINTS, PeakSeries
from vesuvius.monitor.probes.processes import ProcessUse
from vesuvius.monitor.probes.system_sample import SystemSample, rates_between
from vesuvius.monitor.recent import MemorySample

WARMUP_S = 120.0
"""For so long after its start a process allocates what it will need; that is no slope."""
_RISK_WARMUP_S = 30.0

Sizes = dict[str | int, int]
"""Memory at one moment, by part: "root" (the process at the top), "readers" (all that have a row of their own), each of
these by its pid, "others" (the private memory of the rest), "shared" (once) and "used", the sum."""

Peaks = Mapping[str | int, float]
"""The most bytes that the run itself has recorded, by part."""


def sizes_of(sample: SystemSample, root_pid: int | None, singles: Collection[int]) -> Sizes:
    """A sample by part; `singles`: the pids that have a row of their own.  Pure."""
    held = {process.pid: process.anon_bytes for process in sample.processes}
    root = {} if root_pid not in held else {"root": held.pop(root_pid)}
    alone = {pid: size for pid, size in held.items() if pid in singles}
    others = sum(held.values()) - sum(alone.values())
    return _with_sums({**root, "others": others, "shared": sample.shared_bytes}, alone)


def sizes_then(moment: MemorySample) -> Sizes:
    """A kept sample by part.  Pure."""
    known = moment.trainer_bytes + sum(moment.reader_bytes.values()) + moment.shared_bytes
    # Readers on other machines have said what they hold; it is no part of what is used here.
    others = max(moment.used_bytes - known, 0)
    parts = {"root": moment.trainer_bytes, "others": others, "shared": moment.shared_bytes}
    return _with_sums(parts, moment.reader_bytes)


def _with_sums(parts: Mapping[str, int], singles: Mapping[int, int]) -> Sizes:
    readers = sum(singles.values())
    sums: Sizes = {"readers": readers, "used": sum(parts.values()) + readers}
    return sums | dict(parts) | dict(singles)


class History:
    """Sizes over time: what is the most, and the slope, of each part.

    Args:
        age_s: how long the processes had been at work at the first sizes: at the beginning growth says nothing.
            Single processes that come later have a beginning of their own.
    """

    def __init__(self, age_s: float) -> None:
        self._warmup_s = max(WARMUP_S - age_s, 0.0)
        self._series: dict[str | int, PeakSeries] = {}
        self._peaks: dict[str | int, int] = {}
        self._last: Sizes = {}
        self.since: float | None = None  # time of the first sizes

    def add(self, time: float, sizes: Sizes) -> None:
        """Take sizes in, later than those before."""
        self.since = time if self.since is None else self.since
        warmup_s = WARMUP_S if self._last else self._warmup_s
        for name, size in sizes.items():
            self._series.setdefault(name, PeakSeries(warmup_s=warmup_s)).add(time, size)
            self._peaks[name] = max(self._peaks.get(name, 0), size)
        for name in [name for name in self._series if isinstance(name, int) and name not in sizes]:
            del self._series[name], self._peaks[name]
        self._last = sizes

    def rows(self, known: Peaks, root: str, single: str, others: str, names: Mapping[int, str]) -> tuple[Row, ...]:
        """A row for each part of the last sizes, largest single process first, and the total as the last row.

        Args:
            known: peaks from elsewhere.
            root, single, others: what the parts are called.
            names: what single processes are called besides their pid.
        """
        if not (last := self._last):
            return ()
        singles = sorted((name for name in last if isinstance(name, int)), key=lambda pid: -last[pid])
        wanted: list[tuple[str, str, str | int]] = [
            *([("root", root, "root")] if "root" in last else []),
            *([("readers", f"{single}s ({len(singles)})", "readers")] if singles else []),
            *(("reader", f"{single} {pid} {names.get(pid, '')}".rstrip(), pid) for pid in singles),
            *([("others", others, "others")] if last["others"] else []),
            ("store", "object store" if single == "reader" else "shared memory", "shared"),
            ("total", "total", "used"),
        ]
        return tuple(self._row(part, name, key, known) for part, name, key in wanted)

    def _row(self, part: str, name: str, key: str | int, known: Peaks) -> Row:
        windows = self._series[key].peaks
        return Row(
            part,
            name,
            key if isinstance(key, int) else None,
            self._last[key],
            max(self._peaks[key], known.get(key, 0.0)),
            self._series[key].trend,
            windows[-1][0] - windows[0][0] if len(windows) >= MIN_POINTS else None,
        )


class LiveHistory:
    """What was seen of living processes, from the first sample on and, where a run has kept moments, from before it.

    Args:
        limits: what memory is held against.
        root_pid: the process at the top; None = there is none.
        age_s: how long they had been at work at the first sample or moment.
        labels: what the root, single processes and the rest are called.
    """

    def __init__(
        self,
        limits: Limits,
        root_pid: int | None,
        age_s: float,
        labels: tuple[str, str, str] = ("trainer", "reader", "Ray's own"),
    ) -> None:
        self._limits = limits
        self._root_pid = root_pid
        self._labels = labels
        self._parts = History(age_s)
        self._watch = RiskWatch(limits, max(_RISK_WARMUP_S - age_s, 0.0))
        self._before: SystemSample | None = None

    def add(
        self,
        found: Inspection,
        sample: SystemSample,
        singles: Collection[int],
        moments: Sequence[MemorySample] = (),
        peaks: Peaks | None = None,
        names: Mapping[int, str] | None = None,
    ) -> Inspection:
        """Take a sample in.

        Args:
            found: what is known without it.
            sample: later than those before.
            singles: pids of the processes that have a row each.
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
                    self._watch.judge(moment.time, killers_then(moment, sample, self._limits), {})
        self._parts.add(sample.time, sizes_of(sample, self._root_pid, singles))
        risk = self._watch.add(sample)
        before, self._before = self._before, sample
        stopped = ", ".join(str(process.pid) for process in sample.processes if process.is_stopped)
        remark = f"stopped by a signal (SIGSTOP) or a debugger: process {stopped}; kill -CONT resumes it"
        return replace(
            found,
            remarks=(*found.remarks, *([remark] if stopped else [])),
            rows=self._parts.rows(peaks or {}, *self._labels, names or {}),
            peaks_since=min(time for time in (found.peaks_since, self._parts.since) if time is not None),
            limit_bytes=limit_of(sample, self._limits),
            page_cache_bytes=sample.cgroup.file_bytes if sample.cgroup else sample.machine.page_cache_bytes,
            level=risk.level,
            reason=risk.reason,
            killers=risk.killers,
            trend=risk.trend,
            exhaustion=risk.exhaustion,
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


def is_reader(process: ProcessUse) -> bool:
    """Whether its title says that it is one of our readers, an actor of Ray Data."""
    return process.name.startswith("ray::") and ("_RayReader" in process.name or "MapWorker" in process.name)
