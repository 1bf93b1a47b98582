"""A trial, what was predicted of it and what came of it: the words in which policy, runner, ledger and report speak."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from vesuvius.lab.tune.terms.setting import Setting

Stage = Literal["baseline", "workers", "requests", "prefetch", "batch", "switches", "check"]
Risk = Literal["low", "medium", "high"]
Ended = Literal["ok", "guard", "gpu_memory", "killed", "failed", "timeout"]
Bound = Literal["data-bound", "transfer-bound", "host-bound", "compute-bound"]

MOST_TIMES = 20
"""So many times the steps that were asked for are measured at most."""


def steps_worth_a_start(steps: int, step_s: float, start_s: float) -> int:
    """How many steps to measure where so many were asked for: of short ones as many as take the time of the start.

    A hundred steps of 0.05 s take 5 s, and the start of a trial 20 s or more; its interval is then wide for no good
    reason, and what slows a machine for some seconds is all that it saw.
    """
    return round(min(max(steps, start_s / step_s), MOST_TIMES * steps))


@dataclass(frozen=True)
class Prediction:
    """What is expected of a setting.

    Attributes:
        samples_s: samples a second of the whole run; None before anything was measured.
        ram_bytes: host memory of a trial at its peak.
        vram_bytes: GPU memory at its peak, reserve included; None on a CPU.
        seconds: that a trial of it takes.
        risk: how near it comes to the limits of memory at which trials end: low below 70 % of them, medium below 90 %.
        measured: how many sizes the lines through memory were fitted to; 0 = the plan alone.
        later_bytes: host memory that the whole run takes beyond a trial, being longer.
    """

    samples_s: float | None
    ram_bytes: int
    vram_bytes: int | None
    seconds: float
    risk: Risk
    measured: int
    later_bytes: int = 0


@dataclass(frozen=True)
class Trial:
    """A short run with one setting.

    Attributes:
        number: from 0 on, the baseline.
        stage: which knob is being turned.
        changed: in words, against the best so far.
        why: the reason, in words.
    """

    number: int
    setting: Setting
    stage: Stage
    changed: str
    why: str
    prediction: Prediction


@dataclass(frozen=True)
class Measured:
    """What a trial that ended well has measured, its warm-up and pauses left out.

    Attributes:
        steps: that the figures are of.
        samples_s: samples a second.
        low, high: its 95 % confidence interval.
        narrow: whether the interval got as narrow as asked for; else the trial ended at its most steps or seconds.
        step_p50_s: median step.
        data_share, h2d_share, compute_share, host_share: of the step time.
        bound, cause, verdict, overrides: as the run's own verdict says.
        trainer_s: seconds that a sample takes the trainer when data are there.
        reader_s: seconds that a sample takes one reader, waiting for the store included; None where too little
            was read to say.
        decode_s: the part of it that needs a processor.
        buffer_full_share: share of the time in which all places ahead were taken.
        ran_empty_share: share of batches that were asked for when none was ready.
        cores_used: processors that trainer and readers kept busy, on average; None where not measured.
        ram_bytes: peak of the host memory that the run accounts for.
        vram_bytes: peak that was reserved on the GPU, with CUDA's own; None on a CPU.
        start_s: seconds from its start until its first step began to compute: compiling is no part of it; None where
            an older ledger does not say.
    """

    steps: int
    samples_s: float
    low: float
    high: float
    narrow: bool
    step_p50_s: float
    data_share: float
    h2d_share: float
    compute_share: float
    host_share: float
    bound: Bound
    cause: str | None
    verdict: str
    overrides: tuple[str, ...]
    trainer_s: float
    reader_s: float | None
    decode_s: float | None
    buffer_full_share: float
    ran_empty_share: float
    cores_used: float | None
    ram_bytes: int
    vram_bytes: int | None
    start_s: float | None = None

    @property
    def half_width(self) -> float:
        """Of the confidence interval, relative to the mean."""
        return (self.high - self.low) / 2 / self.samples_s

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        return cls(**record | {"overrides": tuple(record["overrides"])})


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        cause: in one line, why it ended badly; '' where it did not.
        seconds: from its start to its end.
        measured: None where it ended before enough steps.
    """

    ended: Ended
    cause: str
    seconds: float
    measured: Measured | None

    def record(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        measured = record["measured"]
        return cls(**record | {"measured": None if measured is None else Measured.from_record(measured)})


@dataclass(frozen=True)
class Entry:
    """A trial that is over."""

    trial: Trial
    outcome: Outcome


@dataclass(frozen=True)
class Stop:
    """The end of a tune.

    Attributes:
        best: the setting to take, which never died of memory; the source's where nothing is left that did not.
        fastest: of those that never died the one with the most samples a second, which may cost more.
        reason: why no further trial, in words: which knobs reached their knee, the noise, a cap, or the budget.
        reasons: for each knob that differs from the source, why it has its value, with figures.
        ended: for each stage that was entered, why it was left: "knee: ...", "noise: ...", "cap: ...", "budget: ...".
        checked: whether `best` and a rival of it were both measured again, in turn.
    """

    best: Setting
    fastest: Setting
    reason: str
    reasons: dict[str, str]
    ended: dict[str, str]
    checked: bool


def trial_record(trial: Trial) -> dict[str, Any]:
    """Plain data."""
    return asdict(trial)


def trial_from_record(record: dict[str, Any]) -> Trial:
    """From `trial_record`, by way of JSON."""
    setting, prediction = Setting.from_record(record["setting"]), Prediction(**record["prediction"])
    return Trial(**record | {"setting": setting, "prediction": prediction})
