"""What a trial runs: the source config with the trial's setting, cut short, and what happens at which of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from vesuvius.config import Config
from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.trial import MOST_TIMES, Trial, steps_worth_a_start

# Steps behind a pause that are left out at most: a ring of hundreds of batches would leave nothing.
_DRAINED_MOST = 20
# Times the least steps, behind which the first pause comes at the latest.
_LATEST = 4
# Measured steps without which nothing can be said.
LEAST_SAID = 3
# More steps than a trial has: the run then judges once, at its end, over all of them but the first.
_NO_VERDICT_BEFORE_THE_END = 10**6
# An orphan ends itself so much later than the runner would have ended it.
_ORPHAN_S = 120.0


@dataclass(frozen=True)
class Course:
    """Which steps of a trial, counted from 1, are measured.

    Attributes:
        warmup_steps: at the start: readers start, kernels are chosen and compiled.
        pause_every: behind each multiple of it the run validates and saves.
        drain_steps: behind such a pause, in which readers have filled the places ahead.
        last_step: at which the run ends by itself.
    """

    warmup_steps: int
    pause_every: int
    drain_steps: int
    last_step: int

    def is_measured(self, step: int) -> bool:
        """Whether a step is neither of the warm-up nor right behind a pause."""
        behind = (step - 1) % self.pause_every
        return step > self.warmup_steps and not (step > self.pause_every and behind < self.drain_steps)


def course_of(
    config: Config, trial: Trial, *, warmup_steps: int, least_steps: int, most_steps: int, seconds: float
) -> Course:
    """The course of a trial of a config.  Pure.

    Validation and checkpoint belong to a trial, because a run's memory peaks there.  They come as soon as half of the
    steps are measured, the least ones at least, so that these are free of them: in a pause readers go on, and what
    they have read by its end makes the steps behind it faster than the readers can keep up.  Where so many steps are
    expected to take more than half of the time, the pause comes earlier; and where nothing is predicted, after a third
    of the least steps, as each may take half a minute.

    Args:
        config: of the tune.
        warmup_steps: that are left out.
        least_steps, most_steps: to be measured; up to twenty times the most, where steps are short.
        seconds: that the trial may take.
    """
    drain = drain_steps(trial.setting)
    if trial.prediction.samples_s:
        step_s = trial.setting.global_batch / trial.prediction.samples_s
        expected_steps = steps_worth_a_start(most_steps, step_s, trial.prediction.seconds / 2)
        in_half_s = int(seconds / 2 / step_s)
        half = min(expected_steps // 2, _LATEST * least_steps)  # a prediction may be far off
        pause = min(warmup_steps + max(least_steps, half), in_half_s)
    else:
        pause = least_steps // 3
    most_steps *= MOST_TIMES  # the runner ends it sooner, but for very short steps
    pause = max(pause, warmup_steps + LEAST_SAID, 2 * drain)  # half of the steps, at least, are not behind a pause
    behind_pauses = max(most_steps - (pause - warmup_steps), 0)
    last = warmup_steps + most_steps + drain * math.ceil(behind_pauses / (pause - drain))
    last = min(last, config.horizon_steps)
    return Course(warmup_steps, min(pause, last), drain, last)


def drain_steps(setting: Setting) -> int:
    """Steps that the batches ahead last for, and the one in which the feeder goes on."""
    ahead = max(setting.workers, 1) * setting.prefetch_factor
    return min(math.ceil(ahead / setting.accumulate_steps) + 1, _DRAINED_MOST)


def trial_config(config: Config, trial: Trial, course: Course, seconds: float) -> Config:
    """The config of a trial.  Pure.

    Each trial has a seed of its own, and so other regions to read: with the same ones a later trial would find in the
    page cache, or in `data.store.cache_dir`, what an earlier one has read, and seem faster.

    The guard ends a trial where it would only make a run smaller: at `monitor.prefetch_at`.  A setting that needs to
    be made smaller is none to recommend.

    Args:
        config: of the tune.
        seconds: after which the runner ends the trial.

    Raises:
        ValidationError: the setting does not fit the config.
    """
    applied = trial.setting.applied_to(config)
    training = _short_training(config, trial.setting, course, seconds)
    monitor = _quiet_monitor(config)
    short = applied.model_copy(
        update={
            "name": trial_name(trial.number),
            "seed": _seed(config.seed, trial.number),
            "training": applied.training.model_copy(update=training),
            "monitor": applied.monitor.model_copy(update=monitor),
        }
    )
    return Config.model_validate(short.model_dump())


def _short_training(config: Config, setting: Setting, course: Course, seconds: float) -> dict[str, Any]:
    """From new weights to the end of the course, with one checkpoint at a time."""
    return {
        "max_steps": course.last_step,
        "max_hours": (seconds + _ORPHAN_S) / 3600,
        "resume": "never",
        "init_from": None,
        "autotune": "off",
        "save_every": course.pause_every,
        "keep_last": 1,
        "keep_every": None,
        "validate_every": course.pause_every if config.training.validate_every else 0,
        "validate_patches": setting.train_batch_size,
        "preview_every": 0,
    }


def _quiet_monitor(config: Config) -> dict[str, Any]:
    """Nobody looks on but the runner, which wants to see each peak."""
    at = config.monitor.prefetch_at
    return {
        "tensorboard": False,
        "prometheus_port": None,
        "verdict_every": _NO_VERDICT_BEFORE_THE_END,
        "sample_every_s": 0.5,
        "write_every_s": 1.0,
        "guard": "act",
        "worker_at": at,
        "exit_at": at,
    }


def trial_name(number: int) -> str:
    """Of a trial's run directory, config and log."""
    return f"{number:03d}"


def validates(config: Config) -> bool:
    """Whether a run of this config validates at all."""
    return config.training.validate_every > 0 and config.data.validation.fraction > 0


def _seed(seed: int, number: int) -> int:
    return int(np.random.default_rng((seed, number)).integers(2**31))
