"""Checkpoints of format 2, in which the channels of a box came before its voxel positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.training.step.test_step import make_config, make_step, train
from vesuvius.config import Config, TrainingConfig, Triple
from vesuvius.diffusion.network import boxes, unet
from vesuvius.training.checkpoint.format import load_checkpoint
from vesuvius.training.checkpoint.initial import read_initial_weights
from vesuvius.training.checkpoint.save import save_checkpoint
from vesuvius.training.checkpoint.trained import load_weights
from vesuvius.training.step.step import TrainStep

RENAMED = {"from_boxes": "stem_in", "to_boxes": "stem_out", "trunk.to_boxes": "trunk.upsamples"}


def space_to_depth(x: Tensor, stride: Triple) -> Tensor:
    """As in format 2."""
    b, c, z, y, x_size = x.shape
    sz, sy, sx = stride
    moved = x.reshape(b, c, z // sz, sz, y // sy, sy, x_size // sx, sx).permute(0, 1, 3, 5, 7, 2, 4, 6)
    return moved.reshape(b, c * sz * sy * sx, z // sz, y // sy, x_size // sx)


def depth_to_space(x: Tensor, stride: Triple) -> Tensor:
    """As in format 2."""
    b, channels, z, y, x_size = x.shape
    sz, sy, sx = stride
    c = channels // (sz * sy * sx)
    moved = x.reshape(b, c, sz, sy, sx, z, y, x_size).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return moved.reshape(b, c, z * sz, y * sy, x_size * sx)


def as_before(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the names of format 2."""
    found = {}
    for name, weight in weights.items():
        module, _, rest = name.removeprefix("trunk.").partition(".")
        now = f"trunk.{module}" if name.startswith("trunk.") else module
        found[f"{RENAMED.get(now, now)}.{rest}"] = weight
    return found


def write_format_2(directory: Path, step: TrainStep) -> Path:
    state: dict[str, Any] = step.state_dict() | {"step": 3, "best": None}
    state["model"] = as_before(state["model"])
    state["averages"] = {
        name: average | {"weights": as_before(average["weights"])} for name, average in state["averages"].items()
    }
    path = save_checkpoint(directory, 3, state, "name: t\n", TrainingConfig(keep_last=3))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 2}))
    return path


def prediction(step: TrainStep, weights: str) -> Tensor:
    x = torch.randn(2, 1, 8, 16, 16, generator=torch.Generator().manual_seed(9))
    shown = x.repeat(1, 2, 1, 1, 1) if step.network.in_channels > 2 else None
    return step.denoiser(weights)(x, torch.tensor([100, 700]), shown)


@pytest.mark.parametrize(
    ("optimizer", "full", "conditional"), [("adamw", 4, False), ("muon", 4, False), ("muon", 0, True)]
)
def test_a_format_2_checkpoint_predicts_and_continues_as_before(
    optimizer: str, full: int, conditional: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three widths and unequal strides reveal channels of the wrong level and unconverted moments."""
    config = make_config(conditional, optimizer=optimizer, extra_ema_decays=(0.5,), train_batch_size=2)
    levels = {"channels": (8, 12, 16), "strides": ((1, 2, 2), (2, 2, 1)), "full_res_channels": full}
    config = Config.model_validate(config.model_dump() | {"model": config.model.model_dump() | levels})
    with monkeypatch.context() as before:
        before.setattr(unet, "space_to_depth", space_to_depth)
        before.setattr(boxes, "depth_to_space", depth_to_space)
        old = make_step(config)
        train(old, config, 3)
        path = write_format_2(tmp_path / "checkpoints", old)
        names = old.weight_names
        expected = [prediction(old, name) for name in names]
        losses = train(old, config, 3)
    assert "stem_in.weight" in load_file(path / "model.safetensors")
    new = make_step(config)
    new.load_state_dict(load_checkpoint(path))
    for name, predicted in zip(names, expected, strict=True):
        # The same float32 sums in another order.
        torch.testing.assert_close(prediction(new, name), predicted, rtol=1e-4, atol=1e-5)
    # Rounding, through 3 steps of large moments.
    torch.testing.assert_close(train(new, config, 3), losses, rtol=1e-5, atol=0)
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes((path / "model.safetensors").read_bytes())
    for weights in (read_initial_weights(alone)[0], load_weights(path, "ema")):
        new.set_weights(weights)
        torch.testing.assert_close(prediction(new, "raw"), expected[names.index("ema")], rtol=1e-4, atol=1e-5)
    new.set_weights(load_weights(path, "model"))
    torch.testing.assert_close(prediction(new, "raw"), expected[names.index("raw")], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("full", [4, 0])
def test_a_seed_is_the_same_function_as_before(full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(train_batch_size=2)
    config = config.model_copy(update={"model": config.model.model_copy(update={"full_res_channels": full})})
    losses = train(make_step(config), config, 4)
    monkeypatch.setattr(unet, "boxed_weights", lambda _: {})  # initial weights as they were drawn
    monkeypatch.setattr(unet, "space_to_depth", space_to_depth)
    monkeypatch.setattr(boxes, "depth_to_space", depth_to_space)
    torch.testing.assert_close(train(make_step(config), config, 4), losses, rtol=1e-5, atol=0)
