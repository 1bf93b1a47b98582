"""What a bench came to: a result for each cell, from its measurements.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vesuvius.experiments.bench.cells import Cell
from vesuvius.experiments.bench.measure import Measurement
from vesuvius.experiments.paired import Comparison, compare_one_of
from vesuvius.monitor.quantile import quantile
from vesuvius.runlog.units import number

RANKS = "training.ranks"
BANDS = ((0.90, "near-linear"), (0.75, "good"), (0.50, "acceptable"), (-math.inf, "poor"))
"""Least efficiency of each band of scaling, the best first: every efficiency is in one of them."""


@dataclass(frozen=True)
class Result:
    """A cell, and what was measured of it."""

    label: str
    overrides: tuple[str, ...]
    cause: str  # why it failed; '' = it did not.  What was measured before that is kept.
    rates: Mapping[int, float]  # samples/s of each round
    samples_s: float | None  # their median
    # over the baseline, from the rounds of one session that have both; None of the baseline
    speed: Comparison | None = None
    start_s: float | None = None  # seconds before the steady state, beyond the steps' usual time
    # ranks, efficiency: of a bench of ranks; the efficiency is the speed per rank over that of the baseline
    ranks: int | None = None
    efficiency: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)  # medians over the rounds, by name


def results_of(cells: Sequence[Cell], measurements: Sequence[Measurement]) -> list[Result]:
    """The results in the order of the cells; the first cell is the baseline."""
    last = {(m.cell, m.round): m for m in measurements}.values()  # what failed may have been measured again
    by_cell = [[m for m in last if m.cell == number] for number in range(len(cells))]
    base = [m for m in by_cell[0] if m.ended == "ok"]
    return [_result(cell, found, base, cells) for cell, found in zip(cells, by_cell, strict=True)]


def _result(cell: Cell, found: Sequence[Measurement], base: Sequence[Measurement], cells: Sequence[Cell]) -> Result:
    fine = [m for m in found if m.ended == "ok"]
    others = {(m.round, m.session): m.samples_s for m in base}  # before and after an interruption is no pair
    pairs = [(m.samples_s, others[m.round, m.session]) for m in fine if (m.round, m.session) in others]
    speed = compare_one_of(pairs, len(cells) - 1) if pairs and cell != cells[0] else None
    figures = {
        name: value
        for name in dict.fromkeys(name for m in found for name in m.figures)
        if (value := _median([m.figures.get(name) for m in fine or found])) is not None
    }
    ranks, base_ranks = _ranks(cell), _ranks(cells[0])
    efficiency = 1.0 if cell == cells[0] and ranks and fine else None
    if speed and ranks and base_ranks:
        efficiency = (1 + speed.gain) * base_ranks / ranks
    return Result(
        cell.label,
        cell.overrides,
        next((f"{m.ended}: {m.cause}" for m in found if m.ended != "ok"), ""),
        {m.round: m.samples_s for m in fine},
        _median([m.samples_s for m in fine]),
        speed,
        _median([m.start_s for m in fine]),
        ranks,
        efficiency,
        figures,
    )


def band(efficiency: float) -> str:
    """The name of an efficiency of scaling, 1 = as fast per rank as one alone."""
    return next(name for least, name in BANDS if efficiency >= least)


def _ranks(cell: Cell) -> int | None:
    """If nothing else differs."""
    values = [override.partition("=")[2] for override in cell.overrides if override.startswith(f"{RANKS}=")]
    return int(values[0]) if len(cell.overrides) == 1 and values and values[0].isdigit() else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return quantile(known, 0.5) if known else None


def verdict(results: Sequence[Result]) -> str:
    """The results in sentences, the fastest first."""
    return "; ".join(_sentences(results)) or "nothing could be measured"


def _sentences(results: Sequence[Result]) -> Iterator[str]:
    base = results[0]
    reference = base.label if "=" in base.label else f"the {base.label}"
    if base.samples_s is None:
        yield f"{reference} was not measured, so nothing is compared with it"
    for each in sorted(results, key=lambda result: -result.speed.gain if result.speed else 0.0):
        if each.speed is not None:
            words = "" if each.efficiency is None else f" ({band(each.efficiency)})"
            yield f"{each.label} is {speed_words(each.speed)} as {reference}{words}"
    if failed := [each.label for each in results if each.cause]:
        yield f"failed: {', '.join(failed)}"


def speed_words(speed: Comparison) -> str:
    """`1.32 times as fast (1.25 to 1.41)`, and whether that is sure."""
    times = f"{number(1 + speed.gain)} times as fast ({span_words(speed)})"
    return times if speed.differs else f"not told apart: {times}"


def span_words(speed: Comparison) -> str:
    """`1.25 to 1.41`."""
    if speed.low is None or speed.high is None:
        return "one round"
    return f"{number(1 + speed.low)} to {number(1 + speed.high)}"
