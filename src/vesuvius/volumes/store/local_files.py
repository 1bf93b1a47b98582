"""Objects that are files below a folder: read, looked for and listed, with errors that keep the system's number."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from vesuvius.volumes.errors import FetchError
from vesuvius.volumes.store.byte_range import ByteRange, checked


def read_file(root: Path, key: str, byte_range: ByteRange | None) -> bytes:
    """As obstore's reads, with errors that keep the system's number.  Raises OSError, FetchError."""
    path = root / key
    check_file(root, key)
    with path.open("rb") as file:
        if byte_range is None:
            return file.read()
        size = os.fstat(file.fileno()).st_size
        start = max(size + byte_range.start, 0) if byte_range.start < 0 else byte_range.start
        stop = size if byte_range.stop is None else min(byte_range.stop, size)
        file.seek(min(start, size))
        return checked(file.read(max(stop - start, 0)), byte_range, size)


def check_file(root: Path, key: str) -> None:
    """Raises FileNotFoundError where there is nothing, FetchError for what is there and no file."""
    path = root / key
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        check_path(root, path)
        raise FileNotFoundError(path) from None
    if not stat.S_ISREG(mode):
        raise FetchError(f"{'a folder' if stat.S_ISDIR(mode) else 'a special file'} in place of the file {path}")


def check_path(root: Path, path: Path) -> None:
    """Raises FetchError where a path ends, below its root, at a dangling link or at a file in place of a folder."""
    for place in (path, *path.parents):
        if place == root or place.is_dir():
            return
        if place.exists():
            raise FetchError(f"a file in place of the folder {place}")
        if place.is_symlink():
            raise FetchError(f"a broken link, {place}")


def list_files(root: Path, prefix: str, folders_too: bool) -> Iterator[str]:
    """Keys of the files (and folders) below a prefix, in any order; links to folders are followed.  Raises OSError."""
    for folder, folders, files in os.walk(root / prefix, onerror=_raise_unless_gone, followlinks=True):
        relative = Path(folder).relative_to(root)
        yield from ((relative / name).as_posix() for name in (*files, *(folders if folders_too else ())))


def _raise_unless_gone(error: OSError) -> None:
    """Below a folder that is not there, or not any more, no keys are listed."""
    if not isinstance(error, FileNotFoundError):
        raise error
