"""A disk of a few MiB that can be filled: a tmpfs in its own mount namespace, invisible to others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

# As root, or, where the system allows it, as anybody.
_NAMESPACES = (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"])
# Mount, say so, and keep the namespace until standard input ends.
_MOUNT = 'mount -t tmpfs -o size="$2" none "$1" && echo mounted && read end'


@contextmanager
def small_disk(directory: Path, kib: int) -> Iterator[Path]:
    """Yields the path of an empty file system of this size; skips the test if mounting is not permitted.

    Args:
        directory: an empty directory to mount on.
    """
    for namespace in _NAMESPACES:
        command = [*namespace, "sh", "-c", _MOUNT, "sh", str(directory), f"{kib}k"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            if holder.stdout.readline() == "mounted\n":
                # The way into another process's mounts.
                yield Path(f"/proc/{holder.pid}/root") / directory.absolute().relative_to("/")
                holder.stdin.close()
                return
    pytest.skip("needs a small tmpfs: neither root nor user namespaces are permitted here")


def fill(disk: Path) -> Path:
    """Leave no byte free.  Returns the ballast file."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert free_bytes(disk) == 0
    return ballast


def free_bytes(disk: Path) -> int:
    """Free space."""
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def with_small_files(door: str, limit: int) -> list[str]:
    """Command prefix that limits files to `limit` bytes: larger writes fail as on a full disk."""
    code = f"""
import resource, signal, sys
from vesuvius.commands.{door} import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.exit(main(sys.argv[1:]))
"""
    return [sys.executable, "-c", code]
