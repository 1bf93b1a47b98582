"""Memory by part (root, readers, Ray's own, object store) over time, and the rows of a table of it.  No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vesuvius.monitor.memcheck.inspection import Row
from vesuvius.monitor.memory.trend import MIN_POINTS, PeakSeries
from vesuvius.monitor.probes.files import Roots, read_text
from vesuvius.monitor.probes.processes import ProcessUse
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.monitor.recent import MemorySample
from vesuvius.monitor.run_files import Peak

WARMUP_S = 120.0
"""For so long after its start a process allocates what it will need; that is no slope."""


@dataclass(frozen=True)
class Split:
    """Memory at one moment, by part."""

    time: float  # seconds since 1970
    root_bytes: int | None  # private memory of the process at the top; None where there is none (`--ray`)
    single_bytes: Mapping[int, int]  # private memory of each process that has a row of its own, by pid
    others_bytes: int  # private memory of all others together
    shared_bytes: int  # shared memory, once

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


def split_sample(sample: SystemSample, root_pid: int | None, is_single: Callable[[ProcessUse], bool]) -> Split:
    """A sample by part.  Pure."""
    root = next((process.anon_bytes for process in sample.processes if process.pid == root_pid), None)
    below = [process for process in sample.processes if process.pid != root_pid]
    return Split(
        time=sample.time,
        root_bytes=root,
        single_bytes={process.pid: process.anon_bytes for process in below if is_single(process)},
        others_bytes=sum(process.anon_bytes for process in below if not is_single(process)),
        shared_bytes=sample.shared_bytes,
    )


def split_moment(moment: MemorySample) -> Split:
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
    """Splits over time: what is the most, and the slope, of each part.

    Args:
        warmup_s: so long after the first split slopes say nothing; single processes that come later have their own.
    """

    def __init__(self, warmup_s: float = WARMUP_S) -> None:
        self._warmup_s = warmup_s
        self._figures: dict[str | int, Figure] = {}
        self._last: Split | None = None

    def add(self, split: Split) -> None:
        """Take a split in, later than those before."""
        warmup_s = self._warmup_s if self._last is None else WARMUP_S
        self._last = split
        sizes = _sizes(split)
        for name, size in sizes.items():
            self._figures.setdefault(name, Figure(warmup_s)).add(split.time, size)
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
        if (last := self._last) is None:
            return ()
        singles = sorted(last.single_bytes, key=lambda pid: -last.single_bytes[pid])
        wanted: list[tuple[str, str, str | int]] = [
            *([("root", labels.root, "root")] if last.root_bytes is not None else []),
            *([("readers", f"{labels.singles} ({len(singles)})", "readers")] if singles else []),
            *(("reader", f"{labels.single} {pid} {(names or {}).get(pid, '')}".rstrip(), pid) for pid in singles),
            *([("others", labels.others, "others")] if last.others_bytes else []),
            ("store", labels.store, "shared"),
            ("total", "total", "used"),
        ]
        rows = [
            self._figures[figure].row(part, name, known.get(figure), figure if isinstance(figure, int) else None)
            for part, name, figure in wanted
        ]
        return tuple(row for row in rows if row is not None)


def _sizes(split: Split) -> dict[str | int, int]:
    """Each size of a split by name, the single processes by pid."""
    sizes: dict[str | int, int] = {
        "others": split.others_bytes,
        "shared": split.shared_bytes,
        "used": split.used_bytes,
        "readers": sum(split.single_bytes.values()),
    }
    if split.root_bytes is not None:
        sizes["root"] = split.root_bytes
    return sizes | dict(split.single_bytes)


def is_reader(process: ProcessUse) -> bool:
    """Whether its title says that it is one of our readers, an actor of Ray Data."""
    return process.name.startswith("ray::") and ("_RayReader" in process.name or "MapWorker" in process.name)


def is_ray(pid: int, roots: Roots) -> bool:
    """Whether a process is a daemon of Ray by its name, a worker by its title, or a script of Ray's package.

    By its whole command line: the title of `ProcessUse` is too short, as daemons begin with a long path.
    """
    words = (read_text(roots.proc / str(pid) / "cmdline") or "").split("\0")
    if words[0].startswith("ray::") or words[0].rsplit("/", 1)[-1] in ("raylet", "gcs_server"):
        return True
    return any("-packages/ray/" in word and word.endswith(".py") for word in words[1:4])
