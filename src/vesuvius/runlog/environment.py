"""Versions, machine and command line of a session, for `env.json` and for those who compare them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from vesuvius.runlog.redact import redacted

_PACKAGES = (
    "vesuvius-diffusion", "torch", "ray", "zarr", "numcodecs", "numpy", "pydantic", "safetensors", "tensorboard",
)  # fmt: skip


def describe_environment() -> dict[str, Any]:
    """Versions, machine and command line, for env.json."""
    import torch  # takes seconds: who only asks where a run is need not wait for it

    return {
        "command": redacted([sys.executable, *sys.argv]),
        "directory": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def installed_version(package: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this package's own checkout, with '+' where files differ; None where it is installed or unknown."""
    checkout = Path(__file__).resolve().parents[3]
    if not (repository := checkout / ".git").exists():
        return None
    command = ["git", f"--git-dir={repository}", f"--work-tree={checkout}"]  # within a hook, GIT_DIR is of another one
    command += ["describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
