"""`vesuvius sample --shape`: from a checkpoint to a volume of any size on disk, and its labels."""

import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray

from vesuvius.accelerator import choose_device
from vesuvius.config import ArrayConfig, Triple
from vesuvius.diffusion.sampler import sampling_levels
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError, StorageError, storage_errors
from vesuvius.generate.common import GenerateRequest, Network, base_record, resolve_checkpoint, translate_gpu_oom
from vesuvius.generate.sample_zarr import to_intensities
from vesuvius.generate.volume import steps
from vesuvius.generate.volume.inputs import InputConfig, Inputs
from vesuvius.generate.volume.passes import CONTEXT, SamplingJob, block_noise
from vesuvius.generate.volume.steps import SamplingRunner, TiledRun
from vesuvius.predict.progress import OnProgress, ProgressReporter, one_thread
from vesuvius.predict.tasks import BlockArray, Blocks, RunTasks, delete_unflushed, run_locally
from vesuvius.predict.tiling import even_tiling
from vesuvius.runlog.files import free_disk_bytes, write_atomically
from vesuvius.runlog.redact import redacted
from vesuvius.runlog.units import format_count, format_duration, format_size, format_sizes
from vesuvius.training.checkpoint.trained import CheckpointInfo, check_weights
from vesuvius.training.stop import StopRequest
from vesuvius.volume_tools.partial import PartialCopy, check_name, has_partial, is_finished, partial_path
from vesuvius.volume_tools.pyramid import Pyramid, levels_to_one
from vesuvius.volumes.alignment import ONES
from vesuvius.volumes.box import Box, box_at, relative, shifted, triple
from vesuvius.volumes.context import ContextAlignment

log = logging.getLogger(__name__)

RECORD_KIND = "drawing"
_ROUNDS = 4
_CHUNK, _LEVELS = 128, 6


@dataclass(frozen=True)
class VolumeRequest(GenerateRequest):
    out: Path  # ends in .zarr
    shape_zyx: Triple | None  # None = that of the input volumes, or of the box in them
    overlap: float = 0.25  # of neighboring tiles, as a share of a patch
    workers: int | None = None  # None = one per GPU of this machine, or per core; 1 = this process
    cluster: str | None = None  # address of a Ray cluster whose nodes share `out`; None = this machine
    rounds: int | None = None  # passes per step when inpainting; None = 4
    inputs: InputConfig = field(default_factory=InputConfig)
    labels_out: Path | None = None  # copy of the condition on the grid of `out`; None = none
    instances_out: Path | None = None  # the same of the instances


def generate_volume(request: VolumeRequest, on_progress: OnProgress = lambda what, done, total: None) -> str:
    """Generate a volume, or resume one; a volume finished with the same arguments is not changed.

    Returns a summary for the terminal.  Raises ConfigError if arguments do not fit the checkpoint or each other, or
    `out` is another volume.  After all other errors, and after a signal (VesuviusError), finished tiles are kept.
    """
    started = time.monotonic()
    with prepared(request) as volume:
        dtype, plan, out = volume.dtype, volume.plan, request.out
        shape = f"{format_sizes(volume.job.tiling.shape_zyx)} {dtype}"
        with StopRequest(None) as stop, translate_gpu_oom(request.batch_size):
            volume.progress = progress = ProgressReporter(stop, on_progress, resumable=True)
            folder = partial_path(out) / "state"
            if is_finished(out, volume.record, RECORD_KIND):
                volume.write_labels()
                return f"{out} is already complete: {shape}, generated with the same arguments"
            active = volume.active_blocks(note := folder / "live_blocks")
            if not active:
                none = ("missing", "mark what to fill with --mask")
                none = none if request.inputs.mask is None else ("marked by --mask", "check both volumes")
                log.warning("No voxel of --inpaint is %s, so it is copied; %s", *none)
            if not has_partial(out, RECORD_KIND):
                volume.check_space(active)
            volume.write_labels()
            with (
                PartialCopy(out, volume.record, plan, dtype, 0, RECORD_KIND).locked() as target,
                storage_errors(str(target.path), "free some space and run the same command again to resume"),
            ):
                folder.mkdir(exist_ok=True)
                delete_unflushed(folder, "*/tiles")
                if volume.job.inpaint and not note.exists():
                    write_atomically(note, np.fromiter(active, np.int64).tobytes())
                sampling = TiledRun(volume.job, folder, progress, active)
                volume.fill(folder, sampling.used)
                with volume.workers_on(folder) as run_tasks:
                    x = sampling.run(run_tasks, volume.workers)
                volume.write(target, x, sampling.used)
        return f"wrote {out}: {shape}, {format_count(plan.levels, 'level')}, in {time.monotonic() - started:.1f} s"


