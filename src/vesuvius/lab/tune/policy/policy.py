"""What to try next, from the ledger alone: the plan of `search.py`, replayed.  Pure, so a tune resumes by itself."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from vesuvius.errors import ConfigError
from vesuvius.lab.tune.policy.prediction import Forecast
from vesuvius.lab.tune.policy.search import search
from vesuvius.lab.tune.terms.known import Known
from vesuvius.lab.tune.terms.setting import in_words
from vesuvius.lab.tune.terms.space import Planner, Space
from vesuvius.lab.tune.terms.trial import Entry, Measured, Outcome, Stop, Trial, steps_worth_a_start

Plan = Generator[Trial, Entry, Stop]

_HOPED = 0.05  # gain of each change of which nothing is known
_ASSUMED_STEPS = 75
_FEEDING = ("baseline", "workers", "requests")


def propose(ledger: Sequence[Entry], space: Space, planner: Planner) -> Trial | Stop:
    """The next trial, or the end.

    Args:
        ledger: all trials so far, in order, as this function has proposed them.
        space: caps and limits; the same as before.
        planner: the same as before.

    Raises:
        ConfigError: another trial was recorded than is proposed here.
    """
    return _replay(search(space, planner), ledger)


def expected_trials(ledger: Sequence[Entry], space: Space, planner: Planner) -> list[Trial]:
    """The trials to come if nearly each gains: at most those that will be tried, each with its prediction.

    Raises:
        ConfigError: as `propose`.
    """
    forecast = Forecast(space, planner, Known(ledger))  # what was hoped for is no ground for a prediction
    plan, known, coming = search(space, planner), Known(ledger), list[Trial]()
    step = _replay(plan, ledger)
    while isinstance(step, Trial):
        coming.append(replace(step, prediction=forecast.predict(step.setting)))
        entry = Entry(step, _hoped(step, known, space))
        known.add(entry)
        step = _advance(plan, entry)
    return coming


def _replay(plan: Plan, ledger: Sequence[Entry]) -> Trial | Stop:
    step = _advance(plan, None)
    for entry in ledger:
        if not isinstance(step, Trial) or step.setting != entry.trial.setting:
            wanted = in_words(step.setting, entry.trial.setting) if isinstance(step, Trial) else "an end"
            raise ConfigError(
                f"a ledger must be of the same config, limits and options; got one that belongs to another tune: where "
                f"its trial {entry.trial.number} stands, this one has {wanted}; leave --resume away to begin anew"
            )
        step = _advance(plan, entry)
    return step


def _advance(plan: Plan, entry: Entry | None) -> Trial | Stop:
    try:
        return next(plan) if entry is None else plan.send(entry)
    except StopIteration as end:
        stop: Stop = end.value
        return stop


def _hoped(trial: Trial, known: Known, space: Space) -> Outcome:
    """A good end: readers scale perfectly, and from the cap on the device computes; all else gains a little."""
    setting, fastest = trial.setting, known.fastest()
    before = None if fastest is None else known.measured(fastest)
    if known.good(setting):
        rate = known.rate(setting).samples_s
    elif fastest is None or before is None:
        rate = _ASSUMED_STEPS * setting.global_batch / (space.trial_s / 2)
    elif setting.workers > fastest.workers:
        rate = before.samples_s * setting.workers / max(fastest.workers, 1)
    else:
        rate = before.samples_s * (1.0 if setting.workers < fastest.workers else 1 + _HOPED)
    start_s = trial.prediction.seconds / 2 if before is None or before.start_s is None else before.start_s
    latency = space.remote and trial.stage == "workers"
    waits = trial.stage == "baseline" or latency
    measured = Measured(
        steps=_hoped_steps(trial, rate, space, start_s),
        samples_s=rate,
        low=rate,
        high=rate,
        narrow=True,
        step_p50_s=setting.global_batch / rate,
        data_share=0.5 if waits else 0.0,
        h2d_share=0.0,
        compute_share=0.5 if waits else 1.0,
        host_share=0.0,
        bound="data-bound" if waits else "compute-bound",
        cause="store latency" if latency else None,
        verdict="",
        overrides=(),
        trainer_s=1 / rate,
        reader_s=max(setting.workers, 1) / rate if before is None else before.reader_s,
        decode_s=None,
        buffer_full_share=2 * _HOPED if trial.stage in _FEEDING else 0.0,
        ran_empty_share=2 * _HOPED if trial.stage in _FEEDING else 0.0,
        cores_used=None,
        ram_bytes=trial.prediction.ram_bytes,
        vram_bytes=trial.prediction.vram_bytes,
        start_s=start_s,
    )
    return Outcome("ok", "", trial.prediction.seconds, measured)


def _hoped_steps(trial: Trial, rate: float, space: Space, start_s: float) -> int:
    """Measured in the time that was predicted for them."""
    expected = trial.prediction.samples_s
    if expected is None:
        return _ASSUMED_STEPS
    step_s = trial.setting.global_batch / expected
    steps = steps_worth_a_start(space.trial_steps[1], step_s, start_s)
    return round(steps * rate / expected)
