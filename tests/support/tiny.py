"""An experiment that takes seconds on one core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TINY_MODEL: dict[str, Any] = {
    "channels": [8, 16],
    "blocks_per_level": 1,
    "stem_stride": [1, 2, 2],
    "full_res_channels": 4,
    "attention_heads": 2,
}

TINY_TRAINING: dict[str, Any] = {
    "train_batch_size": 2,
    "accumulate_steps": 1,
    "workers": 0,
    "steps_per_epoch": 10,
    "epochs": 2,
    "warmup_steps": 3,
    "lr": 1e-3,
    "ema_decay": 0.9,
    "save_every": 10,
    "validate_every": 0,
}


def tiny_sections(name: str, volume: Path) -> dict[str, Any]:
    """All sections of its config, as in YAML."""
    return {
        "name": name,
        "data": {
            "volumes": [{"path": str(volume)}],
            "patch_size": [8, 16, 16],
            "patches_per_region": 4,
        },
        "training": dict(TINY_TRAINING),
        "diffusion": {"sampler_steps": 3},
        "monitor": {"tensorboard": False},
        # Of one level and without the blocks at full resolution, which tests of networks cover, a step takes a third.
        "model": TINY_MODEL | {"channels": [8], "full_res_channels": 0},
    }
