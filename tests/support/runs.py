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

from tests.support import fork_server
from vesuvius.commands import train
from vesuvius.experiments import trainer
from vesuvius.runlog.records import read_records
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint

WriteConfig = Callable[..., Path]


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
