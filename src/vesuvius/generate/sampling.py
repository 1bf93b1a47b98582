"""`vesuvius sample`: from a checkpoint to patch-sized samples, on disk in intensities and as a picture.

A sample depends only on (seed, its index), bit for bit at the same batch size: batches begin at multiples of the batch
size, whatever the count, and the last one may be smaller.
"""

import itertools
import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from vesuvius.errors import NonFiniteError
from vesuvius.generate import common, sample_zarr
from vesuvius.generate.volume.inputs import TrainingCondition
from vesuvius.predict.progress import OnProgress, ProgressReporter
from vesuvius.runlog.units import format_count, format_sizes
from vesuvius.training.checkpoint.trained import CheckpointInfo
from vesuvius.training.stop import StopRequest
from vesuvius.training.validation.pictures import MontageCell, Scale, draw_grid, orthogonal_slices

MAX_IN_MONTAGE = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleRequest(common.GenerateRequest):
    count: int  # samples to write, indices 0 ... count - 1
    out: Path | None  # directory to write; None = below the run's `samples/`


def generate_samples(request: SampleRequest, on_progress: OnProgress = lambda what, done, total: None) -> str:
    """Generate samples and write them with their conditions and a picture.  Returns a summary for the terminal.

    Raises ConfigError, DataError, GpuMemoryError, NonFiniteError, and VesuviusError after a signal: nothing is left.
    """
    started = time.monotonic()
    request = replace(request, batch_size=min(request.batch_size, request.count))
    info = common.resolve_checkpoint(request)
    request = replace(request, checkpoint=info.checkpoint)
    out = request.out or default_out(request, info)
    sample_zarr.check_target(out)
    with (
        StopRequest(None) as stop,
        sample_zarr.atomic_directory(out) as staged,
        common.translate_gpu_oom(request.batch_size),
    ):
        evaluations = _generate_all(request, info, ProgressReporter(stop, on_progress), staged)
    shape, dtype = format_sizes(info.config.data.patch_size), info.data.volumes[request.volume_index].dtype.name
    seconds = time.monotonic() - started
    return (
        f"wrote {out}: {format_count(request.count, 'sample')} of {shape} {dtype} in {seconds:.1f} s "
        f"({seconds / request.count:.2f} s each), {evaluations} network evaluations per sample"
    )


def _generate_all(request: SampleRequest, info: CheckpointInfo, progress: ProgressReporter, directory: Path) -> int:
    """Generate all samples batch by batch, into arrays and a picture.  Returns the network calls per sample."""
    config, every = info.config, range(request.count)
    network = common.Network(request, request.count * config.diffusion.sampler_steps)
    volume, intensity = info.data.volumes[request.volume_index], info.data.intensities.volumes[request.volume_index]
    scale = Scale.of_patch(config.data.patch_size, volume.voxel_size_um)
    log.info(
        "Sampling from %s, %s weights of step %d, %.1f M parameters, device %s, amp %s",
        *(info.checkpoint, request.weights, info.step, network.denoiser.parameters / 1e6),
        *(network.device, network.denoiser.amp),
    )
    batches = [every[first : first + request.batch_size] for first in every[:: request.batch_size]]
    done, cells, evaluations = itertools.count(1), list[MontageCell](), 0

    def step_done(step: int, x: Tensor) -> None:
        progress.report("sampling steps", next(done), len(batches) * config.diffusion.sampler_steps)
        progress.check()

    shape = (request.count, *config.data.patch_size)
    samples = sample_zarr.sample_array(directory / sample_zarr.SAMPLES, shape, volume.dtype, volume.voxel_size_um)
    where = (config.data, info.data, request.volume_index, request.seed)
    with TrainingCondition(*where) if config.has_condition else nullcontext() as conditions:
        if conditions:
            size_um, dtype = conditions.geometry(volume.voxel_size_um).voxel_size_um, conditions.volume.dtype
            condition_array = sample_zarr.sample_array(directory / sample_zarr.CONDITIONS, shape, dtype, size_um)
        for numbers in batches:
            rows = slice(numbers.start, numbers.stop)
            stored = conditions.patches(numbers) if conditions else None
            seen = conditions.seen(numbers, config.diffusion.sampled_condition_noise) if conditions else None
            drawn, evaluations = network.generate(request.seed, numbers, seen, step_done)
            x_0 = drawn[:, 0].cpu().numpy()
            if bad := [n for n, values in zip(numbers, x_0, strict=True) if not np.isfinite(values).all()]:
                raise NonFiniteError(
                    f"The network returned NaN or infinity for samples {', '.join(map(str, bad))} (amp "
                    f"{network.denoiser.amp}, checkpoint {info.checkpoint}); try --amp off, --clip 1 or an "
                    "earlier checkpoint"
                )
            samples[rows] = sample_zarr.to_intensities(x_0, intensity, volume.dtype)
            pictures, caption = [x_0], "{}"
            if conditions and stored is not None:
                condition_array[rows] = stored
                pictures = [sample_zarr.to_model_values(stored, conditions.intensity), x_0]
                caption = "{}: labels, sample" if config.data.class_values else "{}: condition, sample"
            for row_index, number in enumerate(numbers[: MAX_IN_MONTAGE - len(cells)]):
                row = np.hstack([orthogonal_slices(values[row_index], scale) for values in pictures])
                cells.append(MontageCell(caption.format(number), row))
        record = common.base_record(info, request) | {
            "numbers": [*every],
            "noise": config.diffusion.noise,
            "evaluations_per_sample": evaluations,
            "checkpoint": str(info.checkpoint),
            "amp": network.denoiser.amp,
        }
        sample_zarr.record_samples(directory / sample_zarr.SAMPLES, record)
        if conditions:
            place = {"condition": conditions.volume.name, "starts_zyx": [*map(conditions.start_zyx, every)]}
            sample_zarr.record_samples(directory / sample_zarr.CONDITIONS, record | place)
    more = f", first {MAX_IN_MONTAGE} of {request.count}" if request.count > MAX_IN_MONTAGE else ""
    title = (
        f"{config.name} step {info.step} ({request.weights}), {config.diffusion.sampler} "
        f"{config.diffusion.sampler_steps} steps, seed {request.seed}{more}; middle slices across z, y and x"
    )
    draw_grid(cells, title, scale).save(directory / sample_zarr.MONTAGE, format="PNG")
    return evaluations


def default_out(request: SampleRequest, info: CheckpointInfo) -> Path:
    """Return `runs/<name>/samples/step_00000600_dpmpp2m_50_seed0`, with further options unless they are defaults."""
    diffusion = info.config.diffusion
    name = f"step_{info.step:08d}_{diffusion.sampler}_{diffusion.sampler_steps}_seed{request.seed}"
    name += f"_guidance{diffusion.sampler_guidance:g}" if diffusion.sampler_guidance != 1 else ""
    if diffusion.residual_guidance != 1:
        levels = "-".join(f"{level:g}" for level in diffusion.residual_guidance_interval or ())
        name += f"_residual_guidance{diffusion.residual_guidance:g}" + (levels and f"_{levels}")
    name += f"_{request.guide.name}" if request.guide else ""
    name += f"_volume{request.volume_index}" if request.volume_index != 0 else ""
    name += f"_{request.weights}" if request.weights != "ema" else ""
    return common.run_directory(info.checkpoint) / "samples" / name
