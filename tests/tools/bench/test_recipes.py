"""The comparison of recipes: its errors are relative to the linear denoiser, and its pairs are pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tools.bench import recipes

from tests.conftest import write_array

pytestmark = pytest.mark.long

SMALL = ["model.channels=[8,16]", "model.attention_heads=2", "model.full_res_channels=4"]


def test_a_network_that_was_not_trained_is_the_linear_denoiser_at_every_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "LEVELS", 3)
    monkeypatch.setattr(recipes, "PATCHES", 4)
    z, y, x = np.mgrid[:64, :96, :96]
    stripes = (100 + 80 * (np.sin(x / 3 + y / 9) > 0) + np.random.default_rng(0).integers(0, 9, z.shape)).astype(
        np.uint8
    )
    volume = write_array(tmp_path / "stripes.zarr", stripes)
    nothing = recipes.measure(volume, 0, [*SMALL, "training.lr=1e-12", "training.extra_ema_decays=[0.9]"], 21)
    assert nothing["errors"] == pytest.approx([1, 1, 1], abs=2e-3)
    assert list(nothing["mean"]) == ["ema", "ema_0.9"]
    assert nothing["step_s"] > 0
    trained = recipes.measure(volume, 0, SMALL, 21)
    assert max(abs(error - 1) for error in trained["errors"]) > 4e-3


def test_the_table_compares_recipes_on_one_volume_and_seed() -> None:
    errors = {("a", 0): 0.8, ("a", 1): 0.9, ("b", 0): 0.7, ("b", 1): 0.95}
    rows = [
        {"volume": "v", "seed": seed, "recipe": name, "mean": {"ema": error}, "step_s": 1.0}
        for (name, seed), error in errors.items()
    ]
    assert recipes.summary(rows)[2:] == [
        f"| a | {np.sqrt(0.72):.3f} | 0 of 2 | +0.0% (0.0%) | 1.000 |",
        f"| b | {np.sqrt(0.665):.3f} | 1 of 2 | -3.5% (9.0%) | 1.000 |",
    ]