def forecast_volume(request: VolumeRequest) -> str:
    """Describe the disk space and the time that a volume takes.  Writes nothing.  Raises as `generate_volume`."""
    with prepared(request) as volume, translate_gpu_oom(request.batch_size), one_thread():
        job, active, workers = volume.job, volume.active_blocks(), volume.workers
        disk = volume.check_space(active)
        network = Network(volume.request, evaluations=0)
        evaluate, x = _evaluate_by(network, job), torch.zeros(job.batch_size, 1, *job.tiling.patch_zyx)
        for _ in range(2):  # the first call is warm-up
            started = time.monotonic()
            evaluate(0, x, None).sum().item()
        batches = steps.count_batches(job, active)
        tiles = min(batches * job.batch_size, job.tiling.tiles)
        calls = [network.estimate_for(None, 1).calls(step.level) for step in job.passes]
        seconds = (time.monotonic() - started) / calls[0] * sum(calls) * batches / max(1, min(workers, batches))
        return (
            f"volume {format_sizes(job.tiling.shape_zyx)}: {tiles} tiles, {tiles * sum(calls)} network evaluations of "
            f"a tile\ndisk: {disk}\ntime: about {format_duration(seconds)} with {format_count(workers, 'worker')}"
        )


def forecast_with_coarse(coarse: VolumeRequest, request: VolumeRequest) -> str:
    """Describe both volumes of `with_coarse`, the second one with an empty first one.  Raises as `generate_volume`."""
    with prepared(coarse) as volume, TemporaryDirectory() as folder:
        if not (path := coarse.out).exists():
            plan, path = volume.plan, Path(folder) / coarse.out.name
            zarr.create_array(path, shape=plan.shape_zyx, chunks=plan.chunk_zyx, dtype=volume.dtype)  # metadata alone
        inputs = replace(request.inputs, condition=ArrayConfig(path=str(path)))
        second = forecast_volume(replace(request, inputs=inputs))
        return f"first, {coarse.out.name}: {forecast_volume(coarse)}\nthen, {request.out.name}: {second}"


def with_coarse(request: VolumeRequest, checkpoint: Path) -> tuple[VolumeRequest, VolumeRequest]:
    """Return the request for the coarse volume that another checkpoint draws first, and that for the volume.

    With context the coarse volume is larger, so that windows end within it.  Raises as `generate_volume`.
    """
    info, shape = resolve_checkpoint(request), request.shape_zyx
    out = request.out.with_suffix(f".coarse{request.out.suffix}")
    factors = info.data.volumes[request.volume_index].condition_factors
    if factors == ONES:
        raise ConfigError(f"--coarse has no effect: {info.checkpoint} has no coarser condition; remove it")
    check_name(request.out)
    if given := [name for name, value in vars(request.inputs).items() if value is not None]:
        raise ConfigError(f"--coarse draws the condition, so it does not go with --{given[0]}; remove one of them")
    if shape is None:
        raise ConfigError("--coarse needs the size of the volume; add --shape")
    around = Fraction((info.config.data.context or 1) - 1, 2)  # patches on each side
    margin = [math.ceil(size * around / by) for size, by in zip(info.config.data.patch_size, factors, strict=True)]
    sizes = triple(math.ceil(size / by) + 2 * more for size, by, more in zip(shape, factors, margin, strict=True))
    start = triple(math.ceil(more * by) for more, by in zip(margin, factors, strict=True))
    own = ["diffusion.sampler_guidance=", "diffusion.sampler_condition_noise="]
    own += ["diffusion.residual_guidance"] * (request.guide is not None)  # without effect on the other network
    overrides = tuple(each for each in request.overrides if not each.startswith(tuple(own)))
    changes: dict[str, Any] = {"overrides": overrides, "guide": None, "volume_index": 0}
    inputs = InputConfig(condition=ArrayConfig(path=str(out)), box=box_at(start, shape))
    coarse = replace(request, checkpoint=checkpoint, out=out, shape_zyx=sizes, **changes)
    try:
        first = resolve_checkpoint(coarse)
        if first.config.has_condition and first.config.diffusion.sampler_guidance != 0:
            raise ConfigError("trained with conditions; choose a run without, or draw its volume for --condition first")
        drawn_um, um = first.data.volumes[0].voxel_size_um, info.data.volumes[request.volume_index].voxel_size_um
        wanted_um = um and triple(size * float(by) for size, by in zip(um, factors, strict=True))
        if drawn_um and wanted_um and not np.allclose(drawn_um, wanted_um, rtol=0.1):
            what = "makes voxels of {} um, but the condition needs {} um; choose a run of that level"
            raise ConfigError(what.format(*(format_sizes(f"{um:g}" for um in each) for each in (drawn_um, wanted_um))))
        with prepared(coarse):
            pass
    except ConfigError as error:
        raise ConfigError(f"--coarse {checkpoint}: {error}") from error
    return coarse, replace(request, inputs=inputs)


