"""Where a search stands: the trials so far, the best setting, what may still be spent.  It asks for trials."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

from vesuvius.lab.tune.policy.prediction import Forecast
from vesuvius.lab.tune.terms.known import SMALLEST_GAIN, Known, Rate
from vesuvius.lab.tune.terms.setting import Setting, in_words
from vesuvius.lab.tune.terms.space import Planner, Space
from vesuvius.lab.tune.terms.trial import Entry, Measured, Prediction, Stage, Trial
from vesuvius.observe.units import format_duration

T = TypeVar("T")
Asking = Generator[Trial, Entry, T]
"""Asks for trials, is sent what came of them, and returns a T."""

MOST_TRIALS = 25
CHECK_TRIALS = 4  # two pairs of a winner and its rival, at most
_WORTH_A_CHECK = 3  # trials from which on room is kept to compare the best two once more
_HUNGRY = 0.05  # share of the time that is waited for data
_MOST_DEATHS = 2  # in a stage; each costs a start, and may hurt others on the machine


class EnoughError(Exception):
    """Nothing more can be tried: the budget or the number of trials is used up."""


def is_hungry(measured: Measured) -> bool:
    """Whether data come too late, also where the verdict calls it good."""
    return measured.bound == "data-bound" or measured.data_share > _HUNGRY


class State:
    """What stages share.

    Attributes:
        space: caps and limits.
        known: the trials so far.
        forecast: predictions from them.
        best: the setting to go on from.
        accepted: settings that have been the best, in turn: those that the end chooses from.
        ended: for each stage, why it was left.
        because: why a knob was changed, where no trial of it alone can tell.
    """

    def __init__(self, space: Space, planner: Planner) -> None:
        self.space = space
        self.known = Known()
        self.forecast = Forecast(space, planner, self.known)
        self.best = space.source
        self.accepted: list[Setting] = []
        self.ended: dict[str, str] = {}
        self.because: dict[str, str] = {}

    @property
    def now(self) -> Measured:
        """Figures of the best."""
        return self.known.measured(self.best)

    @property
    def data_bound(self) -> bool:
        """Whether the best mostly waits for data, so that a faster step would gain nothing."""
        return self.now.bound == "data-bound"

    @property
    def hungry(self) -> bool:
        """Whether the best waits for data long enough to be worth a trial."""
        return is_hungry(self.now)

    def accept(self, setting: Setting) -> None:
        """Go on from a setting."""
        self.best = setting
        if setting not in self.accepted:
            self.accepted.append(setting)

    def attempt(self, setting: Setting, stage: Stage, why: str, again: bool = False) -> Asking[Rate | None]:
        """Try a setting that has no obstacle; one that was tried is tried anew only if `again`.

        Returns:
            Its rate, of all its trials; None where it ended badly.

        Raises:
            EnoughError: there is no room for it.
        """
        if self.known.good(setting) and not again:
            return None if self.known.died(setting) else self.known.rate(setting)
        prediction = self.forecast.predict(setting)
        self._afford(prediction, stage)
        before = self.space.source if stage == "baseline" else self.best
        entry = yield Trial(len(self.known.entries), setting, stage, in_words(setting, before), why, prediction)
        deaths = len(self.known.deaths)
        self.known.add(entry)
        return self.known.rate(setting) if len(self.known.deaths) == deaths else None

    def compare(self, setting: Setting, stage: Stage, why: str) -> Asking[Rate | None]:
        """`attempt`; where noise leaves open whether it gains, it or the best once more, whichever is less well known.

        Returns:
            Its rate; None where a trial of it ended badly.

        Raises:
            EnoughError: there is no room for it, or none to find out whether it gains.
        """
        is_new = not self.known.good(setting)
        rate = yield from self.attempt(setting, stage, why)
        if rate is None or not is_new or not self._in_doubt(setting):
            return rate
        gain, noise = self.known.gain(setting, self.best), self.known.noise(setting, self.best)
        doubt = f"{100 * gain:.1f} %, with a noise of {100 * noise:.1f} %, leaves it open"
        others = f"once more, because the gain of {in_words(setting, self.best)} of {doubt}"
        try:
            if self.known.rate(self.best).half_width <= rate.half_width or not self._repeatable(self.best):
                return (yield from self.attempt(setting, stage, f"once more: its gain of {doubt}", True))
            yield from self.attempt(self.best, stage, others, True)
        except EnoughError:
            if not self.known.is_gain(setting, self.best):
                raise
        return rate

    def _repeatable(self, setting: Setting) -> bool:
        """Whether its trial was no longer than others may be: the baseline, of slow steps, has twice the time."""
        return self.known.good(setting)[0].outcome.seconds <= self.space.trial_limit_s

    def too_many_deaths(self, stage: Stage) -> bool:
        """Whether a stage has seen enough trials that ended badly."""
        return sum(death.trial.stage == stage for death in self.known.deaths) >= _MOST_DEATHS

    def _in_doubt(self, setting: Setting) -> bool:
        """Up to twice the noise, because of many trials one is lucky, and where 3 % may be missed by it.

        From half of the noise on: a second trial makes it a third smaller at most, which a lesser gain would not reach.
        """
        gain, noise = self.known.gain(setting, self.best), self.known.noise(setting, self.best)
        return max(SMALLEST_GAIN, noise / 2) < gain <= max(2 * noise, SMALLEST_GAIN + noise)

    def no_room(self, settings: Sequence[Setting]) -> str | None:
        """Why not all of these can be tried in the end, in words; None where they can."""
        rest_s = self.space.budget_s - self.known.spent_s
        needed_s = sum(self.forecast.predict(setting).seconds for setting in settings)
        if needed_s > rest_s:
            return f"{self._left(rest_s)}, {len(settings)} trials would take {format_duration(needed_s)}"
        if len(self.known.entries) + len(settings) > MOST_TRIALS:
            return f"budget: {len(self.known.entries)} trials, of at most {MOST_TRIALS}"
        return None

    def _left(self, rest_s: float) -> str:
        rest = format_duration(max(rest_s, 0.0))
        return f"budget: {rest} of {format_duration(self.space.budget_s)} are left"

    def _afford(self, prediction: Prediction, stage: Stage) -> None:
        number, rest_s = len(self.known.entries), self.space.budget_s - self.known.spent_s
        to_check = stage not in ("baseline", "check") and number >= _WORTH_A_CHECK
        pair_s = prediction.seconds + self.forecast.predict(self.best).seconds if to_check else 0.0
        if prediction.seconds + pair_s > rest_s:
            kept = " and a check" if pair_s else ""
            needed = format_duration(prediction.seconds + pair_s)
            raise EnoughError(f"{self._left(rest_s)}, the next trial{kept} would take {needed}")
        if number >= MOST_TRIALS - (0 if stage in ("baseline", "check") else CHECK_TRIALS):
            raise EnoughError(f"budget: {number} trials, of at most {MOST_TRIALS} with a check")
