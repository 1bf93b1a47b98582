"""A grid of overlapping patches over a box of a volume, in order, and the blend of a network's outputs on them."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import VolumeConfig
from vesuvius.errors import ConfigError
from vesuvius.loader.arguments import device_of, dtype_of_labels, tensor_dtype
from vesuvius.loader.device import check_cast, joined
from vesuvius.loader.intensity import intensity_scales, normalized, to_device
from vesuvius.predict.inputs import arrays_of, checked_box, input_ranges, integers_of
from vesuvius.predict.tiling import BlockGrid, Tiling, Window, check_blend, overhang, overlap_slices, sliding_tiling
from vesuvius.runlog.units import format_sizes
from vesuvius.stream.options import to_integer
from vesuvius.threads import Pool, on_thread
from vesuvius.volumes.alignment import AnyAlignment, log_alignment
from vesuvius.volumes.box import Box, format_box, intersection, relative, shape_of, shifted, slices, triple
from vesuvius.volumes.volume import Volume, open_volume

_AHEAD = 4  # tiles whose blocks are read, on as many threads, while one is cut


@dataclass(frozen=True)
class GridBatch:
    """A batch of patches on the device."""

    image: Tensor  # (B, C, Z, Y, X), as `PatchBatch.image` without augmentation
    label: Tensor | None  # (B, L, Z, Y, X) with L arrays of labels; None without labels
    boxes: tuple[Box, ...]  # of each patch, in voxels of the volume; they reach outside a box smaller than a patch


class GridLoader:
    """Patches on a grid over a box of a volume, for validation and inference: finite and in order.

    May be iterated again, also by several loops at once.  The patches are those of MONAI's sliding window; outside a
    box smaller than a patch, the voxels at its faces repeat.  A loop decodes each chunk once and keeps it until no
    later patch needs it: one to two rows of patches along z are in memory.  The next batch is read ahead.

    Args:
        volume: a path or URL, an `ArrayConfig`, or a tuple of these, the channels, aligned by their OME metadata.
        patch_size: voxels (z, y, x).
        overlap: of neighboring patches, as a share of a patch, at least 0 and below 1.
        box: ((z, y, x), (z, y, x)), such as one of `PatchLoader.validation_boxes`; "whole" = all voxels that the volume
            shares with its labels.
        batch_size: of all batches but the last.
        labels, label_dtype, device: as in `PatchLoader`.
        normalize: a `PatchLoader` or its `state_dict()`: as in training; else as in `PatchLoader`.
        multiple: patches start at multiples of it in the box: 2 for outputs of half the resolution.

    Attributes:
        box: the voxels that the patches cover.

    Raises:
        ConfigError: an argument is invalid.
        DataError: a volume cannot be used; also while iterating, if a chunk is damaged or can no longer be read.
        ClosedError: on iterating, the loader is closed.
    """

    def __init__(
        self,
        volume: Any,
        *,
        patch_size: Sequence[int],
        overlap: float = 0.25,
        box: Box | Literal["whole"] | None = "whole",
        batch_size: int = 1,
        labels: Any | None = None,
        label_dtype: torch.dtype | str | None = None,
        normalize: Any = True,
        device: torch.device | str | None = None,
        multiple: int = 1,
    ) -> None:
        self._device, self._batch_size = device_of(device), to_integer("batch_size", batch_size, 1)
        patch, multiple = integers_of("patch_size", patch_size, 1), to_integer("multiple", multiple, 1)
        (first, *more), targets = arrays_of(volume), () if labels is None else arrays_of(labels, "labels")
        images = VolumeConfig(**first.given, channels=tuple(more)).images  # resampled as by a `PatchLoader`
        self._arrays = [open_volume(spec) for spec in (*images, *targets)]
        self._alignments = [log_alignment(self._arrays[0], array, "the array") for array in self._arrays]
        dtypes = [array.dtype for array in self._arrays]
        self._label_dtype = dtype_of_labels(label_dtype, dtypes[len(images) :])
        self.box = _box_of(box, self._alignments)
        self.tiling = sliding_tiling(shape_of(self.box), patch, overlap, multiple=multiple)
        ranges = input_ranges(images, patch, normalize)
        self._scales = [None if each is None else intensity_scales([each]) for each in ranges]
        self._image_dtype = tensor_dtype(dtypes[: len(images)]) if None in ranges else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the volumes.  Safe to call again, and on any thread."""
        for array in self._arrays:
            array.close()

    def __len__(self) -> int:
        return -(-self.tiling.tiles // self._batch_size)

    def __iter__(self) -> Iterator[GridBatch]:
        batches = self._read()
        ahead = on_thread(next, batches, None, name="grid")
        while (batch := ahead.result()) is not None:
            ahead = on_thread(next, batches, None, name="grid")
            yield self._on_device(*batch)

    def tile_box(self, tile: int) -> Box:
        """Return the box of a patch in voxels of the volume."""
        return shifted(self.tiling.tile_box(tile), self.box[0])

    def _read(self) -> Iterator[tuple[range, list[NDArray[Any]]]]:
        """Yield the tiles of each batch, and their voxels [B, Z, Y, X] in each array, as stored."""
        decoders, all_tiles = Pool(_AHEAD, "decode"), range(self.tiling.tiles)
        try:
            readers = [
                _TileReader(array, alignment, self.tiling, self.box, decoders)
                for array, alignment in zip(self._arrays, self._alignments, strict=True)
            ]
            for tiles in (all_tiles[first : first + self._batch_size] for first in all_tiles[:: self._batch_size]):
                arrays = [np.empty((len(tiles), *self.tiling.patch_zyx), reader.dtype) for reader in readers]
                for reader, out in zip(readers, arrays, strict=True):
                    for tile, patch in zip(tiles, out, strict=True):
                        reader.read(tile, patch)
                yield tiles, arrays
        finally:
            decoders.close()

    def _on_device(self, tiles: range, arrays: list[NDArray[Any]]) -> GridBatch:
        raw = [to_device(torch.from_numpy(array), self._device).unsqueeze(1) for array in arrays]
        channels = len(self._scales)
        images = [
            image if scales is None else normalized(image, scales)
            for image, scales in zip(raw[:channels], self._scales, strict=True)
        ]
        if self._label_dtype is not None:
            for array in arrays[channels:]:
                check_cast(array, self._label_dtype)
        label = joined(raw[channels:], self._label_dtype) if raw[channels:] else None
        return GridBatch(joined(images, self._image_dtype), label, tuple(map(self.tile_box, tiles)))


class Aggregator:
    """Blends a network's outputs on all patches of a loader into one array, with the weights of `predict_volume`.

    Args:
        blend: weight of a patch at each of its voxels: "gaussian" (sigma = patch / 8) or "constant" as in MONAI,
            "linear" = falling from the center to the faces, "crop" = only the patch with the nearest center counts.

    Raises:
        ConfigError: there is no such blend.
    """

    def __init__(self, loader: GridLoader, blend: Window = "gaussian") -> None:
        check_blend(blend)
        self._tiling = replace(loader.tiling, window=blend)
        self._missing = {loader.tile_box(tile): tile for tile in range(loader.tiling.tiles)}
        self._total: NDArray[np.float32] | None = None

    def add(self, batch: GridBatch | Sequence[Box], output: Tensor | NDArray[Any]) -> None:
        """Add outputs (B, K, Z', Y', X') on the patches of a batch, or on patches with these boxes, each once.

        The factor Z'/Z = Y'/Y = X'/X must be one of small integers (`multiple`), and integers below 2^24.  Raises
        ConfigError.
        """
        boxes = batch.boxes if isinstance(batch, GridBatch) else batch
        if not isinstance(output, (Tensor, np.ndarray)):
            raise ConfigError(f"The output is a {type(output).__name__}, not a tensor; add the tensor in it")
        if output.dtype.is_complex if isinstance(output, Tensor) else output.dtype.kind not in "biuf":
            raise ConfigError(f"The output is of {output.dtype}, not of real numbers; add a part of it")
        if isinstance(output, np.ndarray):  # torch takes neither flipped arrays nor those of another byte order
            output = torch.from_numpy(np.array(output, output.dtype.newbyteorder("="), order="C"))
        given = output.detach().cpu()
        values = given.float().numpy()
        if not given.is_floating_point() and np.abs(values).max(initial=0) >= 2**24:  # float32 has no more odd numbers
            raise ConfigError(
                f"Integers up to {np.abs(values).max():.0f} are not exact in the float32 of an Aggregator, as those "
                "below 2^24 are; read labels with vesuvius.open_volume, or number them anew"
            )
        if self._total is None:
            self._tiling = _scaled(self._tiling, values.shape)
            self._total = np.zeros((values.shape[1], *self._tiling.shape_zyx), np.float32)
            self._weights = np.zeros(self._tiling.shape_zyx, np.float32)
        if values.shape != (needed := (len(boxes), len(self._total), *self._tiling.patch_zyx)):
            raise ConfigError(f"The output has shape {values.shape}, not {needed}; add the outputs of one network")
        for box, value in zip(boxes, values, strict=True):
            if (tile := self._missing.pop(box, None)) is None:
                raise ConfigError(
                    f"The patch {format_box(box)} was added before, or the loader has no such patch; make an "
                    "Aggregator for each loop"
                )
            self._tiling.add_tile(tile, value, ((0, 0, 0), self._tiling.shape_zyx), self._total, self._weights)

    def result(self) -> NDArray[np.float32]:
        """Return the weighted mean over the loader's box, (K, Z, Y, X).  Raises ConfigError: patches are missing."""
        if self._total is None or self._missing:
            raise ConfigError(
                f"{len(self._missing)} of {self._tiling.tiles} patches were not added; add the outputs of a full loop"
            )
        mean: NDArray[np.float32] = self._total / self._weights
        return mean


class _TileReader:
    """Reads an array on the grid of a volume, for the tiles of a box in order, on the threads of a pool.

    A block, whole chunks about as large as a tile, is read ahead of the first tile that needs it and dropped after the
    last one.
    """

    def __init__(self, array: Volume, alignment: AnyAlignment, tiling: Tiling, box: Box, pool: Pool) -> None:
        self.dtype = array.dtype
        self._array, self._alignment, self._tiling, self._origin, self._pool = array, alignment, tiling, box[0], pool
        (start, stop), chunk = alignment.array_box(box), array.chunk_zyx
        corner = triple(lo // size * size for lo, size in zip(start, chunk, strict=True))
        block = triple(-(-patch // size) * size for patch, size in zip(tiling.patch_zyx, chunk, strict=True))
        self._corner, self._grid = corner, BlockGrid(shape_of((corner, stop)), block)
        self._blocks: dict[int, Future[NDArray[Any]]] = {}
        self._ending = defaultdict[int, list[int]](list)  # blocks by the last tile that needs them

    def read(self, tile: int, out: NDArray[Any]) -> None:
        """Read a tile into an array of its shape and the array's dtype.  Raises the errors of `Volume.read`."""
        for each in range(tile, min(tile + _AHEAD, self._tiling.tiles)):
            self._start_blocks(each)
        whole = self._tiling.tile_box(tile)
        inner, outside = overhang(whole, self._tiling.shape_zyx)
        cut = out[slices(inner, whole[0])]
        self._alignment.read(shifted(inner, self._origin), self._copy, cut)
        if inner != whole:
            out[...] = np.pad(cut, outside, "edge")
        for block in self._ending.pop(tile, ()):
            del self._blocks[block]

    def _start_blocks(self, tile: int) -> None:
        inner, _ = overhang(self._tiling.tile_box(tile), self._tiling.shape_zyx)
        for block in self._over(self._alignment.array_box(shifted(inner, self._origin))):
            if block not in self._blocks:
                box = shifted(self._grid.block_box(block), self._corner)
                self._blocks[block] = self._pool.submit(self._array.read, box)
                users = self._tiling.tiles_over(relative(self._alignment.volume_box(box), self._origin))
                self._ending[max(tile, *users)].append(block)

    def _over(self, box: Box) -> list[int]:
        return self._grid.blocks_over(relative(box, self._corner))

    def _copy(self, box: Box, out: NDArray[Any] | None) -> NDArray[Any]:
        out = np.empty(shape_of(box), self.dtype) if out is None else out
        for block in self._over(box):
            _, there, here = overlap_slices(shifted(self._grid.block_box(block), self._corner), box)
            out[here] = self._blocks[block].result()[there]
        return out


def _box_of(box: Any, alignments: Sequence[AnyAlignment]) -> Box:
    """Return the box to cover, in which all arrays have voxels.  Raises ConfigError."""
    shared = reduce(intersection, (each.covered for each in alignments))
    if isinstance(box, str) and box == "whole":
        return shared
    if box is None:
        raise ConfigError("box is None: no voxels are held out; set validation_fraction, or leave out box for all")
    return checked_box(box, shared)


def _scaled(tiling: Tiling, shape: tuple[int, ...]) -> Tiling:
    """Return the tiling of outputs of this shape.  Raises ConfigError."""
    factors = {Fraction(out, size) for out, size in zip(shape[2:], tiling.patch_zyx, strict=False)}
    factor = min(factors, default=Fraction(0))
    if len(shape) != 5 or len(factors) > 1 or not factor:
        raise ConfigError(
            f"The output has shape {shape}, not (B, K, Z, Y, X) of patches {tiling.patch_zyx}, or a factor of it"
        )
    if (factor * math.gcd(*itertools.chain(*tiling.starts))).denominator != 1:
        raise ConfigError(
            f"Patches of {format_sizes(tiling.patch_zyx)} begin between voxels of an output with a factor of {factor}; "
            f"make the GridLoader with multiple={factor.denominator}"
        )
    return tiling.scaled(factor, max(tiling.patch_zyx))
