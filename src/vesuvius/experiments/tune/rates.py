"""Predicts the samples per second of a setting from blocks of readers alone and of steps alone.  Pure.

Readers and trainer each limit the rate; the smaller limit holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vesuvius.experiments.tune.measurement import Block, BlockKind, Setting, trainer_knobs


class PredictedRates:
    """What the blocks so far say.

    Args:
        blocks: may grow after construction.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks

    def measured(self, kind: BlockKind, setting: Setting) -> float | None:
        """Samples/s; None where they were not measured."""
        return _mean([block.rate for block in self.of(kind, setting)])

    def expected(self, kind: BlockKind, setting: Setting) -> float | None:
        """Samples/s: measured, or predicted; None where nothing that they follow from was measured.

        Readers are scaled from the nearest number of readers and requests.
        """
        if (measured := self.measured(kind, setting)) is not None or kind == "step":
            return measured
        return self._predicted_run(setting) if kind == "run" else self._scaled(setting)

    def run(self, setting: Setting) -> float | None:
        """Expected samples/s of the whole."""
        return self.expected("run", setting)

    def _predicted_run(self, setting: Setting) -> float | None:
        """The smallest limit, less what nearby runs fall short of theirs."""
        limit, runs = self.limit(setting), self.measured_settings()
        if limit is None or not runs:
            return limit
        alike = [other for other in runs if trainer_knobs(other) == trainer_knobs(setting)]
        near = (alike or runs)[0]
        reached, its_limit = self.measured("run", near), self.limit(near)
        return limit * min(reached / its_limit, 1.0) if reached and its_limit else limit

    def limit(self, setting: Setting) -> float | None:
        """The smaller of what readers and trainer allow; None without a block of steps or of readers."""
        readers, trainer = self.expected("readers", setting), self.measured("step", setting)
        if readers is None or trainer is None:
            return None
        if setting.workers == 0:  # one after the other
            return 1 / (1 / readers + 1 / trainer)
        return min(readers, trainer)

    def waiting_share(self, setting: Setting) -> float:
        """Share of a reader's time that waits for the store, which more requests may hide; 0 where it is not known."""
        blocks = [b for b in self.of("readers", setting) if b.reader_s and b.decode_s is not None]
        return 1 - min(blocks[-1].decode_s / blocks[-1].reader_s, 1.0) if blocks else 0.0  # type: ignore[operator]

    def of(self, kind: BlockKind, setting: Setting) -> list[Block]:
        """The blocks that measured this of a setting: steps do not depend on the readers, nor readers on the steps."""
        same = {"run": lambda s: s, "readers": reader_knobs, "step": trainer_knobs}[kind]
        return [
            b
            for b in self._blocks
            if b.kind == kind and b.ended == "ok" and b.rate and same(b.setting) == same(setting)
        ]

    def measured_settings(self) -> list[Setting]:
        """The settings whose whole run was measured, the fastest first."""
        settings = dict.fromkeys(b.setting for b in self._blocks if b.kind == "run" and b.ended == "ok" and b.rate)
        return sorted(settings, key=lambda s: -(self.measured("run", s) or 0.0))

    def per_reader(self, setting: Setting) -> float:
        """Samples/s of one reader that shares its cores with no other: from the blocks with the fewest readers."""
        blocks = [b for b in self._blocks if b.kind == "readers" and b.rate and b.setting.requests == setting.requests]
        fewest = min((_count(b.setting) for b in blocks), default=1)
        return (_mean([b.rate for b in blocks if _count(b.setting) == fewest]) or 0.0) / fewest

    def _scaled(self, setting: Setting) -> float | None:
        """By the number of readers, from the nearest block."""
        blocks = [b for b in self._blocks if b.kind == "readers" and b.ended == "ok" and b.rate]
        if not blocks:
            return None
        near = min(
            blocks,
            key=lambda b: (b.setting.requests != setting.requests, abs(math.log(_count(b.setting) / _count(setting)))),
        )
        return (self.measured("readers", near.setting) or near.rate) * _count(setting) / _count(near.setting)


def reader_knobs(setting: Setting) -> tuple[object, ...]:
    """The knobs that the capacity of the readers depends on."""
    return setting.workers, setting.requests


def _mean(values: Sequence[float]) -> float | None:
    """The geometric mean, in which half the speed and twice the speed cancel; None without values."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def _count(setting: Setting) -> int:
    return max(setting.workers, 1)
