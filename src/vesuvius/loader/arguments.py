"""Checks the arguments of a loader, and makes its data section of them."""

import os
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vesuvius.accelerator import choose_device
from vesuvius.config import ArrayConfig, AugmentConfig, DataConfig, NormalizeConfig, ValidationConfig, VolumeConfig
from vesuvius.config.load import read_config, read_volumes
from vesuvius.config.patterns import NAME, match_volumes
from vesuvius.config.section import natural
from vesuvius.errors import ConfigError, one_line
from vesuvius.stream.options import to_integer

PathLike = str | os.PathLike[str]
Array = PathLike | ArrayConfig
Volumes = PathLike | VolumeConfig | Sequence[PathLike | VolumeConfig | Sequence[Array]] | DataConfig
Arrays = Array | Sequence[Array | Sequence[Array]]

_MASKED_FOREGROUND = 0.5
_OF_DATA = "patch_size", "class_weights", "min_foreground"  # arguments that are keys of a data section


def data_of(volumes: Volumes, given: dict[str, Any], seed: int | None) -> tuple[DataConfig, int]:
    """Make the data config and the seed from the arguments of a loader.  Raises ConfigError."""
    arguments = given.keys() - {"normalize"}
    given = {key: value for key, value in given.items() if value is not None}
    normalize = natural(given.pop("normalize", True))
    if isinstance(volumes, (str, os.PathLike)) and Path(volumes).suffix in (".yaml", ".yml"):
        file = Path(os.path.expanduser(volumes))
        if (found := read_volumes(file)) is None:
            config = read_config(file)
            volumes, seed = config.data, config.seed if seed is None else seed
        elif unknown := sorted(found.keys() - {"volumes", *arguments}):
            known = ", ".join(sorted(arguments))
            raise ConfigError(f"{volumes}: unknown keys {', '.join(unknown)}; use volumes, {known}")
        else:
            try:
                return data_of(_listed(found.pop("volumes")), found | given | {"normalize": normalize}, seed)
            except ConfigError as error:
                raise ConfigError(f"{volumes}: {error}") from None
    seed = 0 if seed is None else to_integer("seed", seed, 0)
    if isinstance(volumes, DataConfig):
        if unused := [*given, *(["normalize"] if not isinstance(normalize, bool) else [])]:
            raise ConfigError(f"{', '.join(unused)} cannot be combined with a data section; set it there")
        return match_volumes(volumes), seed
    for argument, arrays in ("volumes", volumes), ("labels", given.get("labels")), ("mask", given.get("mask")):
        check_paths(argument, arrays)
    keys: dict[str, Any] = {name: given[name] for name in _OF_DATA if name in given}
    sizes = natural(keys.get("patch_size"))
    # rot90 is left to the default if it is possible
    may_rotate = given.get("augment", True) and not (isinstance(sizes, tuple) and len({*sizes[1:]}) > 1)
    keys["augment"] = AugmentConfig(flip=given.get("augment", True), **({} if may_rotate else {"rot90": False}))
    match normalize:
        case bool():
            pass
        case (low, high):
            keys["normalize"] = NormalizeConfig(low=low, high=high)
        case _:
            raise ConfigError(f"normalize {normalize!r} is not valid; set it to True, False or (low, high)")
    keys["validation"] = ValidationConfig(fraction=given.get("validation_fraction", 0.0))
    entries = list(DataConfig(volumes=tuple(map(_volume, _listed(volumes))), min_foreground=1.0).volumes)
    for argument in [name for name in ("labels", "mask") if name in given]:
        arrays = _listed(given[argument])
        if len(arrays) == 1 and NAME in str(arrays[0]):
            arrays *= len(entries)
        if len(arrays) != len(entries):
            remedy = "pass one for each, and several labels of one volume as a tuple"
            raise ConfigError(f"{argument} has {len(arrays)} entries for {len(entries)} volumes; {remedy}")
        if any(each is None for each in arrays):
            raise ConfigError(f"{argument} has an entry None; volumes without {argument} need a loader of their own")
        if argument == "mask":
            entries = [_changed(entry, mask=each) for entry, each in zip(entries, arrays, strict=True)]
            continue
        several = zip(entries, map(_first_and_more, arrays), strict=True)
        entries = [_changed(entry, condition=first, more_labels=more) for entry, (first, more) in several]
    if "ignore_label" in given:
        if any(entry.mask or entry.condition is None for entry in entries):
            raise ConfigError("ignore_label needs labels, and no mask, as it makes a mask of them; add or remove these")
        marks = {"ignore": (given["ignore_label"],)}
        entries = [_changed(entry, mask=entry.labels[0].given | marks) for entry in entries]
    if "min_foreground" not in given:
        least = {"min_foreground": _MASKED_FOREGROUND}
        entries = [_changed(each, **least) if each.mask and each.min_foreground is None else each for each in entries]
    return match_volumes(DataConfig(volumes=tuple(entries), **keys)), seed


