"""The data that a model was trained on, and its network, from a checkpoint, so that sampling needs no volumes.

`state.pt` is memory-mapped: only what is used is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from operator import gt
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vesuvius.config import Config, DataConfig, Triple
from vesuvius.config.load import parse_stored
from vesuvius.diffusion.estimate import Condition, predict
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.runlog.units import format_sizes
from vesuvius.stream.start.prepare import IntensityRange, IntensityRanges, PreparedData
from vesuvius.training.checkpoint.format import (
    STATE,
    check_files,
    digest,
    load_state,
    load_weights_file,
    read_digests,
    stored_averages,
    weights_file,
)
from vesuvius.training.checkpoint.model_file import read_model_state
from vesuvius.training.checkpoint.save import write_state
from vesuvius.training.step.setup import (
    AmpMode,
    autocast,
    build_meta_network,
    build_network,
    parameter_count,
    resolve_amp,
)
from vesuvius.training.step.step import weight_problems
from vesuvius.volumes.affine import Rows
from vesuvius.volumes.alignment import Fractions
from vesuvius.volumes.box import Box, format_box, is_inside, shape_of, triple
from vesuvius.volumes.geometry import FloatTriple

_LAST_WEIGHTS = "model"
_ALIGNMENT = ("condition_factors", "condition_offsets")


@dataclass(frozen=True)
class TrainedVolume:
    """A volume that a model was trained on."""

    name: str  # path and level
    dtype: np.dtype[Any]  # stored dtype of its voxels
    voxel_size_um: FloatTriple | None  # edge lengths (z, y, x), or None if unknown
    shape_zyx: Triple
    # alignment of the condition, as in `Alignment`
    condition_factors: Fractions
    condition_offsets: Fractions
    train: Box
    validation: Box | None
    condition_transform: tuple[Rows, bool] | None = None  # if it is an `AffineAlignment`


@dataclass(frozen=True, eq=False)
class DataFacts:
    """The data that a model was trained on; one entry per `data.volumes` in the tuples."""

    volumes: tuple[TrainedVolume, ...]
    intensities: IntensityRanges  # their intensity ranges
    spectrum: Spectrum  # of their voxels
    fixed_patches: tuple[str, ...] = ()  # `FixedPatches.fingerprint`; () = unknown

    @property
    def voxel_size_um(self) -> FloatTriple | None:
        """Edge lengths (z, y, x) if they are known and equal in all volumes."""
        sizes = {volume.voxel_size_um for volume in self.volumes}
        return sizes.pop() if len(sizes) == 1 else None

    def state_dict(self) -> dict[str, Any]:
        volumes = [
            vars(volume)
            | {"dtype": volume.dtype.name}
            | {key: tuple(map(str, vars(volume)[key])) for key in _ALIGNMENT}
            for volume in self.volumes
        ]
        intensities = {"intensities": self.intensities.volumes, "condition_intensities": self.intensities.conditions}
        return {
            "volumes": volumes,
            **{key: [[intensity.low, intensity.high] for intensity in ranges] for key, ranges in intensities.items()},
            "spectrum": self.spectrum.state_dict(),
            "fixed_patches": self.fixed_patches,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], path: Path) -> Self:
        """Inverse of `state_dict`.  Raises StorageError: the state, read from `path`, is of an earlier version."""
        volumes = []
        try:
            for stored in state["volumes"]:
                known = {"condition_transform": None} | stored
                known = {key.name: known[key.name] for key in fields(TrainedVolume)}  # others are of earlier versions
                known |= {key: triple(map(Fraction, stored[key])) for key in _ALIGNMENT}
                volumes.append(TrainedVolume(**known | {"dtype": np.dtype(stored["dtype"])}))
            intensities, conditions = (
                tuple(IntensityRange(*pair) for pair in state[key]) for key in ("intensities", "condition_intensities")
            )
            ranges, spectrum = IntensityRanges(intensities, conditions), Spectrum.from_state(state["spectrum"])
            return cls(tuple(volumes), ranges, spectrum, tuple(state.get("fixed_patches", ())))
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise StorageError(
                f"{path} does not describe its training data ({type(error).__name__}: {one_line(error)}): it is from "
                "an earlier version of vesuvius; use that version, or start a new run"
            ) from error


def trained_volumes(data: PreparedData) -> tuple[TrainedVolume, ...]:
    """Describe the volumes of prepared data."""
    alignments = [data.array(number, len(arrays) - 1)[1] for number, arrays in enumerate(data.arrays)]
    return tuple(
        TrainedVolume(
            *(v.name, v.dtype, v.voxel_size_um, v.shape_zyx, found.factors, found.offsets),
            **vars(split),
            condition_transform=found.transform,
        )
        for v, found, split in zip(data.volumes, alignments, data.splits, strict=True)
    )


def read_facts(path: Path, config: DataConfig) -> DataFacts | None:
    """Facts stored by `write_facts` for the same data; None if absent or incomplete."""
    try:
        state = load_state(path)
        return DataFacts.from_state(state, path) if state["config"] == voxel_settings(config) else None
    except (StorageError, KeyError, TypeError):
        return None


def write_facts(path: Path, config: DataConfig, facts: DataFacts) -> None:
    """Store facts for other runs on the same data.  Raises OSError."""
    write_state(path, facts.state_dict() | {"config": voxel_settings(config)})


def voxel_settings(config: DataConfig) -> str:
    """The settings that determine the facts, without those that only affect fetching."""
    return config.model_dump_json(exclude={"store", "resident"})


@dataclass(eq=False)
class CheckpointInfo:
    """A checkpoint to sample with, or to resume."""

    checkpoint: Path  # its directory, or a model file
    step: int  # optimizer steps done
    config: Config  # of the run, with overrides
    data: DataFacts  # training data
    # of a resume:
    state: dict[str, Any] = field(default_factory=dict)  # its contents; emptied by `restore`
    drift: list[str] = field(default_factory=list)  # permitted config changes, one line each, then their effects
    accepted: list[str] = field(default_factory=list)  # other differences, accepted by --allow-drift
    other_data: bool = False  # intensity ranges and quarantine belong to other data


class Denoiser:
    """A trained network on a device, as a `Denoise`."""

    def __init__(
        self, info: CheckpointInfo, weights: str, schedule: Schedule, device: torch.device, compiled: bool
    ) -> None:
        """Raises like `load_weights`, and StorageError if the weights belong to another network."""
        self._device, self._schedule = device, schedule
        self.amp: AmpMode = resolve_amp(info.config.training.amp, device)
        found = load_weights(info.checkpoint, weights)
        # Before the network takes memory: a config from elsewhere may name one of any size.
        if problems := weight_problems(build_meta_network(info.config).state_dict(), found):
            raise StorageError(
                f"The {weights} weights of {info.checkpoint} do not fit the network of their config: {problems}; use "
                "the version of vesuvius that trained them"
            )
        self.network = build_network(info.config.with_training(compile=compiled), device).eval()
        self.parameters = parameter_count(self.network)
        self.network.load_state_dict(found)

    @torch.no_grad()
    def __call__(self, x_t: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
        with autocast(self._device, self.amp):
            return predict(self.network, self._schedule, x_t, t, condition)


def read_checkpoint_info(checkpoint: Path, overrides: Sequence[str] = ()) -> CheckpointInfo:
    """Read what a checkpoint was trained on, and its config with overrides (`key.path=value`).

    Raises ConfigError: the overrides do not fit the config; StorageError: the state cannot be read.
    """
    is_file = checkpoint.is_file()
    state = read_model_state(checkpoint) if is_file else load_state(checkpoint / STATE, mmap=True)
    try:
        config = parse_stored(state["config"], overrides, source=str(checkpoint if is_file else checkpoint / STATE))
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n(only keys with a `vesuvius sample` option can change for a trained model)"
        ) from error
    data = DataFacts.from_state(state, checkpoint)
    if is_file and (problem := _contradiction(config, data)):
        raise StorageError(f"The model {checkpoint} contradicts itself: {problem}; copy or download it again")
    return CheckpointInfo(checkpoint, state["step"], config, data)


def _contradiction(config: Config, data: DataFacts) -> str:
    """Return how the data of a model file, which anyone may have written, contradict its config; '' if not.  Pure."""
    patch, count, spectrum = config.data.patch_size, len(config.data.volumes), data.spectrum
    conditions = count if config.has_condition and not config.data.class_values else 0
    described = [len(each) for each in (data.volumes, data.intensities.volumes, data.intensities.conditions)]
    if described != [count, count, conditions]:
        return f"{described} volumes, intensity ranges and those of conditions instead of {[count, count, conditions]}"
    if (*spectrum.power.shape[:2], spectrum.size_x) != patch:
        return f"a spectrum of {format_sizes(spectrum.power.shape)} frequencies for patches of {format_sizes(patch)}"
    for volume in data.volumes:
        shape, parts = volume.shape_zyx, [part for part in (volume.train, volume.validation) if part]
        if bad := [part for part in parts if not is_inside(part, shape) or any(map(gt, patch, shape_of(part)))]:
            return f"patches of {format_sizes(patch)} in {format_box(bad[0])} of {format_sizes(shape)} voxels"
        if min(volume.condition_factors) <= 0:
            return f"condition factors of {format_sizes(volume.condition_factors)}"
    return ""


def load_weights(checkpoint: Path, weights: str) -> dict[str, Tensor]:
    """Weights of an average ("ema", "ema_0.999") or of the last step ("model"), by name, on the CPU.

    Raises ConfigError: the checkpoint has none of that name; StorageError: the file is missing or was changed.
    """
    check_weights(checkpoint, weights)
    if checkpoint.is_file():
        return load_weights_file(checkpoint)
    path = checkpoint / _file_of(weights)
    check_files(checkpoint, path.name)
    if weights == _LAST_WEIGHTS:
        model: dict[str, Tensor] = load_state(path, mmap=True)["model"]
        return model
    return load_weights_file(path)


def check_weights(checkpoint: Path, weights: str) -> str:
    """SHA-256 sum of the file with these weights.  Raises ConfigError if the checkpoint lacks them."""
    is_file = checkpoint.is_file()
    available = ["ema"] if is_file else [*stored_averages(checkpoint), _LAST_WEIGHTS]
    if weights not in available:
        raise ConfigError(f"{checkpoint} has no weights {weights!r}; choose --weights from {', '.join(available)}")
    return digest(checkpoint) if is_file else read_digests(checkpoint)[_file_of(weights)]


def _file_of(weights: str) -> str:
    return STATE if weights == _LAST_WEIGHTS else weights_file(weights)
