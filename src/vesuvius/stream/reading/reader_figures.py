"""Sums of the readers' reports."""

from __future__ import annotations

from dataclasses import dataclass

from vesuvius.stream.reading.reader import BlockReport


@dataclass
class ReaderTotals:
    """The sum of reports.

    Attributes:
        blocks: how many; each is counted before the first of its samples is cut.
        others: as in `BlockReport`.
    """

    blocks: int = 0
    read_s: float | None = None
    decode_s: float = 0.0
    bytes_read: int = 0
    bytes_fetched: int = 0
    requests: int = 0
    retries: int = 0
    cache_hits: int = 0
    cache_misses: int = 0

    def add(self, report: BlockReport) -> None:
        """Add a report."""
        self.blocks += 1
        if report.read_s is not None:
            self.read_s = (self.read_s or 0.0) + report.read_s
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(report, name))


_SUMMED = ("decode_s", "bytes_read", "bytes_fetched", "requests", "retries", "cache_hits", "cache_misses")


@dataclass
class ReaderFigures(ReaderTotals):
    """The figures of one reader process."""

    node: str = ""
    rss_anon_bytes: int | None = None
    rss_anon_peak_bytes: int | None = None

    def add(self, report: BlockReport) -> None:
        """Add a report."""
        super().add(report)
        self.node = report.node
        self.rss_anon_bytes = report.rss_anon_bytes
        if report.rss_anon_bytes is not None:
            self.rss_anon_peak_bytes = max(self.rss_anon_peak_bytes or 0, report.rss_anon_bytes)


class ReaderStats:
    """The figures of all readers of a stream.

    Attributes:
        living: of each living reader process by pid.
        totals: of all together, also those that have ended.  They never fall.
    """

    def __init__(self) -> None:
        self.living: dict[int, ReaderFigures] = {}
        self.totals = ReaderTotals()
        self._pids: dict[str, int] = {}

    def take(self, report: BlockReport, workers: int) -> None:
        """Add a report, of a stream with so many workers."""
        before = self._pids.get(report.actor)
        self._pids[report.actor] = report.pid
        if before is not None and before != report.pid:
            self.living.pop(before, None)
        while len(self._pids) > 2 * max(workers, 1):  # readers of executions that are over
            self.living.pop(self._pids.pop(next(iter(self._pids))), None)
        self.living.setdefault(report.pid, ReaderFigures()).add(report)
        self.totals.add(report)

    def clear(self) -> None:
        """All readers have ended."""
        self._pids.clear()
        self.living.clear()
