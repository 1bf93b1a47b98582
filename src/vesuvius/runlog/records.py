"""`metrics.jsonl` and `system.jsonl`: one JSON object a line, appended, never rewritten.

Figures are unrounded, units stand in the names, and what is not known is null (a NaN has no other form in JSON).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vesuvius.runlog.files import AppendFile

Record = dict[str, Any]
T = TypeVar("T")

_START = "run_start"


class JsonLines:
    """An append-only file of records, one a line.  Outlives a full disk, as `AppendFile` says.  Threads may write.

    Args:
        listeners: called with each record as it stands in the file, by whichever thread writes it; they must not wait
            for a disk or a server.

    Raises:
        OSError: on opening, where the file cannot be opened.
    """

    def __init__(self, path: Path, listeners: Sequence[Callable[[Record], None]] = ()) -> None:
        self._file = AppendFile(path)
        self._listeners = listeners

    def write(self, kind: str, **figures: Any) -> Record:
        """Append one record with its kind and the time (seconds since 1970), and return it as it was written.

        Listeners hear it first: the disk may be what hangs.
        """
        record: Record = replace_nonfinite({"kind": kind, "time": time.time(), **figures})
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
        """Write what waits, and close the file."""
        self._file.close()


def iter_records(path: Path) -> Iterator[Record]:
    """All whole records of a file, in order, one in memory at a time; torn lines are passed over."""
    with path.open("rb") as lines:
        yield from records_in(lines)


def read_records(path: Path) -> list[Record]:
    """As `iter_records`, for files that are short."""
    return list(iter_records(path))


def records_in(lines: Iterable[bytes]) -> Iterator[Record]:
    """The whole records among lines."""
    return (record for line in lines if (record := parse_record(line)) is not None)


def parse_record(text: str | bytes) -> Record | None:
    """A JSON object; None for anything else, such as a torn line."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def run_starts(path: Path) -> list[Record]:
    """The `run_start` of each session, in order.  Reads the file but parses little of it."""
    with path.open("rb") as lines:
        return [record for record in records_in(line for line in lines if _START.encode() in line) if _begins(record)]


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
        known = {
            "validation": start.get("validated_step", step),
            "preview": start.get("previewed_step", step),
            "": step,
        }
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
    return record.get("kind") == _START and isinstance(record.get("step"), int)


def replace_nonfinite(value: Any) -> Any:
    """Plain data with None in place of every NaN and infinity, which JSON does not have; tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return value


def from_dict(kind: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass from the plain data that JSON has of it (`dataclasses.asdict` the other way round).  Pure.

    Names that it does not have are passed over, those that are missing have their default.
    Raises KeyError, TypeError, ValueError, AttributeError: something needed is missing or of another kind.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: _typed(hint, data[name]) for name, hint in hints.items() if name in data})


def read_dataclasses(kind: type[T], path: Path) -> list[T]:
    """One for each line of a file of records, in order; lines that are torn are passed over.  Empty without a file."""
    try:
        records = read_records(path)
    except OSError:
        return []
    found = []
    for record in records:
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            found.append(from_dict(kind, record))
    return found


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _typed(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):  # X | None, or bool | Literal["auto"]
        if value is None or any(value in get_args(kind) for kind in arguments if get_origin(kind) is Literal):
            return value
        return _typed(next(kind for kind in arguments if kind is not NoneType), value)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"must be one of {arguments}; got {value!r}")
        return value
    if origin is tuple:
        return tuple(_typed(arguments[0], each) for each in value)
    if origin is Mapping:
        return {_typed(arguments[0], key): _typed(arguments[1], each) for key, each in value.items()}
    if is_dataclass(hint):
        return from_dict(hint, value)  # type: ignore[arg-type]
    return hint(value)


METRICS_BYTES = 2**18  # some hundred records of the end of a file, which is long in a long run


class Tail:
    """A file of lines, as a rule of JSON, from its end on: first the last ones, after that each time what was appended.

    Args:
        path: the file; it need not be there yet, and may be moved away and started over.
        first_bytes: how much of the end is read first.
    """

    def __init__(self, path: Path, first_bytes: int = METRICS_BYTES) -> None:
        self._path = path
        self._first_bytes = first_bytes
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """The records since the last call; lines that are torn or not yet whole are passed over."""
        records = [parse_record(line) for line in self.lines().splitlines()]
        return [r for r in records if r and isinstance(r.get("kind"), str) and is_number(r.get("time"))]

    def lines(self) -> bytes:
        """The whole lines since the last call."""
        with suppress(OSError), self._path.open("rb") as file:
            now = os.fstat(file.fileno())
            if self._file is None:
                self._offset = max(now.st_size - self._first_bytes, 0)
            elif self._file != (now.st_dev, now.st_ino) or now.st_size < self._offset:
                self._offset = 0
            self._file = now.st_dev, now.st_ino
            text = os.pread(file.fileno(), now.st_size - self._offset, self._offset)
            whole = text.rfind(b"\n") + 1
            self._offset += whole
            return text[:whole]
        return b""


def is_number(value: Any) -> bool:
    """Whether a value of a record is a figure."""
    return isinstance(value, int | float) and not isinstance(value, bool)
