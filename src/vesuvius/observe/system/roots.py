"""Where the system is read from: the real `/proc` and `/sys`, or a recorded tree in a test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Roots:
    """Directories that stand for `/proc` and `/sys`."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
