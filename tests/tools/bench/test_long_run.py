"""The long run kills, goes on, compares and draws."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.long


def test_a_killed_run_is_compared_with_an_undisturbed_one(
    tiny_config: Callable[..., Path], volume: Path, tmp_path: Path
) -> None:
    config = tiny_config(training={"validate_patches": 1})
    command = [
        sys.executable,
        str(REPOSITORY / "tools" / "bench" / "long_run.py"),
        f"--volume={volume}",
        f"--config={config}",
    ]
    options = ["--steps=40", "--minutes=0.2", "--kills=1", "--parallel", f"--out={tmp_path / 'out'}"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| final weights, moments, averages |  | identical bit by bit |" in done.stdout
    assert "| steps | 40 | 40 |" in done.stdout
    for name in ("loss.png", "previews.png"):
        assert Image.open(tmp_path / "out" / name).width > 100
