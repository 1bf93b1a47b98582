"""The machine that a figure was measured on, and a slow server on it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def describe_machine(packages: Sequence[str]) -> dict[str, Any]:
    """CPU, cores, memory, versions.  Reads /proc."""
    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) / 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "machine": {"cpu": cpu[0] if cpu else "?", "cores": len(os.sched_getaffinity(0)), "memory_gib": memory[0]},
        "versions": versions,
    }


@contextlib.contextmanager
def served(folder: Path, latency_ms: float) -> Iterator[str]:
    """Serve a folder over HTTP, with a delay of each answer; yield the address."""
    server = Path(__file__).parents[2] / "tests" / "support" / "chunk_server.py"
    command = [sys.executable, str(server), str(folder), "--latency-ms", str(latency_ms), "--with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
