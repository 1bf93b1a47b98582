"""Trials of a bench (a few overrides of one config each), their results, and the page.  Pure."""

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import yaml

from vesuvius.errors import ConfigError
from vesuvius.experiments import Ended
from vesuvius.experiments.paired import Comparison, compare_one_of
from vesuvius.report.curves import COLORS, Chart, banded, chart
from vesuvius.report.page import Bar, Bars, RunReport, Table, filled
from vesuvius.runlog.units import format_gib, format_number, format_percent, format_speed, quantile

_BARS = "Median of the rounds; the mark spans minimum to maximum.  x: speed relative to the baseline."

Axis = tuple[str, tuple[str, ...]]
"""A config key and its values to measure, as typed."""

RANKS = "training.ranks"
BANDS = ((0.90, "near-linear"), (0.75, "good"), (0.50, "acceptable"), (-math.inf, "poor"))
"""Minimum efficiency of each band of scaling, the best first."""

_NOTE = (
    "samples/s: median of the rounds, with minimum and maximum.  Speed: mean of the ratios within a round; all "
    "95 % intervals of a bench hold together.  Start: time to the steady state minus the "
    "usual time of its steps.  Efficiency: speed per rank relative to the first trial."
)


@dataclass(frozen=True)
class Trial:
    label: str  # what distinguishes it from the other trials
    overrides: tuple[str, ...] = ()  # in addition to those of the command line


@dataclass(frozen=True)
class Measurement:
    """The measurement of a trial in one round."""

    trial: int = 0
    round: int = 0
    ended: Ended = "ok"
    cause: str = ""  # one line; '' if it ended ok
    run: str = ""  # name of its run directory below `trials/`; '' = none
    seconds: float = 0.0
    samples_s: float = 0.0  # in the steady state; 0 unless ok
    # seconds from the start of the process to the steady state, less what the steps until then take in it
    start_s: float | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)  # others, by name; None = not known


@dataclass(frozen=True)
class Result:
    """The results of a trial over all rounds."""

    label: str
    overrides: tuple[str, ...]
    cause: str  # why it failed; '' = it did not.  Earlier rounds are kept.
    rates: Mapping[int, float]  # samples/s of each round
    samples_s: float | None  # their median
    speed: Comparison | None  # over the baseline, from the rounds that have both; None of the baseline
    start_s: float | None  # seconds before the steady state, beyond the steps' usual time
    ranks: int | None  # of a bench of ranks
    efficiency: float | None  # speed per rank over that of the baseline
    figures: Mapping[str, float]  # medians over the rounds, by name


def parse_axis(text: str) -> Axis:
    """Parse `training.workers=0,1,2`, with YAML values.  Raises ConfigError: no key, no value, or a value twice."""
    key, equals, rest = (part.strip() for part in text.partition("="))
    listed = f"[{rest}]"
    try:
        nodes = getattr(yaml.compose(listed, Loader=yaml.SafeLoader), "value", [])
        values = tuple(listed[node.start_mark.index : node.end_mark.index].strip() for node in nodes)
    except yaml.YAMLError:
        values = ()
    if not (key and equals and values and all(values)) or len(set(values)) < len(values):
        raise ConfigError(f"{text!r} is not an axis with different values; write it like training.workers=0,1,2")
    return key, values


def make_trials(sweeps: Sequence[Axis], compares: Sequence[Axis]) -> list[Trial]:
    """Return the baseline, which has the first value of every axis, then the other trials.

    Swept axes are crossed with each other.  A compared axis changes alone, so ten switches cost ten trials, not a
    thousand.  Raises ConfigError if a key has two axes.
    """
    axes = [*sweeps, *compares]
    keys = [key for key, _ in axes]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"A key has more than one axis ({', '.join(keys)}); put all values of a key into one axis")
    base = {key: values[0] for key, values in axes}
    crossed = [dict(each) for each in itertools.product(*([(key, v) for v in values] for key, values in sweeps))]
    chosen = [base | each for each in crossed]
    chosen += [base | {key: value} for key, values in compares for value in values[1:]]
    return [Trial(_label(each, base), tuple(f"{key}={value}" for key, value in each.items())) for each in chosen]


