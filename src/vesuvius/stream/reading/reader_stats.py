"""What readers have done: seconds and counts, and the memory of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vesuvius.volumes.voxels import Nonfinite


@dataclass(frozen=True)
class ReaderTotals:
    """Sums over blocks of regions: of one, or of all since a stream was opened."""

    blocks: int = 0  # each is counted before the first of its samples is cut
    read_s: float | None = None  # waiting for bytes from remote stores; None on disk, where they cannot be told apart
    decode_s: float = 0.0  # decoding regions (on disk including reads)
    bytes_read: int = 0  # bytes decoded, whole chunks
    # bytes_fetched (over the network), requests, retries, cache_hits, cache_misses: as `SourceFigures`
    bytes_fetched: int = 0
    requests: int = 0
    retries: int = 0
    cache_hits: int = 0
    cache_misses: int = 0

    def plus(self, other: ReaderTotals, sign: int = 1) -> ReaderTotals:
        """The sum of both, or with a sign of -1 what came after `other`."""
        both = {name: (value, getattr(other, name)) for name, value in vars(self).items()}
        known = {name: pair for name, pair in both.items() if pair != (None, None)}
        return ReaderTotals(**{name: (mine or 0) + sign * (theirs or 0) for name, (mine, theirs) in known.items()})


@dataclass(frozen=True)
class BlockReport:
    """What a reader says with each block."""

    # pid, node, actor: the process; its machine and its Ray actor, both '' without Ray
    pid: int
    node: str
    actor: str
    began: float  # when the process began to read, seconds since 1970
    rss_anon_bytes: int | None  # private memory of the process; None where the system does not tell (not Linux)
    done: ReaderTotals  # since its last block
    quarantined: list[dict[str, Any]] = field(default_factory=list)  # damage found since then
    nonfinite: list[Nonfinite] = field(default_factory=list)  # of volumes that hold NaN or infinity


@dataclass
class ReaderStats:
    """One reader process."""

    node: str = ""  # host name of its machine
    # rss_anon_bytes: its private memory, and the most of it; None where the system does not tell (not Linux)
    rss_anon_bytes: int | None = None
    rss_anon_peak_bytes: int | None = None


@dataclass
class Readers:
    """The readers of a stream.

    Attributes:
        living: the figures of each living process by pid.
        totals: of all together, also those that have ended.  They never fall.
    """

    living: dict[int, ReaderStats] = field(default_factory=dict)
    totals: ReaderTotals = ReaderTotals()
    _newest: dict[str, tuple[float, int]] = field(default_factory=dict)  # when it began, and pid, by actor

    def take(self, report: BlockReport, most: int) -> tuple[int, str] | None:
        """Add a report; returns pid and node of the process that died, where two of an actor have reported.

        Args:
            most: actors that read at once; those that have not reported for longest are over.  0 = this process reads;
                where it does so only until actors do, it is none of the readers.
        """
        if most and not report.actor:
            self.totals = self.totals.plus(report.done)
            return None
        mine = report.began, report.pid
        # Blocks come in the order of the plan: those of a process may come after those of the one that replaced it.
        older, newer = sorted((mine, self._newest.pop(report.actor, mine)))
        self._newest[report.actor] = newer
        while len(self._newest) > max(most, 1):
            self.living.pop(self._newest.pop(next(iter(self._newest)))[1], None)
        gone = self.living.pop(older[1], None) if older != newer else None
        if mine == newer:
            figures = self.living.setdefault(report.pid, ReaderStats(report.node))
            figures.rss_anon_bytes = report.rss_anon_bytes
            if report.rss_anon_bytes is not None:
                figures.rss_anon_peak_bytes = max(figures.rss_anon_peak_bytes or 0, report.rss_anon_bytes)
        self.totals = self.totals.plus(report.done)
        return (older[1], gone.node if gone else report.node) if older != newer else None

    def clear(self) -> None:
        """All readers have ended."""
        self._newest.clear()
        self.living.clear()
