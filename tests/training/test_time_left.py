"""The time left that a step line promises, against the end of the session: whole schedules on a simulated clock.

The loop, the milestones, the reporter and the stop request are the real ones; the network, the disk and the readers
are figures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.stand_ins import FixedMachine, StillStream, run_context
from vesuvius.config import Config, DataConfig, TrainingConfig, VolumeConfig
from vesuvius.runlog.records import read_records
from vesuvius.stream.options import StreamOptions
from vesuvius.training.checkpoint.progress import Best, Progress
from vesuvius.training.loop import TrainingLoop
from vesuvius.training.milestones import Milestones
from vesuvius.training.stop import StopRequest

FORWARD_S, STEP_S, EACH_FOURTH_WAITS_S, FIRST_STEP_S = 0.3, 1.0, 0.8, 15.0
HANDED_S, WRITTEN_S = 2.0, 10.0  # a checkpoint
PREFLIGHT_S = 400.0
VALIDATE_PATCHES, BATCH = 16, 4
VALIDATION_S = VALIDATE_PATCHES * 8 * 2 * FORWARD_S / BATCH * 1.3  # 8 bins, 2 sets of weights, and noise to draw
PREVIEW_S = 2 * 50 * FORWARD_S / BATCH * 1.2


class Clock:
    """All clocks of the `time` module; tells how much of a span a write on another thread would have taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        for name in ("monotonic", "perf_counter", "time"):
            monkeypatch.setattr(time, name, lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SimulatedDisk:
    """Takes the part of `CheckpointWriter`: a save is copied, then written while the training goes on."""

    def __init__(self, clock: Clock, handed_s: float) -> None:
        self._clock, self._handed_s, self._until = clock, handed_s, 0.0
        self._writing: list[dict[str, float]] = []
        self._saved, self.failures = deque[dict[str, float]](), deque[Any]()

    @property
    def saved(self) -> deque[dict[str, float]]:
        if self._clock.now >= self._until:
            self._saved.extend(self._writing)
            self._writing = []
        return self._saved

    def prepare(self, state: Any) -> None:
        pass

    def save(self, step: int, state: Any, best_step: int | None) -> None:
        self.wait()
        self._clock.sleep(self._handed_s)
        self._until = self._clock.now + WRITTEN_S
        self._writing = [{"step": step, "seconds": WRITTEN_S}]

    def wait(self) -> None:
        self._clock.now = max(self._clock.now, self._until)
        assert self.saved is not None  # takes in what has been written


class SimulatedMilestones(Milestones):
    """Validates and draws in a time of its own; three of four validations are the best so far."""

    clock: Clock

    def _validate(self) -> bool:
        self.clock.sleep(VALIDATION_S)
        progress = self._progress
        progress.validated_step = progress.step
        progress.best = progress.best or Best(progress.step, 0.5)
        return progress.step // self._config.training.validate_every % 4 != 3

    def _preview(self) -> None:
        self.clock.sleep(PREVIEW_S)
        self._progress.previewed_step = self._progress.step


class SimulatedNetwork:
    """In the place of feed, step and their results."""

    def __init__(self, clock: Clock, stream: StillStream, workers_start_s: float) -> None:
        self._clock, self.stream, self._first_s, self._step = clock, stream, workers_start_s, 0
        self.timed: Any = None  # set by the loop

    @contextmanager
    def open(self, **_: Any) -> Iterator[StillStream]:
        yield self.stream

    def next(self, clock: Any) -> SimpleNamespace:
        with clock.waiting():
            self._clock.sleep(EACH_FOURTH_WAITS_S if self._step % 4 == 3 else 0.0)
            self._clock.sleep(0.0 if self._step else self._first_s)
        self._step += 1
        return SimpleNamespace(x_0=None, indices=[0], condition=None, stored=None)

    def accumulate(self, x_0: Any, indices: Any, t: Any, condition: Any, last: bool) -> None:
        with self.timed("forward"):
            self._clock.sleep(FORWARD_S)
        with self.timed("backward"):
            self._clock.sleep(STEP_S - FORWARD_S)

    def apply(self, *_: Any) -> SimpleNamespace:
        figures = {"loss": 1.0, "losses": (1.0,), "grad_norm": 1.0, "finite": True, "overflowed": False}
        return SimpleNamespace(read=lambda: SimpleNamespace(**figures))


def trained(
    directory: Path, monkeypatch: pytest.MonkeyPatch, handed_s: float = HANDED_S, **training: Any
) -> tuple[list[dict[str, Any]], float]:
    """The records of the steps of a session, and when it ended."""
    keys = {"epochs": 1, "warmup_steps": 1, "validate_every": 0, "preview_every": 0, "save_every": 10**6, "workers": 0}
    keys |= {"validate_patches": VALIDATE_PATCHES, "train_batch_size": BATCH, "steps_per_epoch": 600}
    data = DataConfig(volumes=(VolumeConfig(path="v.zarr"),))
    config = Config(name="any", data=data, training=TrainingConfig(**(keys | training)))
    clock = Clock(monkeypatch)
    with StopRequest(config.training.max_hours) as stop:
        clock.sleep(PREFLIGHT_S)
        run = run_context(config, directory, Progress(), stop)
        stream: Any = StillStream(StreamOptions.from_config(config.training, config.cluster))
        stream.events, stream.waiting_for = deque(), "data"
        network: Any = SimulatedNetwork(clock, stream, FIRST_STEP_S)
        disk: Any = SimulatedDisk(clock, handed_s)
        quiet: Any = SimpleNamespace(schedule=None, weight_names=("raw", "ema"))
        milestones = SimulatedMilestones(run, quiet, None, quiet, disk, dict)
        milestones.clock = clock
        idle: Any = SimpleNamespace(obey=lambda *_: None, take=lambda *_: None, act=lambda *_: None, ended=lambda: None)
        monitor: Any = FixedMachine()
        TrainingLoop(run, idle, network, network, milestones, monitor, idle, idle, lambda *_: idle).run_steps()
        assert milestones.save_last() is None
    run.metrics.close()
    return [r for r in read_records(directory / "metrics.jsonl") if r["kind"] == "step"], clock.now


SCHEDULES: dict[str, dict[str, Any]] = {
    "validations are half of the time": {"validate_every": 60},
    "validations, previews and saves": {"validate_every": 75, "preview_every": 48, "save_every": 36},
    "saves that the disk does not keep up with": {"save_every": 5},
    "a limit of hours, behind a long preflight": {"max_hours": 0.25, "validate_every": 40, "save_every": 30},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_after_a_tenth_of_a_session_the_time_left_is_right_within_a_tenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """From there to the half of it: near the end, a best save more or less is a large part of what is left.

    Programs that pass without it: one that counts `max_hours` from the end of the preflight, or takes a median for the
    pace.
    """
    steps, end = trained(tmp_path, monkeypatch, **SCHEDULES[schedule])
    began = steps[0]["time"] - steps[0]["step_s"]
    known = [step for step in steps if step["time"] - began >= 0.1 * (end - began) and not step["eta_at_least"]]
    first_half = [step for step in known if end - step["time"] > 0.5 * (end - began)]
    assert len(first_half) > 80
    wrong = {step["step"]: step["eta_s"] / (end - step["time"]) - 1 for step in first_half}
    assert max(map(abs, wrong.values())) < 0.1, wrong


def test_a_session_near_its_end_counts_the_write_that_it_will_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, end = trained(tmp_path, monkeypatch, steps_per_epoch=100, save_every=20)
    assert steps[-1]["eta_s"] == pytest.approx(end - steps[-1]["time"], rel=0.05)
    assert steps[0]["eta_s"] is None
    assert steps[10]["eta_at_least"], "no save has been measured"
    assert not steps[45]["eta_at_least"]
