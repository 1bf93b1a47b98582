"""Checks the arguments of a loader, and makes its data section of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from vesuvius.config import ArrayConfig, AugmentConfig, DataConfig, NormalizeConfig, ValidationConfig, VolumeConfig
from vesuvius.config.load import read_config
from vesuvius.config.section import natural
from vesuvius.errors import ConfigError, one_line
from vesuvius.stream.options import to_integer

Spec = TypeVar("Spec", bound=ArrayConfig)
PathLike = str | os.PathLike[str]
Volumes = PathLike | VolumeConfig | Sequence[PathLike | VolumeConfig] | DataConfig
Arrays = PathLike | ArrayConfig | Sequence[PathLike | ArrayConfig]

_MASKED_FOREGROUND = 0.5


def data_of(volumes: Volumes, given: dict[str, Any], seed: int | None) -> tuple[DataConfig, int]:
    """Make the data config and the seed from the arguments of a loader."""
    sampling = {
        key: value if key in ("labels", "mask") else natural(value) for key, value in given.items() if value is not None
    }
    if isinstance(volumes, (str, os.PathLike)) and Path(volumes).suffix in (".yaml", ".yml"):
        config = read_config(Path(volumes))
        volumes, seed = config.data, config.seed if seed is None else seed
    seed = 0 if seed is None else to_integer("seed", seed, 0)
    if isinstance(volumes, DataConfig):
        if sampling.get("normalize") is False:
            del sampling["normalize"]
        if sampling:
            raise ConfigError(f"{', '.join(sampling)} cannot be combined with a data section; set it there")
        return volumes, seed
    named = _several("volumes", volumes, VolumeConfig)
    for argument, key in (("labels", "condition"), ("mask", "mask")):
        if argument not in sampling:
            continue
        arrays = _several(argument, sampling[argument], ArrayConfig)
        if len(arrays) != len(named):
            raise ConfigError(f"{argument} has {len(arrays)} entries for {len(named)} volumes; pass one for each")
        named = [volume.model_copy(update={key: each}) for volume, each in zip(named, arrays, strict=True)]
    keys: dict[str, Any] = {"volumes": named}
    if "patch_size" in sampling:
        sizes = _numbers("patch_size", sampling["patch_size"], 3, "voxels (z, y, x)")
        keys["patch_size"] = [to_integer("patch_size", size, 1) for size in sizes]
    square = "patch_size" not in sampling or len({*keys["patch_size"][1:]}) == 1
    flips = sampling.get("augment", True)  # rot90 is left to the default if it is possible
    keys["augment"] = AugmentConfig(flip=flips) if flips and square else AugmentConfig(flip=flips, rot90=False)
    keys["min_foreground"] = sampling.get("min_foreground", _MASKED_FOREGROUND if "mask" in sampling else 0.0)
    if not isinstance(normalize := sampling.get("normalize", True), bool):
        low, high = _numbers("normalize", normalize, 2, "True, False or (low, high)")
        keys["normalize"] = NormalizeConfig(low=float(low), high=float(high))
    keys["validation"] = ValidationConfig(fraction=sampling.get("validation_fraction", 0.0))
    return DataConfig(**keys), seed


def _several(name: str, given: Any, kind: type[Spec]) -> list[Spec]:
    """Convert one or several paths or configs to configs.  Raises ConfigError for anything else."""
    configs = []
    for each in given if isinstance(given, (list, tuple)) else [given]:
        spec = kind(path=os.fspath(each)) if isinstance(each, (str, os.PathLike)) else each
        if not isinstance(spec, kind):
            more = f"; volumes without {name} need a loader of their own" if each is None and name != "volumes" else ""
            entry = f"{name} has an entry of type {type(each).__name__}"
            raise ConfigError(f"{entry}; pass paths or {kind.__name__}s{more}")
        configs.append(spec)
    return configs


def _numbers(name: str, value: Any, count: int, what: str) -> tuple[Any, ...]:
    """Check that a value is a tuple of `count` numbers.  Raises ConfigError for anything else."""
    if not isinstance(value, tuple) or len(value) != count or not all(isinstance(each, Real) for each in value):
        raise ConfigError(f"{name} {value!r} is not valid; set it to {what}")
    return value


def dtype_of_labels(given: Any, stored: str | None) -> torch.dtype | None:
    """Return the dtype of labels on the device; None = as stored.  Raises ConfigError for one that torch lacks."""
    if given is None:
        return torch.int64 if stored and np.dtype(stored).kind in "bui" else None
    if stored is None:
        raise ConfigError(f"label_dtype={given} has no effect without labels; add labels, or remove it")
    try:
        return given if isinstance(given, torch.dtype) else torch.from_numpy(np.empty(0, given)).dtype
    except TypeError as error:
        raise ConfigError(f"label_dtype {given!r} is not a dtype: {one_line(error)}; use torch.int64") from error


def resident_of(given: Any, data: DataConfig) -> bool | float:
    """Return whether the volumes stay in memory, or up to how many GiB; None = as the data section states."""
    wanted = natural(data.resident if given is None else given)
    if given is not None and (not isinstance(wanted, Real) or wanted < 0):
        raise ConfigError(f"resident {given!r} is not valid; set it to True, False or a number of GiB")
    return False if wanted == "auto" else wanted if isinstance(wanted, bool) else float(wanted)


def device_of(device: torch.device | str | None) -> torch.device:
    """Return the device.  Raises ConfigError for one that does not exist or that batches cannot be copied to."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"torch does not recognize device {device!r}: {one_line(error)}; choose another") from error
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device {str(target)!r} is neither the CPU nor a CUDA GPU; use device='cpu' and batch.to({str(target)!r})"
        )
    if target.type == "cuda" and (target.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"device {str(target)!r} does not exist: torch finds {count} CUDA GPUs; choose another, or None"
        )
    return target
