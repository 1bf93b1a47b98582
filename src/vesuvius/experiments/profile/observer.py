"""What a profile does between the steps of the training loop: counts them, then ends the run or lets it continue.

It stands where `training.autotune` stands in a run, so that the loop, the clock and the records are those of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vesuvius.experiments.profile.trace import Operator, Trace
from vesuvius.experiments.steady import Warmup
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.verdict import Verdict
from vesuvius.stream.stream import PatchStream
from vesuvius.training.loop import TrainingLoop, Tuner
from vesuvius.training.reporting.report import StepReporter
from vesuvius.training.step.device import DeviceFeed
from vesuvius.training.step.step import parameter_count

MOST_WARM_STEPS = 40
_WARM_S = 10.0  # after which a trainer is slower than its readers
_TRACED_STEPS = 2
MOST_STEPS_BESIDE = MOST_WARM_STEPS + _TRACED_STEPS
"""Steps that a profile makes besides those that count, at most."""


@dataclass
class Observed:
    """What the records of the run do not say; filled while it runs."""

    begin: int = 0  # the step after which the run began, or continued from a checkpoint
    # steps before those that count, as `Warmup` says, and up to the step that was asked for
    warm_steps: int = 0
    verdict: Verdict | None = None  # on the steps that count; None where too few were made
    complete: bool = False  # all steps that were asked for were made
    parameters: int = 0
    device: str = ""
    amp: str = ""
    # operators, left_out: with `--trace`; `left_out` events did not fit the trace
    operators: list[Operator] = field(default_factory=list)
    left_out: int = 0
    in_place: bool = False  # it is the run itself, which continues
    ranks: int = 1  # of the run; rank 0 is what is observed, in place beside the others and else alone

    @property
    def after(self) -> int:
        """The step after which steps count."""
        return self.begin + self.warm_steps


class Observer:
    """A script that is continued between two steps (`act`).

    Args:
        then: called once the steps have been made, and in place also at the end of a run that makes fewer.
        beside: the tuner of the run; it changes nothing while steps are counted.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        reporter: StepReporter,
        observed: Observed,
        steps: int,
        after: int,
        trace: Path | None,
        then: Callable[[], None],
        beside: Tuner | None = None,
    ) -> None:
        self._loop, self._reporter, self._observed = loop, reporter, observed
        self._steps, self._trace, self._then, self._beside = steps, trace, then, beside
        self._counting = False
        observed.begin = loop.run.progress.step
        self._wanted = after - observed.begin  # steps before those that count
        step = loop.train_step
        observed.parameters, observed.amp = parameter_count(step.network), step.amp
        device = loop.run.device
        observed.device = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self._script = self._run()

    def take(self, verdict: Verdict) -> None:
        """Keep the verdict on the steps that count."""
        if self._counting:
            self._observed.verdict = verdict
        if self._beside is not None:
            self._beside.take(verdict)

    def ended(self) -> None:
        """Write the page of a run that ended before, on what it has made."""
        if self._beside is not None and not self._observed.complete:
            self._then()

    def act(self, stream: PatchStream, feed: DeviceFeed, monitor: Monitor) -> None:
        """Do what comes before the next step."""
        next(self._script, None)
        if self._beside is not None and not self._counting:
            self._beside.act(stream, feed, monitor)

    def _run(self) -> Iterator[None]:
        """Yields where the loop is to make a step; called first after the first one."""
        observed, run, loop = self._observed, self._loop.run, self._loop
        accumulate, batch = run.config.training.accumulate_steps, run.config.global_batch
        warmup, began = Warmup.of(loop.job, loop.feed.stream.options, accumulate, batch), time.monotonic()
        observed.warm_steps = 1
        while observed.warm_steps < self._wanted or not (
            warmup.is_over(observed.warm_steps, time.monotonic() - began, _WARM_S)
            or observed.warm_steps >= MOST_WARM_STEPS
        ):
            yield
            observed.warm_steps += 1
        self._reporter.report(wait=True)
        self._counting = True
        self._reporter.verdicts.restart(run.progress.step)
        for _ in range(self._steps):
            yield
        self._reporter.report(wait=True)
        self._reporter.verdicts.finish(least=1)
        self._counting, observed.complete = False, True
        if self._trace is not None:
            yield from self._look_closer(self._trace)
        self._then()

    def _look_closer(self, path: Path) -> Iterator[None]:
        """Trace some steps, which costs time: none of them counts."""
        trace = Trace(self._loop.run.device)
        trace.start()
        for _ in range(_TRACED_STEPS):
            yield
        trace.stop()
        self._observed.operators = trace.operators(_TRACED_STEPS)
        self._observed.left_out = trace.write(path)
