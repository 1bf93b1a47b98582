"""What a bench measures: cells, each a few overrides of one config.  Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from vesuvius.errors import ConfigError

Axis = tuple[str, tuple[str, ...]]
"""A config key and the values to measure it with, as they are typed."""

_OPEN, _CLOSE, _QUOTES = "[{", "]}", "'\""


@dataclass(frozen=True)
class Cell:
    """Something to measure."""

    label: str  # what distinguishes it from the other cells
    overrides: tuple[str, ...] = ()  # beside those of the command line


def parse_axis(text: str) -> Axis:
    """`training.workers=0,1,2`; commas in brackets, braces and quotes are part of a value.

    Raises:
        ConfigError: there is no key, no value, or a value is there twice.
    """
    key, equals, rest = (part.strip() for part in text.partition("="))
    values = tuple(value.strip() for value in _split(rest))
    if not (key and equals and all(values)) or len(set(values)) < len(values):
        raise ConfigError(f"an axis must look like training.workers=0,1,2, with different values; got {text!r}")
    return key, values


def make_cells(sweeps: Sequence[Axis], compares: Sequence[Axis]) -> list[Cell]:
    """The baseline, which has the first value of every axis, and then the others.

    Swept axes are crossed with each other.  A compared axis changes alone, beside the baseline, so that ten switches
    cost ten cells and not a thousand.

    Raises:
        ConfigError: a key is there twice.
    """
    axes = [*sweeps, *compares]
    keys = [key for key, _ in axes]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"each key must be one axis; got {', '.join(keys)}; put all values of a key into one axis")
    base = {key: values[0] for key, values in axes}
    crossed = [dict(each) for each in itertools.product(*([(key, v) for v in values] for key, values in sweeps))]
    chosen = [base | each for each in crossed]
    chosen += [base | {key: value} for key, values in compares for value in values[1:]]
    return [Cell(_label(each, base), tuple(f"{key}={value}" for key, value in each.items())) for each in chosen]


def _label(chosen: dict[str, str], base: dict[str, str]) -> str:
    """What differs from the baseline; of that itself, its only value."""
    shown = {key: value for key, value in chosen.items() if value != base[key]} or (chosen if len(base) == 1 else {})
    return " ".join(f"{key}={value}" for key, value in shown.items()) or "baseline"


def _split(text: str) -> list[str]:
    """At commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        depth += 0 if quote else (letter in _OPEN) - (letter in _CLOSE)
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
