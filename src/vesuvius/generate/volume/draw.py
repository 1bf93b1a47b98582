"""`vesuvius sample --shape`: from a checkpoint to a volume of any size on disk."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from vesuvius import __version__
from vesuvius.config import ArrayConfig, Triple
from vesuvius.diffusion.levels import sampling_levels
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError, StorageError
from vesuvius.generate.volume.field import Field
from vesuvius.generate.volume.forecast import VolumeForecast, forecast_of, measured_too
from vesuvius.generate.volume.inputs import GivenVolumes, Inputs, fill
from vesuvius.generate.volume.network import NetworkRecipe, OpenNetworkWork
from vesuvius.generate.volume.output import DRAWING, Greys, output_plan, write_volume
from vesuvius.generate.volume.run import Sampling, VolumeStoppedError
from vesuvius.generate.volume.tiling import Tiling
from vesuvius.generate.volume.work import Job, forget_unflushed
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import CheckpointInfo, check_weights, read_checkpoint_info
from vesuvius.training.step.network import lay_out_network
from vesuvius.training.step.step import choose_device
from vesuvius.training.stop import StopRequest
from vesuvius.volume_tools.partial import check_record, finished_record, is_begun, open_partial, partial_path
from vesuvius.volumes.volume import open_volume

log = logging.getLogger(__name__)

Blend = Literal["step", "final"]

_ROUNDS = 4


@dataclass(frozen=True)
class VolumeRequest:
    """What is asked for.

    Attributes:
        checkpoint, weights, overrides, seed, batch_size, volume: as in `SampleRequest`.
        out: a name that ends in .zarr.
        shape_zyx: None = that of the given volumes, or of the box in them.
        overlap: of neighbouring tiles, as a share of a patch.
        blend: tiles are blended in each step, or once, when all are drawn.
        workers: processes; None = the GPUs, or the cores.
        rounds: passes per step of an inpainting; None = 4.
    """

    checkpoint: Path
    weights: str
    overrides: tuple[str, ...]
    seed: int
    batch_size: int
    volume: int
    out: Path
    shape_zyx: Triple | None
    overlap: float = 0.5
    blend: Blend = "step"
    workers: int | None = None
    rounds: int | None = None
    given: GivenVolumes = field(default_factory=GivenVolumes)


@dataclass(frozen=True)
class VolumeSummary:
    """What was written.

    Attributes:
        known: voxels of `--inpaint` that were kept, compared bit by bit after writing; None without it.
        differences: from a coarser condition of grey values, as in `Inputs.differences`; else None.
        already: it was there, made with the same arguments.
    """

    out: Path
    shape_zyx: Triple
    dtype: str
    levels: int
    known: int | None
    seconds: float
    already: bool = False
    differences: tuple[float, float] | None = None


def draw_volume(
    request: VolumeRequest, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> VolumeSummary:
    """Draw a volume, or go on with it; one that is there, made with the same arguments, is left as it is.

    Args:
        on_progress: called with the batches of tiles done and those in all.

    Raises:
        ConfigError: arguments do not fit the checkpoint or each other, or something else is at `out`.
        DataError: a given volume cannot be read.
        StorageError: the disk refuses or is too small.
        VolumeStoppedError, NonFiniteError: as they say; what is done stays.
    """
    started = time.monotonic()
    with _prepared(request) as drawing:
        dtype, plan, out = drawing.greys.dtype, drawing.plan, request.out
        if os.path.lexists(out):
            check_record(out, finished_record(out, DRAWING), drawing.record, DRAWING)
            shutil.rmtree(partial_path(out), ignore_errors=True)
            return VolumeSummary(out, drawing.shape_zyx, dtype.name, plan.levels, None, 0.0, already=True)
        if not is_begun(out, DRAWING):
            drawing.forecast().check_space(out)
        with (
            StopRequest(None) as stop,
            open_partial(out, drawing.record, plan, dtype, 0, DRAWING) as target,
        ):
            folder = target.path / "state"
            folder.mkdir(exist_ok=True)
            try:
                forget_unflushed(drawing.job, folder)
                drawing.fill(folder)
                x = drawing.sampling(folder, stop, on_progress).run()
            except OSError as error:
                raise StorageError(
                    f"a drawing needs a writable disk with enough room; got {error} while writing {target.path}; free "
                    "space: what is done stays, and the same command goes on"
                ) from error

            def check_stop() -> None:
                if stop.wanted():
                    assert stop.exit_code is not None
                    raise VolumeStoppedError(stop.exit_code)

            size_um = drawing.voxel_size_um
            known = write_volume(target, plan, x, drawing.greys, drawing.inputs, out.stem, size_um, check_stop)
        differences = drawing.differences()
    return VolumeSummary(
        out,
        drawing.shape_zyx,
        dtype.name,
        plan.levels,
        known if drawing.inputs.inpaint else None,
        time.monotonic() - started,
        differences=differences,
    )


def forecast_volume(request: VolumeRequest) -> VolumeForecast:
    """What a volume takes in time, disk and memory: calls the network twice, writes nothing.   Raises as that."""
    with _prepared(request) as drawing:
        return drawing.forecast(measured=True)


class _Drawing:
    """A request and all that follows from it."""

    def __init__(self, request: VolumeRequest, info: CheckpointInfo, inputs: Inputs) -> None:
        config, facts = info.config, info.data
        self.inputs, self._request, self._info = inputs, request, info
        shape = request.shape_zyx or inputs.shape_zyx
        assert shape is not None
        self.shape_zyx = shape
        source = inputs.inpaint
        dtype = source.dtype if source is not None else facts.volumes[request.volume].dtype
        schedule = Schedule.from_config(config.diffusion, facts.spectrum)
        self.greys = Greys(dtype, facts.greys.volumes[request.volume], schedule)
        self.voxel_size_um = (source and source.voxel_size_um) or facts.volumes[request.volume].voxel_size_um
        self.plan = output_plan(shape, dtype.itemsize)
        self.tiling = Tiling(shape, config.data.patch_size, request.overlap)
        self.job = Job(
            self.tiling,
            request.seed,
            sampling_levels(schedule, config.diffusion),
            config.diffusion.sampler,
            config.diffusion.sampler_eta,
            whole_tiles=request.blend == "final",
            batch_size=request.batch_size,
            rounds=(request.rounds or _ROUNDS) if source is not None and request.blend == "step" else 1,
            inpaint=source is not None,
            condition=inputs.condition.dtype.str if inputs.condition is not None else None,
        )
        self._recipe = NetworkRecipe(info.checkpoint, request.overrides, request.weights, request.volume)
        self._device = choose_device()
        self.workers = request.workers or _default_workers(self._device, self.tiling.tiles // request.batch_size)

    @property
    def record(self) -> dict[str, Any]:
        """All that the voxels follow from, as plain JSON: a drawing goes on with the same, or not at all."""
        request, info = self._request, self._info
        diffusion = info.config.diffusion
        return {
            "shape_zyx": list(self.shape_zyx),
            "patch_zyx": list(self.tiling.patch_zyx),
            "seed": request.seed,
            "checkpoint": str(info.checkpoint.resolve()),
            "step": info.step,
            "weights": request.weights,
            "sampler": diffusion.sampler,
            **{key: getattr(diffusion, f"sampler_{key}") for key in ("steps", "eta", "clip", "quantile", "guidance")},
            "overlap": request.overlap,
            "blend": request.blend,
            "batch_size": request.batch_size,
            "rounds": self.job.rounds,
            "given": self.inputs.record(),
            "box": None if request.given.box is None else [list(end) for end in request.given.box],
            "volume": info.data.volumes[request.volume].name,
            "grey_low": self.greys.grey.low,
            "grey_high": self.greys.grey.high,
            "amp": info.config.training.amp,
            "device": self._device.type,
            "vesuvius": __version__,
            "torch": torch.__version__,
        }

    def fill(self, folder: Path) -> None:
        """Bring the given volumes into the blocks of the state."""
        inputs = self.inputs
        if inputs.inpaint is not None:
            schedule, grey = self.greys.schedule, self.greys.grey
            fill(Field(folder / "known", self.tiling), self.tiling, lambda box: inputs.known(box, grey, schedule))
        if (condition := inputs.condition) is not None:
            shown = Field(folder / "condition", self.tiling, condition.dtype)
            fill(shown, self.tiling, lambda box: inputs.read(condition, box))

    def sampling(self, folder: Path, stop: StopRequest, on_progress: Callable[[int, int], None]) -> Sampling:
        """All passes."""
        open_work = OpenNetworkWork(self.job, folder, self._recipe)
        log.info(
            "drawing %s voxels from %s (%s weights): %d tiles, %d passes, %d worker(s) on %s",
            _commas(self.shape_zyx),
            self._info.checkpoint,
            self._request.weights,
            self.tiling.tiles,
            len(self.job.passes),
            self.workers,
            self._device.type,
        )
        return Sampling(self.job, folder, open_work, self.workers, stop, on_progress)

    def differences(self) -> tuple[float, float] | None:
        """As `Inputs.differences`, of what was written."""
        if self._info.config.data.condition_classes is not None:
            return None
        with closing(open_volume(ArrayConfig(path=str(self._request.out)))) as written:
            return self.inputs.differences(written.read)

    def forecast(self, measured: bool = False) -> VolumeForecast:
        """What it takes; `measured`: with a call of the network, for time and memory."""
        forecast = forecast_of(
            self.job,
            self.plan.raw_bytes,
            self.workers,
            self._request.out,
        )
        return measured_too(forecast, self.job, self._recipe) if measured else forecast


@contextmanager
def _prepared(request: VolumeRequest) -> Iterator[_Drawing]:
    """Check the request against the checkpoint and the given volumes.  Writes nothing."""
    info = read_checkpoint_info(find_checkpoint(request.checkpoint), request.overrides)
    check_weights(info.checkpoint, request.weights)
    config = info.config
    if request.out.suffix != ".zarr":
        raise ConfigError(f"the name of a volume must end in .zarr; got {request.out}; add the ending to --out")
    if request.volume >= len(info.data.volumes):
        raise ConfigError(
            f"--volume counts the {len(info.data.volumes)} volumes of the training from 0; got {request.volume}; "
            "lower it"
        )
    if request.rounds is not None and (request.given.inpaint is None or request.blend == "final"):
        raise ConfigError("--rounds is of --inpaint with --blend step only; got it without; remove it")
    if request.given.mask is not None and request.given.inpaint is None:
        raise ConfigError("--mask says what to fill of --inpaint; got no --inpaint; add it, or remove --mask")
    _check_condition(request, info)
    lay_out_network(config).check_size(request.batch_size, config.data.patch_size)
    with ExitStack() as held:
        factors = info.data.volumes[request.volume].condition_factors
        inputs = held.enter_context(Inputs(request.given, config.data.store, request.shape_zyx, factors))
        if request.shape_zyx is not None and inputs.shape_zyx not in (None, request.shape_zyx):
            assert inputs.shape_zyx is not None
            raise ConfigError(
                f"--shape must be that of --box in the given volumes; got {_commas(request.shape_zyx)} and "
                f"{_commas(inputs.shape_zyx)}; leave --shape out, or change --box"
            )
        drawing = _Drawing(request, info, inputs)
        drawing.tiling.check()
        yield drawing


def _check_condition(request: VolumeRequest, info: CheckpointInfo) -> None:
    config, given = info.config, request.given.condition
    if given is not None and not config.has_condition:
        raise ConfigError(
            f"--condition needs a model that was trained with conditions; got {given.path} and {info.checkpoint}, "
            "which has none; remove --condition"
        )
    if given is None and config.has_condition and config.diffusion.sampler_guidance != 0:
        raise ConfigError(
            "a model that was trained with conditions needs --condition VOLUME; got none; name one, or add --guidance "
            "0 to draw without"
        )


def _default_workers(device: torch.device, batches: int) -> int:
    if device.type == "cuda":
        return torch.cuda.device_count()
    return max(1, min(len(os.sched_getaffinity(0)), batches))


def _commas(shape: Triple) -> str:
    return ",".join(map(str, shape))
