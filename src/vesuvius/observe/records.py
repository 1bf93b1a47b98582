"""`metrics.jsonl` and `system.jsonl`: one JSON object a line, appended, never rewritten.

Figures are unrounded, units stand in the names, and what is not known is null (a NaN has no other form in JSON).
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any


class JsonLines:
    """An append-only file of records.  Each line is written at once and whole; a line torn by a crash is closed."""

    def __init__(self, path: Path) -> None:
        torn = _is_torn(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if torn:
            self._file.write("\n")

    def write(self, kind: str, **figures: Any) -> None:
        """Append one record with its kind and the time (seconds since 1970)."""
        record = {"kind": kind, "time": time.time(), **figures}
        self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file, in order; torn lines are passed over."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end.  Reads one byte: the file of a long run is long."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
