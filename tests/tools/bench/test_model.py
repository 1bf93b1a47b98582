"""The benchmark of the networks: equal parameters, bytes that are counted right, ratios that are what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.long

BENCH = REPOSITORY / "tools" / "bench" / "model.py"


def test_the_default_model_keeps_at_most_a_third_of_the_bytes_of_monais(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command = [sys.executable, str(BENCH), f"--json={file}", "--threads=1", "--full-size", "--systems="]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    content: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())
    rows = {row["system"]: row for row in content["full_size"]}
    assert content["rows"] == []
    ours, fewest = rows["ours"], rows["monai, 4 levels"]
    for row in rows.values():
        assert row["parameters"] == pytest.approx(ours["parameters"], rel=0.03)
    for amp in ("bf16", "off"):  # the figure of the project, against the memory_saving_advice of the two peers
        assert (
            3 * ours[f"saved_bytes_{amp}"]
            < fewest[f"saved_bytes_{amp}"]
            < rows["monai, 3 levels"][f"saved_bytes_{amp}"]
        )
    # Nothing but activations is kept in float32, and they grow with the batch; in bf16 copies of the weights do not.
    assert ours["saved_bytes_per_further_patch_off"] == pytest.approx(ours["saved_bytes_off"], rel=0.001)
    assert ours["saved_bytes_per_further_patch_bf16"] < ours["saved_bytes_bf16"]
    assert "| monai, 4 levels | " in done.stdout
