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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.diffusion.generate import Generated, generate
from vesuvius.diffusion.schedule import Schedule
from vesuvius.engine.conditioning import Conditioner
from vesuvius.engine.found_checkpoint import find_checkpoint
from vesuvius.engine.montage import Cell, magnification, orthogonal_slices, write_grid
from vesuvius.engine.network import lay_out_network
from vesuvius.engine.sample_conditions import ConditionPatches
from vesuvius.engine.sample_request import (
    MAX_IN_MONTAGE,
    SampleReport,
    SampleRequest,
    default_out,
    describe,
    title,
)
from vesuvius.engine.sample_zarr import (
    CONDITIONS,
    MONTAGE,
    SAMPLES,
    SampleArray,
    check_target,
    published_when_whole,
    to_greys,
)
from vesuvius.engine.self_test import check_convolution, cudnn_problem
from vesuvius.engine.step import choose_device
from vesuvius.engine.stop import StopRequest
from vesuvius.engine.trained import Trained, TrainedNetwork, read_trained
from vesuvius.errors import EXIT_INTERRUPTED, ConfigError, GpuMemoryError, NonFiniteError, VesuviusError

log = logging.getLogger(__name__)


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
) -> SampleReport:
    """Draw samples and write them with their conditions and a picture.

    Args:
        on_step: called after each sampling step of a batch with the number of those done and of all.

    Raises:
        ConfigError: the checkpoint is none, arguments do not fit its config, or the output exists.
        DataError: a condition cannot be read.
        GpuMemoryError, NonFiniteError, StorageError, SamplingStoppedError: as they say; nothing is left behind.
    """
    started = time.monotonic()
    trained = read_trained(find_checkpoint(request.checkpoint), request.overrides)
    _check_request(request, trained)
    out = request.out or default_out(request, trained)
    check_target(out, request.overwrite)
    with StopRequest(None) as stop, published_when_whole(out) as staged:
        try:
            evaluations = _Drawing(request, trained, stop, on_step).write(staged)
        except torch.OutOfMemoryError as error:
            raise GpuMemoryError(
                f"a batch of samples must fit the GPU's memory; got --batch-size {request.batch_size}: out of memory "
                f"({error}); lower --batch-size"
            ) from error
    volume = trained.volumes[request.volume]
    shape_zyx, dtype = trained.config.data.patch_size, volume.dtype.name
    return SampleReport(out, request.count, shape_zyx, dtype, evaluations, time.monotonic() - started)


def _check_request(request: SampleRequest, trained: Trained) -> None:
    """Raises ConfigError where numbers of the command line do not fit the checkpoint."""
    if request.volume >= len(trained.volumes):
        raise ConfigError(
            f"--volume counts the {len(trained.volumes)} volumes of the training from 0; got {request.volume}; lower it"
        )
    try:
        lay_out_network(trained.config).check_size(request.batch_size, trained.config.data.patch_size)
    except ConfigError as error:
        raise ConfigError(f"{error}; here --batch-size takes the place of training.train_batch_size") from error


