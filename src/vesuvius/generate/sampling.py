"""`vesuvius sample`: from a checkpoint to samples of the size of a patch, on disk in grey values and as a picture.

A sample depends on (seed, its number) alone, bit by bit for the same batch size: batches begin at multiples of the
batch size, whatever the count, and the last one may be smaller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import Triple
from vesuvius.diffusion.generate import Generated, generate
from vesuvius.errors import ConfigError, NonFiniteError
from vesuvius.generate.described import DrawRequest, check_volume, described, run_of
from vesuvius.generate.sample_conditions import ConditionPatches
from vesuvius.generate.sample_zarr import (
    CONDITIONS,
    MONTAGE,
    SAMPLES,
    SampleArray,
    check_target,
    published_when_whole,
    to_greys,
)
from vesuvius.generate.volume.network import Network
from vesuvius.generate.watch import OnProgress, Watch, gpu_memory
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import CheckpointInfo, read_checkpoint_info
from vesuvius.training.step.network import lay_out_network
from vesuvius.training.step.step import AmpMode
from vesuvius.training.stop import StopRequest
from vesuvius.training.validation.pictures import MontageCell, draw_grid, magnification, orthogonal_slices

MAX_IN_MONTAGE = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleRequest(DrawRequest):
    """A request for samples."""

    count: int  # samples to write, numbers 0 ... count - 1
    out: Path | None  # directory to write; None: below the run's `samples/`
    overwrite: bool  # replace samples that are there


@dataclass(frozen=True)
class SampleSummary:
    """What was written."""

    out: Path  # the directory
    count: int
    shape_zyx: Triple
    dtype: str  # of the array of shape (count, *shape_zyx)
    evaluations: int  # calls of the network per sample
    seconds: float  # in all


def draw_samples(request: SampleRequest, on_progress: OnProgress = lambda what, done, total: None) -> SampleSummary:
    """Draw samples and write them with their conditions and a picture.

    Raises:
        ConfigError: there is no checkpoint, arguments do not fit its config, or the output exists.
        DataError: a condition cannot be read.
        GpuMemoryError, NonFiniteError, StorageError, SamplingStoppedError: as they say; nothing is left behind.
    """
    started = time.monotonic()
    info = read_checkpoint_info(find_checkpoint(request.checkpoint), request.overrides)
    # One sample does not take the time of a batch.
    request = replace(request, checkpoint=info.checkpoint, batch_size=min(request.batch_size, request.count))
    check_volume(info, request.volume)
    try:
        lay_out_network(info.config).check_size(request.batch_size, info.config.data.patch_size)
    except ConfigError as error:
        raise ConfigError(f"{error}; here --batch-size replaces training.train_batch_size") from error
    out = request.out or default_out(request, info)
    check_target(out, request.overwrite)
    with StopRequest(None) as stop, published_when_whole(out) as staged, gpu_memory(request.batch_size):
        evaluations = _Drawing(request, info, Watch(stop, on_progress)).write(staged)
    dtype, seconds = info.data.volumes[request.volume].dtype.name, time.monotonic() - started
    return SampleSummary(out, request.count, info.config.data.patch_size, dtype, evaluations, seconds)


class _Drawing:
    """Draws the samples of a request batch by batch, into arrays and a picture."""

    def __init__(self, request: SampleRequest, info: CheckpointInfo, watch: Watch) -> None:
        self._request, self._info, self._watch = request, info, watch
        self._network = Network(request)
        batches = -(-request.count // request.batch_size)
        self._steps_done, self._steps = 0, batches * info.config.diffusion.sampler_steps
        denoiser = self._network.denoiser
        log.info(
            "sampling from %s, %s weights of step %d, %.1f M parameters, device %s, amp %s",
            info.checkpoint,
            request.weights,
            info.step,
            denoiser.parameters / 1e6,
            self._network.device,
            denoiser.amp,
        )

    def write(self, directory: Path) -> int:
        """Draw all samples and write them into a directory.  Returns the network calls per sample."""
        request, info = self._request, self._info
        volume, grey = info.data.volumes[request.volume], info.data.greys.volumes[request.volume]
        cells: list[MontageCell] = []
        evaluations = 0
        shape = (request.count, *info.config.data.patch_size)
        samples = SampleArray(directory / SAMPLES, shape, volume.dtype, volume.voxel_size_um)
        with self._open_conditions() as conditions:
            if conditions:
                size_um = conditions.voxel_size_um or volume.voxel_size_um
                shown = SampleArray(directory / CONDITIONS, shape, conditions.volume.dtype, size_um)
            for first in range(0, request.count, request.batch_size):
                numbers = range(first, min(first + request.batch_size, request.count))
                stored = conditions.read(numbers) if conditions else None
                generated = self._generate(numbers, stored)
                evaluations = generated.evaluations
                x_0 = self._on_host(generated.x_0, numbers)
                voxels = to_greys(x_0, grey, volume.dtype)
                samples.write(first, voxels)
                pictures, caption = [x_0], "{}"
                if conditions and stored is not None:
                    shown.write(first, stored)
                    pictures, caption = [conditions.to_model_values(stored), x_0], "{}: condition, sample"
                scale = magnification(x_0.shape[1:])
                for place, number in enumerate(numbers[: MAX_IN_MONTAGE - len(cells)]):
                    row = np.hstack([orthogonal_slices(values[place], scale) for values in pictures])
                    cells.append(MontageCell(caption.format(number), row))
            record = describe(request, info, self._network.denoiser.amp, evaluations)
            samples.finish(record)
            if conditions:
                starts = [conditions.start_zyx(number) for number in record["numbers"]]
                shown.finish(record | {"condition": conditions.volume.name, "starts_zyx": starts})
        draw_grid(cells, title(request, info)).save(directory / MONTAGE, format="PNG")
        return evaluations

    def _open_conditions(self) -> AbstractContextManager[ConditionPatches | None]:
        config, request = self._info.config, self._request
        if not config.has_condition:
            return nullcontext()
        return ConditionPatches(config.data, self._info.data, request.volume, request.seed)

    def _generate(self, numbers: Sequence[int], stored: NDArray[Any] | None) -> Generated:
        """Draw one batch, on the device."""
        config, network = self._info.config, self._network
        shown = None if stored is None else stored[:, None]
        return generate(
            network.denoiser,
            network.schedule,
            config.diffusion,
            self._request.seed,
            numbers,
            (1, *config.data.patch_size),
            network.device,
            condition=network.condition_of(shown, len(numbers)),
            on_step=self._step_done,
        )

    def _step_done(self, step: int, x: Tensor) -> None:
        """Report a sampling step, and end here if a stop is wanted."""
        self._steps_done += 1
        self._watch.tell("sampling steps", self._steps_done, self._steps)
        self._watch.check()

    def _on_host(self, x_0: Tensor, numbers: Sequence[int]) -> NDArray[np.float32]:
        """Copy samples to the host, [len(numbers), Z, Y, X].  Raises NonFiniteError."""
        values: NDArray[np.float32] = x_0[:, 0].cpu().numpy()
        bad = [number for number, sample in zip(numbers, values, strict=True) if not np.isfinite(sample).all()]
        if bad:
            raise NonFiniteError(
                f"The network returned NaN or infinity for samples {', '.join(map(str, bad))} (amp "
                f"{self._network.denoiser.amp}, checkpoint {self._info.checkpoint}); try --amp off, --clip 1 or an "
                "earlier checkpoint"
            )
        return values


def default_out(request: SampleRequest, info: CheckpointInfo) -> Path:
    """`runs/<name>/samples/step_00000600_dpmpp2m_50_seed0`; `samples/...` for a checkpoint outside a run.

    Guidance, volume and weights are named where they are not the defaults.
    """
    diffusion = info.config.diffusion
    name = f"step_{info.step:08d}_{diffusion.sampler}_{diffusion.sampler_steps}_seed{request.seed}"
    name += f"_guidance{diffusion.sampler_guidance:g}" if diffusion.sampler_guidance != 1 else ""
    name += f"_volume{request.volume}" if request.volume != 0 else ""
    name += f"_{request.weights}" if request.weights != "ema" else ""
    return run_of(info.checkpoint) / "samples" / name


def describe(request: SampleRequest, info: CheckpointInfo, amp: AmpMode, evaluations: int) -> dict[str, Any]:
    """How the samples were made, as plain JSON for the attributes of their array."""
    return {
        "numbers": list(range(request.count)),
        "noise": info.config.diffusion.noise,
        "evaluations_per_sample": evaluations,
        "checkpoint": str(info.checkpoint),
        "amp": amp,
        **described(info, request),
    }


def title(request: SampleRequest, info: CheckpointInfo) -> str:
    """The first line of the picture."""
    diffusion = info.config.diffusion
    shown = f", first {MAX_IN_MONTAGE} of {request.count}" if request.count > MAX_IN_MONTAGE else ""
    return (
        f"{info.config.name} step {info.step} ({request.weights}), {diffusion.sampler} "
        f"{diffusion.sampler_steps} steps, seed {request.seed}{shown}: z, y, x slices"
    )