class _Volume:
    """A checked request with its plan, record and output."""

    def __init__(self, request: VolumeRequest, info: CheckpointInfo, inputs: Inputs) -> None:
        config, facts = info.config, info.data
        self.inputs, self.request, self._info, self.progress = inputs, request, info, ProgressReporter()
        shape = request.shape_zyx or inputs.shape_zyx
        assert shape is not None
        source = inputs.inpaint
        self.dtype = source.dtype if source is not None else facts.volumes[request.volume_index].dtype
        self._intensity = facts.intensities.volumes[request.volume_index]
        self._schedule = Schedule.from_config(config.diffusion, facts.spectrum)
        # chunks of at most 128 voxels along each axis; levels down to one chunk, at most six
        levels = min(_LEVELS, levels_to_one(shape, _CHUNK))
        self.plan = Pyramid(shape, triple(min(size, _CHUNK) for size in shape), levels, self.dtype.itemsize)
        trained_um = facts.volumes[request.volume_index].voxel_size_um
        self._geometry = inputs.geometry(trained_um)
        scale = self._geometry.scale_zyx
        if not np.allclose(scale, trained_um or scale, rtol=0.01):
            sizes = [format_sizes(f"{um:g}" for um in each) for each in (scale, trained_um or ())]
            log.warning("The given volumes make voxels of %s um, but the model was trained on %s um", *sizes)
        self.job = SamplingJob(
            even_tiling(shape, config.data.patch_size, request.overlap),
            request.batch_size,
            request.seed,
            sampling_levels(self._schedule, config.diffusion),
            config.diffusion.sampler,
            rounds=(request.rounds or _ROUNDS) if source is not None else 1,
            inpaint=source is not None,
            condition=inputs.condition.dtype.str if inputs.condition is not None else None,
            context=inputs.context,
            condition_noise=config.diffusion.sampled_condition_noise,
        )
        self._device = choose_device()
        batches = self.job.tiling.tiles // request.batch_size
        on_cpu = max(1, min(len(os.sched_getaffinity(0)), batches))
        self.workers = request.workers or (torch.accelerator.device_count() if self._device.type != "cpu" else on_cpu)

    @cached_property
    def record(self) -> dict[str, Any]:
        """Everything the voxels depend on, as plain JSON: a volume is resumed only with an equal record."""
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
            **base_record(info, request),
        }

    def active_blocks(self, note: Path = Path()) -> Blocks:
        """Return the blocks near gaps, or all without --inpaint; `note` caches the result of an earlier start."""
        if not self.job.inpaint:
            return range(self.job.tiling.blocks)
        if note.is_file():
            return dict.fromkeys(np.fromfile(note, np.int64).tolist())
        return steps.active_blocks(self.job.tiling, self.inputs.gaps, self.progress)

    def fill(self, folder: Path, used: Blocks) -> None:
        """Write the arrays that the job is given, by blocks."""
        inputs, tiling = self.inputs, self.job.tiling
        readers: dict[str, Callable[[Box], NDArray[Any]]] = {
            "known": lambda box: inputs.known(box, self._intensity, self._schedule),
            "condition": lambda box: inputs.read("condition", box),
        }
        for name, dtype in self.job.given.items():
            field, option = BlockArray(folder / name, tiling, dtype), "inpaint" if name == "known" else name
            for block in self.progress.track(f"blocks of --{option} read", used, len(used)):
                if not field.has(block):
                    field.write(block, readers[name](tiling.block_box(block)))
        if self.job.context is not None:
            self._fill_context(self.job.context, folder, used)

    def _fill_context(self, context: ContextAlignment, folder: Path, used: Blocks) -> None:
        job, (voxels, noise) = self.job, steps.context_fields(self.job, folder)
        grid, origin = job.context_grid, job.context_box[0]
        covers = (relative(context.cover(job.tiling.block_box(block)), origin) for block in used)
        blocks = {block for cover in covers for block in grid.blocks_over(cover)}
        for block in self.progress.track("blocks of --condition read", sorted(blocks), len(blocks)):
            if not noise.has(block):
                voxels.write(block, self.inputs.read_window(shifted(grid.block_box(block), origin)))
                noise.write(block, block_noise(job.seed, CONTEXT, 0, grid, block).numpy())

    def workers_on(self, folder: Path) -> AbstractContextManager[RunTasks]:
        """Return a context with a function that runs tasks: in this process for one worker, else in Ray actors."""
        request, job = self.request, self.job
        log.info(
            "Generating %s voxels from %s (%s weights): %d tiles, %s, %s on %s",
            *(format_sizes(job.tiling.shape_zyx), self._info.checkpoint, request.weights, job.tiling.tiles),
            *(format_count(job.steps, "pass"), format_count(self.workers, "worker"), self._device.type),
        )
        # workers may run in another folder
        folder, guide = folder.resolve(), request.guide and request.guide.resolve()
        absolute = replace(request, checkpoint=request.checkpoint.resolve(), guide=guide)
        open_runner = partial(_open_runner, job, folder, absolute)
        if self.workers == 1 and request.cluster is None:
            return run_locally(open_runner)
        from vesuvius.predict.ray_workers import ray_workers  # imports Ray

        gpus = int(self._device.type != "cpu")
        files = map(str, filter(None, (absolute.checkpoint, guide)))
        return ray_workers(open_runner, self.workers, gpus, request.cluster, self.progress.check, folder, files)

    def write_labels(self) -> None:
        """Write the labels of a pair, unless they are there, with the grid, chunks, levels and record of the scan."""
        outs = {"condition": self.request.labels_out, "instances": self.request.instances_out}
        for name, out in outs.items():
            record = self.record | (self.inputs.record(instances=True) if name == "instances" else {})
            if out is None or is_finished(out, record, RECORD_KIND):
                continue
            classes, dtype = bool(self._info.config.data.class_values), self.inputs.volumes[name].dtype
            labels = classes or name == "instances"
            with PartialCopy(out, record, self.plan, dtype, 0, RECORD_KIND, labels).locked() as target:
                self._finish(target, partial(self.inputs.read, name), lambda _: self.progress.check())

    def write(self, target: PartialCopy, x: BlockArray, used: Blocks) -> None:
        """Write the last state `x`, which has the `used` blocks, with known voxels as stored."""
        total = self.plan.chunk_count
        done = itertools.count(total + 1 - sum(len(target.missing(level)) for level in range(self.plan.levels)))

        def read(box: Box) -> NDArray[Any]:
            self.progress.check()
            values = np.asarray(self._schedule.model_values(x.read(box, used)))  # type: ignore[arg-type]
            voxels = to_intensities(values, self._intensity, self.dtype)
            if self.inputs.inpaint is None:
                return voxels
            return np.where(self.inputs.gaps(box), voxels, self.inputs.read("inpaint", box))

        def count(size: int) -> None:
            self.progress.report("chunks written", next(done), total)
            self.progress.check()

        self._finish(target, read, count)

    def _finish(
        self, target: PartialCopy, read: Callable[[Box], NDArray[Any]], on_chunk: Callable[[int], None]
    ) -> None:
        """Write the missing chunks of all levels, and rename into place with the model's config in the record."""
        target.fill(0, read, on_chunk)
        target.fill_coarser(on_chunk)
        config = redacted(self._info.config.model_dump(mode="json"))
        replace(target, record=target.record | {"config": config}).publish(self._geometry)

    def check_space(self, active: Blocks) -> str:
        """Describe the disk space needed.  Raises StorageError if the disk is too small."""
        out, labels_out = self.request.out, self.request.labels_out
        state, volume = state_bytes(self.job, active, self.workers), self.plan.raw_bytes
        total, free = state + volume, free_disk_bytes(out.parent)
        need = f"{format_size(state)} for the state, at most {format_size(volume)} for the volume"
        if labels_out is not None and not labels_out.exists():
            dtypes = [of.dtype for name, of in self.inputs.volumes.items() if name in ("condition", "instances")]
            labels = sum(replace(self.plan, voxel_bytes=dtype.itemsize).raw_bytes for dtype in dtypes)
            total, need = total + labels, f"{need}, at most {format_size(labels)} for the labels"
        if total > free:
            raise StorageError(
                f"The disk is too small for {out}: {need}, but {format_size(free)} is free; free some space, "
                "lower --overlap or --shape, or choose another --out"
            )
        return f"{need}; {format_size(free)} free"


