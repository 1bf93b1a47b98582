"""The overhead benchmark runs the real trainer and the bare loop in turns, and reports both."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.long


@pytest.mark.parametrize("options", [[], ["--same"]], ids=["ours", "same"])
def test_both_loops_take_their_turns(tmp_path: Path, options: list[str]) -> None:
    file = tmp_path / "overhead.json"
    command = [sys.executable, str(REPOSITORY / "tools" / "bench" / "overhead.py"), f"--json={file}", "--threads=1"]
    tiny = ["--patch=8,16,16", "--width=8", "--turns=4", "--turn-steps=2"]
    done = subprocess.run([*command, *tiny, *options], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert len(found["ours_s"]) == len(found["bare_s"]) == 4
    assert min(found["ours_s"] + found["bare_s"]) > 0
    pairs = zip(found["ours_s"], found["bare_s"], strict=True)
    assert found["overhead_percent"] == pytest.approx(100 * statistics.median(a / b - 1 for a, b in pairs))
    assert "4 x 2 steps" in done.stdout
    assert list(tmp_path.iterdir()) == [file], "the run was a temporary one"