def _changed(volume: VolumeConfig, **changes: Any) -> VolumeConfig:
    return VolumeConfig(**volume.given | changes)


def check_paths(argument: str, given: Any) -> None:
    """Raise ConfigError for an array in place of its path, also in nested lists; None has messages of its own."""
    if isinstance(given, (list, tuple)):
        for each in given:
            check_paths(argument, each)
    elif not isinstance(given, (str, os.PathLike, ArrayConfig, Mapping, type(None))):
        found = f"{argument}: {one_line(repr(given), 80)} ({type(given).__name__}) is not a path or config"
        raise ConfigError(f"{found}; pass the path or address of a zarr array, or write the array to one")


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _first_and_more(given: Any) -> tuple[Any, list[Any]]:
    first, *more = _listed(given) or [given]
    return first, more


def _volume(given: Any) -> Any:
    """Return a volume with its channels, if there are several."""
    first, more = _first_and_more(given)
    fields = first.given if isinstance(first, ArrayConfig) else {"path": first}
    return fields | {"channels": (*fields.get("channels", ()), *more)} if more else first


def tensor_dtype(
    stored: Sequence[np.dtype[Any]], remedy: str = "set normalize=True, or convert one of the channels"
) -> torch.dtype:
    """Return the smallest dtype that holds the values of all.  Raises ConfigError, with a remedy: there is none."""
    common = np.result_type(*stored)
    if common.kind == "f" and any(dtype.kind in "iu" and dtype.itemsize == 8 for dtype in stored):
        raise ConfigError(f"No dtype holds all values of {' and '.join(map(str, stored))}; {remedy}")
    return torch.from_numpy(np.empty(0, common)).dtype


def dtype_of_labels(given: Any, stored: Sequence[np.dtype[Any]]) -> torch.dtype | None:
    """Return the dtype of labels on the device; None without labels.  Raises ConfigError for one that torch lacks."""
    if given is None:
        integers = all(dtype.kind in "bui" for dtype in stored)
        return torch.int64 if integers and stored else tensor_dtype(stored, "set label_dtype") if stored else None
    if not stored:
        raise ConfigError(f"label_dtype={given} has no effect without labels; add labels, or remove it")
    try:
        return given if isinstance(given, torch.dtype) else torch.from_numpy(np.empty(0, given)).dtype
    except TypeError as error:
        raise ConfigError(f"label_dtype {given!r} is not a dtype: {one_line(error)}; use torch.int64") from error


def resident_of(given: Any, data: DataConfig) -> bool | float:
    """Return whether the volumes stay in memory, or up to how many GiB; None = as the data section states."""
    wanted = natural(data.resident if given is None else given)
    if given is not None and (not isinstance(wanted, Real) or wanted < 0):
        raise ConfigError(f"cache_in_memory {given!r} is not valid; set it to True, False or a number of GiB")
    return False if wanted == "auto" else wanted if isinstance(wanted, bool) else float(wanted)


def device_of(device: torch.device | str | None) -> torch.device:
    """Return the device.  Raises ConfigError for one that does not exist or that batches cannot be copied to."""
    if device is None:
        found = choose_device()
        return torch.device(found.type, torch.accelerator.current_device_index()) if found.type != "cpu" else found
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"torch does not recognize device {device!r}: {one_line(error)}; choose another") from error
    if target.type not in ("cpu", "cuda", choose_device().type):
        remedy = f"use device='cpu' and batch.to({str(target)!r})"
        raise ConfigError(f"device {str(target)!r} is neither the CPU nor a GPU of this machine; {remedy}")
    if target.type != "cpu" and (target.index or 0) >= (count := torch.get_device_module(target).device_count()):
        raise ConfigError(f"device {str(target)!r} does not exist: torch finds {count} GPUs; choose another, or None")
    return target
