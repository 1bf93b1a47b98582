"""The training comparison: equal compute, the same data for both, losses that fall."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tools.bench import training

from tests.conftest import REPOSITORY, write_array

pytestmark = pytest.mark.long


def test_both_networks_train_on_the_same_data_at_equal_compute(tmp_path: Path) -> None:
    z, y, x = np.mgrid[:96, :128, :128]
    waves = (120 + 60 * np.sin(x / 4) + 10 * np.cos((y + z) / 7)).astype(np.uint8)
    volume, file = write_array(tmp_path / "waves.zarr", waves), tmp_path / "training.json"
    options = ["--patch=8,16,16", "--batch=4", "--width=28", "--steps=40", "--validate-every=20", "--validation=8"]
    command = [
        sys.executable,
        str(REPOSITORY / "tools" / "bench" / "training.py"),
        f"--volume={volume}",
        f"--json={file}",
    ]
    done = subprocess.run([*command, "--threads=1", *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert list(found) == ["default", "plain"]
    # Widths go up in steps of 4 channels.
    assert 0.85 < found["plain"]["flop"] / found["default"]["flop"] < 1.15
    for contender in found.values():
        (first, _, loss_at_20), (second, seconds, loss_at_40) = contender["curve"]
        assert (first, second) == (20, 40)
        assert seconds > 0
        assert loss_at_40 < loss_at_20
    assert "the default network reaches the plain one's last loss" in done.stdout


def test_a_gpu_is_waited_for_before_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: acts.append(str(device)))
    monkeypatch.setattr(training.time, "perf_counter", lambda: acts.append("clock"))
    for name in ("cuda", "cpu"):
        training.device_time(torch.device(name))
    assert acts == ["cuda", "clock", "clock"]
