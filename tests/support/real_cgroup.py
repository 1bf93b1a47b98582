"""A real memory cgroup, version 2 or 1, in which the kernel counts and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path("/sys/fs/cgroup")


def popen_in(directory: Path, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """`subprocess.Popen` of a command that starts inside the cgroup."""
    enter = f'echo $$ > "{directory}/cgroup.procs" && exec "$@"'
    return subprocess.Popen(["sh", "-c", enter, "sh", *command], **options)


@contextmanager
def memory_cgroup_or_skip(limit_bytes: int | None = None) -> Iterator[Path]:
    """A new cgroup below that of this process; processes left in it at the end are killed.

    The test is skipped if none can be created.
    """
    try:
        path = (_make_v2 if (_ROOT / "cgroup.controllers").exists() else _make_v1)(limit_bytes)
    except OSError as error:
        pytest.skip(f"a memory cgroup must be writable; got {error}; try as root")
    try:
        yield path
    finally:
        _remove(path)


def _make_v2(limit_bytes: int | None) -> Path:
    parent = _ROOT / _own("")
    path = parent / _name()
    path.mkdir()
    if not (path / "memory.max").exists():
        path.rmdir()
        raise OSError(f"the memory controller is not given to the children of {parent}")
    _set(path, {"memory.max": limit_bytes, "memory.swap.max": 0})
    return path


def _make_v1(limit_bytes: int | None) -> Path:
    parent = _ROOT / "memory" / _own("memory")
    path = (parent if parent.is_dir() else _ROOT / "memory") / _name()
    path.mkdir()
    # What is swapped out would not count.
    _set(path, {"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes})
    return path


def _own(controller: str) -> str:
    """Path of this process's cgroup, without the leading slash."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return next(path.lstrip("/") for _, controllers, path in lines if controller in controllers.split(","))


def _set(path: Path, limits: dict[str, int | None]) -> None:
    for name, value in limits.items():
        if value is not None and (path / name).exists():
            (path / name).write_text(str(value))


def _remove(path: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        for pid in (path / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            path.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _name() -> str:
    return f"vesuvius-{os.getpid()}-{uuid.uuid4().hex[:8]}"
