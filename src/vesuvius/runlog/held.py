"""Directories that this process has locked, wherever they are now: others may move, replace or delete them.

Its path is looked up again before each write that opens a file by name.  Open files follow a moved directory anyway.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vesuvius.errors import RunMovedError

LOCK = ".lock"
_held: list[tuple[Path, int, os.stat_result]] = []
"""Absolute path of each lock file when it was locked, and its descriptor, which keeps the inode from being reused."""
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # other errors, as of a network mount, say nothing


@contextmanager
def holding(directory: Path, lock: int, name: str = LOCK) -> Iterator[None]:
    """Follow a directory while the context lasts; `lock` is the open file `name` in it, whose inode identifies it."""
    entry = (directory.absolute() / name, lock, os.fstat(lock))
    held = [entry] if is_at(entry[0], entry[2]) else []  # some FUSE file systems have no stable inodes
    _held.extend(held)
    try:
        yield
    finally:
        for each in held:
            _held.remove(each)


def where(path: Path) -> Path:
    """Return where a path of the held directory is now; other paths as they are.

    Raises RunMovedError: the directory was deleted or replaced, and is nowhere to be found.
    """
    full = path.absolute()
    for file, lock, opened in reversed(_held):
        if full.is_relative_to(file.parent):
            now = _now(file, lock, opened)
            return path if now == file.parent else now / full.relative_to(file.parent)
    return path


def refuse_moved(path: Path) -> None:
    """Raise RunMovedError if the held directory of a path is not in its place: the path may be another process's."""
    if (now := where(path)) != path:
        raise RunMovedError(f"{path} was moved to {now} by others while it was written; nothing more is written there")


@contextmanager
def folder_of(path: Path) -> Iterator[Path]:
    """Path of a folder in the held directory, created if missing, that stays right while others move the folder.

    Without /proc it is the present path.  Raises OSError, and RunMovedError like `where`.
    """
    folder = where(path)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        followed = Path(f"/proc/self/fd/{descriptor}")
        if where(path) != folder:  # moved meanwhile
            with folder_of(path) as followed:
                yield followed
        else:
            yield followed if followed.exists() else folder
    finally:
        os.close(descriptor)


def shown(text: object) -> str:
    """Text with the paths of `folder_of` as they are now."""
    return re.sub(r"/proc/self/fd/\d+", lambda match: os.readlink(match[0]), str(text))


def problem(directory: Path) -> str:
    """Say if the held directory has been moved, deleted or replaced, with the remedy; '' if it is in its place."""
    try:
        now = where(directory)
    except RunMovedError as error:
        return str(error)
    root = "" if now.parent == directory.absolute().parent else f" and VESUVIUS_RUNS={now.parent}"
    moved = f"The run directory {directory.absolute()} was moved to {now}; continue there with --resume name={now.name}"
    return "" if now == directory else f"{moved}{root}, or move it back"


def is_at(path: Path, opened: os.stat_result) -> bool:
    """Whether an opened file is the one at a path; also if the disk does not say."""
    try:
        return os.path.samestat(os.stat(path), opened)
    except OSError as error:
        return error.errno not in _NOT_THERE


def _now(file: Path, lock: int, opened: os.stat_result) -> Path:
    if is_at(file, opened):
        return file.parent
    with suppress(OSError):
        now = Path(os.readlink(f"/proc/self/fd/{lock}")).parent  # only on Linux
        if now != file.parent and is_at(now / file.name, opened):
            return now
    whose, again = ("run directory", "start a new run") if file.name == LOCK else ("folder", "start again")
    raise RunMovedError(
        f"The {whose} {file.parent} was deleted or replaced by others while it was used; nothing more can be saved "
        f"there: restore it, or {again}"
    )
