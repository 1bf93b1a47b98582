"""Objects and parts of them; those that are files below a folder."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vesuvius.volumes.errors import FetchError


@dataclass(frozen=True)
class ByteRange:
    """Bytes start <= b < stop of an object; a negative start and no stop are the last -start bytes."""

    start: int
    stop: int | None = None
    reserved: int = field(default=0, compare=False)  # bytes at the end of the object that the range must not touch

    def check(self, size: int) -> None:
        """Raises FetchError where an object of `size` bytes, less what is reserved, ends before the range does."""
        if self.stop is not None and self.stop > size - self.reserved:
            kept = f", of which the last {self.reserved} are its index" if self.reserved else ""
            raise FetchError(f"bytes {self.start} to {self.stop} of an object of {size}{kept}")

    def cut(self, data: bytes) -> bytes:
        """These bytes of a whole object.  Raises FetchError as `check`."""
        self.check(len(data))
        return data[self.start : self.stop]


class Answer(NamedTuple):
    """What was read of an object."""

    data: bytes
    size: int  # bytes of the whole object
    stamp: str | None = None  # changes with the content of the object; None where the store tells nothing of the kind
    lasting: bool = False  # whether the stamp also differs from that of any version to come


class LocalFiles:
    """A folder.  Its methods raise OSError, with the system's number, and FetchError."""

    can_list = True
    signing = ""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, key: str, byte_range: ByteRange | None) -> Answer:
        """A file, or a range of it."""
        self.stamp(key)
        with (self._root / key).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if byte_range is None:
                return Answer(file.read(), size)
            byte_range.check(size)
            start = max(size + byte_range.start, 0) if byte_range.start < 0 else min(byte_range.start, size)
            stop = size if byte_range.stop is None else byte_range.stop
            file.seek(start)
            return Answer(file.read(max(stop - start, 0)), size)

    def stamp(self, key: str) -> None:
        """Raises FileNotFoundError where there is nothing, FetchError for what is there and no file, or where the path
        ends at a broken link or at a file in place of a folder."""
        path = self._root / key
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            for place in (path, *path.parents):
                if place == self._root or place.is_dir():
                    break
                if place.exists():
                    raise FetchError(f"a file in place of the folder {place}") from None
                if place.is_symlink():
                    raise FetchError(f"a broken link, {place}") from None
            raise FileNotFoundError(path) from None
        if not stat.S_ISREG(mode):
            raise FetchError(f"{'a folder' if stat.S_ISDIR(mode) else 'a special file'} in place of the file {path}")

    def pages(self, prefix: str, after: str | None) -> Iterator[Iterable[str]]:
        """Keys of the files and folders (one in a chunk's place is no air) below a prefix, in any order and from the
        start; links to folders are followed."""
        for folder, folders, files in os.walk(self._root / prefix, onerror=_raise_unless_gone, followlinks=True):
            below = "" if folder == str(self._root) else f"{Path(folder).relative_to(self._root).as_posix()}/"
            yield (below + name for name in itertools.chain(files, folders))

    def list_one_level(self, prefix: str) -> tuple[list[str], list[str]]:
        """Keys of the files, and of the folders, one segment below `prefix`."""
        files, folders = list[str](), list[str]()
        with os.scandir(self._root / prefix) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).append(f"{prefix}/{entry.name}".lstrip("/"))
        return files, folders


def _raise_unless_gone(error: OSError) -> None:
    """Below a folder that is not there, or not any more, no keys are listed.  Without the system's number nothing is an
    outage: a walk is not tried again, as it would begin anew."""
    if not isinstance(error, FileNotFoundError):
        raise OSError(str(error)) from error
