"""The steady pace of a run, from its records of steps: where it begins, when it is measured, and its figures.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vesuvius.config import Config
from vesuvius.monitor.quantile import quantile
from vesuvius.runlog.records import Record
from vesuvius.stream.options import StreamOptions, batches_ahead
from vesuvius.stream.start.prepare import PreparedData
from vesuvius.trials.cycles import is_enough, sustained_s

_KERNELS_CHOSEN = 3  # steps
_LEAST_STEPS = 3


@dataclass(frozen=True)
class Demand:
    """What has to be seen of a run."""

    seconds: float  # of the steady pace, at least
    batch: int  # samples of a step
    warm_steps: int  # steps until kernels are chosen and batches that were ready at the start are used up
    warm_samples: int  # samples until each region in flight was read: up to there each needs another one
    cycle: int  # samples after which bursts of the readers repeat
    workers: int  # of all ranks
    patches_per_region: int  # patches that one read gives
    compiles: bool = False  # whether the first step compiles the network

    @classmethod
    def of(cls, config: Config, data: PreparedData, ranks: int, seconds: float) -> Demand:
        """That of a config with so many ranks."""
        training, plan = config.training, data.plan
        ahead = batches_ahead(data.job.patch_bytes, StreamOptions.from_config(training, config.cluster))
        return cls(
            seconds,
            training.train_batch_size * training.accumulate_steps * ranks,
            _KERNELS_CHOSEN + -(-ahead // training.accumulate_steps),
            plan.regions_in_flight,
            max(training.workers * ranks, 1) * plan.samples_per_task,
            training.workers * ranks,
            plan.patches_per_region,
            training.compile,
        )


class Pace:
    """Takes the steps of a run as they come."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._warm: list[Record] = []
        self._steady: list[Record] = []

    def add(self, step: Record) -> bool:
        """Take one more; returns whether enough of them were seen.

        A warm-up ends after `seconds`, whatever the readers: a slower trainer does not wait for them.
        """
        demand = self._demand
        later_s = math.fsum(_work_s(each) for each in self._warm[1:])
        is_read = len(self._warm) * demand.batch >= demand.warm_samples or later_s >= demand.seconds
        if len(self._warm) < demand.warm_steps or not is_read:
            self._warm.append(step)
            return False
        self._steady.append(step)
        samples, took_s = self._samples_and_seconds()
        long_enough = is_enough(samples, demand.batch, took_s, demand.cycle, demand.seconds)
        return len(self._steady) >= _LEAST_STEPS and long_enough

    @property
    def samples_s(self) -> float:
        """That the run can keep up: what was read ahead counts with the time that the readers need for it."""
        samples, took_s = self._samples_and_seconds()
        return samples / sustained_s(samples, took_s, self._reader_s(), self._demand.workers)

    def start_s(self, launched_s: float) -> float:
        """Seconds from the launch to the steady pace, beyond what these steps take at that pace.

        Args:
            launched_s: since 1970.
        """
        elapsed_s: float = self._warm[-1]["time"] - launched_s
        return elapsed_s - len(self._warm) * self.figures()["step_s"]

    def figures(self) -> dict[str, float]:
        """Of the steady pace: medians of a step's parts, shares of the time, peaks of the memory of all steps."""
        _, took_s = self._samples_and_seconds()
        found = {
            "step_s": quantile([_work_s(step) for step in self._steady], 0.5),
            "compute_s": quantile([step["gpu_s"] for step in self._steady], 0.5),
            "backward_s": quantile([step["backward_s"] for step in self._steady], 0.5),
            "comm_s": quantile([step["comm_s"] for step in self._steady], 0.5),
            "data_share": math.fsum(step["data_s"] for step in self._steady) / took_s,
            "comm_share": math.fsum(step["comm_s"] for step in self._steady) / took_s,
            "steps": len(self._steady),
            "batch": self._demand.batch,
        }
        if self._demand.compiles:  # what the first step took beside its wait for readers, beyond a usual one
            usual_s = quantile([_work_s(step) - step["data_s"] for step in self._steady], 0.5)
            found["compile_s"] = max(_work_s(self._warm[0]) - self._warm[0]["data_s"] - usual_s, 0.0)
        for name in ("ram", "vram"):
            known = [step[f"{name}_used_bytes"] for step in (*self._warm, *self._steady)]
            if peak := max((size for size in known if size is not None), default=None):
                found[f"{name}_bytes"] = peak
        return found

    def _samples_and_seconds(self) -> tuple[int, float]:
        return len(self._steady) * self._demand.batch, math.fsum(_work_s(step) for step in self._steady)

    def _reader_s(self) -> float | None:
        """That one reader takes for a sample; None where nothing was read meanwhile."""
        before, now = self._warm[-1]["readers"], self._steady[-1]["readers"]
        read = (now["blocks"] - before["blocks"]) * self._demand.patches_per_region
        spent_s = sum((now[name] or 0.0) - (before[name] or 0.0) for name in ("decode_s", "read_s"))
        return spent_s / read if read else None


def _work_s(step: Record) -> float:
    seconds: float = step["step_s"] - step["pause_s"]
    return seconds
