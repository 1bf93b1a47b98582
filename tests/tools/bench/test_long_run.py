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


@pytest.mark.parametrize(
    ("tool", "options", "words"),
    [
        ("checkpoint.py", ["--parameters-m=1", "--repeats=2", "--directory=."], "triggering / synchronous"),
        ("overhead.py", ["--threads=1", "--patch=8,16,16", "--width=8", "--turns=4", "--turn-steps=2"], "4 x 2 steps"),
    ],
)
def test_a_benchmark_measures_and_leaves_its_figures_alone(
    tmp_path: Path, tool: str, options: list[str], words: str
) -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "bench" / tool), "--json=bench.json", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "bench.json"]
