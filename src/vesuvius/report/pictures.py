"""Previews of runs, small enough for a page.  Reads files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vesuvius.report.model import RunReport

_BUDGET_BYTES = 1_000_000
_MOST = 6
_WIDTH, _LEAST_WIDTH = 900, 300


@dataclass(frozen=True)
class Picture:
    """A JPEG with its words; None where the file could not be read, or there is no room for it."""

    caption: str
    data: bytes | None


def embed(reports: Sequence[RunReport], room_bytes: int) -> list[Picture]:
    """Previews of the whole course of a run, or the last ones of several; all together within the room."""
    each = max(_MOST // len(reports), 1)
    chosen = [(report, step, name) for report in reports for step, name in _spread(report.previews, each)]
    budget_bytes = min(_BUDGET_BYTES, room_bytes)
    return [
        Picture(f"{report.name}, step {step}", _small(Path(report.directory) / name, budget_bytes // len(chosen)))
        for report, step, name in chosen
    ]


def _spread(previews: Sequence[tuple[int, str]], count: int) -> list[tuple[int, str]]:
    """So many, evenly over the run, and always the last."""
    if len(previews) <= count:
        return list(previews)
    return [previews[-1 - round(place * (len(previews) - 1) / max(count - 1, 1))] for place in range(count)][::-1]


def _small(path: Path, most_bytes: int) -> bytes | None:
    """A JPEG of at most so many bytes, as wide as they allow."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # as Pillow has it
        return None
    width = min(_WIDTH, picture.width)
    while True:
        file = io.BytesIO()
        size = (width, max(picture.height * width // picture.width, 1))
        picture.resize(size, Image.Resampling.LANCZOS).save(file, format="JPEG", quality=80, optimize=True)
        if file.tell() <= most_bytes:
            return file.getvalue()
        if width < _LEAST_WIDTH:
            return None
        width = width * 3 // 4
