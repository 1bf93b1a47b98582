"""The tasks of a prediction: voxels are staged, the network sees tiles, blocks become chunks of the output.

state/input0/, ...      blocks of each channel and of the mask, as stored
state/tiles/            results of the network, one file per tile
state/done              number of blocks that are written: air leaves no file
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import ArrayConfig
from vesuvius.errors import GpuMemoryError, NonFiniteError, VesuviusError, one_line
from vesuvius.predict.inputs import Inputs, Ranges
from vesuvius.predict.network import Network, open_network
from vesuvius.predict.output import Output
from vesuvius.predict.tasks import Blocks, Job, RollingRun, TaskRunner, Tiles
from vesuvius.predict.tiling import Tiling
from vesuvius.runlog.files import write_atomically
from vesuvius.volume_tools.partial import PartialCopy
from vesuvius.volumes.box import Box, box_along, chunk_ranges, format_box, shifted

DONE, ACTIVE = "done", "active"


@dataclass(frozen=True)
class PredictJob(Job):
    """Everything that the tasks need.  Picklable unless the network is a living module that is not."""

    source: Tiling  # what the network sees, in voxels of the box; `tiling` is that of its output
    output: Output
    target: PartialCopy
    network: Any  # as `open_network` takes it
    import_folder: str
    device: str
    flips: tuple[tuple[int, ...], ...]  # axes of (B, C, Z, Y, X) to mirror, for each evaluation of a tile
    arrays: tuple[ArrayConfig, ...]
    ranges: Ranges
    mask: ArrayConfig | None
    box: Box
    needed: Sequence[int]  # the tiles over active blocks

    @property
    def tiles(self) -> Sequence[int]:
        return self.needed

    @property
    def folder(self) -> Path:
        return self.target.path / "state"

    def tile_store(self) -> Tiles:
        return Tiles(self.folder / "tiles", self.tiling, self.channels)


def active_voxels(
    inputs: Inputs, job: PredictJob, block: int, stored: NDArray[np.bool_] | None = None, from_staged: bool = False
) -> NDArray[np.bool_]:
    """Return where the mask is not 0 in a block of the output: at the voxel of the input that holds its center.

    With `stored`, an occupancy of the volume's chunks or shards, return which of those in the block are stored.
    """
    fine, coarse = Fraction(job.tiling.patch_zyx[0], job.source.patch_zyx[0]).as_integer_ratio()
    axes = [
        ((2 * np.arange(lo, hi) + 1) * coarse // (2 * fine)).clip(0, size - 1)
        for size, lo, hi in zip(job.source.shape_zyx, *job.tiling.block_box(block), strict=True)
    ]
    box = box_along((int(axis[0]), int(axis[-1]) + 1) for axis in axes)
    if stored is not None:
        grid = inputs.volume.grid
        cell = grid.chunk_zyx if stored.shape == grid.counts_zyx else grid.object_zyx
        return stored[np.ix_(*chunk_ranges(shifted(box, inputs.box[0]), cell))]
    return inputs.masked(box, from_staged)[np.ix_(*(axis - axis[0] for axis in axes))]


class PredictRunner(TaskRunner):
    def __init__(self, job: PredictJob, inputs: Inputs, network: Network, evaluations: int = 1) -> None:
        super().__init__(job, evaluations)
        self._prediction, self._inputs, self._network, self._tiles = job, inputs, network, job.tile_store()
        self._device = torch.device(job.device)

    def tiles(self, step: int) -> Tiles:
        return self._tiles

    def stage(self, index: int) -> int:
        return self._inputs.stage(index)

    def read(self, step: int, tiles: Sequence[int]) -> Tensor:
        boxes = map(self._prediction.source.tile_box, tiles)
        return torch.from_numpy(np.stack([self._inputs.read(box) for box in boxes]))

    def evaluate(self, step: int, tiles: Sequence[int], inputs: Tensor) -> Tensor:
        job = self._prediction
        try:
            with torch.inference_mode():
                batch, mean = inputs.to(self._device), None
                for axes in job.flips:
                    result = self._network(batch.flip(axes) if axes else batch).float()
                    if result.shape[0] != len(batch) or result.shape[2:] != job.tiling.patch_zyx:
                        raise ValueError(f"it maps {tuple(batch.shape)} to {tuple(result.shape)}")
                    result = result if job.output.blended is None else result[:, list(job.output.blended)]
                    result = result.flip(axes) if axes else result
                    mean = result if mean is None else mean.add_(result)
                assert mean is not None
                return (mean.div_(len(job.flips)) if len(job.flips) > 1 else mean).cpu()
        except torch.OutOfMemoryError as error:
            raise GpuMemoryError(
                f"The GPU ran out of memory with batch size {job.batch_size} ({one_line(error)}); lower the batch size"
            ) from error
        except Exception as error:
            boxes = "; ".join(format_box(job.source.tile_box(tile)) for tile in tiles)
            raise VesuviusError(
                f"The network failed on tile {boxes} (of the box): {type(error).__name__}: {one_line(error, 400)}; "
                "finished tiles are kept: correct it and run the same command again to resume"
            ) from error

    def non_finite(self, step: int, tile: int) -> str:
        box = format_box(self._prediction.source.tile_box(tile))
        return f"The network returned NaN or infinity for tile {box} (of the box); check its input there and its dtype"

    def write_block(self, step: int, block: int, active: bool = True) -> None:
        job, box = self._prediction, self._job.tiling.block_box(block)
        try:
            voxels = job.output.voxels(self._tiles.blended(box))
        except OverflowError as error:
            raise NonFiniteError(f"An output in {format_box(box)}: {error}; use dtype float32") from error
        if job.mask is not None:
            voxels[:, ~active_voxels(self._inputs, job, block, from_staged=True)] = 0
        job.target.write(0, job.tiling.block_index(block), voxels if job.target.plan.channels else voxels[0])

    def close(self) -> None:
        super().close()
        self._inputs.close()  # ends reads that wait for a store


def open_runner(job: PredictJob) -> PredictRunner:
    """Open the volumes and the network in the process of a worker."""
    inputs = Inputs(job.arrays, job.ranges, job.mask, job.box, job.folder)
    return PredictRunner(job, inputs, open_network(job.network, torch.device(job.device), job.import_folder))


class PredictRun(RollingRun):
    """All active blocks, from the first one that is not written."""

    def __init__(self, job: PredictJob, inputs: Inputs, active: Blocks) -> None:
        super().__init__(job, job.tile_store(), 0, active)
        self._prediction, self._inputs, self._upcoming = job, inputs, set[int]()
        file = job.folder / DONE
        self.done = int(file.read_text()) if file.exists() else 0

    def to_stage(self, batches: set[int]) -> list[int]:
        self._upcoming = self._staged_over(tile for batch in batches for tile in self._job.tiles_of(batch))
        return sorted(staged for staged in self._upcoming if not self._inputs.has(staged))

    def finish(self, blocks: list[int]) -> None:
        job, tiling = self._prediction, self._job.tiling
        job.target.flush_names(0, map(tiling.block_index, blocks))
        self.done += len(blocks)
        write_atomically(job.folder / DONE, str(self.done).encode())
        over = {tile for block in blocks for tile in tiling.tiles_over(tiling.block_box(block))}
        for staged in self._staged_over(over) - self._upcoming:
            if all(self.is_finished(tile, blocks[-1]) for tile in job.source.tiles_over(self._inputs.box_of(staged))):
                self._inputs.delete(staged)

    def _staged_over(self, tiles: Iterable[int]) -> set[int]:
        source = self._prediction.source
        return {staged for tile in tiles for staged in self._inputs.staged_over(source.tile_box(tile))}
