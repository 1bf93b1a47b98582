"""What stands for a stream and for the monitor where a test has neither."""

from __future__ import annotations

from dataclasses import dataclass, field

from vesuvius.observe.system.rates import Rates
from vesuvius.stream.feeder import FeederFigures
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reader_figures import ReaderFigures, ReaderTotals


@dataclass
class StillPath:
    """A data path that has done nothing."""

    options: StreamOptions
    readers: dict[int, ReaderFigures] = field(default_factory=dict)
    reader_deaths: int = 0
    reader_totals: ReaderTotals = field(default_factory=ReaderTotals)
    feeder_figures: FeederFigures = field(default_factory=FeederFigures)


@dataclass
class FixedMachine:
    """A machine that is always as busy."""

    busy: Rates | None = None
    short: bool = False

    def ram(self) -> tuple[int, int]:
        return 1, 2

    def rates(self) -> Rates | None:
        return self.busy

    def gpu_busy(self) -> None:
        return None

    def memory_is_short(self) -> bool:
        return self.short
