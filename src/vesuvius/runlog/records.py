"""`metrics.jsonl` and `system.jsonl`: one JSON object a line, appended, never rewritten.

Figures are unrounded, units stand in the names, and what is not known is null (a NaN has no other form in JSON).
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from vesuvius.runlog.files.append_file import AppendFile

Record = dict[str, Any]

_RUN_START, _VALIDATION, _PREVIEW = "run_start", "validation", "preview"
_START = f'"{_RUN_START}"'.encode()
_STEP = re.compile(rb'"step": (\d+)')


class LineFile(Protocol):
    """What lines are appended to."""

    def write_line(self, text: str) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """An append-only file of records, one a line.  Outlives a full disk, as `AppendFile` says.  Threads may write.

    Args:
        file: a path, or what takes the lines.
        listeners: called with each record as it stands in the file, by whichever thread writes it; they must not wait
            for a disk or a server.

    Raises:
        OSError: on opening, where the file cannot be opened.
    """

    def __init__(self, file: Path | LineFile, listeners: Sequence[Callable[[Record], None]] = ()) -> None:
        self._file = AppendFile(file) if isinstance(file, Path) else file
        self._listeners = listeners

    def write(self, kind: str, **figures: Any) -> Record:
        """Append one record with its kind and the time (seconds since 1970), and return it as it was written.

        Listeners hear it first: the disk may be what hangs.
        """
        record = make_record(kind, **figures)
        try:
            self.share(record)
        finally:
            self._file.write_line(json.dumps(record, allow_nan=False))
        return record

    def share(self, record: Record) -> None:
        """Hand a record that stands in another file to the listeners only."""
        for listener in self._listeners:
            listener(record)

    def close(self) -> None:
        self._file.close()


def make_record(kind: str, **figures: Any) -> Record:
    """A record as it is written: with its kind and the time (seconds since 1970), and null for what is not finite."""
    record: Record = _finite({"kind": kind, "time": time.time(), **figures})
    return record


def iter_records(path: Path, steps: range | None = None) -> Iterator[Record]:
    """All whole records of a file, in order, one in memory at a time; torn lines are passed over.

    Args:
        steps: records of other steps are left out, but for the beginnings of sessions; others are not even parsed.
    """
    with path.open("rb") as lines:
        yield from records_in(lines, steps)


def read_records(path: Path) -> list[Record]:
    """As `iter_records`, for files that are short."""
    return list(iter_records(path))


def records_in(lines: Iterable[bytes], steps: range | None = None) -> Iterator[Record]:
    """The whole records among lines; `steps` as `iter_records`."""
    for line in lines:
        found = None if steps is None or _START in line else _STEP.search(line)
        if (found is None or int(found[1]) in (steps or ())) and (record := parsed(line)) is not None:
            yield record


def parsed(text: str | bytes) -> Record | None:
    """A JSON object; None for anything else, such as a torn line."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def run_starts(path: Path) -> list[Record]:
    """The `run_start` of each session, in order.  Reads the file but parses little of it."""
    with path.open("rb") as lines:
        return [record for record in records_in(line for line in lines if _START in line) if _begins(record)]


def current_records(records: Iterable[Record], starts: Sequence[Record]) -> Iterator[Record]:
    """The records of a run as if it had never been interrupted, in their order, one in memory at a time.  Pure.

    A session that begins at step n (`run_start`) does again what others did beyond n: what they recorded of that is
    dropped, and of validations and previews what its checkpoint does not know of.  Records without a step stay.

    Args:
        starts: each `run_start` that is among them; `run_starts` reads them first.
    """
    # After so many starts, the last step of each kind that no later start goes back behind.
    bounds: list[dict[str, float]] = [{}]
    for start in reversed(starts):
        later, step = bounds[-1], start["step"]
        known = {_VALIDATION: start.get("validated_step", step), _PREVIEW: start.get("previewed_step", step), "": step}
        bounds.append({kind: min(last, later.get(kind, math.inf)) for kind, last in known.items()})
    bounds.reverse()
    begun = 0
    for record in records:
        if _begins(record):
            begun += 1
            if begun > len(starts):  # a session that began since they were read
                return
        last = bounds[begun]
        if (record.get("step") or 0) <= last.get(record["kind"], last.get("", math.inf)):
            yield record


def _begins(record: Record) -> bool:
    return record.get("kind") == _RUN_START and isinstance(record.get("step"), int)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
