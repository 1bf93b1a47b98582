"""Previews of runs, small enough for a page.  Reads files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from vesuvius.report.content import Picture, RunReport

_MOST = 6
_WIDTH, _WIDTH_OF_MANY = 640, 360


def embed(reports: Sequence[RunReport]) -> list[Picture]:
    """Previews of the whole course of a run, or the last ones of several: six, or one of each run."""
    each = max(_MOST // len(reports), 1)
    width = _WIDTH if len(reports) <= _MOST else _WIDTH_OF_MANY
    return [
        Picture(f"{report.name}, step {step}", _small(Path(report.directory) / name, width))
        for report in reports
        for step, name in _spread(report.previews, each)
    ]


def _spread(previews: Sequence[tuple[int, str]], count: int) -> list[tuple[int, str]]:
    """So many, evenly over the run, and always the last."""
    if len(previews) <= count:
        return list(previews)
    return [previews[-1 - round(place * (len(previews) - 1) / max(count - 1, 1))] for place in range(count)][::-1]


def _small(path: Path, width: int) -> bytes | None:
    """A JPEG; None where the file cannot be read."""
    from PIL import Image

    file = io.BytesIO()
    try:
        with Image.open(path) as image:
            image.thumbnail((width, 2 * width), Image.Resampling.LANCZOS)
            image.convert("RGB").save(file, format="JPEG", quality=75)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # as Pillow has it
        return None
    return file.getvalue()