def _label(chosen: dict[str, str], base: dict[str, str]) -> str:
    """Return the differences from the baseline; for the baseline itself, its only value."""
    shown = {key: value for key, value in chosen.items() if value != base[key]} or (chosen if len(base) == 1 else {})
    return " ".join(f"{key}={value}" for key, value in shown.items()) or "baseline"


def results_of(trials: Sequence[Trial], measurements: Sequence[Measurement]) -> list[Result]:
    by_trial = [[m for m in measurements if m.trial == number] for number in range(len(trials))]
    base = [m for m in by_trial[0] if m.ended == "ok"]
    return [_result(trial, rounds, base, trials) for trial, rounds in zip(trials, by_trial, strict=True)]


def _result(trial: Trial, rounds: list[Measurement], base: list[Measurement], trials: Sequence[Trial]) -> Result:
    fine = [m for m in rounds if m.ended == "ok"]
    others = {m.round: m.samples_s for m in base}
    pairs = [(m.samples_s, others[m.round]) for m in fine if m.round in others]
    speed = compare_one_of(pairs, len(trials) - 1) if pairs and trial != trials[0] else None
    figures = {
        name: value
        for name in dict.fromkeys(name for m in rounds for name in m.figures)
        if (value := _median([m.figures.get(name) for m in fine or rounds])) is not None
    }
    ranks, base_ranks = _ranks(trial), _ranks(trials[0])
    efficiency = 1.0 if trial == trials[0] and ranks and fine else None
    if speed and ranks and base_ranks:
        efficiency = (1 + speed.gain) * base_ranks / ranks
    return Result(
        trial.label,
        trial.overrides,
        next((f"{m.ended}: {m.cause}" for m in rounds if m.ended != "ok"), ""),
        {m.round: m.samples_s for m in fine},
        _median([m.samples_s for m in fine]),
        speed,
        _median([m.start_s for m in fine]),
        ranks,
        efficiency,
        figures,
    )


def band(efficiency: float) -> str:
    return next(name for least, name in BANDS if efficiency >= least)


def _ranks(trial: Trial) -> int | None:
    """Number of ranks of a trial that sets nothing else; None for other trials."""
    key, _, value = trial.overrides[0].partition("=") if len(trial.overrides) == 1 else ("", "", "")
    return int(value) if key == RANKS and value.isdigit() else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return quantile(known, 0.5) if known else None


def headline(results: Sequence[Result]) -> str:
    """Return a sentence on the trials that are measurably faster than the baseline, then the failures.

    A trial is called the fastest only if it is measurably faster than each other one.  All tests have the level of
    those with the baseline: a wrong sentence requires that a certain one of them fails for some trial.
    """
    base = results[0]
    reference = base.label if "=" in base.label else f"the {base.label}"
    gains = [(each, each.speed) for each in results if each.speed is not None]
    gains.sort(key=lambda each: (each[1].is_above(0.0), each[1].gain), reverse=True)
    if base.samples_s is None:
        words = f"Nothing could be compared: {reference} could not be measured"
    elif not gains:
        words = f"No other trial was measured; {reference}: {format_number(base.samples_s)} samples/s"
    elif gains[0][1].is_above(0.0):
        (best, speed), rivals = gains[0], ""
        for each in (each for each in results if each.rates and each != best):
            pairs = [(rate, each.rates[number]) for number, rate in best.rates.items() if number in each.rates]
            if not pairs or not compare_one_of(pairs, len(results) - 1).is_above(0.0):
                rivals += f"{', ' if rivals else ''}{each.label}"
        words = f"{best.label} is {'measurably faster' if rivals else 'fastest'}: {speed_words(speed, reference)}"
        words += f"; not measurably faster than {rivals}" if rivals else ""
    else:
        (best, speed), words = gains[0], f"No trial is measurably faster than {reference}"
        words += f"; largest gain: {best.label}, {speed_words(speed, reference)}" if speed.gain > 0 else ""
    failed = [each.label for each in results if each.cause]
    return words + (f".  Failed: {', '.join(failed)}." if failed else ".")


