"""From a checkpoint to a network that predicts: where it is, what it was trained on, and its weights.

Needs no training data and starts no Ray.  Of `state.pt`, mapped into memory, only what is asked for is read.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vesuvius.config import Config
from vesuvius.config_file import parse_config
from vesuvius.data.geometry import FloatTriple
from vesuvius.data.prepare import GreyRanges
from vesuvius.diffusion.condition import NO_CONDITION, Condition
from vesuvius.engine.checkpoint import MANIFEST, find_damage, newest_checkpoint
from vesuvius.engine.network import build_network
from vesuvius.engine.resume import stored_greys, stored_scalars
from vesuvius.engine.run_dir import RUNS, RunDir
from vesuvius.engine.step import AmpMode, autocast, parameter_count, resolve_amp
from vesuvius.errors import ConfigError, StorageError, one_line

Weights = Literal["ema", "model"]

_FILE_OF: Mapping[Weights, str] = {"ema": "ema.safetensors", "model": "state.pt"}


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint directory; `verified` where all of it was just read and found whole."""

    path: Path
    verified: bool


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
        scalars: what the network is told of each, float32 [volumes, n].
    """

    checkpoint: FoundCheckpoint
    step: int
    config: Config
    volumes: tuple[VolumeFacts, ...]
    greys: GreyRanges
    scalars: NDArray[np.float32]


class TrainedNetwork:
    """A network with trained weights, on a device, as a `Denoise`.

    Attributes:
        amp: the dtype it is computed in.
        parameters: number of its weights.
    """

    def __init__(self, trained: Trained, weights: Weights, device: torch.device) -> None:
        """Reads the weights.  Raises what `load_weights` raises, and StorageError where they are of another network."""
        self._device = device
        self.amp: AmpMode = resolve_amp(trained.config.training.amp, device)
        self.network = build_network(trained.config, device).eval()
        self.parameters = parameter_count(self.network)
        found = load_weights(trained.checkpoint, weights)
        try:
            self.network.load_state_dict(found)
        except RuntimeError as error:
            raise StorageError(
                "a checkpoint's weights must be those of the network in its config; got "
                f"{one_line(error)} in {trained.checkpoint.path / _FILE_OF[weights]}; use the version of vesuvius that "
                "has trained it"
            ) from error

    @torch.no_grad()
    def __call__(self, x_t: Tensor, t: Tensor, condition: Condition = NO_CONDITION) -> Tensor:
        """The network's prediction for BCZYX at timesteps [B]."""
        with autocast(self._device, self.amp):
            prediction: Tensor = self.network(condition.joined(x_t), t, condition.scalars)
        return prediction


def find_checkpoint(given: Path) -> FoundCheckpoint:
    """What `--checkpoint` means: a run's newest whole checkpoint, or the one that is named.

    Args:
        given: a run directory, the name of one in `runs/`, a checkpoint directory, or its state.pt or ema.safetensors.

    Raises:
        ConfigError: it is none of these, or the run has no checkpoint yet.
        StorageError: the run has checkpoints and none is whole.
    """
    named = [RUNS / given] if given.name == str(given) else []
    try:
        return _find_checkpoint(given, named)
    except PermissionError as error:
        raise StorageError(
            f"a checkpoint must be readable; got {error}; change the permissions or run as its owner"
        ) from error


def _find_checkpoint(given: Path, named: Sequence[Path]) -> FoundCheckpoint:
    for path in (given, *named):
        if path.name in _FILE_OF.values() and path.is_file() and _is_checkpoint(path.parent):
            return FoundCheckpoint(path.parent, verified=False)
        if _is_checkpoint(path):
            return FoundCheckpoint(path, verified=False)
        if RunDir(path).checkpoints.is_dir():
            newest = newest_checkpoint(RunDir(path).checkpoints)
            if newest is None:
                raise ConfigError(
                    f"a run needs a checkpoint to sample from; got {path}, which has none yet; wait for its first "
                    "(training.save_every)"
                )
            return FoundCheckpoint(newest, verified=True)
    what = "which holds none of these" if given.exists() else "which is not there"
    raise ConfigError(
        "--checkpoint must be a run directory, the name of one in runs/, a checkpoint directory, or the "
        f"ema.safetensors or state.pt in one; got {given}, {what}; try runs/NAME or "
        "runs/NAME/checkpoints/step_00000500"
    )


def read_trained(checkpoint: FoundCheckpoint, overrides: Sequence[str] = ()) -> Trained:
    """What a checkpoint was trained on, and the config to go on with.

    Args:
        overrides: `key.path=value`, put on top of the config that the checkpoint holds.

    Raises:
        ConfigError: the config and the overrides do not go together.
        StorageError: the state cannot be read, or lacks what sampling needs.
    """
    path = checkpoint.path / "state.pt"
    state = _map_state(path)
    try:
        text = json.dumps(state["config"], ensure_ascii=False)  # JSON is YAML
        volumes = tuple(_volume_facts(volume) for volume in state["volumes"])
        scalars, greys, step = stored_scalars(state), stored_greys(state), int(state["step"])
        assert scalars is not None
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"a checkpoint must say what it was trained on; got {type(error).__name__}: {one_line(error)} in {path}; "
            "it is of an earlier version: train on with `vesuvius train --resume`, and sample from what that saves"
        ) from error
    try:
        config = parse_config(text, overrides, source=str(path))
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n(of a trained model only keys that an option of `vesuvius sample` sets can change: give it or "
            "leave it out)"
        ) from error
    return Trained(checkpoint, step, config, volumes, greys, scalars)


def load_weights(checkpoint: FoundCheckpoint, weights: Weights) -> dict[str, Tensor]:
    """The averaged weights ("ema") or those of the last step ("model"), by name, on the CPU.

    Reads the file that they are in, and all of it unless the checkpoint was verified.  Raises StorageError: that file
    is missing, cannot be read or is not the one that was written.
    """
    path = checkpoint.path / _FILE_OF[weights]
    if not checkpoint.verified and (damage := find_damage(path.parent, [path.name])):
        raise _unreadable(path, damage)
    if weights == "model":
        model: dict[str, Tensor] = _map_state(path)["model"]
        return model
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _is_checkpoint(path: Path) -> bool:
    """Whether a directory holds any part of a checkpoint: a damaged one is reported as such."""
    return any((path / name).is_file() for name in (MANIFEST, *_FILE_OF.values()))


def _volume_facts(volume: Mapping[str, Any]) -> VolumeFacts:
    size = volume["voxel_size_um"]
    return VolumeFacts(volume["name"], np.dtype(volume["dtype"]), None if size is None else (size[0], size[1], size[2]))


def _map_state(path: Path) -> dict[str, Any]:
    """The state with its tensors left on the disk until they are used."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error
    return state


def _unreadable(path: Path, error: Exception | str) -> StorageError:
    got = error if isinstance(error, str) else f"{type(error).__name__}: {one_line(error)}"
    return StorageError(f"a checkpoint must be as it was written; got {got} for {path}; use another checkpoint")
