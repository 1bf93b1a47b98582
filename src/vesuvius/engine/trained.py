"""From a checkpoint to a network that predicts: what it was trained on, and its weights.

Needs no training data and starts no Ray.  Of `state.pt`, mapped into memory, only what is asked for is read.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vesuvius.config import Config
from vesuvius.config_file import parse_stored
from vesuvius.diffusion.condition import NO_CONDITION, Condition
from vesuvius.diffusion.preconditioning import predict
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.engine.checkpoint import MANIFEST, STATE, readable, stored_averages, weights_file
from vesuvius.engine.found_checkpoint import FoundCheckpoint, find_checkpoint, unreadable
from vesuvius.engine.network import build_network
from vesuvius.engine.resume import stored_greys, stored_scalars, stored_spectrum
from vesuvius.engine.step import AmpMode, autocast, parameter_count, resolve_amp
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.stream.prepare import GreyRanges
from vesuvius.volumes.geometry import FloatTriple

_LAST_WEIGHTS = "model"


@dataclass(frozen=True)
class VolumeFacts:
    """What a checkpoint says of a volume it was trained on.

    Attributes:
        name: path and level.
        dtype: stored dtype of its voxels.
        voxel_size_um: edge lengths (z, y, x), or None where unknown.
    """

    name: str
    dtype: np.dtype[Any]
    voxel_size_um: FloatTriple | None


@dataclass(frozen=True)
class Trained:
    """What a checkpoint says beside its weights.

    Attributes:
        checkpoint: where it is.
        step: optimizer steps it has been trained for.
        config: that of the run, with the overrides.
        volumes: one entry per `data.volumes`.
        greys: their grey ranges.
        spectrum: of their voxels; None in checkpoints of versions that knew no edm.
        scalars: what the network is told of each, float32 [volumes, n].
    """

    checkpoint: FoundCheckpoint
    step: int
    config: Config
    volumes: tuple[VolumeFacts, ...]
    greys: GreyRanges
    spectrum: Spectrum | None
    scalars: NDArray[np.float32]


@dataclass(frozen=True)
class InitialWeights:
    """What a new run starts from.

    Attributes:
        weights: by name, float32 on the CPU.
        source: the file that they are from.
    """

    weights: dict[str, Tensor]
    source: Path


class TrainedNetwork:
    """A network with trained weights, on a device, as a `Denoise`.

    Attributes:
        amp: the dtype it is computed in.
        parameters: number of its weights.
    """

    def __init__(self, trained: Trained, weights: str, schedule: Schedule, device: torch.device) -> None:
        """Reads the weights.  Raises what `load_weights` raises, and StorageError where they are of another network."""
        self._device, self._schedule = device, schedule
        self.amp: AmpMode = resolve_amp(trained.config.training.amp, device)
        self.network = build_network(trained.config, device).eval()
        self.parameters = parameter_count(self.network)
        found = load_weights(trained.checkpoint, weights)
        try:
            self.network.load_state_dict(found)
        except RuntimeError as error:
            raise StorageError(
                "a checkpoint's weights must be those of the network in its config; got "
                f"{one_line(error)} in {trained.checkpoint.path / _file_of(weights)}; use the version of vesuvius that "
                "has trained it"
            ) from error

    @torch.no_grad()
    def __call__(self, x_t: Tensor, t: Tensor, condition: Condition = NO_CONDITION) -> Tensor:
        """What the network says about BCZYX at timesteps [B]."""
        with autocast(self._device, self.amp):
            return predict(self.network, self._schedule, x_t, t, condition)


def read_trained(checkpoint: FoundCheckpoint, overrides: Sequence[str] = ()) -> Trained:
    """What a checkpoint was trained on, and the config to go on with.

    Args:
        overrides: `key.path=value`, put on top of the config that the checkpoint holds.

    Raises:
        ConfigError: the config and the overrides do not go together.
        StorageError: the state cannot be read, or lacks what sampling needs.
    """
    path = checkpoint.path / STATE
    state = _map_state(path)
    try:
        stored = state["config"]
        volumes = tuple(_volume_facts(volume) for volume in state["volumes"])
        scalars, greys, step = stored_scalars(state), stored_greys(state), int(state["step"])
        spectrum = stored_spectrum(state)
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"a checkpoint must say what it was trained on; got {type(error).__name__}: {one_line(error)} in {path}; "
            "it is of an earlier version: train on with `vesuvius train --resume`, and sample from what that saves"
        ) from error
    try:
        config = parse_stored(stored, overrides, source=str(path))
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n(of a trained model only keys that an option of `vesuvius sample` sets can change: give it or "
            "leave it out)"
        ) from error
    return Trained(checkpoint, step, config, volumes, greys, spectrum, scalars)


def load_weights(checkpoint: FoundCheckpoint, weights: str) -> dict[str, Tensor]:
    """The weights of an average ("ema", "ema_0.999") or those of the last step ("model"), by name, on the CPU.

    Reads the file that they are in, and all of it unless the checkpoint was verified.

    Raises:
        ConfigError: the checkpoint has no such weights.
        StorageError: the file is missing, cannot be read or is not the one that was written.
    """
    there = [*stored_averages(checkpoint.path), _LAST_WEIGHTS]
    if weights not in there:
        raise ConfigError(
            f"--weights must be one of {', '.join(there)}, which the checkpoint holds; got {weights!r} of "
            f"{checkpoint.path}; choose another"
        )
    path = checkpoint.path / _file_of(weights)
    checkpoint.check(path.name)
    if weights == _LAST_WEIGHTS:
        model: dict[str, Tensor] = _map_state(path)["model"]
        return model
    return _load_safetensors(path)


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
        source, weights = found.path / weights_file("ema"), load_weights(found, "ema")
    else:
        if (given.parent / MANIFEST).is_file():
            FoundCheckpoint(given.parent, verified=False).check(given.name)
        source, weights = given, _load_safetensors(given)
    return InitialWeights({name: weight.float() for name, weight in weights.items()}, source)


def _file_of(weights: str) -> str:
    return STATE if weights == _LAST_WEIGHTS else weights_file(weights)


def _volume_facts(volume: Mapping[str, Any]) -> VolumeFacts:
    size = volume["voxel_size_um"]
    return VolumeFacts(volume["name"], np.dtype(volume["dtype"]), None if size is None else (size[0], size[1], size[2]))


def _map_state(path: Path) -> dict[str, Any]:
    """The state with its tensors left on the disk until they are used."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise unreadable(path, error) from error
    return state


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error) from error
