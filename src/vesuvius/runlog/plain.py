"""Dataclasses from the plain data that JSON has of them (`dataclasses.asdict` the other way round)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from vesuvius.runlog.records import read_records

T = TypeVar("T")


def from_plain(kind: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass; names that it does not have are passed over, those that are missing have their default.  Pure.

    Raises KeyError, TypeError, ValueError, AttributeError: something needed is missing or of another kind.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{name: _typed(hint, data[name]) for name, hint in hints.items() if name in data})


def read_plain(kind: type[T], path: Path) -> list[T]:
    """One for each line of a file of records, in order; lines that are torn are passed over.  Empty without a file."""
    try:
        records = read_records(path)
    except OSError:
        return []
    found = []
    for record in records:
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            found.append(from_plain(kind, record))
    return found


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


def _typed(hint: Any, value: Any) -> Any:
    origin, arguments = _parts(hint)
    if origin is UnionType:  # X | None
        return None if value is None else _typed(next(kind for kind in arguments if kind is not NoneType), value)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"must be one of {arguments}; got {value!r}")
        return value
    if origin is tuple:
        return tuple(_typed(arguments[0], each) for each in value)
    if origin is Mapping:
        return {_typed(arguments[0], key): _typed(arguments[1], each) for key, each in value.items()}
    if is_dataclass(hint):
        return from_plain(hint, value)  # type: ignore[arg-type]
    return hint(value)
