"""The predicted memory of a setting, and reasons against trying it: the planner corrected by the blocks.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from vesuvius.errors import one_line
from vesuvius.runlog.units import size_text
from vesuvius.tuning.block import DEADLY, Block, Ended
from vesuvius.tuning.search.memory_line import Point, Size, predict_size
from vesuvius.tuning.setting import Setting
from vesuvius.tuning.space import Planner, Space

Risk = Literal["low", "medium", "high"]

_LOW_BELOW, _MEDIUM_BELOW = 0.70, 0.90  # shares of the limits
_ENDED_BY: dict[str, str] = {
    "guard": "the memory guard",
    "gpu_memory": "a lack of GPU memory",
    "killed": "a kill",
    "failed": "an error",
    "timeout": "its time limit",
}
_NUMBERS = ("workers", "requests", "prefetch_factor", "train_batch_size")
_TURNED = {*_NUMBERS, "accumulate_steps"}


class Memory:
    """Predicts memory from the planner and the blocks so far.

    Args:
        planner: should cache; it is called repeatedly for the same settings.
        blocks: may grow after construction.
    """

    def __init__(self, space: Space, planner: Planner, blocks: Sequence[Block]) -> None:
        self._space = space
        self._planner = planner
        self._blocks = blocks

    def obstacle(self, setting: Setting) -> str | None:
        """Return why a setting may not be tried, as text; None if it may."""
        if kept := self._space.kept_by(setting):
            return kept
        if death := self._barred_by(setting):
            return death_text(death)
        vram, vram_limit_bytes = self.vram(setting), self._space.vram_limit_bytes
        if vram is not None and vram_limit_bytes is not None and vram.most_bytes > vram_limit_bytes:
            return _beyond(vram.most_bytes, "GPU memory", vram_limit_bytes)
        ram_bytes = self.ram(setting).most_bytes + self._planner.later_bytes(setting)
        if ram_bytes > self._space.ram_limit_bytes:
            return _beyond(ram_bytes, "RAM", self._space.ram_limit_bytes)
        return None

    def died(self, setting: Setting) -> bool:
        """Whether a block of a setting ran out of memory; such a setting is never recommended."""
        return any(block.setting == setting and block.ended in DEADLY for block in self._blocks)

    def run_ram_bytes(self, setting: Setting) -> int:
        """Return the expected host memory of the whole run, which takes more than a short one."""
        return self.ram(setting).expected_bytes + self._planner.later_bytes(setting)

    def risk(self, setting: Setting) -> Risk:
        """Return how near the whole run comes to the limits: low below 70 %, medium below 90 %."""
        vram, share = self.vram(setting), self.run_ram_bytes(setting) / self._space.ram_limit_bytes
        if vram is not None and self._space.vram_limit_bytes:
            share = max(share, vram.expected_bytes / self._space.vram_limit_bytes)
        return "low" if share < _LOW_BELOW else "medium" if share < _MEDIUM_BELOW else "high"

    def ram(self, setting: Setting) -> Size:
        """Return the predicted host memory."""
        planned = self._planner.ram_bytes(setting)
        size = predict_size(setting, planned, self._points("ram_bytes", self._planner.ram_bytes))
        dead = [self._planner.ram_bytes(other) for other in self._dead(setting, ("guard", "killed"))]
        return _floored(size, planned, dead, self._space.ram_limit_bytes)

    def vram(self, setting: Setting) -> Size | None:
        """Return the predicted GPU memory; None on a CPU."""
        planned, limit_bytes = self._planner.vram_bytes(setting), self._space.vram_limit_bytes
        if planned is None or limit_bytes is None:
            return None
        size = predict_size(setting, planned, self._points("vram_bytes", self._planner.vram_bytes))
        dead = [self._planner.vram_bytes(other) or 0 for other in self._dead(setting, ("gpu_memory",))]
        return _floored(size, planned, dead, limit_bytes)

    def _dead(self, setting: Setting, ends: tuple[Ended, ...]) -> list[Setting]:
        """Settings with the same switches that ended so; none where this one was measured without."""
        if any(block.setting == setting and block.ended == "ok" for block in self._blocks):
            return []
        return [b.setting for b in self._blocks if b.ended in ends and not set(b.setting.changes(setting)) - _TURNED]

    def _points(
        self, peak: Literal["ram_bytes", "vram_bytes"], planned: Callable[[Setting], int | None]
    ) -> list[Point]:
        """The highest peak of each measured setting, beside its plan."""
        peaks: dict[Setting, int] = {}
        for block in self._blocks:
            measured = getattr(block, peak)
            if block.ended == "ok" and measured is not None:
                peaks[block.setting] = max(peaks.get(block.setting, 0), measured)
        return [Point(setting, planned(setting) or 0, measured) for setting, measured in peaks.items()]

    def _barred_by(self, setting: Setting) -> Block | None:
        """Return the failed block that bars a setting; a lack of memory also bars all settings that are no smaller."""
        for block in self._blocks:
            if block.ended == "ok":
                continue
            if block.setting == setting:
                return block
            if block.ended not in DEADLY:
                continue  # errors and timeouts do not bar larger settings
            differing = block.setting.changes(setting).keys() - {"accumulate_steps"}
            larger = all(getattr(setting, knob) >= getattr(block.setting, knob) for knob in _NUMBERS)
            if differing <= set(_NUMBERS) and larger:
                return block
        return None


def death_text(block: Block) -> str:
    """Describe a failure: `a run block with workers 8, ... was ended by the memory guard: ...`."""
    s = block.setting
    return (
        f"a {block.kind} block with workers {s.workers}, prefetch_factor {s.prefetch_factor}, train_batch_size "
        f"{s.train_batch_size} was ended by {_ENDED_BY.get(block.ended, 'no figures')}: "
        f"{one_line(block.cause) or 'no cause is known'}"
    )


def _beyond(size_bytes: int, where: str, limit_bytes: int) -> str:
    return f"up to {size_text(size_bytes)} of {where} predicted, limit {size_text(limit_bytes)}"


def _floored(size: Size, planned_bytes: int, dead: list[int], limit_bytes: int) -> Size:
    """Put the size beyond the limit if a setting with no larger plan ran out of memory."""
    if not any(planned_bytes >= died for died in dead):
        return size
    return Size(max(size.expected_bytes, limit_bytes + 1), max(size.most_bytes, limit_bytes + 1), size.sizes)
