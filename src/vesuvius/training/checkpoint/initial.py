"""Weights that a new run starts from (`training.init_from`), and whether they mean there what they mean here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vesuvius.config import Config
from vesuvius.config.describe import flatten
from vesuvius.config.load import parse_stored
from vesuvius.config.yaml_source import read_yaml
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.plan.plan import differences
from vesuvius.training.checkpoint.format import (
    CONFIG,
    MANIFEST,
    STATE,
    check_files,
    find_checkpoint,
    load_state,
    load_weights_file,
    permission_checked,
    weights_file,
)
from vesuvius.training.checkpoint.trained import DataFacts, load_weights
from vesuvius.training.step.step import weight_problems

_SIGMA_MAX = "diffusion.sigma_max"
# Keys that give weights their meaning, and further ones that a new run may change.
_MEANING = (
    *("model.", "diffusion.timesteps", "diffusion.noise", "diffusion.sigma_m", "diffusion.prediction"),
    "data.condition_classes",
)
_NAMED = ("diffusion.", "data.normalize.", "data.condition_", "voxel size")


def read_initial_weights(given: Path) -> tuple[dict[str, Tensor], Path]:
    """Averaged weights named by `training.init_from`, by name, in float32 on the CPU; and their file.

    Args:
        given: as for `find_checkpoint`, or any `.safetensors` file.

    Raises ConfigError: there are no weights; StorageError: they are damaged.
    """
    with permission_checked():
        alone = given.suffix == ".safetensors" and given.is_file()
    if not alone:
        found = find_checkpoint(given, "training.init_from")
        source, weights = found / weights_file("ema"), load_weights(found, "ema")
    else:
        if (given.parent / MANIFEST).is_file():
            check_files(given.parent, given.name)
        source, weights = given, load_weights_file(given)
    # Copies: the file is memory-mapped, and its run may delete it.
    return {name: weight.to(torch.float32, copy=True) for name, weight in weights.items()}, source


def compare_initial(source: Path, now: Config, data_now: DataFacts | None) -> list[str]:
    """Compare the config of a weights file, which lies next to it in a checkpoint, with the one of a new run.

    Returns differences that a new run may have, one line each.  Raises ConfigError: the weights mean something else.
    """
    path, data_then = source.parent / CONFIG, None
    try:
        if is_checkpoint := (source.parent / MANIFEST).is_file():
            check_files(source.parent, CONFIG)
        before = parse_stored(
            read_yaml(path.read_text(encoding="utf-8"), str(path), is_stored=True)[0], source=str(path)
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:  # a ConfigError is a ValueError
        if is_checkpoint:
            raise
        cause = "" if isinstance(error, FileNotFoundError) else f" ({one_line(error)})"
        return [
            f"{source} comes without the config of its run{cause}; make sure yourself that prediction, noise, "
            "timesteps, strides, heads and intensities are those it was trained with"
        ]
    with suppress(StorageError):  # only the weights and their config were copied
        data_then = DataFacts.from_state(load_state(source.parent / STATE, mmap=True), source.parent / STATE)
    data_now = None if data_then is None else data_now
    old, new = _meaning(before, data_then), _meaning(now, data_now)
    lines = differences(old, new)
    same_key = before.diffusion.sigma_max == now.diffusion.sigma_max
    refused = [line for line in lines if line.startswith(_MEANING) and not (same_key and line.startswith(_SIGMA_MAX))]
    if refused:
        raise ConfigError(
            f"The weights of training.init_from={now.training.init_from} mean something else in this run:\n  "
            + "\n  ".join(refused)
            + f"\ncopy these keys from {path}, or give a copy of {source.name} without its config to "
            "start from the weights in spite of it"
        )
    kept = f" (it follows the data; {_SIGMA_MAX}={old.get(_SIGMA_MAX)} keeps the noise levels of the weights)"
    return [line + (kept if line.startswith(_SIGMA_MAX) else "") for line in lines if line.startswith(_NAMED)]


def _meaning(config: Config, data: DataFacts | None) -> dict[str, Any]:
    """Settings by key, with those that stand for others as what they come to."""
    found = flatten(config.model_dump(mode="json")) | {"voxel size, um": data and data.voxel_size_um}
    found["model.strides"] = config.model.level_strides_zyx
    if config.diffusion.noise != "spectral":
        found["diffusion.sigma_min"] = found[_SIGMA_MAX] = None  # without effect
    elif data is not None:
        alpha_bar = float(Schedule.from_config(config.diffusion, data.spectrum).alpha_bar_64[-1])
        found[_SIGMA_MAX] = float(f"{math.sqrt(1 / alpha_bar - 1):.3g}")
    if not config.has_condition:
        found["diffusion.condition_dropout"] = None
    return found


def check_initial_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises ConfigError if weights do not fit a network, possibly on the meta device, or are not finite."""
    if problems := weight_problems(dict(network.named_parameters()), weights):
        raise ConfigError(
            f"The weights of training.init_from do not fit the network: {problems}; copy model.* from their run, or "
            "remove training.init_from"
        )
    if bad := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise ConfigError(
            f"The weights of training.init_from are not finite: NaN or infinity in {', '.join(bad[:3])}{more}; use an "
            "earlier checkpoint of their run, or remove training.init_from"
        )