def speed_words(speed: Comparison, reference: str) -> str:
    """`15 % faster than the baseline (12 to 18 % faster)`."""
    words = format_speed(1 + speed.gain)
    interval = format_speed(*(1 + end for end in speed.ends)) if speed.ends else "too few rounds to test"
    return f"{words} {'as' if words.endswith('as fast') else 'than'} {reference} ({interval})"


def build_page(
    name: str, directory: str, facts: Mapping[str, str], results: Sequence[Result], config_text: str, train: str
) -> RunReport:
    """The report of a bench; `train` is the command that trains with the baseline, without its overrides."""
    base = results[0]
    sure = [each for each in results if each.speed and each.speed.is_above(0.0)]
    best = max(sure, key=lambda each: each.speed.gain if each.speed else 0.0, default=None)
    failed = Table("Failed", ("trial", "cause"), tuple((each.label, each.cause) for each in results if each.cause))
    return RunReport(
        name=name,
        directory=directory,
        facts=facts,
        headline=headline(results),
        tone="bad" if base.samples_s is None else "good" if best else "",
        commands=(shlex.join([*shlex.split(train), *best.overrides]),) if best else (),
        bars=Bars("Samples/s", tuple(_bar(each, results) for each in results if each.rates), _BARS),
        charts=tuple(_scaling(results)),
        tables=filled(table_of(results), failed),
        config_text=config_text,
    )


def _bar(result: Result, results: Sequence[Result]) -> Bar:
    rates, speed, rate = result.rates.values(), result.speed, result.samples_s or 0.0
    text = f"{format_number(rate)}" if speed is None else f"{format_number(rate)}: {format_number(1 + speed.gain)}x"
    is_sure = bool(speed and speed.is_above(0.0))
    color = "baseline" if result == results[0] else "best" if is_sure else "compute"
    return Bar(result.label, rate, text, COLORS[color], min(rates), max(rates))


def _scaling(results: Sequence[Result]) -> list[Chart]:
    """Samples/s over the number of ranks with the line of ideal scaling; empty for a bench of other keys."""
    known = [(each.ranks, each.samples_s, each.rates.values()) for each in results if each.ranks and each.samples_s]
    if len(known) < 2:
        return []
    ranks, rates = [float(count) for count, *_ in known], [rate for _, rate, _ in known]
    measured = banded("measured", ranks, rates, [min(each) for *_, each in known], [max(each) for *_, each in known])
    ideal = banded("ideal", ranks, [rates[0] * count / ranks[0] for count in ranks])
    series = [measured, ideal and replace(ideal, dashed=True)]
    return chart("scaling", "Scaling", "samples/s", series, x_label="ranks")


def table_of(results: Sequence[Result]) -> Table:
    rows = [_row(each, index == 0) for index, each in enumerate(results)]
    columns = dict.fromkeys(name for row in rows for name in row)
    return Table("Results", tuple(columns), tuple(tuple(row.get(name, "-") for name in columns) for row in rows), _NOTE)


def _row(result: Result, is_base: bool) -> dict[str, str]:
    figures, speed, ends = result.figures, result.speed, sorted(result.rates.values())
    row = {
        "trial": result.label,
        "samples/s": format_number(result.samples_s),
        "min to max": f"{format_number(ends[0])} to {format_number(ends[-1])}" if len(ends) > 1 else "-",
        "speed": "baseline" if is_base else f"{format_number(1 + speed.gain)}x" if speed else "-",
        "interval": " to ".join(f"{1 + end:.2f}" for end in speed.ends) if speed else "-",
    }
    if result.ranks:
        share = result.efficiency
        row["efficiency"] = f"{format_percent(share)} {band(share)}" if share else "-"
        row["comm, s"] = format_number(figures.get("comm_s"))
    return row | {
        "rounds": str(len(ends)),
        "step, s": format_number(figures.get("step_s")),
        "start, s": format_number(result.start_s),
        "data wait": format_percent(figures.get("data_share")),
        "RAM, GiB": format_gib(figures.get("ram_bytes")),
        "VRAM, GiB": format_gib(figures.get("vram_bytes")),
    }
