"""Lines of a run of months in little space: long files are compressed and numbered, the newest stays plain."""

from __future__ import annotations

import gzip
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vesuvius.runlog.files.append_file import AppendFile
from vesuvius.runlog.records import iter_records, records_in

log = logging.getLogger(__name__)

ROTATE_BYTES = 4 * 2**20


class RotatedFile:
    """Appends lines to `path`; once it is long, to a new one, and the old becomes `<stem>.000001<suffix>.gz`.

    Outlives a full disk, as `AppendFile` says; then nothing is compressed until there is space again.  Threads may
    write, but no signal handler.

    Raises:
        OSError: on opening, where the file cannot be opened.
    """

    def __init__(self, path: Path, rotate_bytes: int = ROTATE_BYTES) -> None:
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._file = AppendFile(path)
        self._written = path.stat().st_size
        self._using, self._closed = threading.Lock(), False

    def write_line(self, text: str) -> None:
        """Append a text and a newline; nothing once it is closed."""
        with self._using:
            if self._closed:  # it must not begin another file
                return
            self._file.write_line(text)
            self._written += len(text) + 1
            if self._written > self._rotate_bytes:
                self._rotate()

    def close(self) -> None:
        with self._using:
            self._closed = True
            self._file.close()

    def _rotate(self) -> None:
        """Begin a new file and compress those before it.  A kill at any moment loses nothing and doubles nothing."""
        self._written = 0
        if self._file.is_waiting:  # a full disk: its lines belong into the present file
            return
        number = 1 + max(_parts(self._path), default=0)
        part = self._path.with_name(f"{self._path.stem}.{number:06d}{self._path.suffix}")
        try:
            os.rename(self._path, part)
            try:
                file = AppendFile(self._path)
            except OSError:
                os.rename(part, self._path)
                raise
            self._file.close()
            self._file = file
            for part in _parts(self._path).values():
                _compress(part)
        except OSError as error:
            log.warning("%s must be writable to compress it; got %s; free some space", self._path, error)


def iter_rotated(path: Path, steps: range | None = None) -> Iterator[dict[str, Any]]:
    """All whole records of a file and of the parts before it, in order, as `iter_records`."""
    for _, part in sorted(_parts(path).items()):
        with gzip.open(part) if part.suffix == ".gz" else part.open("rb") as lines:
            yield from records_in(lines, steps)
    if path.exists():
        yield from iter_records(path, steps)


def _parts(path: Path) -> dict[int, Path]:
    """The files before the present one, by number; the compressed one where a kill has left both."""
    found = {}
    for part in sorted(path.parent.glob(f"{path.stem}.*{path.suffix}*")):
        match = re.fullmatch(rf"{re.escape(path.stem)}\.(\d+){re.escape(path.suffix)}(\.gz)?", part.name)
        if match:
            found[int(match[1])] = part
    return found


def _compress(part: Path) -> None:
    """Make a file `<name>.gz` of it, under another name until it is whole."""
    if part.suffix == ".gz":
        part.with_suffix("").unlink(missing_ok=True)
        return
    partial = part.with_name(f".{part.name}.partial")
    try:
        with part.open("rb") as plain, gzip.open(partial, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(plain, packed)
    except OSError:
        partial.unlink()  # what is left of the disk is for the records themselves
        raise
    partial.rename(part.with_name(part.name + ".gz"))
    part.unlink()
