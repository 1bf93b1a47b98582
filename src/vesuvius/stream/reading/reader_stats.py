"""Statistics of readers: seconds, counts, and the memory of each."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

from vesuvius.volumes.voxels import Nonfinite


@dataclass(frozen=True)
class ReaderTotals:
    """Totals over blocks: of one block, or of all since a stream was opened."""

    blocks: int = 0  # counted before their first sample is cut
    read_s: float | None = None  # waiting for remote stores; None on disk, where reads and decoding are not separated
    decode_s: float = 0.0  # decoding regions (on disk including reads)
    bytes_read: int = 0  # bytes decoded, whole chunks
    bytes_fetched: int = 0  # over the network; this and the rest as in `SourceStats`
    requests: int = 0
    retries: int = 0
    cache_hits: int = 0
    cache_misses: int = 0

    def plus(self, other: Self, sign: int = 1) -> Self:
        """Return the sum of both, or with a sign of -1 the difference."""
        pairs = {name: (value, getattr(other, name)) for name, value in vars(self).items()}
        known = {name: (a or 0) + sign * (b or 0) for name, (a, b) in pairs.items() if (a, b) != (None, None)}
        return replace(self, **known)


@dataclass(frozen=True)
class BlockReport:
    """Report of a reader, sent with each block."""

    pid: int
    node: str  # this and the next are '' without Ray
    actor: str
    began: float  # start of the reader, seconds since 1970
    rss_anon_bytes: int  # private memory of the process, without shared pages
    done: ReaderTotals  # since its last block
    quarantined: list[dict[str, Any]] = field(default_factory=list)  # damage found since its last block
    nonfinite: list[Nonfinite] = field(default_factory=list)  # volumes that hold NaN or infinity


@dataclass
class ReaderStats:
    node: str = ""  # `node_name` of its machine
    rss_anon_bytes: int = 0  # private memory
    rss_anon_peak_bytes: int = 0

    def update(self, report: BlockReport) -> None:
        self.rss_anon_bytes = report.rss_anon_bytes
        self.rss_anon_peak_bytes = max(self.rss_anon_peak_bytes, report.rss_anon_bytes)


@dataclass
class Readers:
    """The readers of a stream."""

    living: dict[int, ReaderStats] = field(default_factory=dict)  # by pid
    totals: ReaderTotals = ReaderTotals()  # of all, including ended ones; never decrease
    _newest: dict[str, tuple[float, int]] = field(default_factory=dict)  # start and pid of the newest process by actor

    def add(self, report: BlockReport, workers: int) -> tuple[int, str] | None:
        """Add a report.  Returns pid and node of a process that died, if another one of the same actor has reported.

        Beyond the number of `workers`, actors that have not reported for longest have ended.  This process, which reads
        on threads, counts as a reader only if there are none.
        """
        self.totals = self.totals.plus(report.done)
        if not report.actor:
            if not workers:
                self.living.setdefault(report.pid, ReaderStats(report.node)).update(report)
            return None
        process = report.began, report.pid
        # Blocks arrive in plan order: those of a process may come after those of its replacement.
        older, newer = sorted((process, self._newest.pop(report.actor, process)))
        self._newest[report.actor] = newer
        while len(self._newest) > workers:
            self.living.pop(self._newest.pop(next(iter(self._newest)))[1], None)
        dead = self.living.pop(older[1], None) if older != newer else None
        if process == newer:
            self.living.setdefault(report.pid, ReaderStats(report.node)).update(report)
        return (older[1], dead.node if dead else report.node) if older != newer else None

    def clear(self) -> None:
        self._newest.clear()
        self.living.clear()
