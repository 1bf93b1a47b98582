"""What a search asks for, gets and ends with: the data types that policy, ledger and report share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vesuvius.tuning.block import Block, Kind
from vesuvius.tuning.search.pairs import Comparison
from vesuvius.tuning.setting import Knob, Setting

Stage = Literal["baseline", "readers", "batch", "switches", "confirm"]
Verdict = Literal["better", "unchanged", "undecided", "none"]

SMALLEST_GAIN = 0.03
"""Smallest relative gain that is worth a change."""


@dataclass(frozen=True)
class Step:
    """What is measured next, why, and what is expected of it: samples/s (None = unknown), memory, seconds."""

    number: int
    stage: Stage
    setting: Setting
    kind: Kind
    why: str
    rate: float | None
    ram_bytes: int
    vram_bytes: int | None
    seconds: float


@dataclass(frozen=True)
class Entry:
    """A step and its block."""

    step: Step
    block: Block


@dataclass(frozen=True)
class Recommendation:
    """The result of a tune.

    Attributes:
        verdict: "better": `best` is surely faster than the baseline, or as fast and cheaper.  "unchanged": nothing that
            was tried is worth a change.  "undecided": the budget was spent first.  "none": nothing could be measured.
        best: the recommended setting, which never ran out of memory.
        base: the setting of the baseline: the source, or the nearest smaller one that fits.
        reason: why the tune ended.
        reasons: for each knob that differs from the source, why.
        ended: for each stage, why it ended.
        gain: of `best` over `base`, from blocks in turn; None where they were not measured in turn.
        rivals: what was compared in turn with what, and what came of it.
    """

    verdict: Verdict
    best: Setting
    base: Setting
    reason: str
    reasons: dict[Knob, str] = field(default_factory=dict)
    ended: dict[Stage, str] = field(default_factory=dict)
    gain: Comparison | None = None
    rivals: tuple[tuple[Setting, Setting, Comparison], ...] = ()
