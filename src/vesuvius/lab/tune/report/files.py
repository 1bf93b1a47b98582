"""The files of a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vesuvius.errors import StorageError
from vesuvius.lab.tune.report.curves import draw_curves
from vesuvius.lab.tune.report.html import render_html
from vesuvius.lab.tune.report.report import Report
from vesuvius.lab.tune.report.text import render_markdown
from vesuvius.lab.tune.terms.space import Space
from vesuvius.lab.tune.terms.trial import Entry
from vesuvius.observe.whole_file import write_whole


def write_report(directory: Path, report: Report, entries: Sequence[Entry], space: Space) -> None:
    """Writes report.json (unrounded), report.md, report.html and curves.png, each whole or not at all.

    Raises StorageError.
    """
    light, dark = (draw_curves(entries, space, dark=scheme) for scheme in (False, True))
    files = {
        "report.json": (json.dumps(asdict(report), indent=1, allow_nan=False) + "\n").encode(),
        "report.md": render_markdown(report).encode(),
        "report.html": render_html(report, light, dark).encode(),
        "curves.png": light,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_whole(directory / name, data)
    except OSError as error:
        raise StorageError(
            f"{directory}: the report must be writable; got {error.strerror}; make room, or change its permissions"
        ) from error
