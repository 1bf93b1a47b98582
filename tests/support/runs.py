"""Calls of `vesuvius train` in the current directory, and their results, for tests of whole runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.conftest import TINY_MODEL
from tests.support import fork_server
from vesuvius.commands import train
from vesuvius.experiments import trainer
from vesuvius.runlog.records import read_records
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint

WriteConfig = Callable[..., Path]
PATCH = (8, 16, 16)


def fork_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the trials of a tune from a process that has torch imported."""
    stand_in = SimpleNamespace(**vars(subprocess) | {"Popen": fork_server.start})
    monkeypatch.setattr(trainer, "subprocess", stand_in)


def vesuvius_train(config: Path, *arguments: str) -> int:
    return train.main(["--config", str(config), *arguments])


def train_in(place: Path, *configs: Path) -> Path:
    """Two steps of each config; returns the directory of the runs."""
    with chdir(place):
        for config in configs:
            assert vesuvius_train(config, "training.max_steps=2", "training.save_every=2") == 0
    return place


def write_config(path: Path, volumes: list[dict[str, Any]], data: dict[str, Any]) -> Path:
    """A tiny config of ten steps, which samples in three."""
    config = {
        "name": path.stem,
        "data": {"volumes": volumes, "patch_size": list(PATCH), "patches_per_region": 4} | data,
        "training": {
            "train_batch_size": 4,
            "workers": 0,
            "steps_per_epoch": 10,
            "warmup_steps": 3,
            "lr": 1e-3,
            "ema_decay": 0.9,
            "extra_ema_decays": [0.5],
            "save_every": 5,
            "validate_every": 0,
        },
        "diffusion": {"sampler_steps": 3},
        "monitor": {"tensorboard": False},
        "model": TINY_MODEL | {"channels": [8]},
    }
    path.write_text(yaml.safe_dump(config))
    return path


def final_weights(name: str = "tiny") -> dict[str, torch.Tensor]:
    """Raw weights and averages of the newest checkpoint."""
    state = load_checkpoint(list_checkpoints(Path("runs") / name / "checkpoints")[-1])
    averages = {f"{a}.{k}": v for a, average in state["averages"].items() for k, v in average["weights"].items()}
    return state["model"] | averages


def assert_same_weights(name: str, other: str = "tiny") -> None:
    """Assert that two runs ended with identical bits."""
    weights, others = final_weights(name), final_weights(other)
    assert weights.keys() == others.keys()
    for key, weight in weights.items():
        assert torch.equal(weight, others[key]), key


def records_of(kind: str, name: str = "tiny") -> list[dict[str, Any]]:
    return [record for record in read_records(Path("runs") / name / "metrics.jsonl") if record["kind"] == kind]


def steps_of(name: str = "tiny") -> list[dict[str, Any]]:
    return records_of("step", name)
