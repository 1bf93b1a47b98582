"""MONAI's recipe beside ours: error by level in the right units, and a run of seconds from training to table.

Would pass otherwise: noise of 0-to-1 grey values taken for that of -1 to +1 (a factor of 2 in sigma, up to 4 in the
error), x_0 without alpha, a larger budget that begins again instead of going on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from tests.conftest import REPOSITORY
from vesuvius.config.load import read_config
from vesuvius.diffusion.schedule import Schedule
from vesuvius.volume_tools.phantom import write_phantom

pytestmark = pytest.mark.long

TOOL = REPOSITORY / "tools" / "bench" / "recipes_peers.py"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(REPOSITORY / "tools"), *sys.path])
    from bench import recipes_peers

    return recipes_peers


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("volume") / "phantom.zarr"
    write_phantom(path, (64, 192, 192), seed=0)
    return path


def test_the_linear_denoiser_in_monais_terms_has_an_error_of_one(peers: Any, volume: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(peers.config_of(volume, 0)))
    config = read_config(file)
    spectrum = peers.recipes.held_out_patches(config)[1]
    schedule = Schedule.from_config(config.diffusion, spectrum)
    table = torch.from_numpy(peers.recipes.noise_in_model_values(schedule))
    alpha_bar = peers.DDPMScheduler(peers.TIMESTEPS, **peers.BETAS).alphas_cumprod.double()

    def linear(x_t: Tensor, t: Tensor) -> Tensor:
        alpha, sigma = float(alpha_bar[t[0]].sqrt()), float((1 - alpha_bar[t[0]]).sqrt())
        near = (table / (2 * sigma / alpha)).log().abs().argmin()
        ours = schedule.sqrt_alpha_bar[near] * schedule.standardised(2 * x_t / alpha - 1)
        x_0 = schedule.linear_x_0(spectrum, ours, near.expand(len(x_t)))
        return (x_t - alpha * (x_0 + 1) / 2) / sigma

    errors = [error for error in peers.monai_errors(linear, file) if error == error]
    assert len(errors) >= 6
    # Levels that are 20 % apart: at most 1.2 squared.
    assert all(0.69 < error < 1.44 for error in errors), errors


def test_a_larger_budget_goes_on_and_all_is_judged(peers: Any, volume: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = out / "phantom_0_monai_lr_0.001"
    folder.mkdir(parents=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(peers.config_of(volume, 0)))
    steps = peers.train_monai(peers.Task(config, folder, 0, 1.0, 0, 0), 1e-3)[1]
    state = torch.load(folder / "state.pt", weights_only=True)
    assert (state["steps"], state["loader"]["sample_index"]) == (steps, 8 * steps)
    torch.save(state | {"steps": 1000}, folder / "state.pt")
    command = [sys.executable, str(TOOL), f"--volume=phantom={volume}", f"--out={out}", "--lr=1e-3", "--budget=15"]
    command += ["--samples=16", "--ddim=2", "--classifier-steps=4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["recipe"]: row for row in (json.loads(path.read_text()) for path in out.glob("*.json"))}
    assert rows["monai lr 0.001"]["steps"] > 1000
    assert rows["monai lr 0.001"]["calls"] == 2
    assert rows["ours"]["steps"] >= 1
    for row in rows.values():
        assert 0 <= row["figures"]["auc"]["distance"] <= 1
        assert f"| phantom | {row['recipe']} | 0 | 15 | {row['steps']} | " in done.stdout
    assert rows["ours"]["figures"]["air"]["held_out"] == rows["monai lr 0.001"]["figures"]["air"]["held_out"]
