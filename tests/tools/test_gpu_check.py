"""The check of a GPU, rehearsed on the CPU: all its code but what asks CUDA for memory and kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY

TOOL = REPOSITORY / "tools" / "gpu_check.py"

# A sitecustomize module, which runs before the tool: the machine has torch, numpy, zarr and pydantic, and no vesuvius.
BARE_MACHINE = f"""
import sys

REFUSED = {{
    "PIL", "diffusers", "einops", "google_crc32c", "grpc", "monai", "moto", "obstore", "psutil", "pyarrow", "ray",
    "rich", "safetensors", "tensorstore", "yaml", "zarrs",
}}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
sys.path[:] = [entry for entry in sys.path if entry != {str(REPOSITORY / "src")!r}]
"""


def run_check(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), f"--json={folder / 'check.json'}", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment)


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "check.json").read_text())
    return content


@pytest.mark.long
def test_without_a_gpu_it_says_so_and_exits_2(tmp_path: Path) -> None:
    done = run_check(tmp_path)
    assert done.returncode == 2
    assert "needs a CUDA GPU" in done.stderr
    assert "--rehearse" in done.stderr
    assert not (tmp_path / "check.json").exists()


@pytest.mark.long
def test_a_rehearsal_on_a_bare_machine_says_so_and_has_all_its_figures(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BARE_MACHINE)
    done = run_check(tmp_path, "--rehearse", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    content, text = read(tmp_path), done.stdout
    assert text.startswith("REHEARSAL")
    assert content["finished"] is content["about"]["rehearsal"] is True
    assert [network["name"] for network in content["networks"]] == ["ours", "plain"]
    assert content["skipped"] == ["monai, which cannot be imported"]
    assert content["figures"]["patches_s_to_monai"] is None, "unknown is not 0"
    for system in ("ours", "plain"):
        swept = [row for row in content["steps"] if row["system"] == system and not row["settings"]]
        outcomes = [(row["micro_batch"], row["outcome"]) for row in swept]
        assert outcomes == [(1, "ok"), (2, "ok"), (4, "out of memory")]
    default = content["largest"][0]
    assert (default["settings"], default["micro_batch"], default["too_many"]) == ({}, 2, 3)
    steps = [row for row in content["steps"] if row["outcome"] != "out of memory"]
    turned = [row["settings"] for row in steps if row["settings"]]
    switches = ("noise", "recompute_norm", "channels_last", "amp", "checkpoint_levels", "cudnn_benchmark")
    assert set(switches) <= {key for settings in turned for key in settings}
    for row in steps:
        assert row["outcome"] == "ok"
        assert row["patches_s"] == pytest.approx(row["micro_batch"] / row["step_s"])
        assert row["waiting_share"] == pytest.approx(row["data_share"] + row["h2d_share"] + row["other_share"])
        assert row["peak_allocated_bytes"] is row["mfu"] is None, "a CPU has neither"
        assert row["predicted_peak_bytes"] > 0, row.get("prediction")
    parity = {row["amp"]: row for row in content["parity"]}
    assert list(parity) == ["off", "bf16", "fp16"]
    assert parity["off"]["largest_difference"] == 0
    assert all(0 < parity[amp]["largest_difference"] < 0.03 for amp in ("bf16", "fp16"))
    assert all(row["ok"] for row in [*parity.values(), *content["self_test"]])


@pytest.mark.long
def test_a_failed_parity_ends_in_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(REPOSITORY / 'tools')!r})\n"
        "from gpu import parity\n"
        "parity.PARITY_LIMIT = 0.0\n"  # float32 itself differs by 0, which is not below it
    )
    done = run_check(tmp_path, "--rehearse", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert read(tmp_path)["figures"]["parity_ok"] is False
    assert "| off | 0.0e+00 |" in done.stdout
    assert "NO" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_memory_is_measured_and_the_plan_is_near_it(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), f"--json={tmp_path / 'check.json'}", "--minutes=2", "--seconds=0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    content = read(tmp_path)
    row = content["steps"][0]
    assert row["peak_reserved_bytes"] >= row["peak_allocated_bytes"] > 0
    # The tolerance of the prediction.
    assert row["predicted_peak_bytes"] == pytest.approx(row["peak_allocated_bytes"], rel=0.15)
    assert content["figures"]["waiting_share"] <= 0.02
