"""Runs of the door `train` in the current directory, and what they leave, for the tests of whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vesuvius import train
from vesuvius.engine.checkpoint import list_checkpoints, load_checkpoint
from vesuvius.observe.records import read_records

WriteConfig = Callable[..., Path]


def vesuvius_train(config: Path, *arguments: str) -> int:
    return train.main(["--config", str(config), *arguments])


def final_weights(name: str = "tiny") -> dict[str, torch.Tensor]:
    """The raw weights and each average of the newest checkpoint."""
    state = load_checkpoint(list_checkpoints(Path("runs") / name / "checkpoints")[-1])
    averages = {f"{a}.{k}": v for a, average in state["averages"].items() for k, v in average["weights"].items()}
    return state["model"] | averages


def records_of(kind: str, name: str = "tiny") -> list[dict[str, Any]]:
    return [record for record in read_records(Path("runs") / name / "metrics.jsonl") if record["kind"] == kind]


def steps_of(name: str = "tiny") -> list[dict[str, Any]]:
    return records_of("step", name)
