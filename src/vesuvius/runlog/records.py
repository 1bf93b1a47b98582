"""`metrics.jsonl` and `system.jsonl`: one JSON object a line, appended, never rewritten.

Figures are unrounded, units stand in the names, and what is not known is null (a NaN has no other form in JSON).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from vesuvius.runlog.files.append_file import AppendFile


class LineFile(Protocol):
    """What lines are appended to."""

    def write_line(self, text: str) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """An append-only file of records, one a line.  Outlives a full disk, as `AppendFile` says.

    Args:
        file: a path, or what takes the lines.

    Raises:
        OSError: on opening, where the file cannot be opened.
    """

    def __init__(self, file: Path | LineFile) -> None:
        self._file = AppendFile(file) if isinstance(file, Path) else file

    def write(self, kind: str, **figures: Any) -> dict[str, Any]:
        """Append one record with its kind and the time (seconds since 1970), and return it as it was written."""
        record = make_record(kind, **figures)
        self.append(record)
        return record

    def append(self, record: dict[str, Any]) -> None:
        """Append what `make_record` has made."""
        self._file.write_line(json.dumps(record, allow_nan=False))

    def close(self) -> None:
        self._file.close()


def make_record(kind: str, **figures: Any) -> dict[str, Any]:
    """A record as it is written: with its kind and the time (seconds since 1970), and null for what is not finite."""
    record: dict[str, Any] = _finite({"kind": kind, "time": time.time(), **figures})
    return record


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file, in order; torn lines are passed over."""
    return list(records_in(path.read_text(encoding="utf-8", errors="replace").splitlines()))


def records_in(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The whole records among lines of text."""
    return (record for line in lines if (record := parsed(line)) is not None)


def parsed(text: str | bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else, such as a torn line."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
