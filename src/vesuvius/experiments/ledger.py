"""`ledger.jsonl`: what an experiment was asked for, then a line for each result; `--resume` continues it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from vesuvius import __version__
from vesuvius.config.describe import flatten
from vesuvius.errors import ConfigError
from vesuvius.runlog.files import write_whole
from vesuvius.runlog.records import JsonLines, from_plain, read_records
from vesuvius.runlog.redact import redacted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)
else:
    T = TypeVar("T")


class Ledger(Generic[T]):
    """The results of a tune or a bench, on disk: a new ledger, or an earlier one with `read`.  A context manager.

    Args:
        what: 'tune' or 'bench'.
        asked: what was asked for, as plain data.

    Attributes:
        results: all so far, in order.
        session: how many sessions have added results to it, with this one.
    """

    def __init__(self, path: Path, what: str, asked: Mapping[str, Any]) -> None:
        self.what, self.asked = what, asked
        self.results: list[T] = []
        self.session = 1
        self._path = path
        self._file: JsonLines | None = None

    @classmethod
    def read(cls, path: Path, what: str, kind: type[T]) -> Self:
        """Continue a ledger on disk, whose results are of one dataclass.

        Raises:
            ConfigError: it is missing, or not of this version.
        """
        try:
            records = read_records(path)
            ledger = cls(path, what, next(record["asked"] for record in records if record["kind"] == what))
            found = [record for record in records if record["kind"] == "result"]
            ledger.results = [from_plain(kind, record["result"]) for record in found]
            ledger.session = 1 + max((record["session"] for record in found), default=0)
        except OSError as error:
            raise ConfigError(f"there is no {what} to continue: {error}; drop --resume to start one") from error
        except (StopIteration, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ConfigError(
                f"{path} is not a ledger of this version of vesuvius: {type(error).__name__} {error}; drop --resume to "
                "start over"
            ) from error
        return ledger

    def check_same(self, asked: Mapping[str, Any]) -> None:
        """Raise ConfigError if any of `asked` differs from what this ledger was begun with."""
        was, now = flatten({key: self.asked.get(key) for key in asked}), flatten(asked)
        for key in sorted(was.keys() | now.keys()):
            if was.get(key) != now.get(key):
                raise ConfigError(
                    f"this {self.what} was begun with {key} {was.get(key)!r}, not {now.get(key)!r}; repeat what it was "
                    "begun with, or drop --resume to start over"
                )

    def add(self, result: T) -> None:
        """Append a result.  Raises OSError."""
        self.results.append(result)
        self._write("result", session=self.session, result=asdict(result))

    def begin(self) -> None:
        """Write what was asked for.  Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write(self.what, version=__version__, asked=self.asked)

    def _write(self, kind: str, **figures: Any) -> None:
        self._file = self._file or JsonLines(self._path)
        self._file.write(kind, **figures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Write all figures of an experiment as JSON, whole or not at all, without secrets.  Raises OSError."""
    write_whole(path, (json.dumps(redacted(figures), indent=1, allow_nan=False) + "\n").encode())