def state_bytes(job: SamplingJob, active: Blocks, workers: int) -> int:
    """Return the largest size of a state on disk."""
    tiling, used = job.tiling, len(steps.used_blocks(job, active))
    block_voxels = math.prod(tiling.patch_zyx)
    fields = (4 if any(step.keeps_x_0 for step in job.passes) else 2) + job.inpaint
    of_condition = np.dtype(job.condition).itemsize if job.condition else 0
    around = (of_condition + 4) * math.prod(job.context_grid.shape_zyx) if job.context else 0
    voxel_bytes = 4 * fields + (0 if job.context else of_condition)
    # Tiles are kept for the rows along z over two groups of blocks and over the row of blocks before them.
    starts = tiling.starts[0]
    depth = tiling.patch_zyx[0] * (2 + -(-2 * steps.BLOCKS_PER_GROUP * workers // math.prod(tiling.block_grid[1:])))
    rows = min(len(starts), 2 + depth // (starts[1] - starts[0] if len(starts) > 1 else depth))
    return block_voxels * (used * voxel_bytes + 4 * rows * math.prod(tiling.tile_grid[1:])) + around


@contextmanager
def prepared(request: VolumeRequest) -> Iterator[_Volume]:
    """Check the request against the checkpoint and the input volumes.  Writes nothing."""
    info = resolve_checkpoint(request)
    check_weights(info.checkpoint, request.weights)
    config, inputs = info.config, request.inputs
    if request.out.suffix != ".zarr":
        raise ConfigError(f"--out {request.out} does not end in .zarr; add the ending")
    if request.cluster is not None and request.workers is None:
        raise ConfigError("--cluster needs --workers; add it, e.g. the number of GPUs of the nodes")
    if inputs.condition is not None and not config.has_condition:
        raise ConfigError(f"--condition has no effect: {info.checkpoint} was trained without conditions; remove it")
    if request.rounds is not None and inputs.inpaint is None:
        raise ConfigError("--rounds has no effect without --inpaint; remove it")
    if inputs.mask is not None and inputs.inpaint is None:
        raise ConfigError("--mask has no effect without --inpaint; add --inpaint, or remove --mask")
    if inputs.condition is None and config.has_condition and config.diffusion.sampler_guidance != 0:
        remedy = "add --condition VOLUME" + ", or --guidance 0 to generate without" * config.learns_without_condition
        raise ConfigError(f"--condition is missing, but the model was trained with conditions; {remedy}")
    if request.labels_out is not None and config.diffusion.sampler_guidance == 0:
        raise ConfigError("--guidance 0 ignores labels, so no pairs are written; remove it, or let --out end in .zarr")
    if inputs.instances is not None and request.instances_out is None:
        raise ConfigError("--instances are labels of pairs; add --condition and an --out without .zarr, or remove it")
    factors = info.data.volumes[request.volume_index].condition_factors
    with Inputs(inputs, config.data, request.shape_zyx, factors) as opened:
        if request.shape_zyx is not None and opened.shape_zyx not in (None, request.shape_zyx):
            assert opened.shape_zyx is not None
            sizes = f"{format_sizes(request.shape_zyx)} differs from --box ({format_sizes(opened.shape_zyx)})"
            raise ConfigError(f"--shape {sizes}; remove --shape, or change --box")
        yield _Volume(replace(request, checkpoint=info.checkpoint), info, opened)


def _evaluate_by(network: Network, job: SamplingJob) -> steps.Evaluate:
    return lambda step, x, condition: network.estimate_for(condition, len(x))(
        x.to(network.device), job.passes[step].level
    )[0]


def _open_runner(job: SamplingJob, folder: Path, request: GenerateRequest) -> SamplingRunner:
    return SamplingRunner(job, folder, _evaluate_by(Network(request, job.steps * job.tiling.tiles), job))
