"""Memory by part (root, readers, Ray's own, object store) over time, and the rows of a table of it.

No I/O: looks and moments come in, rows go out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vesuvius.observe.inspect.inspection import Row
from vesuvius.observe.recent import Moment
from vesuvius.observe.risk.trend import MIN_POINTS, PeakSeries
from vesuvius.observe.run_files import Peak
from vesuvius.observe.system.look import Look
from vesuvius.observe.system.processes import ProcessUse

WARMUP_S = 30.0
"""After its start a process allocates what it will need; that is no trend."""


@dataclass(frozen=True)
class Split:
    """Memory at one moment, by part.

    Attributes:
        time: seconds since 1970.
        root_bytes: private memory of the process at the top; None where there is none (`--ray`).
        single_bytes: private memory of each process that has a row of its own, by pid.
        others_bytes: private memory of all others together.
        shared_bytes: shared memory, once.
    """

    time: float
    root_bytes: int | None
    single_bytes: Mapping[int, int]
    others_bytes: int
    shared_bytes: int

    @property
    def used_bytes(self) -> int:
        return (self.root_bytes or 0) + sum(self.single_bytes.values()) + self.others_bytes + self.shared_bytes


@dataclass(frozen=True)
class Labels:
    """What the parts are called: `singles` in the plural, `single` one of them, before its pid."""

    root: str = "trainer"
    singles: str = "readers"
    single: str = "reader"
    others: str = "Ray's own"
    store: str = "object store"


def split_look(look: Look, root_pid: int | None, is_single: Callable[[ProcessUse], bool]) -> Split:
    """A look by part.  Pure."""
    root = next((process.anon_bytes for process in look.processes if process.pid == root_pid), None)
    below = [process for process in look.processes if process.pid != root_pid]
    return Split(
        time=look.time,
        root_bytes=root,
        single_bytes={process.pid: process.anon_bytes for process in below if is_single(process)},
        others_bytes=sum(process.anon_bytes for process in below if not is_single(process)),
        shared_bytes=look.shared_bytes,
    )


def split_moment(moment: Moment) -> Split:
    """A moment by part.  Pure."""
    known = moment.trainer_bytes + sum(moment.reader_bytes.values()) + moment.shared_bytes
    return Split(
        time=moment.time,
        root_bytes=moment.trainer_bytes,
        single_bytes=moment.reader_bytes,
        # Readers on other machines have said what they hold; it is no part of what is used here.
        others_bytes=max(moment.used_bytes - known, 0),
        shared_bytes=moment.shared_bytes,
    )


class Figure:
    """One size over time, for a row of its own."""

    def __init__(self, part: str, name: str, warmup_s: float = 0.0) -> None:
        self._part = part
        self._name = name
        self._series = PeakSeries(warmup_s=warmup_s)
        self._peak: Peak | None = None
        self._now_bytes: int | None = None

    def add(self, time: float, size_bytes: int) -> None:
        """Take a size in, later than those before."""
        self._series.add(time, size_bytes)
        before = self._peak or Peak(size_bytes, time)
        self._peak = Peak(max(before.size_bytes, size_bytes), before.since)
        self._now_bytes = size_bytes

    def row(self, known: Peak | None = None) -> Row | None:
        """None before the first size; `known` is a peak from elsewhere (the run's own records)."""
        if self._peak is None:
            return None
        peaks = [peak for peak in (self._peak, known) if peak is not None]
        return Row(
            part=self._part,
            name=self._name,
            pid=None,
            now_bytes=self._now_bytes,
            peak_bytes=max(peak.size_bytes for peak in peaks),
            peak_since=min(peak.since for peak in peaks),
            trend=self._series.trend,
            seen_s=_seen_s(self._series),
        )


class History:
    """Splits over time: what is the most, and the slope, of each part.

    Args:
        warmup_s: so long after the first split slopes say nothing; single processes that come later have their own.
    """

    def __init__(self, warmup_s: float = WARMUP_S) -> None:
        self._warmup_s = warmup_s
        self._series: dict[str | int, PeakSeries] = {}
        self._peaks: dict[str | int, Peak] = {}
        self._last: Split | None = None

    def add(self, split: Split) -> None:
        """Take a split in, later than those before."""
        is_first, self._last = self._last is None, split
        figures = _figures(split)
        for name, size in figures.items():
            if name not in self._series:
                self._series[name] = PeakSeries(warmup_s=self._warmup_s if is_first else WARMUP_S)
            self._series[name].add(split.time, size)
            before = self._peaks.get(name, Peak(size, split.time))
            self._peaks[name] = Peak(max(before.size_bytes, size), before.since)
        for name in [name for name in self._series if isinstance(name, int) and name not in figures]:
            del self._series[name], self._peaks[name]

    def rows(
        self, labels: Labels, known: Mapping[str | int, Peak], names: Mapping[int, str] | None = None
    ) -> tuple[Row, ...]:
        """A row for each part of the last split, largest single process first, and the total as the last row.

        Args:
            labels: what the parts are called.
            known: peaks from elsewhere (the run's own records).
            names: what single processes are called besides their pid.
        """
        if self._last is None:
            return ()
        last, rows = self._last, []
        if last.root_bytes is not None:
            rows.append(self._row("root", labels.root, "root", known))
        if last.single_bytes:
            rows.append(self._row("readers", f"{labels.singles} ({len(last.single_bytes)})", "readers", known))
        for pid in sorted(last.single_bytes, key=lambda pid: -last.single_bytes[pid]):
            name = f"{labels.single} {pid} {(names or {}).get(pid, '')}".rstrip()
            rows.append(self._row("reader", name, pid, known, pid))
        if last.others_bytes:
            rows.append(self._row("others", labels.others, "others", known))
        rows.append(self._row("store", labels.store, "shared", known))
        rows.append(self._row("total", "total", "used", known))
        return tuple(rows)

    def _row(
        self, part: str, name: str, figure: str | int, known: Mapping[str | int, Peak], pid: int | None = None
    ) -> Row:
        assert self._last is not None
        peaks = [self._peaks[figure], *([known[figure]] if figure in known else [])]
        return Row(
            part=part,
            name=name,
            pid=pid,
            now_bytes=_figures(self._last)[figure],
            peak_bytes=max(peak.size_bytes for peak in peaks),
            peak_since=min(peak.since for peak in peaks),
            trend=self._series[figure].trend,
            seen_s=_seen_s(self._series[figure]),
        )


def _seen_s(series: PeakSeries) -> float | None:
    windows = series.peaks
    return windows[-1][0] - windows[0][0] if len(windows) >= MIN_POINTS else None


def _figures(split: Split) -> dict[str | int, int]:
    """Each figure of a split by name, the single processes by pid."""
    figures: dict[str | int, int] = {
        "others": split.others_bytes,
        "shared": split.shared_bytes,
        "used": split.used_bytes,
        "readers": sum(split.single_bytes.values()),
    }
    if split.root_bytes is not None:
        figures["root"] = split.root_bytes
    return figures | dict(split.single_bytes)
