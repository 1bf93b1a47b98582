"""From a checkpoint to a network that predicts: what it was trained on, and its weights.

Needs no training data and starts no Ray.  Of `state.pt`, mapped into memory, only what is asked for is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vesuvius.config import Config
from vesuvius.config.load import parse_stored
from vesuvius.diffusion.preconditioning import Condition, predict
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.training.checkpoint.data_facts import DataFacts
from vesuvius.training.checkpoint.format import (
    MANIFEST,
    STATE,
    check_files,
    find_checkpoint,
    load_state,
    load_weights_file,
    read_digests,
    readable,
    stored_averages,
    weights_file,
)
from vesuvius.training.step.network import build_network
from vesuvius.training.step.step import AmpMode, autocast, parameter_count, resolve_amp

_LAST_WEIGHTS = "model"


@dataclass(frozen=True, eq=False)
class CheckpointInfo:
    """What a checkpoint says beside its weights."""

    checkpoint: Path  # where it is
    step: int  # optimizer steps it has been trained for
    config: Config  # that of the run, with the overrides
    data: DataFacts  # what it was trained on


@dataclass(frozen=True)
class InitialWeights:
    """What a new run starts from."""

    weights: dict[str, Tensor]  # by name, float32 on the CPU
    source: Path  # the file that they are from


class Denoiser:
    """A network with trained weights, on a device, as a `Denoise`.

    Attributes:
        amp: the dtype it is computed in.
        parameters: number of its weights.
    """

    def __init__(self, info: CheckpointInfo, weights: str, schedule: Schedule, device: torch.device) -> None:
        """Reads the weights.  Raises what `load_weights` raises, and StorageError where they are of another network."""
        self._device, self._schedule = device, schedule
        self.amp: AmpMode = resolve_amp(info.config.training.amp, device)
        self.network = build_network(info.config, device).eval()
        self.parameters = parameter_count(self.network)
        found = load_weights(info.checkpoint, weights)
        try:
            self.network.load_state_dict(found)
        except RuntimeError as error:
            raise StorageError(
                "a checkpoint's weights must be those of the network in its config; got "
                f"{one_line(error)} in {info.checkpoint / _file_of(weights)}; use the version of "
                "vesuvius that trained it"
            ) from error

    @torch.no_grad()
    def __call__(self, x_t: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        """What the network says about BCZYX at timesteps [B]."""
        with autocast(self._device, self.amp):
            return predict(self.network, self._schedule, x_t, t, condition)


def read_checkpoint_info(checkpoint: Path, overrides: Sequence[str] = ()) -> CheckpointInfo:
    """What a checkpoint was trained on, and the config to continue with.

    Args:
        overrides: `key.path=value`, put on top of the config that the checkpoint holds.

    Raises:
        ConfigError: the config and the overrides do not go together.
        StorageError: the state cannot be read, or lacks what sampling needs.
    """
    path = checkpoint / STATE
    state = load_state(checkpoint, mmap=True)
    try:
        stored = state["config"]
        data, step = DataFacts.from_state(state), int(state["step"])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"a checkpoint must say what it was trained on; got {type(error).__name__}: {one_line(error)} in {path}; "
            "it is from an earlier version: train on with `vesuvius train --resume`, and sample from its new checkpoint"
        ) from error
    try:
        config = parse_stored(stored, overrides, source=str(path))
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n(for a trained model, only keys that have an option of `vesuvius sample` can change: "
            "set or drop that option)"
        ) from error
    return CheckpointInfo(checkpoint, step, config, data)


def load_weights(checkpoint: Path, weights: str) -> dict[str, Tensor]:
    """The weights of an average ("ema", "ema_0.999") or those of the last step ("model"), by name, on the CPU.

    Reads all of the file that they are in.

    Raises:
        ConfigError: the checkpoint has no such weights.
        StorageError: the file is missing, cannot be read or is not the one that was written.
    """
    check_weights(checkpoint, weights)
    path = checkpoint / _file_of(weights)
    check_files(checkpoint, path.name)
    if weights == _LAST_WEIGHTS:
        model: dict[str, Tensor] = load_state(checkpoint, mmap=True)["model"]
        return model
    return load_weights_file(path)


def check_weights(checkpoint: Path, weights: str) -> str:
    """The SHA-256 sum of the file with these weights.  Raises ConfigError where a checkpoint has no such weights."""
    there = [*stored_averages(checkpoint), _LAST_WEIGHTS]
    if weights not in there:
        raise ConfigError(
            f"--weights must be one of {', '.join(there)}, which the checkpoint holds; got {weights!r} of "
            f"{checkpoint}; choose another"
        )
    return read_digests(checkpoint)[_file_of(weights)]


def read_initial_weights(given: Path) -> InitialWeights:
    """The averaged weights that `training.init_from` names, in float32 on the CPU.  Reads them, and nothing else.

    Args:
        given: as `find_checkpoint` takes it, or a `.safetensors` file anywhere.

    Raises:
        ConfigError: there are no weights.
        StorageError: they are damaged.
    """
    with readable():
        alone = given.suffix == ".safetensors" and given.is_file()
    if not alone:
        found = find_checkpoint(given, "training.init_from")
        source, weights = found / weights_file("ema"), load_weights(found, "ema")
    else:
        if (given.parent / MANIFEST).is_file():
            check_files(given.parent, given.name)
        source, weights = given, load_weights_file(given)
    return InitialWeights({name: weight.float() for name, weight in weights.items()}, source)


def _file_of(weights: str) -> str:
    return STATE if weights == _LAST_WEIGHTS else weights_file(weights)
