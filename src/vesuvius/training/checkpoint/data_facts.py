"""What a run knows of its data.  A checkpoint and a kept step hold it: sampling and replay need no volumes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np

from vesuvius.config import DataConfig, Triple
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.stream.start.prepare import GreyRange, GreyRanges, Kind, PreparedData
from vesuvius.training.checkpoint.format import read_state
from vesuvius.training.checkpoint.save import write_state
from vesuvius.volumes.alignment import ONES, ZEROS, Fractions
from vesuvius.volumes.box import Box, triple
from vesuvius.volumes.geometry import FloatTriple


@dataclass(frozen=True)
class TrainedVolume:
    """A volume that a model is trained on."""

    name: str  # path and level
    dtype: np.dtype[Any]  # stored dtype of its voxels
    voxel_size_um: FloatTriple | None  # edge lengths (z, y, x), or None where unknown
    shape_zyx: Triple | None = None
    # condition_factors, condition_offsets: how its condition lies in it, as in `Alignment`
    condition_factors: Fractions = ONES
    condition_offsets: Fractions = ZEROS
    within: Box | None = None  # the part that is split, as in `PreparedData`; None = all


@dataclass(frozen=True, eq=False)
class DataFacts:
    """The data that a model is trained on, one entry per `data.volumes` where plural."""

    volumes: tuple[TrainedVolume, ...]
    greys: GreyRanges  # their grey ranges
    spectrum: Spectrum  # of their voxels

    def state_dict(self) -> dict[str, Any]:
        """As tensors and plain data."""
        volumes = [
            vars(volume)
            | {"dtype": volume.dtype.name}
            | {key: tuple(map(str, vars(volume)[key])) for key in ("condition_factors", "condition_offsets")}
            for volume in self.volumes
        ]
        greys = {"greys": self.greys.volumes, "condition_greys": self.greys.conditions}
        return {
            "volumes": volumes,
            **{key: [[grey.low, grey.high] for grey in ranges] for key, ranges in greys.items()},
            "spectrum": self.spectrum.state_dict(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """What `state_dict` returned.  Raises KeyError, TypeError and ValueError where `state` lacks it."""
        volumes = state["volumes"]
        greys, conditions = (tuple(GreyRange(*pair) for pair in state[key]) for key in ("greys", "condition_greys"))
        return cls(
            tuple(
                TrainedVolume(
                    volume["name"],
                    np.dtype(volume["dtype"]),
                    volume["voxel_size_um"],
                    volume["shape_zyx"],
                    triple(map(Fraction, volume["condition_factors"])),
                    triple(map(Fraction, volume["condition_offsets"])),
                    volume["within"],
                )
                for volume in volumes
            ),
            GreyRanges(greys, conditions),
            Spectrum.from_state(state["spectrum"]),
        )


def trained_volumes(data: PreparedData) -> tuple[TrainedVolume, ...]:
    """The volumes of prepared data."""
    kind: Kind = "condition" if data.conditions else "volume"
    lies = [data.array(kind, number)[1] for number in range(len(data.volumes))]
    return tuple(
        TrainedVolume(v.name, v.dtype, v.voxel_size_um, v.shape_zyx, found.factors, found.offsets, within)
        for v, found, within in zip(data.volumes, lies, data.within, strict=True)
    )


def read_facts(path: Path, config: DataConfig) -> DataFacts | None:
    """What `write_facts` has kept for such a config; None where it is not there or not whole."""
    try:
        state = read_state(path)
        return DataFacts.from_state(state) if state["config"] == _of_voxels(config) else None
    except (OSError, KeyError, TypeError, ValueError):
        return None


def write_facts(path: Path, config: DataConfig, facts: DataFacts) -> None:
    """Keep them for other runs on the same data.  Raises OSError."""
    write_state(path, facts.state_dict() | {"config": _of_voxels(config)})


def _of_voxels(config: DataConfig) -> str:
    """What of a config the facts follow from; not how voxels are fetched."""
    return config.model_dump_json(exclude={"store"})
