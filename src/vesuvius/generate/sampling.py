"""`vesuvius sample`: from a checkpoint to samples of the size of a patch, on disk in grey values and as a picture.

A sample follows from (seed, its number), bit by bit at equal batch size: batches begin at multiples of the batch size,
whatever the count, and the last one is filled up with samples that are thrown away.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius import __version__
from vesuvius.config import ArrayConfig, Triple
from vesuvius.diffusion.generate import Generated, generate
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import EXIT_INTERRUPTED, ConfigError, GpuMemoryError, NonFiniteError, VesuviusError
from vesuvius.generate.sample_conditions import ConditionPatches
from vesuvius.generate.sample_zarr import (
    CONDITIONS,
    MONTAGE,
    NPY,
    SAMPLES,
    SampleArray,
    check_target,
    published_when_whole,
    to_greys,
)
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import CheckpointInfo, Denoiser, read_checkpoint_info
from vesuvius.training.step.conditioning import Conditioner
from vesuvius.training.step.network import lay_out_network
from vesuvius.training.step.self_test import check_convolution, cudnn_problem
from vesuvius.training.step.step import AmpMode, choose_device
from vesuvius.training.stop import StopRequest
from vesuvius.training.validation.montage import Cell, draw_grid, magnification, orthogonal_slices
from vesuvius.volumes.box import Box

MAX_IN_MONTAGE = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleRequest:
    """What is asked for.

    Attributes:
        checkpoint: as `find_checkpoint` takes it.
        weights: "ema", another average, or "model" for those of the last step.
        overrides: `key.path=value`, on top of the checkpoint's config: sampler and amp.
        count: samples to write, numbers 0 ... count - 1.
        seed, batch_size: what a sample follows from, beside its number.
        volume: number of the volume whose grey values, condition and scalars are used.
        out: directory to write; None: below the run's `samples/`.
        overwrite: replace samples that are there.
        condition, box: what all samples are shown, in place of the training's condition; the box has the size of a
            patch, None = all of it.
        npy: write samples.npy, too.
    """

    checkpoint: Path
    weights: str
    overrides: tuple[str, ...]
    count: int
    seed: int
    batch_size: int
    volume: int
    out: Path | None
    overwrite: bool
    condition: ArrayConfig | None = None
    box: Box | None = None
    npy: bool = False


@dataclass(frozen=True)
class SampleSummary:
    """What was written.

    Attributes:
        out: the directory.
        dtype: of the array of shape (count, *shape_zyx).
        evaluations: calls of the network per sample.
        seconds: in all.
    """

    out: Path
    count: int
    shape_zyx: Triple
    dtype: str
    evaluations: int
    seconds: float


class SamplingStoppedError(VesuviusError):
    """A signal came before the last sample."""

    def __init__(self, exit_code: int, done: int, total: int) -> None:
        name = signal.SIGINT.name if exit_code == EXIT_INTERRUPTED else signal.SIGTERM.name
        super().__init__(
            f"samples are written when all are drawn; got {name} after {done} of {total} sampling steps; nothing is "
            "left of them: give the same command again"
        )
        self.exit_code = exit_code


def draw_samples(
    request: SampleRequest, on_step: Callable[[int, int], None] = lambda done, total: None
) -> SampleSummary:
    """Draw samples and write them with their conditions and a picture.

    Args:
        on_step: called after each sampling step of a batch with the number of those done and of all.

    Raises:
        ConfigError: the checkpoint is none, arguments do not fit its config, or the output exists.
        DataError: a condition cannot be read.
        GpuMemoryError, NonFiniteError, StorageError, SamplingStoppedError: as they say; nothing is left behind.
    """
    started = time.monotonic()
    # One sample does not take the time of a batch.
    request = replace(request, batch_size=min(request.batch_size, request.count))
    info = read_checkpoint_info(find_checkpoint(request.checkpoint), request.overrides)
    _check_request(request, info)
    out = request.out or default_out(request, info)
    check_target(out, request.overwrite)
    with StopRequest(None) as stop, published_when_whole(out) as staged:
        try:
            evaluations = _Drawing(request, info, stop, on_step).write(staged)
        except torch.OutOfMemoryError as error:
            raise GpuMemoryError(
                f"a batch of samples must fit the GPU's memory; got --batch-size {request.batch_size}: out of memory "
                f"({error}); lower --batch-size"
            ) from error
    dtype, seconds = info.data.volumes[request.volume].dtype.name, time.monotonic() - started
    return SampleSummary(out, request.count, info.config.data.patch_size, dtype, evaluations, seconds)


def _check_request(request: SampleRequest, info: CheckpointInfo) -> None:
    """Raises ConfigError where numbers of the command line do not fit the checkpoint."""
    if request.volume >= len(info.data.volumes):
        raise ConfigError(
            f"--volume counts the {len(info.data.volumes)} volumes of the training from 0; got {request.volume}; "
            "lower it"
        )
    if request.condition is None and request.box is not None:
        raise ConfigError("--box is a part of --condition; got no --condition; add it, or remove --box")
    if request.condition is not None and not info.config.has_condition:
        raise ConfigError(
            f"--condition needs a model that was trained with conditions; got {request.condition.path} and "
            f"{info.checkpoint}, which has none; remove --condition"
        )
    try:
        lay_out_network(info.config).check_size(request.batch_size, info.config.data.patch_size)
    except ConfigError as error:
        raise ConfigError(f"{error}; here --batch-size takes the place of training.train_batch_size") from error


class _Drawing:
    """One call: the network that draws, and the arrays and the picture that it fills batch by batch."""

    def __init__(
        self, request: SampleRequest, info: CheckpointInfo, stop: StopRequest, on_step: Callable[[int, int], None]
    ) -> None:
        config, device = info.config, choose_device()
        self._request, self._info, self._stop, self._on_step = request, info, stop, on_step
        self._device = device
        self._schedule = Schedule.from_config(config.diffusion, info.data.spectrum).to(device)
        self._network = Denoiser(info, request.weights, self._schedule, device)
        if problem := cudnn_problem(device, self._network.amp, config.training.channels_last):
            log.warning("sampling will be slow: %s", problem)
        check_convolution(device, self._network.amp)
        self._conditioner = Conditioner(
            config.data.condition_classes, info.data.greys.conditions, info.data.scalars, device
        )
        batches = -(-request.count // request.batch_size)
        self._steps_done, self._steps = 0, batches * config.diffusion.sampler_steps
        log.info(
            "sampling from %s, %s weights of step %d, %.1f M parameters, device %s, amp %s",
            info.checkpoint,
            request.weights,
            info.step,
            self._network.parameters / 1e6,
            device,
            self._network.amp,
        )

    def write(self, directory: Path) -> int:
        """Draw all samples and write what `directory` is to hold; calls of the network per sample."""
        request, info = self._request, self._info
        volume, grey = info.data.volumes[request.volume], info.data.greys.volumes[request.volume]
        cells: list[Cell] = []
        evaluations = 0
        shape = (request.count, *info.config.data.patch_size)
        samples = SampleArray(directory / SAMPLES, shape, volume.dtype, volume.voxel_size_um)
        flat = None
        if request.npy:
            flat = np.lib.format.open_memmap(directory / NPY, mode="w+", dtype=volume.dtype, shape=shape)
        with self._open_conditions() as conditions:
            if conditions:
                size_um = conditions.voxel_size_um or volume.voxel_size_um
                shown = SampleArray(directory / CONDITIONS, shape, conditions.volume.dtype, size_um)
            for first in range(0, request.count, request.batch_size):
                numbers = range(first, first + request.batch_size)
                wanted = numbers[: request.count - first]
                stored = conditions.read(numbers) if conditions else None
                generated = self._generate(numbers, stored)
                evaluations = generated.evaluations
                x_0 = self._on_host(generated.x_0, wanted)
                voxels = to_greys(x_0, grey, volume.dtype)
                samples.write(first, voxels)
                if flat is not None:
                    flat[first : first + len(voxels)] = voxels
                pictures, caption = [x_0], "{}"
                if conditions and stored is not None:
                    shown.write(first, stored[: len(wanted)])
                    pictures, caption = [conditions.to_model_values(stored), x_0], "{}: condition, sample"
                scale = magnification(x_0.shape[1:])
                for place, number in enumerate(wanted[: MAX_IN_MONTAGE - len(cells)]):
                    row = np.hstack([orthogonal_slices(values[place], scale) for values in pictures])
                    cells.append(Cell(caption.format(number), row))
            record = describe(request, info, self._network.amp, evaluations)
            samples.finish(record)
            if conditions:
                starts = [conditions.start_zyx(number) for number in record["numbers"]]
                shown.finish(record | {"condition": conditions.volume.name, "starts_zyx": starts})
        if flat is not None:
            flat.flush()
        draw_grid(cells, title(request, info)).save(directory / MONTAGE, format="PNG")
        return evaluations

    def _open_conditions(self) -> AbstractContextManager[ConditionPatches | None]:
        config, request, facts = self._info.config, self._request, self._info.data
        if not config.has_condition:
            return nullcontext()
        volume = facts.volumes[request.volume]
        return ConditionPatches(
            config.data,
            request.volume,
            request.seed,
            facts.greys.conditions,
            request.condition,
            request.box,
            volume.shape_zyx,
            volume.condition_factors,
        )

    def _generate(self, numbers: Sequence[int], stored: NDArray[Any] | None) -> Generated:
        """Draw one batch, on the device."""
        config, request = self._info.config, self._request
        raw = None if stored is None else torch.from_numpy(stored).unsqueeze(1)
        return generate(
            self._network,
            self._schedule,
            config.diffusion,
            request.seed,
            numbers,
            (1, *config.data.patch_size),
            self._device,
            condition=self._conditioner(raw, [request.volume] * len(numbers)),
            on_step=self._step_done,
        )

    def _step_done(self, step: int, x: Tensor) -> None:
        """After each sampling step: tell, and see whether to go on."""
        self._steps_done += 1
        self._on_step(self._steps_done, self._steps)
        if self._stop.wanted():
            assert self._stop.exit_code is not None
            raise SamplingStoppedError(self._stop.exit_code, self._steps_done, self._steps)

    def _on_host(self, x_0: Tensor, wanted: Sequence[int]) -> NDArray[np.float32]:
        """The samples that are to be written, [len(wanted), Z, Y, X].  Raises NonFiniteError."""
        values: NDArray[np.float32] = x_0[: len(wanted), 0].cpu().numpy()
        bad = [number for number, sample in zip(wanted, values, strict=True) if not np.isfinite(sample).all()]
        if bad:
            raise NonFiniteError(
                f"samples must be finite; got NaN or infinity in number {', '.join(map(str, bad))} (amp "
                f"{self._network.amp}, checkpoint {self._info.checkpoint}); try --amp off, --clip 1 or an "
                "earlier checkpoint"
            )
        return values


def default_out(request: SampleRequest, info: CheckpointInfo) -> Path:
    """`runs/<name>/samples/step_00000600_dpmpp2m_50_seed0`; `samples/...` for a checkpoint outside a run.

    Guidance, eta, volume and weights are named where they are not the usual ones.
    """
    path, diffusion = info.checkpoint, info.config.diffusion
    parent = path.parent if path.parent.name else path.absolute().parent
    run = parent.parent if parent.name == "checkpoints" else Path()
    parts = [f"step_{info.step:08d}", diffusion.sampler, str(diffusion.sampler_steps), f"seed{request.seed}"]
    unusual = {
        f"guidance{diffusion.sampler_guidance:g}": diffusion.sampler_guidance != 1,
        f"eta{diffusion.sampler_eta:g}": diffusion.sampler_eta != 0,
        f"volume{request.volume}": request.volume != 0,
        request.weights: request.weights != "ema",
    }
    return run / "samples" / "_".join([*parts, *(part for part, named in unusual.items() if named)])


def describe(request: SampleRequest, info: CheckpointInfo, amp: AmpMode, evaluations: int) -> dict[str, Any]:
    """How the samples were made, as plain JSON: what stands in the attributes of their array."""
    diffusion, grey = info.config.diffusion, info.data.greys.volumes[request.volume]
    return {
        "seed": request.seed,
        "numbers": list(range(request.count)),
        "batch_size": request.batch_size,
        "noise": diffusion.noise,
        "sampler": diffusion.sampler,
        **{key: getattr(diffusion, f"sampler_{key}") for key in ("steps", "eta", "clip", "quantile", "guidance")},
        "evaluations_per_sample": evaluations,
        "checkpoint": str(info.checkpoint),
        "step": info.step,
        "weights": request.weights,
        "amp": amp,
        "volume": info.data.volumes[request.volume].name,
        "grey_low": grey.low,
        "grey_high": grey.high,
        "vesuvius": __version__,
        "torch": torch.__version__,
    }


def title(request: SampleRequest, info: CheckpointInfo) -> str:
    """The first line of the picture."""
    diffusion = info.config.diffusion
    shown = f", first {MAX_IN_MONTAGE} of {request.count}" if request.count > MAX_IN_MONTAGE else ""
    return (
        f"{info.config.name} step {info.step} ({request.weights}), {diffusion.sampler} "
        f"{diffusion.sampler_steps} steps, seed {request.seed}{shown}: z, y, x slices"
    )
