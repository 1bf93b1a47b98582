"""The input of a network from a volume: its channels, aligned and normalized, and a mask; staged on disk.

An array is staged in blocks of whole chunks, in its stored dtype, so that each chunk is fetched and decoded once,
however many tiles need it.
"""

import itertools
import logging
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.config import (
    ArrayConfig,
    AugmentConfig,
    DataConfig,
    MaskConfig,
    NormalizeConfig,
    Triple,
    ValidationConfig,
    VolumeConfig,
)
from vesuvius.config.section import natural
from vesuvius.errors import ConfigError, one_line
from vesuvius.loader.arguments import check_paths
from vesuvius.loader.intensity import intensity_scales, normalized
from vesuvius.loader.patch_loader import PatchLoader, array_key
from vesuvius.predict.tasks import BlockArray
from vesuvius.predict.tiling import BlockGrid, overhang
from vesuvius.stream.options import to_integer
from vesuvius.stream.start.prepare import IntensityRange, prepare_data
from vesuvius.volumes.alignment import AnyAlignment, log_alignment
from vesuvius.volumes.box import Box, format_box, intersection, relative, scale, shape_of, shifted, slices, triple
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.occupancy import selection
from vesuvius.volumes.store.objects import is_remote
from vesuvius.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

_BLOCK_VOXELS, _SHARDED_VOXELS = 2**21, 2**24
"""Voxels of a staged block, unless a chunk has more; more for shards, whose index is read with each block."""

Ranges = tuple[IntensityRange | None, ...]
"""The intensities of each channel that become -1 and +1; None = as stored."""


class Inputs:
    """The opened arrays of a volume, staged in a folder.  Boxes are in voxels of the box that is predicted."""

    def __init__(
        self, channels: Sequence[ArrayConfig], ranges: Ranges, mask: ArrayConfig | None, box: Any, folder: Path
    ) -> None:
        """Reads metadata.  Raises DataError, and ConfigError if the box is not inside all channels."""
        self.ranges = ranges
        self._scales = [None if each is None else intensity_scales([each]) for each in ranges]
        specs, volumes = (*channels, *([] if mask is None else [mask])), list[Volume]()
        with ExitStack() as opened:
            volumes += (opened.enter_context(open_volume(spec)) for spec in specs)
            names = ["the channel"] * len(channels) + ["the mask"]
            placed = [log_alignment(volumes[0], each, name) for each, name in zip(volumes, names, strict=False)]
            if any(spec.transform for spec in specs):
                raise ConfigError(
                    "A channel or mask has a transform, which only loaders apply; resample it on one grid"
                )
            covered = reduce(intersection, (each.covered for each in placed[: len(channels)]))
            self.box = covered if box is None else checked_box(box, covered)
            self._open = opened.pop_all()
        self.shape_zyx, self.volume = shape_of(self.box), volumes[0]
        pairs = enumerate(zip(volumes, placed, strict=True))
        self.arrays = [_Array(*pair, self.box, folder / f"input{number}") for number, pair in pairs]
        self.channels, self.mask = self.arrays[: len(channels)], self.arrays[-1] if mask is not None else None
        self._counting, self._counted = threading.Lock(), self._fetched()  # of metadata

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for array in self.arrays:
            if array.volume.nonfinite:
                array.volume.nonfinite.warn()
        self.close()

    def close(self) -> None:
        self._open.close()

    def _array(self, staged: int) -> "tuple[_Array, int]":
        block, number = divmod(staged, len(self.arrays))
        return self.arrays[number], block

    def staged_over(self, box: Box) -> Iterator[int]:
        """Yield the staged blocks, of all arrays, that a box needs; it may reach outside."""
        inner = shifted(overhang(box, self.shape_zyx)[0], self.box[0])
        for number, array in enumerate(self.arrays):
            for block in array.grid.blocks_over(relative(array.needed(inner), array.origin)):
                yield block * len(self.arrays) + number

    def box_of(self, staged: int) -> Box:
        """Return the box that needs a staged block."""
        array, block = self._array(staged)
        return relative(array.alignment.volume_box(array.box_of(block)), self.box[0])

    def has(self, staged: int) -> bool:
        array, block = self._array(staged)
        return array.staged.has(block)

    def delete(self, staged: int) -> None:
        array, block = self._array(staged)
        array.staged.delete(block)

    def stage(self, staged: int) -> int:
        """Fetch a block and write it; returns the bytes fetched since the last call.  Raises as `Volume.read`."""
        array, block = self._array(staged)
        array.staged.write(block, array.volume.read(array.box_of(block)), flush=False)
        with self._counting:
            before, self._counted = self._counted, self._fetched()
            return self._counted - before

    def _fetched(self) -> int:
        return sum(each.volume.source.stats.bytes_fetched for each in self.arrays)

    def read(self, box: Box) -> NDArray[np.float32]:
        """Return the channels over a box from staged blocks: float32 (C, Z, Y, X); edge voxels repeat outside."""
        inner, outside = overhang(box, self.shape_zyx)
        values = np.empty((len(self.channels), *shape_of(inner)), np.float32)
        for out, array, scales in zip(values, self.channels, self._scales, strict=True):
            raw = array.alignment.read(shifted(inner, self.box[0]), array.read)
            out[...] = raw if scales is None else normalized(torch.from_numpy(raw)[None], scales)[0].numpy()
        return np.pad(values, [(0, 0), *outside], mode="edge") if any(map(any, outside)) else values

    def masked(self, box: Box, from_staged: bool) -> NDArray[np.bool_]:
        """Return where the mask is foreground, over a box inside; False where the mask does not reach."""
        assert self.mask is not None
        spec = self.mask.volume.spec
        select = selection(spec if isinstance(spec, MaskConfig) else MaskConfig(path=spec.path))
        found, there = np.zeros(shape_of(box), np.bool_), shifted(box, self.box[0])
        part = intersection(there, self.mask.alignment.covered)
        if all(lo < hi for lo, hi in zip(*part, strict=True)):
            read = self.mask.read if from_staged else self.mask.volume.read
            found[slices(part, there[0])] = select(self.mask.alignment.read(part, read))
        return found

    def record(self) -> list[Any]:
        """Return names and fingerprints of the arrays, as plain JSON."""
        arrays = ((each.volume, each.needed(self.box)) for each in self.arrays)
        found = [[array_key(volume), metadata_hash(volume.array), volume.stored_stamp(box)] for volume, box in arrays]
        spec = self.mask.volume.spec if self.mask else None
        marks = [spec.labels, spec.ignore] if isinstance(spec, MaskConfig) else []
        return [*found, marks] if any(marks) else found