class _Drawing:
    """The parts of one call, wired together."""

    def __init__(
        self, request: SampleRequest, trained: Trained, stop: StopRequest, on_step: Callable[[int, int], None]
    ) -> None:
        config, device = trained.config, choose_device()
        self._request, self._trained, self._stop, self._on_step = request, trained, stop, on_step
        self._device = device
        self._schedule = Schedule.from_config(config.diffusion, trained.spectrum).to(device)
        self._network = TrainedNetwork(trained, request.weights, self._schedule, device)
        if problem := cudnn_problem(device, self._network.amp, config.training.channels_last):
            log.warning("sampling will be slow: %s", problem)
        check_convolution(device, self._network.amp)
        self._conditioner = Conditioner(
            config.data.condition_classes, trained.greys.conditions, trained.scalars, device
        )
        self._batches = -(-request.count // request.batch_size)
        self._steps_done = 0
        log.info(
            "sampling from %s, %s weights of step %d, %.1f M parameters, device %s, amp %s",
            trained.checkpoint.path,
            request.weights,
            trained.step,
            self._network.parameters / 1e6,
            device,
            self._network.amp,
        )

    def write(self, directory: Path) -> int:
        """Draw all samples and write what `directory` is to hold; calls of the network per sample."""
        request, trained = self._request, self._trained
        evaluations = 0
        with self._open_conditions() as conditions:
            files = _Files(directory, request, trained, conditions)
            for batch in range(self._batches):
                numbers = range(batch * request.batch_size, (batch + 1) * request.batch_size)
                stored = conditions.read(numbers) if conditions else None
                generated = self._generate(numbers, stored)
                evaluations = generated.evaluations
                wanted = numbers[: request.count - numbers[0]]
                files.add(wanted, self._on_host(generated.x_0, wanted), stored)
            files.finish(describe(request, trained, self._network.amp, evaluations))
        return evaluations

    def _open_conditions(self) -> AbstractContextManager[ConditionPatches | None]:
        request, trained = self._request, self._trained
        if not trained.config.has_condition:
            return nullcontext()
        return ConditionPatches(trained.config.data, request.volume, request.seed, trained.greys.conditions)

    def _generate(self, numbers: Sequence[int], stored: NDArray[Any] | None) -> Generated:
        """Draw one batch, on the device."""
        config, request = self._trained.config, self._request
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
        total = self._batches * self._trained.config.diffusion.sampler_steps
        self._steps_done += 1
        self._on_step(self._steps_done, total)
        if self._stop.wanted():
            assert self._stop.exit_code is not None
            raise SamplingStoppedError(self._stop.exit_code, self._steps_done, total)

    def _on_host(self, x_0: Tensor, wanted: Sequence[int]) -> NDArray[np.float32]:
        """The samples that are to be written, [len(wanted), Z, Y, X].  Raises NonFiniteError."""
        values: NDArray[np.float32] = x_0[: len(wanted), 0].cpu().numpy()
        bad = [number for number, sample in zip(wanted, values, strict=True) if not np.isfinite(sample).all()]
        if bad:
            raise NonFiniteError(
                f"samples must be finite; got NaN or infinity in number {', '.join(map(str, bad))} (amp "
                f"{self._network.amp}, checkpoint {self._trained.checkpoint.path}); try --amp off, --clip 1 or an "
                "earlier checkpoint"
            )
        return values


class _Files:
    """The arrays and the picture of one call, filled batch by batch."""

    def __init__(
        self, directory: Path, request: SampleRequest, trained: Trained, conditions: ConditionPatches | None
    ) -> None:
        volume, shape_zyx = trained.volumes[request.volume], trained.config.data.patch_size
        self._montage, self._title = directory / MONTAGE, title(request, trained)
        self._grey, self._dtype = trained.greys.volumes[request.volume], volume.dtype
        self._samples = SampleArray(directory / SAMPLES, request.count, shape_zyx, volume.dtype, volume.voxel_size_um)
        self._conditions = conditions
        if conditions:
            shown = conditions.volume
            size_um = shown.voxel_size_um or volume.voxel_size_um
            self._shown = SampleArray(directory / CONDITIONS, request.count, shape_zyx, shown.dtype, size_um)
        self._cells: list[Cell] = []

    def add(self, numbers: Sequence[int], x_0: NDArray[np.float32], stored: NDArray[Any] | None) -> None:
        """Write samples of consecutive numbers.

        Args:
            x_0: [len(numbers), Z, Y, X], model values.
            stored: their conditions in the same shape and perhaps further ones, in the stored dtype.
        """
        pictures, caption = [x_0], "{}"
        self._samples.write(numbers[0], to_greys(x_0, self._grey, self._dtype))
        if self._conditions and stored is not None:
            self._shown.write(numbers[0], stored[: len(numbers)])
            pictures, caption = [self._conditions.to_model_values(stored), x_0], "{}: condition, sample"
        scale = magnification(x_0.shape[1:])
        for place, number in enumerate(numbers[: MAX_IN_MONTAGE - len(self._cells)]):
            row = np.hstack([orthogonal_slices(values[place], scale) for values in pictures])
            self._cells.append(Cell(caption.format(number), row))

    def finish(self, record: dict[str, Any]) -> None:
        """Write the picture, and into the arrays how they were made."""
        self._samples.finish(record)
        if self._conditions:
            starts = [self._conditions.start_zyx(number) for number in record["numbers"]]
            self._shown.finish(record | {"condition": self._conditions.volume.name, "starts_zyx": starts})
        write_grid(self._montage, self._cells, self._title)
