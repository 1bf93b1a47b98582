"""What a bench came to: a result for each cell, from its measurements.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vesuvius.benchmark.grid import Cell
from vesuvius.benchmark.ledger import Measurement
from vesuvius.benchmark.paired import Interval, bands, break_even_step, median_interval
from vesuvius.monitor.quantile import quantile
from vesuvius.runlog.units import format_percent, number

RANKS = "training.ranks"
SURE_LEVEL = 0.9


@dataclass(frozen=True)
class Result:
    """A cell, and what was measured of it."""

    label: str
    overrides: tuple[str, ...]
    cause: str  # why it failed; '' = it did not.  What was measured before that is kept.
    rates: Mapping[int, float]  # samples/s of each round
    samples_s: Interval | None
    # times as fast as the baseline, from the rounds of one session that have both; None of the baseline
    speed: Interval | None = None
    start_s: float | None = None  # seconds before the steady pace, beyond the steps' usual time
    # steps after which it is ahead of the baseline for good; None = never, or not known
    even_step: float | None = None
    # ranks, efficiency, band: of a bench of ranks; the efficiency is the speed per rank over that of the baseline,
    # the band that of its interval
    ranks: int | None = None
    efficiency: float | None = None
    band: str = ""
    figures: Mapping[str, float] | None = None  # medians over the rounds, by name
    run: str = ""  # the last one below `cells/`; '' = none
    loader: str = ""  # its name; '' = train


def results_of(cells: Sequence[Cell], measurements: Sequence[Measurement]) -> list[Result]:
    """The results in the order of the cells; the first cell is the baseline."""
    by_cell = [[m for m in measurements if m.cell == number] for number in range(len(cells))]
    base = [m for m in by_cell[0] if m.ended == "ok"]
    return [_result(cell, found, base, cells[0]) for cell, found in zip(cells, by_cell, strict=True)]


def _result(cell: Cell, found: Sequence[Measurement], base: Sequence[Measurement], first: Cell) -> Result:
    fine = [m for m in found if m.ended == "ok"]
    others = {(m.round, m.session): m.samples_s for m in base}  # before and after an interruption is no pair
    ratios = [m.samples_s / others[m.round, m.session] for m in fine if (m.round, m.session) in others]
    speed = None if cell == first else median_interval(ratios)
    start_s = _median([m.start_s for m in fine])
    figures = {
        name: value
        for name in dict.fromkeys(name for m in found for name in m.figures)
        if (value := _median([m.figures.get(name) for m in fine or found])) is not None
    }
    ranks, base_ranks = _ranks(cell), _ranks(first)
    efficiency, reached = None, ""
    if speed and ranks and base_ranks:
        efficiency = speed.mid * base_ranks / ranks
        reached = bands(speed.low * base_ranks / ranks, speed.high * base_ranks / ranks)
    if cell == first and ranks and fine:
        efficiency, reached = 1.0, bands(1.0, 1.0)
    return Result(
        cell.label,
        cell.overrides,
        next((f"{m.ended}: {m.cause}" for m in found if m.ended != "ok"), ""),
        {m.round: m.samples_s for m in fine},
        median_interval([m.samples_s for m in fine]),
        speed,
        start_s,
        _even_step(start_s, speed, base, figures.get("batch")),
        ranks,
        efficiency,
        reached,
        figures,
        next((m.run for m in reversed(found) if m.run), ""),
        cell.loader,
    )


def _even_step(
    start_s: float | None, speed: Interval | None, base: Sequence[Measurement], batch: float | None
) -> float | None:
    base_start_s = _median([m.start_s for m in base])
    if start_s is None or base_start_s is None or speed is None or not batch or not told_apart(speed):
        return None
    base_rate = quantile([m.samples_s for m in base], 0.5)
    step = break_even_step(start_s, base_rate * speed.mid, base_start_s, base_rate, int(batch))
    return step if math.isfinite(step) else None


def _ranks(cell: Cell) -> int | None:
    """Where nothing else differs."""
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
    for each in sorted(results, key=lambda result: -result.speed.mid if result.speed else 0.0):
        if each.speed is not None:
            yield f"{each.label} is {speed_words(each.speed)} {reference}" + (
                f" ({each.band}, {format_percent(each.efficiency)} efficiency)" if each.efficiency is not None else ""
            )
    if failed := [each.label for each in results if each.cause]:
        yield f"failed: {', '.join(failed)}"


def speed_words(speed: Interval) -> str:
    """`1.32 times as fast (1.25 to 1.41, 96.9 %) as`, and whether that is sure."""
    level = "one round" if speed.level <= 0 else f"{span_words(speed)}, {format_percent(speed.level)}"
    if not told_apart(speed):
        return f"not told apart: {number(speed.mid)} times as fast ({level}) as"
    unsure = "" if speed.level >= SURE_LEVEL else ": too few rounds to be sure"
    return f"{number(speed.mid)} times as fast ({level}{unsure}) as"


def told_apart(speed: Interval) -> bool:
    """Whether a speed differs from the baseline's by more than its interval."""
    return not speed.low <= 1 <= speed.high


def span_words(interval: Interval) -> str:
    """`1.25 to 1.41`."""
    return f"{number(interval.low)} to {number(interval.high)}"
