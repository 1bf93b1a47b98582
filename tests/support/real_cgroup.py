"""A real memory cgroup, version 2 or 1, in which the kernel counts and kills: for tests and tools."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path("/sys/fs/cgroup")


class NoCgroupError(RuntimeError):
    """No cgroup can be created here."""


@dataclass(frozen=True)
class MemoryCgroup:
    """A cgroup with a limit, or without."""

    path: Path
    version: int

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` of a command that starts inside the cgroup."""
        return popen_in(self.path, command, **options)

    def page_cache_bytes(self) -> int:
        """Page cache without shared memory."""
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        file, shmem = ("file", "shmem") if self.version == 2 else ("total_cache", "total_shmem")
        return int(stat[file]) - int(stat[shmem])

    def kills(self) -> int:
        """Processes killed by the kernel for exceeding the limit."""
        file = "memory.events" if self.version == 2 else "memory.oom_control"
        return int(dict(line.split() for line in (self.path / file).read_text().splitlines())["oom_kill"])


def popen_in(directory: Path, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """`subprocess.Popen` of a command that starts inside the cgroup."""
    enter = f'echo $$ > "{directory}/cgroup.procs" && exec "$@"'
    return subprocess.Popen(["sh", "-c", enter, "sh", *command], **options)


@contextmanager
def memory_cgroup_or_skip(limit_bytes: int | None = None) -> Iterator[MemoryCgroup]:
    """A new cgroup for a test, which is skipped if none can be created."""
    with ExitStack() as held:
        try:
            group = held.enter_context(memory_cgroup(limit_bytes))
        except NoCgroupError as error:
            pytest.skip(str(error))
        yield group


@contextmanager
def memory_cgroup(limit_bytes: int | None) -> Iterator[MemoryCgroup]:
    """Create a cgroup below that of this process; processes left in it at the end are killed.

    Raises:
        NoCgroupError: no permission.
    """
    make = _make_v2 if (_ROOT / "cgroup.controllers").exists() else _make_v1
    try:
        group = make(limit_bytes)
    except OSError as error:
        raise NoCgroupError(f"a memory cgroup must be writable; got {error}; try as root") from error
    try:
        yield group
    finally:
        _remove(group.path)


def _make_v2(limit_bytes: int | None) -> MemoryCgroup:
    parent = _ROOT / _own("")
    path = parent / _name()
    path.mkdir()
    if not (path / "memory.max").exists():
        path.rmdir()
        raise OSError(f"the memory controller is not given to the children of {parent}")
    _set(path, {"memory.max": limit_bytes, "memory.swap.max": 0})
    return MemoryCgroup(path, 2)


def _make_v1(limit_bytes: int | None) -> MemoryCgroup:
    parent = _ROOT / "memory" / _own("memory")
    path = (parent if parent.is_dir() else _ROOT / "memory") / _name()
    path.mkdir()
    # What is swapped out would not count.
    _set(path, {"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes})
    return MemoryCgroup(path, 1)


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
