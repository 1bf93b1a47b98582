"""`vesuvius sample --shape`: from a checkpoint to a volume of any size on disk."""

from __future__ import annotations

import io
import logging
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
from vesuvius.diffusion.levels import sampling_levels
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError, storage_errors
from vesuvius.generate.described import DrawRequest, check_volume, described
from vesuvius.generate.volume.field import Field
from vesuvius.generate.volume.forecast import VolumeForecast, forecast_of, measured_too
from vesuvius.generate.volume.inputs import GivenVolumes, Inputs
from vesuvius.generate.volume.network import open_network_work
from vesuvius.generate.volume.output import DRAWING, Greys, output_plan, write_volume
from vesuvius.generate.volume.run import RunParts, Sampling, this_process
from vesuvius.generate.volume.tiling import Tiling
from vesuvius.generate.volume.work import BlockSet, VolumeJob, forget_unflushed, live_blocks
from vesuvius.generate.watch import OnProgress, Watch, gpu_memory
from vesuvius.runlog.files import write_whole
from vesuvius.runlog.units import format_sizes
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import CheckpointInfo, check_weights, read_checkpoint_info
from vesuvius.training.step.network import lay_out_network
from vesuvius.training.step.step import choose_device
from vesuvius.training.stop import StopRequest
from vesuvius.volume_tools.partial import is_begun, is_finished, open_partial
from vesuvius.volume_tools.pyramid import multiscale
from vesuvius.volumes.box import Box

log = logging.getLogger(__name__)

_ROUNDS = 4


@dataclass(frozen=True)
class VolumeRequest(DrawRequest):
    """A request for a volume."""

    out: Path  # a name that ends in .zarr
    shape_zyx: Triple | None  # None = that of the given volumes, or of the box in them
    overlap: float = 0.5  # of neighbouring tiles, as a share of a patch
    workers: int | None = None  # None = the GPUs of this machine, or its cores; 1 = this process
    cluster: str | None = None  # address of a Ray cluster whose nodes share `out`; None = this machine
    rounds: int | None = None  # passes per step of an inpainting; None = 4
    given: GivenVolumes = field(default_factory=GivenVolumes)


@dataclass(frozen=True)
class VolumeSummary:
    """What was written."""

    out: Path
    shape_zyx: Triple
    dtype: str
    levels: int
    seconds: float
    already: bool = False  # it existed, drawn with the same arguments


def draw_volume(request: VolumeRequest, on_progress: OnProgress = lambda what, done, total: None) -> VolumeSummary:
    """Draw a volume, or continue one; a finished one that was drawn with the same arguments is left as it is.

    Raises:
        ConfigError: arguments do not fit the checkpoint or each other, or something else is at `out`.
        DataError: a given volume cannot be read.
        StorageError: the disk fails or is too small.
        GpuMemoryError, SamplingStoppedError, NonFiniteError: as they say; what is done stays.
    """
    started = time.monotonic()
    with _prepared(request) as drawing:
        dtype, plan, out = drawing.greys.dtype, drawing.plan, request.out
        summary = VolumeSummary(out, drawing.tiling.shape_zyx, dtype.name, plan.levels, 0.0)
        if is_finished(out, drawing.record, DRAWING):
            return replace(summary, already=True)
        with StopRequest(None) as stop, gpu_memory(request.batch_size):
            watch = Watch(stop, on_progress, resumable=True)
            if not is_begun(out, DRAWING):
                drawing.forecast(drawing.live(watch)).check_space(out)
            with (
                open_partial(out, drawing.record, plan, dtype, 0, DRAWING) as target,
                storage_errors(
                    "a drawing needs a writable disk with enough space",
                    "free space: what is done is kept, and the same command continues",
                    f"while writing {target.path}",
                ),
            ):
                folder = target.path / "state"
                folder.mkdir(exist_ok=True)
                forget_unflushed(folder)
                sampling = Sampling(drawing.job, folder, watch, drawing.live(watch, folder / "live.npy"))
                drawing.fill(folder, sampling.used, watch)
                with drawing.workers_on(folder, watch) as run_parts:
                    x = sampling.run(run_parts, drawing.workers)
                write_volume(target, plan, x, sampling.used, drawing.greys, drawing.inputs, drawing.multiscale, watch)
    return replace(summary, seconds=time.monotonic() - started)


def forecast_volume(request: VolumeRequest) -> VolumeForecast:
    """The time, disk space and memory that a volume takes.  Calls the network twice, writes nothing."""
    with _prepared(request) as drawing, gpu_memory(request.batch_size):
        return measured_too(drawing.forecast(drawing.live(Watch())), drawing.job, drawing.request)


