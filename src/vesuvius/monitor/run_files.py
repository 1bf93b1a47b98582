"""The ends of the files of a run directory, read from outside.  Files of a long run are long."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from vesuvius.runlog.records import parsed

METRICS_BYTES = 2**18  # some hundred records


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
        records = [parsed(line) for line in self.lines().splitlines()]
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
