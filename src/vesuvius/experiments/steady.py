"""Warm-up, length of a measurement, and samples/s of the steady state; for bench, tune and profile.  Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, Self

from vesuvius.plan.plan import Plan
from vesuvius.runlog.records import Record
from vesuvius.runlog.units import quantile
from vesuvius.stream.options import StreamOptions, batches_ahead
from vesuvius.stream.reading.reader_stats import ReaderTotals

KERNEL_STEPS = 3
"""Steps until kernels are chosen and compiled."""

_LEAST_STEPS = 3
_SETTLED = 0.05  # a trial is long enough once the relative standard error of its rate is below this,
_LONGEST = 4.0  # or once it is this many times as long
_FEW = 4  # fewer pieces do not show the error
_OUTRUN_BY = 1.1  # tolerated ratio of a measured rate to what the readers can sustain


@dataclass(frozen=True)
class Warmup:
    least_steps: int  # until kernels are chosen and the batches prefetched at the start are used up
    full_steps: int  # until each region in flight has also been read once

    @classmethod
    def of(cls, plan: Plan, options: StreamOptions, accumulate: int, batch: int) -> Self:
        """The warm-up of a run with steps of `batch` samples, of `accumulate` micro-batches on each rank."""
        least = KERNEL_STEPS + -(-batches_ahead(options) // accumulate)
        return cls(least, max(least, -(-plan.regions_in_flight // batch)))

    def is_over(self, steps: int, elapsed_s: float, most_s: float) -> bool:
        return steps >= self.full_steps or (steps >= self.least_steps and elapsed_s >= most_s)


def cycle_of(plan: Plan, workers: int) -> int:
    """Samples after which bursts repeat: each reader has delivered a task, in full rounds of the plan."""
    return -(-max(workers, 1) * plan.samples_per_task // plan.regions_in_flight) * plan.regions_in_flight


def reader_times(before: ReaderTotals, now: ReaderTotals, region: int) -> tuple[float, float] | None:
    """Seconds that one reader takes per sample, and decodes; None if nothing was read.  `region`: its samples."""
    if not (read := (now.blocks - before.blocks) * region):
        return None
    decode_s = (now.decode_s - before.decode_s) / read
    return decode_s + ((now.read_s or 0.0) - (before.read_s or 0.0)) / read, decode_s


def reader_limited_s(samples: int, took_s: float, reader_s: float | None, workers: int) -> float:
    """The time that the samples took or, for prefetched ones, the time that the readers need for them."""
    if reader_s and workers and samples / took_s > _OUTRUN_BY * workers / reader_s:
        return samples * reader_s / workers
    return took_s


def is_settled(durations: Sequence[float]) -> bool:
    """Whether the mean duration of equal pieces of work, at least four, is known well enough."""
    count = len(durations)
    return count >= _FEW and stdev(durations) / math.sqrt(count) <= _SETTLED * fmean(durations)


class TrialLength:
    """Length of a measurement: full cycles that take about `seconds`, and more the more their time varies.

    Samples come in batches, and in bursts once per `cycle` samples: a part of a cycle may be all burst or all wait.
    """

    def __init__(self, batch: int, cycle: int, seconds: float) -> None:
        self._batch, self._cycle, self._seconds, self._most_s = batch, cycle, seconds, _LONGEST * seconds
        self._ends_s = [0.0]  # end of each cycle

    def is_over(self, samples: int, elapsed_s: float) -> bool:
        """Whether the measurement is long enough; called after each batch."""
        if samples >= self._cycle * len(self._ends_s):
            self._ends_s.append(elapsed_s)
        cycles = round(self._seconds * samples / max(elapsed_s, 1e-9) / self._cycle)
        is_whole = cycles and samples >= cycles * self._cycle and samples % self._cycle < self._batch
        is_late = samples and elapsed_s >= (2 * self._seconds if cycles else self._seconds)  # within bounds
        if not is_whole and not is_late:
            return False
        if self._seconds >= self._most_s or is_settled([end - begin for begin, end in pairwise(self._ends_s)]):
            return True
        self._seconds = min(2 * self._seconds, self._most_s)
        return False


class SteadyState:
    """Collects step records until the steady state was measured; `workers` are the readers of all ranks."""

    def __init__(self, warmup: Warmup, plan: Plan, workers: int, batch: int, seconds: float) -> None:
        self._warmup, self._seconds, self._batch, self._workers = warmup, seconds, batch, workers
        self._region = plan.patches_per_region
        self._length = TrialLength(batch, cycle_of(plan, workers), seconds)
        self._warm: list[Record] = []
        self._steady: list[Record] = []

    def add(self, step: Record) -> bool:
        later_s = math.fsum(_work_s(each) for each in self._warm[1:])
        if not self._warmup.is_over(len(self._warm), later_s, self._seconds):
            self._warm.append(step)
            return False
        self._steady.append(step)
        return self._length.is_over(*self._samples_and_seconds()) and len(self._steady) >= _LEAST_STEPS

    @property
    def samples_s(self) -> float:
        """Sustainable samples/s: samples read ahead count with the time that the readers need for them."""
        samples, took_s = self._samples_and_seconds()
        before, now = (ReaderTotals(**steps[-1]["readers"]) for steps in (self._warm, self._steady))
        reader_s, _ = reader_times(before, now, self._region) or (None, None)
        return samples / reader_limited_s(samples, took_s, reader_s, self._workers)

    def start_s(self, launched_s: float) -> float:
        """Seconds from the launch (a time since 1970) to the steady state, beyond the usual time of its steps."""
        elapsed_s: float = self._warm[-1]["time"] - launched_s
        return elapsed_s - len(self._warm) * self.figures()["step_s"]

    def figures(self) -> dict[str, float]:
        """Median times, shares of the time, and peak memory of all steps."""
        steps, (_, took_s) = self._steady, self._samples_and_seconds()
        figures: dict[str, Any] = {
            "step_s": quantile([_work_s(step) for step in steps], 0.5),
            "comm_s": quantile([step["comm_s"] for step in steps], 0.5),
            "data_share": math.fsum(step["data_s"] for step in steps) / took_s,
            "comm_share": math.fsum(step["comm_s"] for step in steps) / took_s,
            "steps": len(steps),
            "batch": self._batch,
        }
        for name in ("ram", "vram"):
            sizes = [step[f"{name}_used_bytes"] for step in (*self._warm, *steps)]
            figures[f"{name}_bytes"] = max((size for size in sizes if size is not None), default=None)
        return {name: value for name, value in figures.items() if value is not None}

    def _samples_and_seconds(self) -> tuple[int, float]:
        return len(self._steady) * self._batch, math.fsum(_work_s(step) for step in self._steady)


def _work_s(step: Record) -> float:
    seconds: float = step["step_s"] - step["pause_s"]
    return seconds
