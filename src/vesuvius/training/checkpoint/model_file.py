"""A trained model in one `.safetensors` file: averaged weights, and in its header all else that sampling needs.

    weights            as in `model.safetensors` of a checkpoint
    vesuvius.spectrum  power spectrum of the training voxels
    header             key "vesuvius": JSON with format, step, license, config, volumes and intensity ranges

It holds no code and no pickle, so it can come from anywhere.  `tools/export_model.py` writes it, `download.py` fetches
it.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt, PositiveFloat
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vesuvius.errors import StorageError, one_line
from vesuvius.runlog.files import named_in_utf8

SUFFIX = ".safetensors"
FORMAT = 1
OWN = "vesuvius"
SPECTRUM = f"{OWN}.spectrum"

Three = tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]
Row = tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]
Ranges = tuple[tuple[FiniteFloat, FiniteFloat], ...]


class _Volume(BaseModel):
    """`TrainedVolume`; others' files may hold anything."""

    name: str
    dtype: Annotated[str, Field(pattern="^(bool|u?int(8|16|32|64)|float(16|32|64))$")]
    voxel_size_um: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None
    shape_zyx: Three
    condition_factors: tuple[str, str, str]
    condition_offsets: tuple[str, str, str]
    condition_transform: tuple[tuple[Row, Row, Row], bool] | None
    train: tuple[Three, Three]
    validation: tuple[Three, Three] | None


class Description(BaseModel):
    license: str
    step: NonNegativeInt
    config: dict[str, Any]
    volumes: Annotated[tuple[_Volume, ...], Field(min_length=1)]
    intensities: Annotated[Ranges, Field(min_length=1)]
    condition_intensities: Ranges
    spectrum: dict[str, FiniteFloat]


def is_model_file(path: Path) -> bool:
    """Whether a file names its network, config and data; others hold weights alone.  Raises StorageError: damaged."""
    return path.suffix == SUFFIX and path.is_file() and OWN in _header(path)[0]


def read_model_state(path: Path) -> dict[str, Any]:
    """Return what a `state.pt` holds for sampling: step, config and facts.  Raises StorageError."""
    header, power = _header(path)
    try:
        state = json.loads(header[OWN])
        if (written := state["format"]) != FORMAT:
            newer = ", or a newer one" if isinstance(written, int) and written > FORMAT else ""
            remedy = f"use the version of vesuvius that wrote it{newer}"
            raise StorageError(f"Cannot read the model {path}: its format is {written}, not {FORMAT}; {remedy}")
        described = Description.model_validate(state).model_dump()
        return described | {"spectrum": described["spectrum"] | {"power": power}}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error


def _header(path: Path) -> tuple[dict[str, str], Tensor | None]:
    try:
        with named_in_utf8(path) as named, safe_open(named, "pt") as file:
            return file.metadata() or {}, file.get_tensor(SPECTRUM) if SPECTRUM in file.keys() else None  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> StorageError:
    return StorageError(
        f"Cannot read the model {path}: {type(error).__name__}: {one_line(error)}; copy or download it again"
    )
