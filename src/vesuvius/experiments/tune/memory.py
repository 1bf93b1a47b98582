"""The predicted memory of a setting, and reasons against trying it: the planner corrected by the blocks.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from vesuvius.errors import one_line
from vesuvius.experiments.tune.measurement import DEADLY, Block, Planner, SearchSpace, Setting
from vesuvius.runlog.units import size_text

Risk = Literal["low", "medium", "high"]

GROWTH = 1.5
"""Assumed growth per planned byte: the planner knows what grows with a knob, and may be off by half in the amount."""

_SAVING = 0.5  # assumed saving per byte that the planner saves
_SPREAD = 0.01  # relative spread of the peaks of one setting
_LOW_BELOW, _MEDIUM_BELOW = 0.70, 0.90  # shares of the limits
ENDED_BY = {
    "guard": "the memory guard",
    "gpu_memory": "a lack of GPU memory",
    "killed": "a kill",
    "failed": "an error",
    "timeout": "its time limit",
}
_SIZES = {"workers", "requests", "prefetch_factor", "train_batch_size", "accumulate_steps"}


@dataclass(frozen=True)
class Size:
    """Predicted bytes: the best estimate, and a safe upper bound; no block starts if that exceeds a limit."""

    expected_bytes: int
    most_bytes: int


class PredictedMemory:
    """Predicts memory from the planner and the blocks so far.

    Args:
        planner: should cache; it is called repeatedly for the same settings.
        blocks: may grow after construction.
    """

    def __init__(self, space: SearchSpace, planner: Planner, blocks: Sequence[Block]) -> None:
        self._space, self._planner, self._blocks = space, planner, blocks

    def obstacle(self, setting: Setting) -> str | None:
        """Return why a setting may not be tried, as text; None if it may."""
        if kept := self._space.kept_by(setting):
            return kept
        if (failed := next((block for block in self._blocks if self._bars(block, setting)), None)) is not None:
            return death_text(failed)
        vram, vram_limit_bytes = self._vram(setting), self._space.vram_limit_bytes
        if vram is not None and vram_limit_bytes is not None and vram.most_bytes > vram_limit_bytes:
            return _beyond(vram.most_bytes, "GPU memory", vram_limit_bytes)
        ram_bytes = self.ram(setting).most_bytes + self._planner.later_bytes(setting)
        if ram_bytes > self._space.ram_limit_bytes:
            return _beyond(ram_bytes, "RAM", self._space.ram_limit_bytes)
        return None

    def run_ram_bytes(self, setting: Setting) -> int:
        """Return the expected host memory of the whole run, which takes more than a short one."""
        return self.ram(setting).expected_bytes + self._planner.later_bytes(setting)

    def risk(self, setting: Setting) -> Risk:
        """Return how near the whole run comes to the limits: low below 70 %, medium below 90 %."""
        share = self.run_ram_bytes(setting) / self._space.ram_limit_bytes
        if (vram_bytes := self.vram_bytes(setting)) is not None and self._space.vram_limit_bytes:
            share = max(share, vram_bytes / self._space.vram_limit_bytes)
        return "low" if share < _LOW_BELOW else "medium" if share < _MEDIUM_BELOW else "high"

    def ram(self, setting: Setting) -> Size:
        """Return the predicted host memory."""
        return self._size(setting, self._planner.ram_bytes, "ram_bytes")

    def vram_bytes(self, setting: Setting) -> int | None:
        """Return the expected GPU memory; None on a CPU."""
        return None if (vram := self._vram(setting)) is None else vram.expected_bytes

    def _vram(self, setting: Setting) -> Size | None:
        if self._planner.vram_bytes(setting) is None:
            return None
        return self._size(setting, lambda other: self._planner.vram_bytes(other) or 0, "vram_bytes")

    def _size(self, setting: Setting, planned: Callable[[Setting], int], peak: str) -> Size:
        """From the nearest measured peak, by the planned difference; without one, as planned.

        Until a whole run was measured, no less than planned: readers alone compute nothing, steps alone read little.
        """
        runs, parts = self._peaks(peak, whole=True), self._peaks(peak, whole=False)
        if setting in runs:
            return Size(runs[setting], runs[setting])
        wanted, peaks = planned(setting), runs or parts
        if not peaks:
            return Size(wanted, wanted)
        near = min(peaks, key=lambda s: (len(_switches_apart(s, setting)), abs(planned(s) - wanted)))
        growth, off = wanted - planned(near), peaks[near] / max(planned(near), 1)
        expected = int(peaks[near] + min(max(off, 1.0), GROWTH) * growth)
        expected = max(expected, parts.get(setting, 0), 0 if runs else wanted)
        most = peaks[near] + (GROWTH if growth > 0 else _SAVING) * growth
        return Size(expected, max(expected, int((1 + _SPREAD) * most)))

    def _peaks(self, peak: str, whole: bool) -> dict[Setting, int]:
        """The measured peaks of each setting, in whole runs or in blocks of a part of one."""
        found: dict[Setting, int] = {}
        for block in self._blocks:
            if block.ended == "ok" and (block.kind == "run") == whole and (size := getattr(block, peak)) is not None:
                found[block.setting] = max(found.get(block.setting, 0), size)
        return found

    def _bars(self, block: Block, setting: Setting) -> bool:
        """Whether a failed block bars a setting; a lack of memory also bars all that are planned no smaller."""
        if block.ended == "ok" or block.setting == setting:
            return block.ended != "ok"
        if block.ended not in DEADLY or _switches_apart(block.setting, setting):
            return False  # errors and timeouts do not bar larger settings
        if any(other.setting == setting and other.ended == "ok" for other in self._blocks):
            return False
        planned = self._planner.vram_bytes if block.ended == "gpu_memory" else self._planner.ram_bytes
        return (planned(setting) or 0) >= (planned(block.setting) or 0)


def does_not_fit(obstacle: str) -> str:
    """Say that the config itself may not be tried, and what to do."""
    remedy = "lower training.workers, training.prefetch_factor or training.train_batch_size"
    return f"the config does not fit this machine: {obstacle}; {remedy}"


def death_text(block: Block) -> str:
    """Describe a failure: `a run block with workers 8, ... was ended by the memory guard: ...`."""
    s = block.setting
    return (
        f"a {block.kind} block with workers {s.workers}, prefetch_factor {s.prefetch_factor}, train_batch_size "
        f"{s.train_batch_size} was ended by {ENDED_BY.get(block.ended, 'no figures')}: "
        f"{one_line(block.cause) or 'no cause is known'}"
    )


def _switches_apart(one: Setting, other: Setting) -> set[str]:
    return set[str](one.changes(other)) - _SIZES


def _beyond(size_bytes: int, where: str, limit_bytes: int) -> str:
    return f"up to {size_text(size_bytes)} of {where} predicted, limit {size_text(limit_bytes)}"
