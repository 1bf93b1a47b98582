"""An evaluation as a report, as text for the terminal and as plain JSON.  Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.generate.evaluate.figures import COPIES, Figure, Judgement
from vesuvius.report.content import RunReport, Table
from vesuvius.report.curves import Chart, banded, chart
from vesuvius.runlog.records import finite
from vesuvius.training.validation.pictures import MontageCell, middle_slice
from vesuvius.training.validation.texture import HISTOGRAM_EDGES

SHOWN = 24
_NAMES = {"generated": "generated", "held_out": "held out", "training": "training"}

_HOW = (
    "Generated patches are compared with held-out ones, which training has never seen. The floor is the same "
    "comparison with patches of training in their place: a perfect model comes out there. Real patches are mirrored "
    "and turned as training does. p: how often some figure of a table would be as "
    "far off if patches changed places at random; those that overlap do so together. A figure is beyond the floor if "
    "that is below 5 %. What cannot be measured is unknown. Distances: of the histograms in model values "
    "(Wasserstein), of the power spectra in dB, of the two-point correlations; of copies the difference of the shares."
)


def build_page(
    name: str, directory: str, facts: Mapping[str, str], judgement: Judgement, notes: Sequence[str]
) -> RunReport:
    """The report; `notes`: what limits the figures."""
    how = Table("How to read it", ("",), tuple((text,) for text in (_HOW, *notes)))
    tables = (figure_table(judgement.figures), how)
    return RunReport(name, directory, facts, verdict(judgement), charts=tuple(_charts(judgement)), tables=tables)


def verdict(judgement: Judgement) -> str:
    """What an operator should know first."""
    named = {
        reading: ", ".join(figure.name for figure in judgement.figures if figure.reading == reading)
        for reading in ("beyond the floor", "unlike held out", "unknown")
    }
    found = [f"{reading.capitalize()}: {names}." for reading, names in named.items() if names]
    if not named["beyond the floor"]:
        found.insert(0, "No figure is beyond the floor.")
    copies = next(figure for figure in judgement.figures if figure.key == COPIES)
    if copies.beyond:
        shares = "{generated:.0%} of the samples repeat training voxels ({held_out:.0%} by chance)"
        found.append(f"Memorised: {shares.format(**copies.values)}.")
    elif copies.beyond is None:
        found.append("Whether training voxels are memorised is unknown: too few patches have texture.")
    else:
        found.append("No sign of memorised training voxels among those that were searched.")
    return " ".join(found)


def figure_table(figures: Sequence[Figure]) -> Table:
    """One line per figure."""
    rows = [
        (
            figure.name,
            figure.reading + (f"; {figure.note}" if figure.note else ""),
            *(_number(figure.values[of]) if of in figure.values else "" for of in _NAMES),
            _number(figure.distance),
            "" if figure.floor is None else _number(figure.floor),
            _number(figure.p),
        )
        for figure in figures
    ]
    columns = ("figure", "reading", *_NAMES.values(), "distance", "real against real", "p")
    return Table("Generated against real patches", columns, tuple(rows))


def plain(judgement: Judgement) -> dict[str, Any]:
    """All figures as plain JSON; what is not finite is null."""
    found: dict[str, Any] = finite(
        {
            "verdict": verdict(judgement),
            "figures": {
                figure.key: asdict(figure) | {"beyond": figure.beyond, "reading": figure.reading}
                for figure in judgement.figures
            },
            "nearest_distances": {of: found.tolist() for of, found in judgement.distances.items()},
        }
    )
    return found


def montage_cells(rows: Mapping[str, NDArray[np.float32]], scale: int, columns: int) -> list[MontageCell]:
    """Middle slices of the first patches of each kind, in rows by turns."""
    count = min(SHOWN, *map(len, rows.values())) // columns * columns
    return [
        MontageCell(f"{name} {number}", middle_slice(patches[number], scale))
        for first in range(0, count, columns)
        for name, patches in rows.items()
        for number in range(first, first + columns)
    ]


def _charts(judgement: Judgement) -> list[Chart]:
    textures = {_NAMES[of]: texture for of, texture in judgement.textures.items()}
    middles = (HISTOGRAM_EDGES[:-1] + HISTOGRAM_EDGES[1:]) / 2
    greys = [banded(of, middles, texture.histogram) for of, texture in textures.items()]
    power = [banded(of, texture.frequency, texture.power) for of, texture in textures.items()]
    is_log = all((texture.power > 0).all() for texture in textures.values())
    found = chart("histogram", "Grey values", "share of voxels", greys, x_label="model value")
    found += chart("spectrum", "Radial power spectrum", "power", power, x_label="cycles per voxel", log=is_log)
    for axis, name in enumerate("zyx"):
        series = [
            banded(of, np.arange(len(texture.correlation[axis])), texture.correlation[axis])
            for of, texture in textures.items()
            if axis < len(texture.correlation)
        ]
        title = f"Two-point correlation along {name}"
        found += chart(f"correlation_{name}", title, "correlation", series, x_label="voxels apart")
    series = []
    for of, distances in judgement.distances.items():
        known = np.sort(distances[np.isfinite(distances)])
        series.append(banded(_NAMES[of], 100 * (np.arange(len(known)) + 0.5) / max(len(known), 1), known))
    title = "Nearest training place: unexplained variance"
    return found + chart("nearest", title, "share", series, x_label="% of patches that are nearer")


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3g}"
