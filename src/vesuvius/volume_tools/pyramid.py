"""The levels of a new volume: shapes, downsampling and OME-Zarr metadata.  Pure."""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import ConfigError
from vesuvius.runlog.units import format_sizes
from vesuvius.volumes.box import Box, chunk_box, grid_shape, triple
from vesuvius.volumes.geometry import Geometry


@dataclass(frozen=True)
class Pyramid:
    """The levels of a new volume, all with the same chunk size."""

    shape_zyx: Triple  # voxels of the finest level
    chunk_zyx: Triple
    levels: int
    voxel_bytes: int
    per_shard: int = 0  # chunks of a zarr v3 shard along each axis; 0 = zarr v2, one file per chunk
    channels: int = 0  # of an array (c, z, y, x) with chunks of one channel; 0 = an array (z, y, x); not with shards

    @cached_property
    def shapes(self) -> list[Triple]:
        """Shape of each level, finest first; each is half the one above, rounded up."""
        return [triple(-(-size // 2**level) for size in self.shape_zyx) for level in range(self.levels)]

    @cached_property
    def counts(self) -> list[Triple]:
        """Chunks of each level along each axis."""
        return [grid_shape(shape, self.chunk_zyx) for shape in self.shapes]

    @property
    def raw_bytes(self) -> int:
        """Uncompressed bytes of all levels."""
        return self.voxel_bytes * max(1, self.channels) * sum(map(math.prod, self.shapes))

    @property
    def chunk_count(self) -> int:
        return sum(map(math.prod, self.counts))

    def box_of(self, level: int, chunk: Triple) -> Box:
        return chunk_box(chunk, self.chunk_zyx, self.shapes[level])


def levels_to_one(shape_zyx: Triple, chunk: int) -> int:
    """Number of levels down to the first one that fits into a chunk."""
    return max(1, (-(-max(shape_zyx) // chunk) - 1).bit_length() + 1)


def multiscale(name: str, levels: int, geometry: Geometry, channels: bool = False) -> dict[str, Any]:
    """OME-Zarr 0.4 metadata of levels 0, 1, ..., all from the corner of the finest, as in the published scrolls.

    With `channels` the first axis is c.
    """
    axes: list[dict[str, str]] = [{"name": "c", "type": "channel"}] * channels
    axes += [
        {"name": axis, "type": "space"} | ({"unit": unit} if unit else {})
        for axis, unit in zip("zyx", geometry.units_zyx, strict=True)
    ]
    corner = [*[0.0] * channels, *geometry.translation_zyx]
    shift = [{"type": "translation", "translation": corner}] * geometry.translated
    scales = ([*[1.0] * channels, *(size * 2**level for size in geometry.scale_zyx)] for level in range(levels))
    datasets = [
        {"path": str(level), "coordinateTransformations": [{"type": "scale", "scale": scale}, *shift]}
        for level, scale in enumerate(scales)
    ]
    return {"version": "0.4", "name": name, "axes": axes, "datasets": datasets}


def downsample_mean(voxels: NDArray[Any]) -> NDArray[Any]:
    """Downsample (Z, Y, X) by the mean of 2x2x2 voxels (fewer at an odd end); integers are rounded half up.

    Returns the same dtype, each axis half as long, rounded up.  For bool, or labels 0 and 1, this is the majority.
    """
    per_axis = [np.minimum(2, size - np.arange(0, size, 2)) for size in voxels.shape]
    z, y, x = np.ix_(*per_axis)
    count: NDArray[Any] = (z * y * x).astype(np.uint8)
    if voxels.dtype.kind == "f":
        mean: NDArray[Any] = _pair_sums(voxels.astype(_sum_dtype(voxels.dtype))) / count
    elif voxels.dtype.itemsize < 8:
        mean = (_pair_sums(voxels.astype(_sum_dtype(voxels.dtype))) + count // 2) // count
    else:  # no larger dtype for sums of 8-byte integers: sum eighths and remainders; count divides 8
        mean = _pair_sums(voxels >> 3) * (8 // count) + (_pair_sums(voxels & 7) + count // 2) // count
    return mean.astype(voxels.dtype, copy=False)


def downsample_mode(labels: NDArray[Any]) -> NDArray[Any]:
    """Downsample (Z, Y, X) by the most frequent label of 2x2x2 voxels (fewer at an odd end); the largest wins a tie."""
    even = np.pad(labels, [(0, size % 2) for size in labels.shape], mode="edge")  # doubles all votes at an odd end
    z, y, x = even.shape
    blocks = even.reshape(z // 2, 2, y // 2, 2, x // 2, 2).transpose(1, 3, 5, 0, 2, 4).reshape(8, z // 2, y // 2, -1)
    blocks.sort(axis=0)
    most, votes, run = blocks[0].copy(), np.ones(blocks.shape[1:], np.uint8), np.ones(blocks.shape[1:], np.uint8)
    for before, label in pairwise(blocks):
        run = np.where(label == before, run + 1, 1).astype(np.uint8)
        np.copyto(most, label, where=run >= votes)
        votes = np.maximum(votes, run)
    return np.asarray(most)


def _sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A dtype that holds the sum of eight voxels."""
    kind = "u" if dtype.kind == "b" else dtype.kind
    return np.dtype(f"{kind}{max(4, dtype.itemsize) if kind == 'f' else 2 * dtype.itemsize}")


def _pair_sums(voxels: NDArray[Any]) -> NDArray[Any]:
    """Sums of 2x2x2 voxels, or fewer at an odd end."""
    for axis in range(3):
        pairs = np.moveaxis(voxels, axis, 0)
        folded = pairs[::2].copy()
        folded[: len(pairs) // 2] += pairs[1::2]
        voxels = np.moveaxis(folded, 0, axis)
    return voxels


def check_levels(levels: int, shape_zyx: Triple) -> None:
    """Raise ConfigError unless 1 <= `levels` <= the number of levels down to a single voxel."""
    most = (max(shape_zyx) - 1).bit_length() + 1
    if not 1 <= levels <= most:
        raise ConfigError(
            f"--levels {levels} is impossible for {format_sizes(shape_zyx)} voxels; choose 1 to {most} (which ends "
            "in a single voxel)"
        )
