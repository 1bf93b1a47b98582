"""Predicts memory and samples/s of a setting from the trials so far.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from vesuvius.errors import one_line
from vesuvius.experiments.tune.measurement import (
    OOM_OUTCOMES,
    Planner,
    Result,
    SearchSpace,
    Setting,
    TrialKind,
    trainer_knobs,
)
from vesuvius.runlog.units import format_size

Risk = Literal["low", "medium", "high"]

# The planner may be off by half: planned growth counts more, planned savings count less.
_GROWTH, _SAVING = 1.5, 0.5
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


class PredictedMemory:
    """Predicts memory from the planner, corrected by the trials so far, which may grow after construction."""

    def __init__(self, space: SearchSpace, planner: Planner, results: Sequence[Result]) -> None:
        self._space, self._planner, self._results = space, planner, results

    def obstacle(self, setting: Setting) -> str | None:
        """Return why a setting may not be tried; None if it may."""
        if kept := [knob for knob in self._space.kept if knob in setting.changes(self._space.source)]:
            return f"--keep {','.join(kept)}"
        if (failed := next((result for result in self._results if self._bars(result, setting)), None)) is not None:
            return death_text(failed)
        limits = (
            (self.vram_bytes(setting), "GPU memory", self._space.vram_limit_bytes),
            (self.run_ram_bytes(setting), "RAM", self._space.ram_limit_bytes),
        )
        for size_bytes, where, limit_bytes in limits:
            if size_bytes is not None and limit_bytes is not None and size_bytes > limit_bytes:
                return f"up to {format_size(size_bytes)} of {where} predicted, limit {format_size(limit_bytes)}"
        return None

    def run_ram_bytes(self, setting: Setting) -> int:
        """Return the maximum host memory of a full run, which exceeds that of a short one."""
        return self._most(setting, "ram_bytes") + self._planner(setting).later_bytes

    def vram_bytes(self, setting: Setting) -> int | None:
        """Return the maximum GPU memory; None on a CPU."""
        return None if self._planner(setting).vram_bytes is None else self._most(setting, "vram_bytes")

    def risk(self, setting: Setting) -> Risk:
        """Return how close a full run comes to the limits: low below 70 %, medium below 90 %."""
        share = self.run_ram_bytes(setting) / self._space.ram_limit_bytes
        if (vram_bytes := self.vram_bytes(setting)) is not None and self._space.vram_limit_bytes:
            share = max(share, vram_bytes / self._space.vram_limit_bytes)
        return "low" if share < _LOW_BELOW else "medium" if share < _MEDIUM_BELOW else "high"

    def _most(self, setting: Setting, name: Literal["ram_bytes", "vram_bytes"]) -> int:
        """An upper estimate in bytes: the nearest measured peak plus the planned difference.

        Until a full run is measured, at least the plan: readers alone compute nothing, steps alone read little.
        """

        def planned(other: Setting) -> int:
            return getattr(self._planner(other), name) or 0

        peaks: dict[bool, dict[Setting, int]] = {True: {}, False: {}}  # of full runs, and of parts
        for result in self._results:
            if result.ended == "ok" and (size_bytes := getattr(result, name)) is not None:
                found = peaks[result.kind == "run"]
                found[result.setting] = max(found.get(result.setting, 0), size_bytes)
        if setting in peaks[True]:
            return peaks[True][setting]
        wanted, known = planned(setting), peaks[True] or peaks[False]
        if not known:
            return wanted
        near = min(known, key=lambda s: (len(_switches_apart(s, setting)), abs(planned(s) - wanted)))
        growth = wanted - planned(near)
        most = known[near] + (_GROWTH if growth > 0 else _SAVING) * growth
        return max(int((1 + _SPREAD) * most), peaks[False].get(setting, 0), 0 if peaks[True] else wanted)

    def _bars(self, result: Result, setting: Setting) -> bool:
        """Whether a failed trial rules out a setting; a lack of memory also rules out all that are planned as large."""
        if result.ended == "ok" or result.setting == setting:
            return result.ended != "ok"
        if result.ended not in OOM_OUTCOMES or _switches_apart(result.setting, setting):
            return False  # errors and timeouts do not rule out larger settings
        if any(other.setting == setting and other.ended == "ok" for other in self._results):
            return False
        wanted, died = self._planner(setting), self._planner(result.setting)
        if result.ended == "gpu_memory":
            return (wanted.vram_bytes or 0) >= (died.vram_bytes or 0)
        return wanted.ram_bytes >= died.ram_bytes


class PredictedRates:
    """Predicts samples/s from the trials so far: the smaller of the readers' and the trainer's limit."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = results

    def of(self, kind: TrialKind, setting: Setting) -> list[Result]:
        """The trials of a kind that apply to a setting: steps do not depend on readers, and readers not on steps."""
        same = {"run": lambda s: s, "readers": lambda s: (s.workers, s.requests), "step": trainer_knobs}[kind]
        return [b for b in self._measured(kind) if same(b.setting) == same(setting)]

    def measured(self, kind: TrialKind, setting: Setting) -> float | None:
        """Samples/s: the geometric mean of the trials; None if there are none."""
        rates = [result.rate for result in self.of(kind, setting)]
        return math.exp(math.fsum(map(math.log, rates)) / len(rates)) if rates else None

    def expected(self, kind: TrialKind, setting: Setting) -> float | None:
        """Samples/s: measured, or predicted; None if no measurement allows a prediction."""
        if (measured := self.measured(kind, setting)) is not None or kind == "step":
            return measured
        return self._scaled(setting) if kind == "readers" else self._predicted(setting)

    def limit(self, setting: Setting) -> float | None:
        """The smaller limit of readers and trainer; None without a trial of each."""
        readers, trainer = self.expected("readers", setting), self.measured("step", setting)
        if readers is None or trainer is None:
            return None
        return min(readers, trainer) if setting.workers else 1 / (1 / readers + 1 / trainer)  # one after the other

    def waiting_share(self, setting: Setting) -> float:
        """Share of a reader's time spent waiting for the store, which more requests may hide; 0 if unknown."""
        times = [(b.decode_s, b.reader_s) for b in self.of("readers", setting)]
        decode_s, reader_s = times[-1] if times else (None, None)
        return 0.0 if decode_s is None or not reader_s else 1 - min(decode_s / reader_s, 1.0)

    def runs(self) -> list[Setting]:
        """The settings with a measured full run, the fastest first."""
        settings = dict.fromkeys(b.setting for b in self._measured("run"))
        return sorted(settings, key=lambda s: -(self.measured("run", s) or 0.0))

    def _measured(self, kind: TrialKind) -> list[Result]:
        return [b for b in self._results if b.kind == kind and b.ended == "ok"]

    def _predicted(self, setting: Setting) -> float | None:
        """The smaller limit, reduced by the shortfall of the nearest measured run."""
        limit, runs = self.limit(setting), self.runs()
        if limit is None or not runs:
            return limit
        near = next((other for other in runs if trainer_knobs(other) == trainer_knobs(setting)), runs[0])
        reached, its_limit = self.measured("run", near), self.limit(near)
        return limit * min(reached / its_limit, 1.0) if reached and its_limit else limit

    def _scaled(self, setting: Setting) -> float | None:
        """The rate of the nearest trial, scaled by the number of readers."""
        counts = {b.setting: max(b.setting.workers, 1) for b in self._measured("readers")}
        if not counts:
            return None
        count = max(setting.workers, 1)
        near = min(counts, key=lambda s: (s.requests != setting.requests, abs(math.log(counts[s] / count))))
        return (self.measured("readers", near) or 0.0) * count / counts[near]


def death_text(result: Result) -> str:
    """Describe a failure: `a run trial with workers 8, ... was ended by the memory guard: ...`."""
    s = result.setting
    return (
        f"a {result.kind} trial with workers {s.workers}, prefetch_factor {s.prefetch_factor}, train_batch_size "
        f"{s.train_batch_size} was ended by {ENDED_BY[result.ended]}: "
        f"{one_line(result.cause) or 'cause unknown'}"
    )


def _switches_apart(one: Setting, other: Setting) -> set[str]:
    return set[str](one.changes(other)) - _SIZES
