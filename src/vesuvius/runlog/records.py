"""Reads and writes `metrics.jsonl` and `system.jsonl`: append-only, one JSON object per line.

Figures are unrounded, names carry units, and unknown figures and NaN are null.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vesuvius.errors import VesuviusError, disk_remedy
from vesuvius.runlog.files import AppendFile

Record = dict[str, Any]
T = TypeVar("T")
_hints = cache(get_type_hints)


class JsonLines:
    """An append-only file of records.  Thread-safe; survives a full disk, see `AppendFile`.

    Listeners are called with each record in the writing thread; they must not wait for a disk or a server.
    Raises OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, listeners: Sequence[Callable[[Record], None]] = ()) -> None:
        self._file = AppendFile(path)
        self._listeners = listeners

    def write(self, kind: str, **figures: Any) -> Record:
        """Append a record with its kind and time, and return it; listeners get it first, as the disk may hang."""
        record: Record = replace_nonfinite({"kind": kind, "time": time.time(), **figures})
        try:
            self.share(record)
        finally:
            self._file.write_line(json.dumps(record, allow_nan=False))
        return record

    def share(self, record: Record) -> None:
        for listener in self._listeners:
            listener(record)

    def close(self) -> None:
        self._file.close()


def iter_records(path: Path) -> Iterator[Record]:
    """Iterate over the records of a file in order; torn lines are skipped."""
    with path.open("rb") as lines:
        yield from (record for line in lines if (record := parse_record(line)) is not None)


@contextmanager
def naming_wrong_values(directory: Path) -> Iterator[None]:
    """Raise a VesuviusError for what an unreadable file, or a record with a wrong value, causes in the context."""
    try:
        yield
    except VesuviusError:
        raise
    except OSError as error:
        raise VesuviusError(f"cannot read the records of {directory}: {error}; {disk_remedy(error)}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise VesuviusError(
            f"cannot read the records of {directory}: a line of its .jsonl files has a wrong value "
            f"({type(error).__name__}: {error}); remove that line"
        ) from error


def read_records(path: Path) -> list[Record]:
    return list(iter_records(path))


def parse_record(text: str | bytes) -> Record | None:
    """Parse a JSON object; None for anything else, such as a torn line."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def is_repeated(record: Record, start: Record) -> bool:
    """Whether a session that begins with `start` (`run_start`) repeats an earlier record.  Pure.

    It repeats all steps after the one at which it begins, and validations and previews unknown to its checkpoint.
    Other records are never repeated: they say what happened, perhaps why the earlier session died.
    """
    known = {"step": "step", "validation": "validated_step", "preview": "previewed_step"}.get(record["kind"])
    if known is None:
        return False
    last: int = start["step"] if start.get(known) is None else start[known]
    return (record.get("step") or 0) > last


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None; tuples become lists."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def from_dict(kind: type[T], data: Mapping[str, Any]) -> T:
    """Build a dataclass from plain data, the inverse of `dataclasses.asdict`.  Pure.

    Unknown names are ignored, missing ones get their defaults.
    Raises KeyError, TypeError, ValueError, AttributeError: a value is missing or has the wrong type.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: _typed(hint, data[name]) for name, hint in hints.items() if name in data})


def read_dataclasses(kind: type[T], path: Path) -> list[T]:
    """Read a dataclass from each line of a file, without torn lines; empty without a file."""
    try:
        records = read_records(path)
    except OSError:
        return []
    values = []
    for record in records:
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            values.append(from_dict(kind, record))
    return values


def _typed(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):  # X | None
        return None if value is None else _typed(arguments[0], value)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is not one of {arguments}")
        return value
    if origin is tuple:
        return tuple(_typed(arguments[0], each) for each in value)
    if origin is Mapping:
        return {_typed(arguments[0], key): _typed(arguments[1], each) for key, each in value.items()}
    if is_dataclass(hint):
        return from_dict(hint, value)  # type: ignore[arg-type]
    return hint(value)


class Tail:
    """Follows a file of lines, which may not exist yet and may be replaced; first, its last `first_bytes` are read."""

    def __init__(self, path: Path, first_bytes: int = 2**18) -> None:
        self._path = path
        self._first_bytes = first_bytes
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the records appended since the last call, without torn or incomplete lines."""
        records = [parse_record(line) for line in self.lines().splitlines()]
        return [r for r in records if r and isinstance(r.get("kind"), str) and is_number(r.get("time"))]

    def lines(self) -> bytes:
        """Return the complete lines appended since the last call."""
        with suppress(OSError), self._path.open("rb") as file:
            now = os.fstat(file.fileno())
            if self._file is None:
                self._offset = max(now.st_size - self._first_bytes, 0)
            elif self._file != (now.st_dev, now.st_ino) or now.st_size < self._offset:
                self._offset = 0
            self._file = now.st_dev, now.st_ino
            text = os.pread(file.fileno(), now.st_size - self._offset, self._offset)
            complete = text.rfind(b"\n") + 1
            self._offset += complete
            return text[:complete]
        return b""


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
