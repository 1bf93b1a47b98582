"""Who holds how much memory.  Private pages are counted per process, shared ones (the object store) once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use by a process and all its descendants.

    Attributes:
        anon_bytes: private memory of all of them.
        shared_bytes: shared memory, counted once (the largest mapping: every reader maps the same object store).
        limit_bytes: what this machine or container may use.
    """

    anon_bytes: int
    shared_bytes: int
    limit_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.anon_bytes + self.shared_bytes


def measure_memory(pid: int | None = None) -> MemoryUse:
    """Measure a process (this one by default) and its descendants, Ray's among them."""
    import psutil  # here, because the memory plan takes no more than a constant from this file, and works without

    root = psutil.Process(pid)
    anon, shared = 0, 0
    for process in [root, *root.children(recursive=True)]:
        status = _rss_of(process.pid)
        anon += status.get("RssAnon", 0)
        shared = max(shared, status.get("RssShmem", 0))
    return MemoryUse(anon, shared, memory_limit_bytes())


def memory_limit_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """The smallest of the machine's memory and the limit of a cgroup v2 or v1 mounted as a container sees it."""
    import psutil

    limits = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory.high", "memory/memory.limit_in_bytes"):
        try:
            text = (cgroup_root / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def _rss_of(pid: int) -> dict[str, int]:
    """RssAnon and RssShmem in bytes; empty where the process is gone or the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {
        key: int(rest.split()[0]) * 1024 for key, _, rest in (line.partition(":") for line in lines) if key in _KEYS
    }


_KEYS = {"RssAnon", "RssShmem"}
