"""What a profile does between the steps of the training loop: counts them, traces some more, then ends the run.

It stands where `training.autotune` stands in a run, so that the loop, the clock and the records are those of training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from vesuvius.errors import EXIT_OK
from vesuvius.experiments.steady import Warmup
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.verdict import Verdict
from vesuvius.stream.stream import PatchStream
from vesuvius.training.loop import TrainingLoop
from vesuvius.training.reporting.report import StepReporter
from vesuvius.training.step.device import DeviceFeed
from vesuvius.training.step.step import parameter_count

MOST_WARM_STEPS = 40
_WARM_S = 10.0  # after which a trainer is slower than its readers
_TRACED_STEPS = 2
MOST_STEPS_BESIDE = MOST_WARM_STEPS + _TRACED_STEPS
"""Steps that a profile makes besides those that count, at most."""

_OPERATORS = 25
OPERATORS = "operators.txt"


@dataclass
class Observed:
    """What the records of the run do not say; filled while it runs."""

    warm_steps: int = 0  # steps before those that count, as `Warmup` says
    verdict: Verdict | None = None  # on the steps that count; None until all are made
    parameters: int = 0
    device: str = ""
    amp: str = ""


class Observer:
    """A script that is continued between two steps (`act`).

    Args:
        steps: that count.
        trace: file for a trace of some further steps; None = none.
    """

    def __init__(
        self, loop: TrainingLoop, reporter: StepReporter, observed: Observed, steps: int, trace: Path | None
    ) -> None:
        self._loop, self._reporter, self._observed, self._steps, self._trace = loop, reporter, observed, steps, trace
        step, device = loop.train_step, loop.run.device
        observed.parameters, observed.amp = parameter_count(step.network), step.amp
        observed.device = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self._counting = False
        self._script = self._run()

    def take(self, verdict: Verdict) -> None:
        """Keep the verdict on the steps that count, not on those before or after, nor of a run that is stopped."""
        if self._counting:
            self._observed.verdict = verdict

    def ended(self) -> None:
        """Nothing is left to do."""

    def act(self, stream: PatchStream, feed: DeviceFeed, monitor: Monitor) -> None:
        """Do what comes before the next step."""
        next(self._script, None)

    def _run(self) -> Iterator[None]:
        """Yields where the loop is to make a step; called first after the first one."""
        observed, run, loop = self._observed, self._loop.run, self._loop
        accumulate, batch = run.config.training.accumulate_steps, run.config.global_batch
        warmup, began = Warmup.of(loop.job, loop.feed.stream.options, accumulate, batch), time.monotonic()
        warm = 1
        while warm < MOST_WARM_STEPS and not warmup.is_over(warm, time.monotonic() - began, _WARM_S):
            yield
            warm += 1
        observed.warm_steps = warm
        self._reporter.report(wait=True)
        self._reporter.verdicts.restart(run.progress.step)
        for _ in range(self._steps):
            yield
        self._reporter.report(wait=True)
        self._counting = True
        self._reporter.verdicts.finish(least=1)
        self._counting = False
        if self._trace is not None:
            yield from self._look_closer(self._trace)
        run.stop.ask(EXIT_OK, "the profile has its steps")

    def _look_closer(self, path: Path) -> Iterator[None]:
        """Trace some steps, which costs time: none of them counts."""
        on_gpu = self._loop.run.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        profiler = profile(activities=activities, profile_memory=True)
        profiler.start()
        for _ in range(_TRACED_STEPS):
            yield
        profiler.stop()
        of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=of, row_limit=_OPERATORS, max_name_column_width=80)
        path.with_name(OPERATORS).write_text(table, encoding="utf-8")
        profiler.export_chrome_trace(str(path))
