"""A lab for `--dry-run` that measures nothing: readers scale perfectly and every change gains a little."""

from __future__ import annotations

from vesuvius.tuning.block import Block, Kind
from vesuvius.tuning.search.rates import trainer_knobs
from vesuvius.tuning.setting import Setting
from vesuvius.tuning.space import Planner, Space

_TRAINER = 10.0  # assumed samples/s of the steps
_ALL_READERS = 30.0  # and of all readers that there may be: few of them are too few
_GAIN = 0.2  # of each change of batch or switches
_START_S, _CHANGE_S = 20.0, 5.0


class OptimisticLab:
    """Answers as if nearly every change were a gain, so that a search asks for all that may come."""

    def __init__(self, space: Space, planner: Planner) -> None:
        self._planner = planner
        self._reader = _ALL_READERS / space.most_workers
        self._trainer: dict[object, float] = {}

    def measure(self, setting: Setting, kind: Kind, seconds: float, limit_s: float) -> Block:
        """As `Lab`, at once."""
        knobs = trainer_knobs(setting)
        new = knobs not in self._trainer
        step = self._trainer.setdefault(knobs, _TRAINER * (1 + _GAIN) ** len(self._trainer))
        readers = self._reader * max(setting.workers, 1)
        rate = {"step": step, "readers": readers, "run": min(step, readers)}[kind]
        samples = max(round(rate * seconds), 1)
        return Block(
            setting,
            kind,
            "ok",
            "",
            seconds=min(seconds + (_START_S if new else _CHANGE_S), limit_s),
            samples=samples,
            measured_s=samples / rate,
            data_share=max(1 - readers / step, 0.0),
            ram_bytes=self._planner.ram_bytes(setting),
            vram_bytes=self._planner.vram_bytes(setting),
        )