class _Array:
    """An array, its alignment with the first one, and the grid of its staged blocks, which begins at `origin`."""

    def __init__(self, volume: Volume, alignment: AnyAlignment, box: Box, path: Path) -> None:
        self.volume, self.alignment = volume, alignment
        (first, stop), chunk = self.needed(box), volume.chunk_zyx
        self.origin = scale(triple(lo // size for lo, size in zip(first, chunk, strict=True)), chunk)
        block, most = list(chunk), _BLOCK_VOXELS if volume.grid.shard_zyx is None else _SHARDED_VOXELS
        while 2 * math.prod(block) <= most:
            block[block.index(min(block))] *= 2
        shape = triple(hi - lo for lo, hi in zip(self.origin, stop, strict=True))
        self.grid = BlockGrid(shape, triple(block))
        self.staged = BlockArray(path, self.grid, volume.dtype)

    def needed(self, box: Box) -> Box:
        """Return the voxels of the array that a box of the first one needs; empty where it does not reach."""
        part = intersection(box, self.alignment.covered)
        if all(lo < hi for lo, hi in zip(*part, strict=True)):
            return self.alignment.array_box(part)
        return (0, 0, 0), (0, 0, 0)

    def box_of(self, block: int) -> Box:
        return shifted(self.grid.block_box(block), self.origin)

    def read(self, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read staged voxels of the array."""
        return self.staged.read(relative(box, self.origin))


def integers_of(name: str, zyx: Any, least: int) -> Triple:
    """Return three integers (z, y, x).  Raises ConfigError."""
    try:
        return triple(to_integer(name, each, least) for each in natural(zyx))
    except (TypeError, ValueError):
        raise ConfigError(f"{name} has {zyx!r} in place of three integers (z, y, x) of at least {least}") from None


def checked_box(box: Any, shared: Box) -> Box:
    """Return a box in the voxels that all arrays share.  Raises ConfigError: it is not inside."""
    ends = natural(box)
    if not isinstance(ends, tuple) or len(ends) != 2:
        raise ConfigError(f"box {box!r} is not ((z, y, x), (z, y, x)), its first voxel and its end; correct it")
    start, stop = (integers_of("box", end, 0) for end in ends)
    if not all(first <= lo < hi <= last for first, lo, hi, last in zip(shared[0], start, stop, shared[1], strict=True)):
        raise ConfigError(
            f"box {format_box((start, stop))} is not inside {format_box(shared)}, the voxels of the volume that all "
            "its arrays share; change box"
        )
    return start, stop


def arrays_of(volume: Any, name: str = "volume") -> tuple[ArrayConfig, ...]:
    """Return the channels of a volume: a path or address, a config, or a tuple of these.  Raises ConfigError."""
    check_paths(name, volume)
    if isinstance(volume, (tuple, list)) and volume:
        return tuple(itertools.chain.from_iterable(map(arrays_of, volume)))
    if isinstance(volume, ArrayConfig):
        images = volume.images if isinstance(volume, VolumeConfig) else (volume,)
        return tuple(ArrayConfig(**_fields(each)) for each in images)
    return (ArrayConfig(path=volume),)


def input_ranges(arrays: Sequence[ArrayConfig], patch_zyx: Triple, normalize: Any) -> Ranges:
    """Return the intensity range of each channel.

    Args:
        normalize: True = as a PatchLoader estimates it; False = as stored; (low, high); or a PatchLoader or its state:
            the ranges that it has for these arrays, else the same rule.

    Raises:
        ConfigError: it is something else; DataError: as `prepare_data`.
    """
    if isinstance(normalize, PatchLoader):
        normalize = normalize.state_dict()
    known: Mapping[str, Any] = {}
    if isinstance(normalize, Mapping):
        if "normalize" not in normalize:
            raise ConfigError(
                "The state of the loader has no normalization: it was saved by an older version; pass "
                "normalize=(low, high), or the loader itself"
            )
        known, normalize = normalize.get("intensity_ranges", {}), normalize["normalize"]
    match natural(normalize):
        case bool() as wanted:
            pass
        case (low, high) if None not in (low, high):
            NormalizeConfig(low=low, high=high)  # checks them
            return (IntensityRange(low, high),) * len(arrays)
        case _:
            raise ConfigError(
                f"normalize {normalize!r} is not valid; set it to True, False, (low, high), a loader or its state"
            )
    if not wanted:
        return (None,) * len(arrays)
    with ExitStack() as opened:
        volumes = [opened.enter_context(open_volume(spec)) for spec in arrays]
        keys, patch = list(map(array_key, volumes)), triple(map(min, patch_zyx, volumes[0].shape_zyx))
    if not known.keys() >= {*keys}:
        known, keys = {_without_links(key): ends for key, ends in known.items()}, list(map(_without_links, keys))
    if known.keys() >= {*keys}:
        return tuple(IntensityRange(*known[key]) for key in keys)
    data = DataConfig(
        volumes=(VolumeConfig(**_fields(arrays[0]), channels=tuple(arrays[1:])),),
        patch_size=patch,
        augment=AugmentConfig(rot90=False),
        validation=ValidationConfig(fraction=0.0),
    )
    prepared = prepare_data(0, data)
    try:
        found = prepared.intensity_ranges(data).volumes
        if known:
            text = "%s was not in training (%s): its range is estimated anew, %s; if it has moved, pass (low, high)"
            ranges = ", ".join(f"{each.low:g} to {each.high:g}" for each in found)
            log.warning(text, " with ".join(keys), one_line(str(dict(known))), ranges)
        return found
    finally:
        for array in itertools.chain(*prepared.arrays):
            array.close()


def _without_links(key: str) -> str:
    """Return the key of an array in a state, without links and slashes at the end of its path."""
    if not (parts := re.fullmatch(r"(.*?)((?: level \d+)? \[[\d, ]*\])", key, re.DOTALL)):
        return key
    return f"{parts[1].rstrip('/') if is_remote(parts[1]) else os.path.realpath(parts[1])}{parts[2]}"


def _fields(spec: ArrayConfig) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.model_fields_set & ArrayConfig.model_fields.keys()}
