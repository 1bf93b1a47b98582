"""Memory by part (root, readers, Ray's own, object store) over time, and the rows of a table of it.  No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import psutil

from vesuvius.monitor.memcheck.inspection import Row
from vesuvius.monitor.memory.trend import MIN_POINTS, PeakSeries
from vesuvius.monitor.probes.files import read_text
from vesuvius.monitor.probes.processes import ProcessUse
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.monitor.recent import MemorySample
from vesuvius.monitor.run_files import Peak

WARMUP_S = 120.0
"""For so long after its start a process allocates what it will need; that is no slope."""


Sizes = dict[str | int, int]
"""Memory at one moment, by part: "root" (the process at the top), "readers" (all that have a row of their own), each of
these by its pid, "others" (the private memory of the rest), "shared" (once) and "used", the sum."""


@dataclass(frozen=True)
class Labels:
    """What the parts are called: `singles` in the plural, `single` one of them, before its pid."""

    root: str = "trainer"
    singles: str = "readers"
    single: str = "reader"
    others: str = "Ray's own"
    store: str = "object store"


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


class Figure:
    """One size over time, for a row of its own."""

    def __init__(self, warmup_s: float = 0.0) -> None:
        self._series = PeakSeries(warmup_s=warmup_s)
        self._peak: Peak | None = None
        self._now_bytes: int | None = None

    def add(self, time: float, size_bytes: int) -> None:
        """Take a size in, later than those before."""
        self._series.add(time, size_bytes)
        before = self._peak or Peak(size_bytes, time)
        self._peak = Peak(max(before.size_bytes, size_bytes), before.since)
        self._now_bytes = size_bytes

    def row(self, part: str, name: str, known: Peak | None = None, pid: int | None = None) -> Row | None:
        """None before the first size; `known` is a peak from elsewhere (the run's own records)."""
        if self._peak is None:
            return None
        peaks = [peak for peak in (self._peak, known) if peak is not None]
        windows = self._series.peaks
        return Row(
            part=part,
            name=name,
            pid=pid,
            now_bytes=self._now_bytes,
            peak_bytes=max(peak.size_bytes for peak in peaks),
            peak_since=min(peak.since for peak in peaks),
            trend=self._series.trend,
            seen_s=windows[-1][0] - windows[0][0] if len(windows) >= MIN_POINTS else None,
        )


class History:
    """Sizes over time: what is the most, and the slope, of each part.

    Args:
        warmup_s: so long after the first sizes slopes say nothing; single processes that come later have their own.
    """

    def __init__(self, warmup_s: float = WARMUP_S) -> None:
        self._warmup_s = warmup_s
        self._figures: dict[str | int, Figure] = {}
        self._last: Sizes = {}

    def add(self, time: float, sizes: Sizes) -> None:
        """Take sizes in, later than those before."""
        warmup_s = WARMUP_S if self._last else self._warmup_s
        self._last = sizes
        for name, size in sizes.items():
            self._figures.setdefault(name, Figure(warmup_s)).add(time, size)
        for name in [name for name in self._figures if isinstance(name, int) and name not in sizes]:
            del self._figures[name]

    def rows(
        self, labels: Labels, known: Mapping[str | int, Peak], names: Mapping[int, str] | None = None
    ) -> tuple[Row, ...]:
        """A row for each part of the last split, largest single process first, and the total as the last row.

        Args:
            labels: what the parts are called.
            known: peaks from elsewhere (the run's own records).
            names: what single processes are called besides their pid.
        """
        if not (last := self._last):
            return ()
        singles = sorted((name for name in last if isinstance(name, int)), key=lambda pid: -last[pid])
        wanted: list[tuple[str, str, str | int]] = [
            *([("root", labels.root, "root")] if "root" in last else []),
            *([("readers", f"{labels.singles} ({len(singles)})", "readers")] if singles else []),
            *(("reader", f"{labels.single} {pid} {(names or {}).get(pid, '')}".rstrip(), pid) for pid in singles),
            *([("others", labels.others, "others")] if last["others"] else []),
            ("store", labels.store, "shared"),
            ("total", "total", "used"),
        ]
        rows = [
            self._figures[figure].row(part, name, known.get(figure), figure if isinstance(figure, int) else None)
            for part, name, figure in wanted
        ]
        return tuple(row for row in rows if row is not None)


def is_reader(process: ProcessUse) -> bool:
    """Whether its title says that it is one of our readers, an actor of Ray Data."""
    return process.name.startswith("ray::") and ("_RayReader" in process.name or "MapWorker" in process.name)


def is_ray(pid: int) -> bool:
    """Whether a process is a daemon of Ray by its name, a worker by its title, or a script of Ray's package.

    By its whole command line: the title of `ProcessUse` is too short, as daemons begin with a long path.
    """
    words = (read_text(f"{psutil.PROCFS_PATH}/{pid}/cmdline") or "").split("\0")
    if words[0].startswith("ray::") or words[0].rsplit("/", 1)[-1] in ("raylet", "gcs_server"):
        return True
    return any("-packages/ray/" in word and word.endswith(".py") for word in words[1:4])
