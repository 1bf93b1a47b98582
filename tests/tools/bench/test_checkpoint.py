"""The benchmark of checkpoints measures each kind of save and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.long


def test_each_kind_of_save_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = [sys.executable, str(REPOSITORY / "tools" / "bench" / "checkpoint.py"), "--parameters-m=1", "--repeats=2"]
    options = [f"--directory={tmp_path}", f"--json={file}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seconds = json.loads(file.read_text())
    saves = ("synchronous", "triggering", "until it is written", "first")
    assert [len(seconds[name]) for name in saves] == [2] * 4
    assert all(value > 0 for values in seconds.values() for value in values)
    assert "triggering / synchronous" in done.stdout
    assert list(tmp_path.iterdir()) == [file]
