"""`vesuvius sample --shape`: from a checkpoint to a volume of any size on disk, and the labels it follows."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.diffusion.sampler import sampling_levels
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError, StorageError, storage_errors
from vesuvius.generate.common import (
    GenerateRequest,
    Network,
    OnProgress,
    Watch,
    checked_checkpoint,
    described,
    gpu_memory,
)
from vesuvius.generate.sample_zarr import to_grey_values
from vesuvius.generate.volume.block_array import Field
from vesuvius.generate.volume.inputs import InputConfig, Inputs
from vesuvius.generate.volume.tasks import (
    GROUP,
    Blocks,
    RunParts,
    Sampling,
    TaskRunner,
    VolumeJob,
    forget_unflushed,
    live_blocks,
    this_process,
    used_blocks,
)
from vesuvius.generate.volume.tiling import Tiling
from vesuvius.runlog.files import free_disk_bytes, write_atomically
from vesuvius.runlog.redact import redacted
from vesuvius.runlog.units import format_count, format_duration, format_size, format_sizes
from vesuvius.training.checkpoint.trained import CheckpointInfo, check_weights
from vesuvius.training.step.setup import choose_device
from vesuvius.training.stop import StopRequest
from vesuvius.volume_tools.partial import PartialCopy, open_partial
from vesuvius.volume_tools.pyramid import Pyramid, halve, halve_labels, levels_to_one, multiscale
from vesuvius.volume_tools.record import has_partial, is_finished, partial_path
from vesuvius.volumes.box import Box, triple

log = logging.getLogger(__name__)

DRAWING = "drawing"
_ROUNDS = 4
_CHUNK, _LEVELS = 128, 6


@dataclass(frozen=True)
class VolumeRequest(GenerateRequest):
    """A request for a volume."""

    out: Path  # a name that ends in .zarr
    shape_zyx: Triple | None  # None = that of the given volumes, or of the box in them
    overlap: float = 0.25  # of neighbouring tiles, as a share of a patch
    workers: int | None = None  # None = the GPUs of this machine, or its cores; 1 = this process
    cluster: str | None = None  # address of a Ray cluster whose nodes share `out`; None = this machine
    rounds: int | None = None  # passes per step of an inpainting; None = 4
    inputs: InputConfig = field(default_factory=InputConfig)
    labels_out: Path | None = None  # where the condition is written too, on the grid of `out`


def generate_volume(request: VolumeRequest, on_progress: OnProgress = lambda what, done, total: None) -> str:
    """Draw a volume, or continue one; a finished one that was drawn with the same arguments is left as it is.

    Returns:
        What was written, in words.

    Raises:
        ConfigError: arguments do not fit the checkpoint or each other, or something else is at `out`.
        DataError: a given volume cannot be read.
        StorageError: the disk fails or is too small.
        GpuMemoryError, SamplingStoppedError, NonFiniteError: as they say; what is done stays.
    """
    started = time.monotonic()
    with prepared(request) as drawing:
        dtype, plan, out = drawing.dtype, drawing.plan, request.out
        shape = f"{format_sizes(drawing.job.tiling.shape_zyx)} {dtype}"
        with StopRequest(None) as stop, gpu_memory(request.batch_size):
            watch, folder = Watch(stop, on_progress, resumable=True), partial_path(out) / "state"
            if is_finished(out, drawing.record, DRAWING):
                drawing.write_labels(watch)
                return f"{out} is already there: {shape}, drawn with the same arguments"
            live = drawing.live(watch, note := folder / "live_blocks")
            if not has_partial(out, DRAWING):
                drawing.check_space(live)
            drawing.write_labels(watch)
            with (
                open_partial(out, drawing.record, plan, dtype, 0, DRAWING) as target,
                storage_errors(
                    str(target.path),
                    "finished tiles are kept: free some space and run the same command again",
                ),
            ):
                folder.mkdir(exist_ok=True)
                forget_unflushed(folder)
                if drawing.job.inpaint and not note.exists():
                    write_atomically(note, np.fromiter(live, np.int64).tobytes())
                sampling = Sampling(drawing.job, folder, watch, live)
                drawing.fill(folder, sampling.used, watch)
                with drawing.workers_on(folder, watch) as run_parts:
                    x = sampling.run(run_parts, drawing.workers)
                drawing.write(target, x, sampling.used, watch)
        return f"wrote {out}: {shape}, {format_count(plan.levels, 'level')}, in {time.monotonic() - started:.1f} s"


def forecast_volume(request: VolumeRequest) -> str:
    """The disk space and the time that a volume takes, in words.  Calls the network twice, writes nothing.

    Raises what `generate_volume` does before it writes, StorageError included.
    """
    with prepared(request) as drawing, gpu_memory(request.batch_size):
        job, live, workers = drawing.job, drawing.live(Watch()), drawing.workers
        disk = drawing.check_space(live)
        network, x = Network(drawing.request), torch.zeros((job.batch_size, 1, *job.tiling.patch_zyx))
        estimate = network.estimate_for(None, job.batch_size)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for _ in range(2):  # the first call prepares kernels
            started = time.monotonic()
            estimate(x.to(network.device), job.levels[0])[0].sum().item()
        seconds = time.monotonic() - started
        torch.set_num_threads(threads)
        batches, passes = job.batches(live), len(job.passes)
        tiles = min(batches * job.batch_size, job.tiling.tiles)
        seconds *= passes * batches / max(1, min(workers, batches))
        return (
            f"volume {format_sizes(job.tiling.shape_zyx)}: {tiles} tiles, {tiles * passes} network evaluations of a "
            f"tile\ndisk: {disk}\n"
            f"time: about {format_duration(seconds)} with {format_count(workers, 'worker')}"
        )


class _Drawing:
    """A request and all that follows from it."""

    def __init__(self, request: VolumeRequest, info: CheckpointInfo, inputs: Inputs) -> None:
        config, facts = info.config, info.data
        self.inputs, self.request, self._info = inputs, request, info
        shape = request.shape_zyx or inputs.shape_zyx
        assert shape is not None
        source = inputs.inpaint
        self.dtype = source.dtype if source is not None else facts.volumes[request.volume_index].dtype
        self._grey = facts.greys.volumes[request.volume_index]
        self._schedule = Schedule.from_config(config.diffusion, facts.spectrum)
        # Chunks of at most 128 voxels along each axis, and levels down to one chunk, at most six.
        levels = min(_LEVELS, levels_to_one(shape, _CHUNK))
        self.plan = Pyramid(shape, triple(min(size, _CHUNK) for size in shape), levels, self.dtype.itemsize)
        scale, unit, corner = inputs.space(facts.volumes[request.volume_index].voxel_size_um)
        self._multiscale = multiscale(request.out.stem, levels, scale, [unit] * 3, corner)
        self.job = VolumeJob(
            Tiling(shape, config.data.patch_size, request.overlap),
            request.seed,
            sampling_levels(self._schedule, config.diffusion),
            config.diffusion.sampler,
            batch_size=request.batch_size,
            rounds=(request.rounds or _ROUNDS) if source is not None else 1,
            inpaint=source is not None,
            condition=inputs.condition.dtype.str if inputs.condition is not None else None,
        )
        self._device = choose_device()
        batches = self.job.tiling.tiles // request.batch_size
        on_cpu = max(1, min(len(os.sched_getaffinity(0)), batches))
        self.workers = request.workers or (torch.cuda.device_count() if self._device.type == "cuda" else on_cpu)

    @property
    def record(self) -> dict[str, Any]:
        """All that the voxels depend on, as plain JSON: a drawing is continued only if it is the same."""
        request, info, tiling = self.request, self._info, self.job.tiling
        return {
            "shape_zyx": list(tiling.shape_zyx),
            "patch_zyx": list(tiling.patch_zyx),
            "checkpoint": str(info.checkpoint.resolve()),
            "overlap": request.overlap,
            "rounds": self.job.rounds,
            "given": self.inputs.record(),
            "box": None if request.inputs.box is None else [list(end) for end in request.inputs.box],
            "amp": info.config.training.amp,
            "device": self._device.type,
            **described(info, request),
        }

    def live(self, watch: Watch, note: Path = Path()) -> Blocks:
        """The blocks with gaps near (`live_blocks`); all without --inpaint.

        Args:
            note: a file with what an earlier start has found.
        """
        if not self.job.inpaint:
            return range(self.job.tiling.blocks)
        if note.is_file():
            return dict.fromkeys(np.fromfile(note, np.int64).tolist())
        return live_blocks(self.job.tiling, self.inputs.gaps, watch)

    def fill(self, folder: Path, used: Blocks, watch: Watch) -> None:
        """Copy the used blocks of the given volumes into the state."""
        inputs, tiling = self.inputs, self.job.tiling

        def copy_blocks(field: Field, option: str, read: Callable[[Box], NDArray[Any]]) -> None:
            field.create()
            for block in watch.over(f"blocks of {option} read", used, len(used)):
                if not field.has(block):
                    field.write(block, read(tiling.block_box(block)))

        if inputs.inpaint is not None:
            known = Field(folder / "known", tiling)
            copy_blocks(known, "--inpaint", lambda box: inputs.known(box, self._grey, self._schedule))
        if (condition := inputs.condition) is not None:
            shown = Field(folder / "condition", tiling, condition.dtype)
            copy_blocks(shown, "--condition", lambda box: inputs.read(condition, box))

    def workers_on(self, folder: Path, watch: Watch) -> AbstractContextManager[RunParts]:
        """What does the parts: this process if it is alone, else actors of Ray."""
        request = self.request
        log.info(
            "drawing %s voxels from %s (%s weights): %d tiles, %s, %s on %s",
            *(format_sizes(self.job.tiling.shape_zyx), self._info.checkpoint, request.weights),
            *(self.job.tiling.tiles, format_count(len(self.job.passes), "pass"), format_count(self.workers, "worker")),
            self._device.type,
        )
        # Workers may run in another folder.
        elsewhere = replace(request, checkpoint=request.checkpoint.resolve())
        open_work = partial(_open_work, self.job, folder.resolve(), elsewhere)
        if self.workers == 1 and request.cluster is None:
            return this_process(open_work)
        from vesuvius.generate.volume.ray_workers import ray_workers  # imports Ray

        return ray_workers(open_work, self.workers, int(self._device.type == "cuda"), request.cluster, watch.check)

    def write_labels(self, watch: Watch) -> None:
        """Write the labels of a pair, unless they are there, with the grid, chunks, levels and record of the scan."""
        out, condition = self.request.labels_out, self.inputs.condition
        if out is None or is_finished(out, self.record, DRAWING):
            return
        assert condition is not None
        halved = halve_labels if self._info.config.data.labels else halve
        with open_partial(out, self.record, self.plan, condition.dtype, 0, DRAWING) as target:
            target.fill(0, lambda box: self.inputs.read(condition, box), lambda _: watch.check())
            replace(target, halved=halved).fill_coarser()
            self._publish(target)

    def _publish(self, target: PartialCopy) -> None:
        """Give a volume its name, and the config of the model beside the record."""
        config = redacted(self._info.config.model_dump(mode="json"))
        about = self._multiscale | {"name": target.out.stem}
        replace(target, record=self.record | {"config": config}).publish(about)

    def write(self, target: PartialCopy, x: Field, used: Blocks, watch: Watch) -> None:
        """Write all levels that are missing, known voxels as they were stored, and give the volume its name.

        Args:
            x: the last state.
            used: the blocks that it has; the voxels of others are known.
        """
        total = self.plan.chunk_count
        left = sum(len(target.missing(level)) for level in range(self.plan.levels))
        done = itertools.count(total - left + 1)

        def read(box: Box) -> NDArray[Any]:
            watch.check()
            values = np.asarray(self._schedule.model_values(x.read(box, used)))  # type: ignore[arg-type]
            voxels = to_grey_values(values, self._grey, self.dtype)
            if self.inputs.inpaint is None:
                return voxels
            return np.where(self.inputs.gaps(box), voxels, self.inputs.read(self.inputs.inpaint, box))

        def count(size: int) -> None:
            watch.tell("chunks written", next(done), total)
            watch.check()

        target.fill(0, read, count)
        target.fill_coarser(count)
        self._publish(target)

    def check_space(self, live: Blocks) -> str:
        """Describe the disk space needed.  Raises StorageError if the disk is too small."""
        out, labels_out, volume = self.request.out, self.request.labels_out, self.plan.raw_bytes
        state, free = state_bytes(self.job, live, self.workers), free_disk_bytes(out.parent)
        total, need = (
            state + volume,
            f"{format_size(state)} for the state, at most {format_size(volume)} for the volume",
        )
        if labels_out is not None and self.inputs.condition is not None and not labels_out.exists():
            labels = replace(self.plan, voxel_bytes=self.inputs.condition.dtype.itemsize).raw_bytes
            total, need = total + labels, f"{need}, at most {format_size(labels)} for the labels"
        if total > free:
            raise StorageError(
                f"The disk is too small for {out}: {need}, but {format_size(free)} is free; free some space, "
                "lower --overlap or --shape, or choose another --out"
            )
        return f"{need}; {format_size(free)} free"


def state_bytes(job: VolumeJob, live: Blocks, workers: int) -> int:
    """The most that a state takes on the disk."""
    tiling, used = job.tiling, len(used_blocks(job, live))
    block_voxels = math.prod(tiling.patch_zyx)
    fields = (4 if any(step.keeps_x_0 for step in job.passes) else 2) + job.inpaint
    voxel_bytes = 4 * fields + (np.dtype(job.condition).itemsize if job.condition else 0)
    # Of predictions the rows along z over a group of blocks, and over the row of blocks before it, are kept.
    starts = tiling.starts[0]
    depth = tiling.patch_zyx[0] * (2 + -(-GROUP * workers // math.prod(tiling.block_grid[1:])))
    rows = min(len(starts), 2 + depth // (starts[1] - starts[0] if len(starts) > 1 else depth))
    return block_voxels * (used * voxel_bytes + 4 * rows * math.prod(tiling.tile_grid[1:]))


@contextmanager
def prepared(request: VolumeRequest) -> Iterator[_Drawing]:
    """Check the request against the checkpoint and the given volumes.  Writes nothing."""
    info = checked_checkpoint(request)
    check_weights(info.checkpoint, request.weights)
    config, given = info.config, request.inputs
    if request.out.suffix != ".zarr":
        raise ConfigError(f"--out {request.out} does not end in .zarr, as the name of a volume must; add the ending")
    if request.cluster is not None and request.workers is None:
        raise ConfigError("--cluster does not say how many workers draw; add --workers, such as the GPUs of its nodes")
    if given.condition is not None and not config.has_condition:
        raise ConfigError(f"--condition has no use: {info.checkpoint} was trained without conditions; remove it")
    if request.rounds is not None and given.inpaint is None:
        raise ConfigError("--rounds has no effect without --inpaint; remove it")
    if given.mask is not None and given.inpaint is None:
        raise ConfigError("--mask says what to fill in --inpaint, which is missing; add it, or remove --mask")
    if given.condition is None and config.has_condition and config.diffusion.sampler_guidance != 0:
        raise ConfigError(
            "--condition is missing, and the model was trained with conditions; name a volume, or add --guidance 0 to "
            "draw without"
        )
    if request.labels_out is not None and config.diffusion.sampler_guidance == 0:
        raise ConfigError("--guidance 0 ignores the labels, so there are no pairs; remove it, or end --out in .zarr")
    factors = info.data.volumes[request.volume_index].condition_factors
    with Inputs(given, config.data, request.shape_zyx, factors) as inputs:
        if request.shape_zyx is not None and inputs.shape_zyx not in (None, request.shape_zyx):
            assert inputs.shape_zyx is not None
            raise ConfigError(
                f"--shape {format_sizes(request.shape_zyx)} is not that of --box ({format_sizes(inputs.shape_zyx)}); "
                "leave --shape out, or change --box"
            )
        drawing = _Drawing(replace(request, checkpoint=info.checkpoint), info, inputs)
        drawing.job.tiling.check()
        yield drawing


def _open_work(job: VolumeJob, folder: Path, request: GenerateRequest) -> TaskRunner:
    """Open the network in a worker and return what does the work with it."""
    torch.set_num_threads(1)  # sums are rounded in the same order wherever a tile is computed
    network = Network(request)
    return TaskRunner(job, folder, lambda stored: network.estimate_for(stored, job.batch_size), network.device)
