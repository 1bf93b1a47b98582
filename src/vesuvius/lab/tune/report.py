"""What a tune has found, as plain data: everything that its texts, its page and its JSON say.  Pure.

ledger, stop, space, options -> `build_report` -> Report -> report_text, report_html, report_files
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from vesuvius.config_words import to_yaml
from vesuvius.lab.tune.options import Horizon, Option, Pooled, pool
from vesuvius.lab.tune.setting import Setting
from vesuvius.lab.tune.space import Goal, Space
from vesuvius.lab.tune.trial import Bound, Ended, Entry, Stage, Stop

NEAR = 0.15
"""A prediction that is off by no more than this was good."""


@dataclass(frozen=True)
class TrialRow:
    """A trial as it was expected and as it went; what was not measured, or not predicted, is None.

    Attributes:
        overrides: of the source config.
        low, high: 95 % confidence interval of samples/s.
        samples_error, ram_error, vram_error: predicted / measured - 1.
    """

    number: int
    stage: Stage
    changed: str
    why: str
    overrides: tuple[str, ...]
    ended: Ended
    cause: str
    seconds: float
    steps: int | None
    samples_s: float | None
    low: float | None
    high: float | None
    data_share: float | None
    verdict: str | None
    ram_bytes: int | None
    vram_bytes: int | None
    predicted_samples_s: float | None
    predicted_ram_bytes: int
    predicted_vram_bytes: int | None
    samples_error: float | None
    ram_error: float | None
    vram_error: float | None


@dataclass(frozen=True)
class Baseline:
    """The run as it was before, in all its trials; `step_s` is the mean of an optimizer step."""

    samples_s: float
    low: float
    high: float
    step_s: float
    total_s: float
    ram_bytes: int
    vram_bytes: int | None
    data_share: float
    bound: Bound
    cause: str | None
    verdict: str
    as_the_source: bool


@dataclass(frozen=True)
class Sureness:
    """How well the recommended setting is known: interval of its samples/s, and what that rests on."""

    low: float
    high: float
    trials: tuple[int, ...]
    steps: int
    checked: bool


@dataclass(frozen=True)
class Quality:
    """How good the predictions of a quantity were over the trials that ended well and had one.

    Attributes:
        within: trials whose prediction was off by at most `NEAR`; `share` of all.
        median_error: of the errors' sizes.
    """

    quantity: str
    trials: int
    within: int
    share: float | None
    median_error: float | None


@dataclass(frozen=True)
class Change:
    """A knob that the recommendation turns, values as they stand in YAML."""

    knob: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True)
class Report:
    """All that is told of a tune.

    Attributes:
        name: of the experiment.
        source, tuned: paths of the configs; `tuned` None where nothing is to be changed.
        command: that has made this.
        train_command: to run now.
        machine: lines that describe it.
        spent_s: of all trials.
        baseline: None where no trial of it ended well.
        gain: samples/s of B over the baseline's; None where one was not measured.
        ended: for each stage that was entered, why it was left.
        reason: why the tune ended.
        options: A, B, C.
    """

    name: str
    source: str
    tuned: str | None
    command: str
    train_command: str
    date: str
    versions: Mapping[str, str]
    machine: tuple[str, ...]
    goal: Goal
    scale_batch: bool
    budget_s: float
    spent_s: float
    horizon: Horizon
    ram_limit_bytes: int
    vram_limit_bytes: int | None
    baseline: Baseline | None
    gain: float | None
    sureness: Sureness | None
    options: tuple[Option, Option, Option]
    changes: tuple[Change, ...]
    reason: str
    ended: Mapping[str, str]
    quality: tuple[Quality, ...]
    trials: tuple[TrialRow, ...]

    @property
    def best(self) -> Option:
        """B."""
        return self.options[1]


def build_report(
    *,
    name: str,
    source: str,
    tuned: str | None,
    command: str,
    date: str,
    versions: Mapping[str, str],
    machine: Sequence[str],
    space: Space,
    ledger: Sequence[Entry],
    stop: Stop,
    options: tuple[Option, Option, Option],
    horizon: Horizon,
) -> Report:
    """Gather the report.  The arguments are explained at `Report`."""
    known = pool(ledger)
    rows = tuple(_row(entry, space) for entry in ledger)
    baseline = _baseline(ledger, known, space, horizon)
    best = known.get(stop.best)
    return Report(
        name=name,
        source=source,
        tuned=tuned,
        command=command,
        train_command=f"vesuvius train --config {shlex.quote(tuned or source)}",
        date=date,
        versions=dict(versions),
        machine=tuple(machine),
        goal=space.goal,
        scale_batch=space.scale_batch,
        budget_s=space.budget_s,
        spent_s=sum(entry.outcome.seconds for entry in ledger),
        horizon=horizon,
        ram_limit_bytes=space.ram_limit_bytes,
        vram_limit_bytes=space.vram_limit_bytes,
        baseline=baseline,
        gain=best.samples_s / baseline.samples_s if best and baseline else None,
        sureness=Sureness(best.low, best.high, best.trials, best.steps, stop.checked) if best else None,
        options=options,
        changes=_changes(stop, space.source),
        reason=stop.reason,
        ended=dict(stop.ended),
        quality=_quality(rows, space.vram_limit_bytes is not None),
        trials=rows,
    )


def _baseline(
    ledger: Sequence[Entry], known: Mapping[Setting, Pooled], space: Space, horizon: Horizon
) -> Baseline | None:
    """From the first trial that ended well as long as only the baseline was looked for."""
    settings = [entry.trial.setting for entry in ledger if entry.trial.stage == "baseline"]
    setting = next((setting for setting in settings if setting in known), None)
    if setting is None:
        return None
    pooled = known[setting]
    first = next(entry for entry in ledger if entry.trial.number == pooled.trials[0])
    measured = first.outcome.measured
    assert measured is not None
    step_s = horizon.global_batch / pooled.samples_s
    return Baseline(
        samples_s=pooled.samples_s,
        low=pooled.low,
        high=pooled.high,
        step_s=step_s,
        total_s=step_s * horizon.steps_per_epoch * horizon.epochs,
        ram_bytes=pooled.ram_bytes,
        vram_bytes=pooled.vram_bytes,
        data_share=measured.data_share,
        bound=measured.bound,
        cause=measured.cause,
        verdict=measured.verdict,
        as_the_source=setting == space.source,
    )


def _row(entry: Entry, space: Space) -> TrialRow:
    trial, outcome = entry.trial, entry.outcome
    m, expected = outcome.measured, trial.prediction
    return TrialRow(
        number=trial.number,
        stage=trial.stage,
        changed=trial.changed,
        why=trial.why,
        overrides=tuple(trial.setting.overrides(space.source)),
        ended=outcome.ended,
        cause=outcome.cause,
        seconds=outcome.seconds,
        steps=m.steps if m else None,
        samples_s=m.samples_s if m else None,
        low=m.low if m else None,
        high=m.high if m else None,
        data_share=m.data_share if m else None,
        verdict=m.verdict if m else None,
        ram_bytes=m.ram_bytes if m else None,
        vram_bytes=m.vram_bytes if m else None,
        predicted_samples_s=expected.samples_s,
        predicted_ram_bytes=expected.ram_bytes,
        predicted_vram_bytes=expected.vram_bytes,
        samples_error=_error(expected.samples_s, m.samples_s if m else None),
        ram_error=_error(expected.ram_bytes, m.ram_bytes if m else None),
        vram_error=_error(expected.vram_bytes, m.vram_bytes if m else None),
    )


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1


def _changes(stop: Stop, source: Setting) -> tuple[Change, ...]:
    return tuple(
        Change(knob, to_yaml(getattr(source, knob)), to_yaml(value), stop.reasons.get(knob, "measured"))
        for knob, value in stop.best.changes(source).items()
    )


def _quality(rows: Sequence[TrialRow], on_gpu: bool) -> tuple[Quality, ...]:
    good = [row for row in rows if row.ended == "ok"]
    errors = {"samples/s": [row.samples_error for row in good], "RAM": [row.ram_error for row in good]}
    if on_gpu:
        errors["VRAM"] = [row.vram_error for row in good]
    return tuple(
        _judge(quantity, [abs(error) for error in found if error is not None]) for quantity, found in errors.items()
    )


def _judge(quantity: str, errors: list[float]) -> Quality:
    within = sum(error <= NEAR for error in errors)
    share = within / len(errors) if errors else None
    return Quality(quantity, len(errors), within, share, median(errors) if errors else None)
