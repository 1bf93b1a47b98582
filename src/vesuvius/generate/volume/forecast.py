"""The time, disk space and memory that a volume will take, known before anything is written."""

from __future__ import annotations

import math
import resource
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vesuvius.config import Triple
from vesuvius.errors import StorageError
from vesuvius.generate.described import DrawRequest
from vesuvius.generate.volume.field import Field
from vesuvius.generate.volume.network import Network
from vesuvius.generate.volume.run import GROUP
from vesuvius.generate.volume.work import BlockSet, VolumeJob, used_blocks
from vesuvius.runlog.files import free_disk_bytes
from vesuvius.runlog.units import format_duration, format_sizes, size_text


@dataclass(frozen=True)
class VolumeForecast:
    """The time, disk space and memory that a volume takes."""

    shape_zyx: Triple
    tiles: int  # per pass; of an inpainting those near gaps
    evaluations: int  # calls of the network for one tile in all (guidance calls it twice)
    workers: int
    state_bytes: int  # on the disk, at most
    output_bytes: int  # on the disk, at most: without compression
    free_bytes: int  # of that disk
    seconds: float | None = None  # with these workers; None = not measured
    worker_bytes: int | None = None  # memory of a worker; None = not measured

    def text(self) -> str:
        """For the terminal."""
        lines = [
            f"volume {format_sizes(self.shape_zyx)}: {self.tiles} tiles, {self.evaluations} network "
            "evaluations of a tile",
            f"disk: {size_text(self.state_bytes)} for the state and at most {size_text(self.output_bytes)} for the "
            f"volume; {size_text(self.free_bytes)} free",
        ]
        if self.seconds is not None and self.worker_bytes is not None:
            lines += [
                f"time: about {format_duration(self.seconds)} with {self.workers} worker(s)",
                f"memory: about {size_text(self.worker_bytes)} per worker, whatever the shape",
            ]
        return "\n".join(lines)

    def check_space(self, out: Path) -> None:
        """Raises StorageError where the disk is too small."""
        if self.state_bytes + self.output_bytes > self.free_bytes:
            raise StorageError(
                f"The disk is too small for {out}: {size_text(self.state_bytes)} for the state and "
                f"{size_text(self.output_bytes)} for the volume are needed, and {size_text(self.free_bytes)} are free; "
                "free space, lower --overlap or --shape, or choose another --out"
            )


def forecast_of(job: VolumeJob, output_bytes: int, workers: int, out: Path, live: BlockSet) -> VolumeForecast:
    """The forecast without time and memory, from numbers alone and the free space at `out`.

    Args:
        live: blocks with gaps near.
    """
    tiling, used = job.tiling, len(used_blocks(job, live))
    tiles, _ = job.tiles_and_batches(live)
    fields = 4 if any(step.keeps_x_0 for step in job.passes) else 2
    state = (fields + job.inpaint) * used * Field(Path(), tiling).block_bytes
    if job.condition is not None:
        state += used * Field(Path(), tiling, job.condition).block_bytes
    # predictions: of the rows of tiles along z over a group of blocks and over the row of blocks before it
    (size_z, *_), (patch_z, *_), starts_z = tiling.shape_zyx, tiling.patch_zyx, tiling.starts[0]
    reach = patch_z * (1 + -(-GROUP * workers // math.prod(tiling.block_grid[1:])))
    rows = max(
        bisect_left(starts_z, lo + reach) - bisect_right(starts_z, lo - patch_z) for lo in range(0, size_z, patch_z)
    )
    tiles_kept = min(tiling.tiles, rows * tiling.tile_grid[1] * tiling.tile_grid[2])
    state += tiles_kept * Field(Path(), tiling).block_bytes
    return VolumeForecast(
        shape_zyx=tiling.shape_zyx,
        tiles=tiles,
        evaluations=tiles * len(job.passes),
        workers=workers,
        state_bytes=state,
        output_bytes=output_bytes,
        free_bytes=free_disk_bytes(out.parent),
    )


def measured_too(forecast: VolumeForecast, job: VolumeJob, request: DrawRequest) -> VolumeForecast:
    """The forecast with time and memory.  Calls the network twice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        network = Network(request)
        estimate = network.estimate_for(None, job.batch_size)
        x = torch.zeros((job.batch_size, 1, *job.tiling.patch_zyx), device=network.device)
        for _ in range(2):  # the first call prepares kernels
            started = time.monotonic()
            estimate(x, job.levels[0])[0].sum().item()
            seconds = time.monotonic() - started
    finally:
        torch.set_num_threads(threads)
    calls = -(-forecast.evaluations // job.batch_size)
    return replace(
        forecast,
        seconds=seconds * calls / max(1, min(forecast.workers, calls // len(job.passes))),
        worker_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
