"""What the trials so far have shown: rates pooled over repeated trials of a setting, and what died.  No I/O.

A setting that died of memory in one trial and ran in another is measured, but nothing to recommend: see `died`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.trial import Ended, Entry, Measured

SMALLEST_GAIN = 0.03
"""A change that gives less is not worth its cost."""

DEADLY: tuple[Ended, ...] = ("guard", "gpu_memory", "killed")
"""Ends of a setting that takes more memory than there is, now or on another day."""

_NARROWEST = 1e-3  # relative; an interval of no width would outweigh all others
_SIGMAS = 1.96  # from a standard deviation to half of a 95 % interval


@dataclass(frozen=True)
class Rate:
    """Samples a second of a setting, of all its trials, with the 95 % confidence interval as +- `half_width` of it."""

    samples_s: float
    half_width: float

    @property
    def low(self) -> float:
        """Lower end of the interval, samples a second; a rate is never below 0."""
        return max(self.samples_s * (1 - self.half_width), 0.0)

    @property
    def high(self) -> float:
        """Upper end of the interval, samples a second."""
        return self.samples_s * (1 + self.half_width)


class Known:
    """The trials so far.

    Attributes:
        entries: in their order.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries: list[Entry] = []
        self._good: dict[Setting, list[Entry]] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Take in a trial that is over."""
        self.entries.append(entry)
        if entry.outcome.ended == "ok" and entry.outcome.measured is not None:
            self._good.setdefault(entry.trial.setting, []).append(entry)

    @property
    def settings(self) -> list[Setting]:
        """Those with a trial that ended well, in the order of their first one."""
        return list(self._good)

    @property
    def deaths(self) -> list[Entry]:
        """Trials that ended badly."""
        return [e for e in self.entries if e.outcome.ended != "ok" or e.outcome.measured is None]

    def died(self, setting: Setting) -> bool:
        """Whether any trial of a setting ended by memory: then it is never to be recommended."""
        return any(death.trial.setting == setting and death.outcome.ended in DEADLY for death in self.deaths)

    @property
    def spent_s(self) -> float:
        """Of all trials."""
        return sum(entry.outcome.seconds for entry in self.entries)

    def good(self, setting: Setting) -> list[Entry]:
        """The trials of a setting that ended well."""
        return self._good.get(setting, [])

    def measured(self, setting: Setting) -> Measured:
        """The newest figures of a setting that is one of `settings`, with the pooled rate and the highest memory."""
        figures = [_figures(entry) for entry in self._good[setting]]
        rate = self.rate(setting)
        vram = [one.vram_bytes for one in figures if one.vram_bytes is not None]
        return replace(
            figures[-1],
            samples_s=rate.samples_s,
            low=rate.low,
            high=rate.high,
            ram_bytes=max(one.ram_bytes for one in figures),
            vram_bytes=max(vram, default=None),
        )

    def rate(self, setting: Setting) -> Rate:
        """Of a setting that is one of `settings`: means weighted by the inverse of their variance.

        Trials may differ by more than their intervals say.  Then the interval is widened by Birge's ratio, the root of
        chi-squared by its degrees of freedom (R. T. Birge, Phys. Rev. 40, 207, 1932).
        """
        figures = [_figures(entry) for entry in self._good[setting]]
        rates = [one.samples_s for one in figures]
        halves = [max((one.high - one.low) / 2, _NARROWEST * one.samples_s) for one in figures]
        weights = [half**-2 for half in halves]
        mean = sum(weight * rate for weight, rate in zip(weights, rates, strict=True)) / sum(weights)
        chi_squared = sum(((rate - mean) * _SIGMAS / half) ** 2 for rate, half in zip(rates, halves, strict=True))
        birge = math.sqrt(chi_squared / max(len(rates) - 1, 1))
        return Rate(mean, max(birge, 1.0) / math.sqrt(sum(weights)) / mean)

    def gain(self, setting: Setting, base: Setting) -> float:
        """Of samples a second, as a share of the base's."""
        return self.rate(setting).samples_s / self.rate(base).samples_s - 1

    def noise(self, setting: Setting, base: Setting) -> float:
        """A gain below this share may be none."""
        return math.hypot(self.rate(setting).half_width, self.rate(base).half_width)

    def is_gain(self, setting: Setting, base: Setting) -> bool:
        """Whether a setting is faster by more than 3 % and more than the noise."""
        return self.gain(setting, base) > max(SMALLEST_GAIN, self.noise(setting, base))

    def fastest(self) -> Setting | None:
        """Of the settings that never died the one with the most samples a second."""
        alive = [setting for setting in self._good if not self.died(setting)]
        return max(alive, key=lambda setting: self.rate(setting).samples_s, default=None)


def _figures(entry: Entry) -> Measured:
    measured = entry.outcome.measured
    assert measured is not None  # kept out by `add`
    return measured
