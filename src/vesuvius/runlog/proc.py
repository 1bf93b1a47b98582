"""What Linux says of this machine and its processes in /proc."""

from __future__ import annotations

from pathlib import Path

import psutil


def boot_id() -> str:
    """Which start of which machine this is; empty where the system does not tell."""
    try:
        return Path(psutil.PROCFS_PATH, "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def rss_anon_bytes(pid: int | str = "self") -> int | None:
    """Private memory of a process, without what it shares; None where the system does not tell."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")), None)
    except OSError:
        return None
