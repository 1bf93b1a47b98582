"""The benchmarks of checkpoints and of the trainer's overhead run and print their figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.long


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
