"""What a trial should take and give, from the planner and the trials before it: memory, rate, seconds.  Pure."""

from __future__ import annotations

from vesuvius.errors import one_line
from vesuvius.lab.tune.policy.memory_line import Point, Size, predict_size
from vesuvius.lab.tune.policy.throughput import nearest, predict_rate
from vesuvius.lab.tune.terms.known import DEADLY, Known
from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.space import Planner, Space
from vesuvius.lab.tune.terms.trial import Entry, Prediction, Risk, steps_worth_a_start
from vesuvius.observe.units import size_text

_LOW_BELOW, _MEDIUM_BELOW = 0.70, 0.90  # of the limits at which trials end
_COMPILE_S = 90.0  # that the first compiled trial takes longer to start, as a guess
_RAM_DEATHS, _VRAM_DEATHS = ("guard", "killed"), ("gpu_memory",)
_ENDED_BY: dict[str, str] = {
    "guard": "the memory guard",
    "gpu_memory": "a lack of GPU memory",
    "killed": "a kill",
    "failed": "an error",
    "timeout": "its time limit",
}
_NUMBERS = ("workers", "requests", "prefetch_factor", "train_batch_size")


class Forecast:
    """Predictions from the trials so far, and what forbids one.

    Args:
        space: limits.
        planner: asked for the same settings again and again.
        known: grows while trials are added to it.
    """

    def __init__(self, space: Space, planner: Planner, known: Known) -> None:
        self._space = space
        self._planner = planner
        self._known = known

    def predict(self, setting: Setting) -> Prediction:
        """What is expected of a setting."""
        ram, vram = self.ram(setting), self.vram(setting)
        later_bytes = self._planner.later_bytes(setting)
        samples_s = (
            self._known.rate(setting).samples_s
            if self._known.good(setting)
            else predict_rate(setting, self._known, self._space.cores)
        )
        return Prediction(
            samples_s=samples_s,
            ram_bytes=ram.expected_bytes,
            vram_bytes=None if vram is None else vram.expected_bytes,
            seconds=self._seconds(setting, samples_s),
            risk=self._risk(ram.expected_bytes + later_bytes, vram),
            measured=ram.sizes if vram is None else max(ram.sizes, vram.sizes),
            later_bytes=later_bytes,
        )

    def obstacle(self, setting: Setting) -> str | None:
        """Why a setting may not be tried, in words; None where it may."""
        if not self._space.allows(setting):
            changed = setting.changes(self._space.source)
            return f"--keep {','.join(knob for knob in self._space.kept if knob in changed)}"
        death = self._barred_by(setting)
        if death is not None:
            return death_text(death)
        vram, vram_limit_bytes = self.vram(setting), self._space.vram_limit_bytes
        if vram is not None and vram_limit_bytes is not None and vram.most_bytes > vram_limit_bytes:
            return _beyond(vram.most_bytes, "GPU memory", vram_limit_bytes)
        ram_bytes = self.ram(setting).most_bytes + self._planner.later_bytes(setting)
        if ram_bytes > self._space.ram_limit_bytes:
            return _beyond(ram_bytes, "RAM", self._space.ram_limit_bytes)
        return None

    def ram(self, setting: Setting) -> Size:
        """Host memory."""
        planned = self.planned(setting)[0]
        points = [
            Point(other, self.planned(other)[0], self._known.measured(other).ram_bytes)
            for other in self._known.settings
        ]
        dead = [self.planned(d.trial.setting)[0] for d in self._known.deaths if d.outcome.ended in _RAM_DEATHS]
        return _floored(predict_size(setting, planned, points), planned, dead, self._space.ram_limit_bytes)

    def vram(self, setting: Setting) -> Size | None:
        """GPU memory; None on a CPU."""
        planned = self.planned(setting)[1]
        if planned is None:
            return None
        points = []
        for other in self._known.settings:
            measured, its_plan = self._known.measured(other).vram_bytes, self.planned(other)[1]
            if measured is not None and its_plan is not None:
                points.append(Point(other, its_plan, measured))
        deaths = [self.planned(d.trial.setting)[1] for d in self._known.deaths if d.outcome.ended in _VRAM_DEATHS]
        dead = [died for died in deaths if died is not None]
        size = predict_size(setting, planned, points)
        limit_bytes = self._space.vram_limit_bytes
        return size if limit_bytes is None else _floored(size, planned, dead, limit_bytes)

    def planned(self, setting: Setting) -> tuple[int, int | None]:
        """RAM and VRAM as the planner has them."""
        return self._planner.ram_bytes(setting), self._planner.vram_bytes(setting)

    def _barred_by(self, setting: Setting) -> Entry | None:
        """A trial that ended badly bars its setting; by memory, all with as much of every number and its switches."""
        for death in self._known.deaths:
            died = death.trial.setting
            if died == setting:
                return death
            if death.outcome.ended not in DEADLY:
                continue  # an error or slowness of one setting says nothing about larger ones
            differing = died.changes(setting).keys() - {"accumulate_steps"}
            larger = all(getattr(setting, knob) >= getattr(died, knob) for knob in _NUMBERS)
            if differing <= set(_NUMBERS) and larger:
                return death
        return None

    def _seconds(self, setting: Setting, samples_s: float | None) -> float:
        """What the nearest trial took beside its steps, and as many steps at the expected rate as a trial has room for.

        That one's pauses count in full, though a longer trial's are spent on measuring: rather too much.
        """
        base = nearest(setting, self._known.settings)
        if base is None or not samples_s:
            return self._space.trial_s
        other_s, limit_s, step_s = self._other_s(base), self._space.trial_limit_s, setting.global_batch / samples_s
        steps = steps_worth_a_start(self._space.trial_steps[1], step_s, self._known.measured(base).start_s or 0.0)
        if setting.compile and not any(other.compile for other in self._known.settings):
            other_s, limit_s = other_s + _COMPILE_S, 2 * limit_s  # as the runner has it
        return min(other_s + steps * step_s, limit_s)

    def _other_s(self, base: Setting) -> float:
        """What the last trial of a setting took beside its measured steps."""
        outcome = self._known.good(base)[-1].outcome
        assert outcome.measured is not None  # it ended well
        work_s = outcome.measured.steps * base.global_batch / outcome.measured.samples_s
        # One that lived on what was read before was faster than its figures say.
        return max(outcome.seconds - work_s, outcome.measured.start_s or 0.0)

    def _risk(self, ram_bytes: int, vram: Size | None) -> Risk:
        share = ram_bytes / self._space.ram_limit_bytes
        if vram is not None and self._space.vram_limit_bytes:
            share = max(share, vram.expected_bytes / self._space.vram_limit_bytes)
        return "low" if share < _LOW_BELOW else "medium" if share < _MEDIUM_BELOW else "high"


def death_text(death: Entry) -> str:
    """`trial 4 was ended by the memory guard with workers 8, ...: ...`."""
    setting = death.trial.setting
    return (
        f"trial {death.trial.number} was ended by {_ENDED_BY.get(death.outcome.ended, 'no figures')} with workers "
        f"{setting.workers}, prefetch_factor {setting.prefetch_factor}, train_batch_size {setting.train_batch_size}: "
        f"{one_line(death.outcome.cause) or 'no cause is known'}"
    )


def _beyond(size_bytes: int, where: str, limit_bytes: int) -> str:
    return f"up to {size_text(size_bytes)} of {where} predicted, limit {size_text(limit_bytes)}"


def _floored(size: Size, planned_bytes: int, dead: list[int], limit_bytes: int) -> Size:
    """Whoever plans as much as what died of memory is predicted beyond the limit."""
    if not any(planned_bytes >= died for died in dead):
        return size
    beyond = limit_bytes + 1
    return Size(max(size.expected_bytes, beyond), max(size.most_bytes, beyond), size.sizes)
