"""Runs with spectral noise levels and those of the classic DDPM: trained, resumed, validated and sampled."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from tests.conftest import REPOSITORY
from tests.support.runs import WriteConfig, final_weights, records_of, vesuvius_train
from vesuvius.commands import sample
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint

SPECTRAL = {"noise": "spectral", "sampler": "dpmpp2m", "sampler_steps": 3}
# Of four steps, two of them before a resume.
VALIDATED = {"steps_per_epoch": 2, "save_every": 2, "validate_every": 2, "validate_patches": 2}


def newest(name: str) -> Path:
    return list_checkpoints(Path("runs") / name / "checkpoints")[-1]


def drawn(name: str, out: str) -> np.ndarray:  # type: ignore[type-arg]
    assert sample.main(["--checkpoint", name, "--count", "1", "--out", out]) == 0
    return np.asarray(zarr.open_array(f"{out}/samples.zarr/0", mode="r"))


def test_a_run_measures_its_data_once_and_reuses_the_facts_for_resume_and_sampling(
    tiny_config: WriteConfig, volume: Path
) -> None:
    """The noise levels must not change with the data, or if the volume is gone."""
    config = tiny_config("straight", diffusion=SPECTRAL, training=VALIDATED)
    assert vesuvius_train(config) == 0
    assert re.search(r"noise      spectral, sigma 0\.02 to \d", Path("runs/straight/logs/train_full.log").read_text())
    config = tiny_config("parts", diffusion=SPECTRAL, training=VALIDATED)
    assert vesuvius_train(config, "training.max_steps=2") == 0
    assert vesuvius_train(config, "--resume") == 0
    straight, parts = final_weights("straight"), final_weights("parts")
    assert all(torch.equal(weight, parts[name]) for name, weight in straight.items())
    found = records_of("validation", "parts")
    assert [record["step"] for record in found] == [2, 4]
    for record in found:
        of_levels = record["weights"]["ema"]["relative_bins"]
        judged = [error for error, sigma in zip(of_levels, record["bin_sigmas"], strict=True) if 0.3 <= sigma <= 80]
        assert record["relative_error"] == pytest.approx(np.exp(np.mean(np.log(judged))))
        assert 0 < len(judged) < len(of_levels)
        assert len(of_levels) == len(record["bin_edges"]) - 1
    best = min(found, key=lambda record: record["relative_error"])
    assert found[-1]["best_step"] == best["step"]
    shutil.rmtree(volume)
    assert drawn("parts", "one").tobytes() == drawn("straight", "other").tobytes()


@pytest.mark.long
def test_the_classic_ddpm_is_one_config_away(tiny_config: WriteConfig, volume: Path) -> None:
    tiny = ["model.channels=[8, 16]", "model.full_res_channels=4", "model.attention_heads=2"]
    steps = ["training.max_steps=2", "training.workers=0", "training.validate_every=0", "training.preview_every=0"]
    volumes = f"data.volumes={json.dumps([{'path': str(volume)}])}"
    fewer = ["diffusion.timesteps=20", "diffusion.sampler_steps=20"]
    config = REPOSITORY / "configs" / "ddpm.yaml"
    assert vesuvius_train(config, volumes, *tiny, *steps, *fewer) == 0
    diffusion = load_checkpoint(newest("ddpm"))["config"]["diffusion"]
    classic = {"noise": "linear", "prediction": "eps", "sampler": "ddpm", "min_snr_gamma": None}
    assert {key: diffusion[key] for key in classic} == classic
    assert drawn("ddpm", "out").shape == (1, 8, 32, 32)
