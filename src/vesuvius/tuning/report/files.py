"""The files of a report."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from vesuvius.errors import StorageError
from vesuvius.runlog.files.whole_file import write_whole
from vesuvius.tuning.report.curves import draw_curves
from vesuvius.tuning.report.report import Report
from vesuvius.tuning.report.text import render_markdown


def write_report(directory: Path, report: Report) -> None:
    """Write report.json (unrounded), report.md and curves.png, each whole or not at all.

    Raises StorageError.
    """
    files = {
        "report.json": (json.dumps(asdict(report), indent=1, allow_nan=False) + "\n").encode(),
        "report.md": render_markdown(report).encode(),
        "curves.png": draw_curves(report.blocks, report.ram_limit_bytes, report.vram_limit_bytes),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_whole(directory / name, data)
    except OSError as error:
        raise StorageError(
            f"{directory}: the report must be writable; got {error.strerror}; make room, or change its permissions"
        ) from error
