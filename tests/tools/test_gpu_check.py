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


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What a rehearsal on a bare machine wrote and printed."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(BARE_MACHINE)
    done = run_check(folder, "--rehearse", PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr
    return read(folder), done.stdout


def test_without_a_gpu_it_says_so_and_exits_2(tmp_path: Path) -> None:
    done = run_check(tmp_path)
    assert done.returncode == 2
    assert "needs a CUDA GPU" in done.stderr
    assert "--rehearse" in done.stderr
    assert not (tmp_path / "check.json").exists()


@pytest.mark.long
def test_a_rehearsal_says_loudly_that_it_is_one(rehearsal: tuple[dict[str, Any], str]) -> None:
    content, text = rehearsal
    assert text.startswith("REHEARSAL")
    assert content["about"]["rehearsal"] is True
    assert content["finished"] is True


@pytest.mark.long
def test_torch_numpy_and_pydantic_are_enough(rehearsal: tuple[dict[str, Any], str]) -> None:
    content, text = rehearsal
    assert [network["name"] for network in content["networks"]] == ["ours", "plain"]
    assert content["skipped"] == ["monai, which cannot be imported"]
    assert "skipped   monai" in text
    assert content["figures"]["patches_s_to_monai"] is None, "unknown is not 0"


@pytest.mark.long
def test_micro_batches_double_until_one_does_not_fit_and_the_check_goes_on(
    rehearsal: tuple[dict[str, Any], str],
) -> None:
    content, _ = rehearsal
    for system in ("ours", "plain"):
        swept = [row for row in content["steps"] if row["system"] == system and not row["settings"]]
        outcomes = [(row["micro_batch"], row["outcome"]) for row in swept]
        assert outcomes == [(1, "ok"), (2, "ok"), (4, "out of memory")]
    default = content["largest"][0]
    assert (default["settings"], default["micro_batch"], default["too_many"]) == ({}, 2, 3)
    assert content["figures"]["largest_micro_batch"] == 2


@pytest.mark.long
def test_every_switch_is_turned_and_every_step_has_its_figures(rehearsal: tuple[dict[str, Any], str]) -> None:
    content, text = rehearsal
    steps = [row for row in content["steps"] if row["outcome"] != "out of memory"]
    turned = [row["settings"] for row in steps if row["settings"]]
    for settings in (
        {"noise": "edm", "optimizer": "muon"},
        {"recompute_norm": False},
        {"channels_last": True},
        {"amp": "fp16"},
        {"amp": "off"},
        {"checkpoint_levels": [0]},
        {"cudnn_benchmark": False},
    ):
        assert settings in turned
    for row in steps:
        assert row["outcome"] == "ok"
        assert row["patches_s"] == pytest.approx(row["micro_batch"] / row["step_s"])
        low, high = row["step_s_range"]
        assert 0 < low <= row["step_s"] <= high
        assert row["waiting_share"] == pytest.approx(row["data_share"] + row["h2d_share"] + row["other_share"])
        assert 0 <= row["waiting_share"] < 1
        assert row["peak_allocated_bytes"] is row["mfu"] is None, "a CPU has neither"
        assert row["predicted_peak_bytes"] > 0, row.get("prediction")
    assert "| ours | 2 | recompute_norm=False |" in text


@pytest.mark.long
def test_losses_agree_between_precisions_and_the_network_is_in_them(rehearsal: tuple[dict[str, Any], str]) -> None:
    parity = {row["amp"]: row for row in rehearsal[0]["parity"]}
    assert list(parity) == ["off", "bf16", "fp16"]
    assert parity["off"]["largest_difference"] == 0
    for amp in ("bf16", "fp16"):
        assert 0 < parity[amp]["largest_difference"] < 0.03
    assert all(row["ok"] for row in [*parity.values(), *rehearsal[0]["self_test"]])


@pytest.mark.long
def test_the_tables_can_be_printed_again_from_the_file(rehearsal: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    content, text = rehearsal
    (tmp_path / "check.json").write_text(json.dumps(content))
    command = [sys.executable, str(REPOSITORY / "tools" / "gpu" / "report.py"), str(tmp_path / "check.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text


@pytest.mark.long
def test_what_the_time_does_not_suffice_for_is_named(tmp_path: Path) -> None:
    done = run_check(tmp_path, "--rehearse", "--minutes=0.05")
    assert done.returncode == 0, done.stderr
    content = read(tmp_path)
    assert "parity of losses" in content["skipped"]
    assert content["steps"] == []
    assert content["figures"]["parity_ok"] is None


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
