"""Describe the machine that a figure was measured on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Sequence
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


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