class _Drawing:
    """A request and all that follows from it."""

    def __init__(self, request: VolumeRequest, info: CheckpointInfo, inputs: Inputs) -> None:
        config, facts = info.config, info.data
        self.inputs, self.request, self._info = inputs, request, info
        shape = request.shape_zyx or inputs.shape_zyx
        assert shape is not None
        source = inputs.inpaint
        dtype = source.dtype if source is not None else facts.volumes[request.volume].dtype
        schedule = Schedule.from_config(config.diffusion, facts.spectrum)
        self.greys = Greys(dtype, facts.greys.volumes[request.volume], schedule)
        scale, unit, corner = inputs.space(facts.volumes[request.volume].voxel_size_um)
        self.plan = output_plan(shape, dtype.itemsize)
        self.multiscale = multiscale(request.out.stem, self.plan.levels, scale, [unit] * 3, corner)
        self.tiling = Tiling(shape, config.data.patch_size, request.overlap)
        self.job = VolumeJob(
            self.tiling,
            request.seed,
            sampling_levels(schedule, config.diffusion),
            config.diffusion.sampler,
            batch_size=request.batch_size,
            rounds=(request.rounds or _ROUNDS) if source is not None else 1,
            inpaint=source is not None,
            condition=inputs.condition.dtype.str if inputs.condition is not None else None,
        )
        self._live: NDArray[np.bool_] | None = None
        self._device = choose_device()
        self.workers = request.workers or _default_workers(self._device, self.tiling.tiles // request.batch_size)

    @property
    def record(self) -> dict[str, Any]:
        """All that the voxels depend on, as plain JSON: a drawing is continued only if it is the same."""
        request, info = self.request, self._info
        return {
            "shape_zyx": list(self.tiling.shape_zyx),
            "patch_zyx": list(self.tiling.patch_zyx),
            "checkpoint": str(info.checkpoint.resolve()),
            "overlap": request.overlap,
            "rounds": self.job.rounds,
            "given": self.inputs.record(),
            "box": None if request.given.box is None else [list(end) for end in request.given.box],
            "amp": info.config.training.amp,
            "device": self._device.type,
            **described(info, request),
        }

    def live(self, watch: Watch, note: Path | None = None) -> BlockSet:
        """The blocks with gaps near (`live_blocks`); all without --inpaint.

        Args:
            note: a file with what an earlier start has found; else it is written.
        """
        if not self.job.inpaint:
            return BlockSet(self.tiling.blocks)
        if note is not None and note.exists():
            return BlockSet(self.tiling.blocks, np.load(note))
        if self._live is None:
            self._live = live_blocks(self.tiling, self.inputs.gaps, watch)
        if note is not None:
            npy = io.BytesIO()
            np.save(npy, self._live)
            write_whole(note, npy.getvalue())
        return BlockSet(self.tiling.blocks, self._live)

    def fill(self, folder: Path, used: BlockSet, watch: Watch) -> None:
        """Copy the used blocks of the given volumes into the state."""
        inputs, greys = self.inputs, self.greys

        def copy_blocks(field: Field, option: str, read: Callable[[Box], NDArray[Any]]) -> None:
            field.create()
            for block in watch.over(f"blocks of {option} read", used, len(used)):
                if not field.has(block):
                    field.write(block, read(self.tiling.block_box(block)))

        if inputs.inpaint is not None:
            known = Field(folder / "known", self.tiling)
            copy_blocks(known, "--inpaint", lambda box: inputs.known(box, greys.grey, greys.schedule))
        if (condition := inputs.condition) is not None:
            shown = Field(folder / "condition", self.tiling, condition.dtype)
            copy_blocks(shown, "--condition", lambda box: inputs.read(condition, box))

    def workers_on(self, folder: Path, watch: Watch) -> AbstractContextManager[RunParts]:
        """What does the parts: this process if it is alone, else actors of Ray."""
        request = self.request
        log.info(
            "drawing %s voxels from %s (%s weights): %d tiles, %d passes, %d worker(s) on %s",
            format_sizes(self.tiling.shape_zyx),
            self._info.checkpoint,
            request.weights,
            self.tiling.tiles,
            len(self.job.passes),
            self.workers,
            self._device.type,
        )
        # Workers may run in another folder.
        elsewhere = replace(request, checkpoint=request.checkpoint.resolve())
        open_work = partial(open_network_work, self.job, folder.resolve(), elsewhere)
        if self.workers == 1 and request.cluster is None:
            return this_process(open_work)
        from vesuvius.generate.volume.ray_workers import ray_workers  # imports Ray

        return ray_workers(open_work, self.workers, int(self._device.type == "cuda"), request.cluster, watch.check)

    def forecast(self, live: BlockSet) -> VolumeForecast:
        """The forecast, still without time and memory."""
        return forecast_of(self.job, self.plan.raw_bytes, self.workers, self.request.out, live)


@contextmanager
def _prepared(request: VolumeRequest) -> Iterator[_Drawing]:
    """Check the request against the checkpoint and the given volumes.  Writes nothing."""
    info = read_checkpoint_info(find_checkpoint(request.checkpoint), request.overrides)
    check_weights(info.checkpoint, request.weights)
    config, given = info.config, request.given
    if request.out.suffix != ".zarr":
        raise ConfigError(f"--out {request.out} does not end in .zarr, as the name of a volume must; add the ending")
    if request.cluster is not None and request.workers is None:
        raise ConfigError("--cluster does not say how many workers draw; add --workers, such as the GPUs of its nodes")
    check_volume(info, request.volume)
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
    lay_out_network(config).check_size(request.batch_size, config.data.patch_size)
    factors = info.data.volumes[request.volume].condition_factors
    with Inputs(given, config.data, request.shape_zyx, factors) as inputs:
        if request.shape_zyx is not None and inputs.shape_zyx not in (None, request.shape_zyx):
            assert inputs.shape_zyx is not None
            raise ConfigError(
                f"--shape {format_sizes(request.shape_zyx)} is not that of --box ({format_sizes(inputs.shape_zyx)}); "
                "leave --shape out, or change --box"
            )
        drawing = _Drawing(replace(request, checkpoint=info.checkpoint), info, inputs)
        drawing.tiling.check()
        yield drawing


def _default_workers(device: torch.device, batches: int) -> int:
    if device.type == "cuda":
        return torch.cuda.device_count()
    return max(1, min(len(os.sched_getaffinity(0)), batches))
