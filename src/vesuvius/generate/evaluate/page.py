"""An evaluation as a report, as text for the terminal and as plain JSON.  Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.generate.evaluate.figures import Estimate, Figure, Judgement
from vesuvius.generate.evaluate.seams import LEVEL, Seam
from vesuvius.report.content import RunReport, Table
from vesuvius.report.curves import Chart, banded, chart
from vesuvius.training.validation.montage import MontageCell, middle_slice
from vesuvius.training.validation.texture import HISTOGRAM_EDGES

SHOWN = 24
_NAMES = {"generated": "generated", "held_out": "held out", "training": "training"}

_HOW = (
    "Generated patches are compared with held-out ones, which training has never seen. The floor is the same "
    "comparison with patches of training in their place: a perfect model comes out there. Real patches are mirrored, "
    "turned and varied in contrast and brightness as training does. In brackets: 95 % intervals, from 200 sets drawn "
    "with replacement, in which overlapping patches are drawn together. A figure is beyond the floor where fewer than "
    "5 % of all tables would have one so far off if generated and training patches changed places at random; the AUC "
    "where its interval is above 0.5. What cannot be measured is unknown. Distances, less what chance adds: of the "
    "histograms in model values (Wasserstein), of the power spectra in dB, of the two-point correlations; nearest "
    "training place: the median share of a patch's variance that the most similar place of training leaves "
    "unexplained, 0 for a copy."
)


def build_page(
    name: str,
    directory: str,
    facts: Mapping[str, str],
    judgement: Judgement,
    seams: Sequence[tuple[Seam, Seam | None]],
    notes: Sequence[str],
) -> RunReport:
    """The report.

    Args:
        seams: of the tiled volume, each beside the same of real voxels.
        notes: what limits the figures.
    """
    how = Table("How to read it", ("",), tuple((text,) for text in (_HOW, *notes)))
    tables = [figure_table(judgement.figures), seam_table(seams), how]
    return RunReport(
        name=name,
        directory=directory,
        facts=facts,
        verdict=verdict(judgement, [seam for seam, _ in seams]),
        parts=(),
        targets=(),
        charts=tuple(_charts(judgement)),
        tables=tuple(table for table in tables if table.rows),
        previews=(),
        config={},
        config_text="",
    )


def verdict(judgement: Judgement, seams: Sequence[Seam]) -> str:
    """What an operator should know first."""
    named = {
        reading: ", ".join(figure.name for figure in judgement.figures if figure.reading == reading)
        for reading in ("beyond the floor", "unlike held out", "unknown")
    }
    found = [f"{reading.capitalize()}: {names}." for reading, names in named.items() if names]
    if not named["beyond the floor"]:
        found.insert(0, "No figure is beyond the floor.")
    generated, held_out = (judgement.copies.get(of, math.nan) for of in ("generated", "held_out"))
    if judgement.memorised:
        found.append(f"Memorised: {generated:.0%} of the samples repeat training voxels ({held_out:.0%} by chance).")
    elif judgement.memorised is None:
        found.append("Whether training voxels are memorised is unknown: too few patches have texture.")
    else:
        found.append("No sign of memorised training voxels among those that were searched.")
    for reading in dict.fromkeys(seam.reading for seam in seams):
        axes = ", ".join(seam.axis for seam in seams if seam.reading == reading)
        found.append(f"Faces of tiles along {axes}: {reading}.")
    return " ".join(found)


def figure_table(figures: Sequence[Figure]) -> Table:
    """One line per figure."""
    rows = [
        (
            figure.name,
            figure.reading + (f"; {figure.note}" if figure.note else ""),
            *(_text(figure.values.get(of)) for of in _NAMES),
            _text(figure.distance),
            _text(figure.floor),
        )
        for figure in figures
    ]
    columns = ("figure", "reading", *_NAMES.values(), "distance", "real against real")
    return Table("Generated against real patches", columns, tuple(rows))


def seam_table(seams: Sequence[tuple[Seam, Seam | None]]) -> Table:
    """One line per axis."""
    rows = [
        (
            seam.axis,
            str(seam.faces),
            _number(seam.value),
            _number(seam.p),
            "" if real is None else f"{_number(real.value)} (p {_number(real.p)})",
            seam.reading,
        )
        for seam, real in seams
    ]
    note = (
        "Mean squared difference of neighbouring voxels across faces of tiles over that across all other planes: 1 "
        "where faces do not show. p: how often faces at random planes nearby would stand out as much. They show where "
        f"that is below {LEVEL:.0%} for all axes together."
    )
    columns = ("axis", "faces", "faces / others", "p", "real voxels, same planes", "reading")
    return Table("Seams of the tiled volume", columns, tuple(rows), note)


def plain(judgement: Judgement, seams: Sequence[tuple[Seam, Seam | None]]) -> dict[str, Any]:
    """All figures as plain JSON; what is not finite is null."""
    found: dict[str, Any] = _json(
        {
            "verdict": verdict(judgement, [seam for seam, _ in seams]),
            "figures": {
                figure.key: asdict(figure) | {"beyond": figure.beyond, "reading": figure.reading}
                for figure in judgement.figures
            },
            "copies": judgement.copies,
            "memorised": judgement.memorised,
            "nearest_distances": {of: found.tolist() for of, found in judgement.distances.items()},
            "seams": {
                seam.axis: asdict(seam) | {"reading": seam.reading, "real": real and asdict(real)}
                for seam, real in seams
            },
        }
    )
    return found


def montage_cells(rows: Mapping[str, NDArray[np.float32]], scale: int, columns: int = 8) -> list[MontageCell]:
    """Middle slices of the first patches of each kind, in rows by turns."""
    count, cells = min(SHOWN, *map(len, rows.values())), []
    for first in range(0, count - count % min(columns, count), columns):
        for name, patches in rows.items():
            cells += [
                MontageCell(f"{name} {number}", middle_slice(patches[number], scale))
                for number in range(first, min(first + columns, count))
            ]
    return cells


def _charts(judgement: Judgement) -> list[Chart]:
    textures = judgement.textures
    middles = (HISTOGRAM_EDGES[:-1] + HISTOGRAM_EDGES[1:]) / 2
    found = chart(
        "histogram",
        "Grey values",
        "share of voxels",
        [banded(_NAMES[of], middles, texture.histogram) for of, texture in textures.items()],
        x_label="model value",
    )
    found += chart(
        "spectrum",
        "Radial power spectrum",
        "power",
        [banded(_NAMES[of], texture.frequency, texture.power) for of, texture in textures.items()],
        x_label="cycles per voxel",
        log=all((texture.power > 0).all() for texture in textures.values()),
    )
    for axis in range(3):
        series = [
            banded(_NAMES[of], np.arange(len(texture.correlation[axis])), texture.correlation[axis])
            for of, texture in textures.items()
            if axis < len(texture.correlation)
        ]
        title = f"Two-point correlation along {'zyx'[axis]}"
        found += chart(f"correlation_{'zyx'[axis]}", title, "correlation", series, x_label="voxels apart")
    series = []
    for of, distances in judgement.distances.items():
        known = np.sort(distances[np.isfinite(distances)])
        series.append(banded(_NAMES[of], 100 * (np.arange(len(known)) + 0.5) / max(len(known), 1), known))
    title = "Nearest training place: unexplained variance"
    return found + chart("nearest", title, "share", series, x_label="% of patches that are nearer")


def _text(found: Estimate | None) -> str:
    if found is None or math.isnan(found.value):
        return ""
    return f"{found.value:.3g} [{found.low:.3g}, {found.high:.3g}]"


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3f}"


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
