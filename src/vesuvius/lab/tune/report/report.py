"""What a tune has found, as plain data: everything that its texts, its page and its JSON say.  Pure.

known, stop, space, options -> `build_report` -> Report -> report_text, report_html, report_files
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from vesuvius.config_words import to_yaml
from vesuvius.lab.tune.report.options import Horizon, Option
from vesuvius.lab.tune.terms.known import Known
from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.space import Goal, Space
from vesuvius.lab.tune.terms.trial import Bound, Ended, Entry, Stage, Stop

NEAR = 0.15
"""A prediction that is off by no more than this was good."""


@dataclass(frozen=True)
class TrialRow:
    """A trial as it was expected and as it went; what was not measured, or not predicted, is None.

    Attributes:
        first: whether it was the first of its setting: later ones were predicted from what it had measured.
        overrides: of the source config.
        low, high: 95 % confidence interval of samples/s.
        samples_error, ram_error, vram_error: predicted / measured - 1.
    """

    number: int
    first: bool
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
    """How good the predictions of a quantity were, over the first trial of each setting that ended well and had one.

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
        train_command: what to run now.
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
    train_command: str,
    date: str,
    versions: Mapping[str, str],
    machine: Sequence[str],
    space: Space,
    known: Known,
    stop: Stop,
    options: tuple[Option, Option, Option],
    horizon: Horizon,
) -> Report:
    """Gather the report.  The arguments are explained at `Report`; `known` holds all trials."""
    rows = tuple(_row(entry, known, space) for entry in known.entries)
    baseline = _baseline(known, space, horizon)
    sureness = _sureness(known, stop)
    return Report(
        name=name,
        source=source,
        tuned=tuned,
        command=command,
        train_command=train_command,
        date=date,
        versions=dict(versions),
        machine=tuple(machine),
        goal=space.goal,
        scale_batch=space.scale_batch,
        budget_s=space.budget_s,
        spent_s=known.spent_s,
        horizon=horizon,
        ram_limit_bytes=space.ram_limit_bytes,
        vram_limit_bytes=space.vram_limit_bytes,
        baseline=baseline,
        gain=known.rate(stop.best).samples_s / baseline.samples_s if sureness and baseline else None,
        sureness=sureness,
        options=options,
        changes=_changes(stop, space.source),
        reason=stop.reason,
        ended=dict(stop.ended),
        quality=_quality(rows, space.vram_limit_bytes is not None),
        trials=rows,
    )


def _baseline(known: Known, space: Space, horizon: Horizon) -> Baseline | None:
    """From the first trial that ended well as long as only the baseline was looked for."""
    settings = [entry.trial.setting for entry in known.entries if entry.trial.stage == "baseline"]
    setting = next((setting for setting in settings if known.good(setting)), None)
    if setting is None:
        return None
    pooled, first = known.measured(setting), known.good(setting)[0].outcome.measured
    assert first is not None  # it ended well
    step_s = horizon.global_batch / pooled.samples_s
    return Baseline(
        samples_s=pooled.samples_s,
        low=pooled.low,
        high=pooled.high,
        step_s=step_s,
        total_s=step_s * horizon.steps,
        ram_bytes=pooled.ram_bytes,
        vram_bytes=pooled.vram_bytes,
        data_share=first.data_share,
        bound=first.bound,
        cause=first.cause,
        verdict=first.verdict,
        as_the_source=setting == space.source,
    )


def _sureness(known: Known, stop: Stop) -> Sureness | None:
    trials = known.good(stop.best)
    if not trials:
        return None
    pooled = known.measured(stop.best)
    steps = sum(entry.outcome.measured.steps for entry in trials if entry.outcome.measured)
    numbers = tuple(entry.trial.number for entry in trials)
    return Sureness(pooled.low, pooled.high, numbers, steps, stop.checked)


def _row(entry: Entry, known: Known, space: Space) -> TrialRow:
    trial, outcome = entry.trial, entry.outcome
    m, expected = outcome.measured, trial.prediction
    return TrialRow(
        number=trial.number,
        first=next(other for other in known.entries if other.trial.setting == trial.setting) == entry,
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
    good = [row for row in rows if row.first and row.ended == "ok"]
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
