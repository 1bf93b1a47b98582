"""`vesuvius.predict_volume`: any network on a volume of any size, written as an OME-Zarr; resumed after any end."""

import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vesuvius.config import ArrayConfig, MaskConfig, Triple
from vesuvius.config.section import natural
from vesuvius.errors import ConfigError, disk_path, needs_extra, storage_errors
from vesuvius.loader.arguments import device_of
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.predict.inputs import Inputs, arrays_of, input_ranges, integers_of
from vesuvius.predict.job import ACTIVE, PredictJob, PredictRun, PredictRunner, active_voxels, open_runner
from vesuvius.predict.network import Network, Probe, fingerprint, open_network, probe_network
from vesuvius.predict.output import make_output
from vesuvius.predict.progress import OnProgress, ProgressReporter, one_thread
from vesuvius.predict.tasks import Blocks, RunTasks, delete_unflushed, run_locally
from vesuvius.predict.tiling import Window, check_blend, sliding_tiling
from vesuvius.runlog.files import take_lock, write_atomically
from vesuvius.runlog.held import refuse_moved
from vesuvius.runlog.records import parse_record
from vesuvius.runlog.units import format_count, format_sizes
from vesuvius.stream.options import to_integer
from vesuvius.training.stop import StopRequest
from vesuvius.volume_tools.partial import PartialCopy, check_name, finished_record, is_finished, partial_path
from vesuvius.volume_tools.pyramid import Pyramid, levels_to_one
from vesuvius.volumes.box import Box, triple
from vesuvius.volumes.geometry import VOXELS
from vesuvius.volumes.occupancy import chunk_occupancy
from vesuvius.volumes.store.objects import is_remote

KIND = "prediction"
CHUNK = 128  # edge of the output's chunks
BATCHES_PER_GROUP, BLOCKS_PER_GROUP = 16, 4  # for each evaluation at a time: enough to keep all of them busy
_CPU_BATCHES, _GPU_BATCHES = (1,), (8, 4, 2, 1)  # "auto": the first that fits, in memory and in what the network takes


@dataclass(frozen=True)
class PredictRequest:
    """The arguments of `predict_volume`."""

    network: Any
    volume: Any
    out: Path  # ends in .zarr
    patch_zyx: Triple
    overlap: float = 0.25
    batch_size: int | Literal["auto"] = "auto"
    channels: Sequence[int] | None = None
    box: Box | None = None
    mask: Any = None
    device: torch.device | str | None = None
    workers: int | None = None
    cluster: str | None = None
    blend: Window = "gaussian"
    activation: str | None = None
    threshold: float | None = None
    dtype: Any = None
    mirror: Sequence[str] = ()
    normalize: Any = True
    resume: bool = True


@dataclass(frozen=True)
class Prediction:
    """A predicted volume, and what this call did for it."""

    path: Path
    shape_zyx: Triple
    channels: int
    dtype: np.dtype[Any]
    tiles: int  # evaluated by this call
    fetched_bytes: int  # of the volume, by this call
    seconds: float

    def __str__(self) -> str:
        channels = f"{format_count(self.channels, 'channel')} of " if self.channels > 1 else ""
        shape = f"{channels}{format_sizes(self.shape_zyx)} {self.dtype}"
        return f"{self.path}: {shape}, {format_count(self.tiles, 'tile')} in {self.seconds:.1f} s"


def predict_volume(
    network: Any,
    volume: Any,
    out: str | os.PathLike[str],
    *,
    patch_size: Sequence[int],
    overlap: float = 0.25,
    batch_size: int | Literal["auto"] = "auto",
    channels: Sequence[int] | None = None,
    box: Box | None = None,
    mask: Any = None,
    device: torch.device | str | None = None,
    workers: int | None = None,
    cluster: str | None = None,
    blend: Literal["gaussian", "linear", "constant", "crop"] = "gaussian",
    activation: Literal["softmax", "sigmoid", "argmax"] | None = None,
    threshold: float | None = None,
    dtype: Any = None,
    mirror: Sequence[str] = (),
    normalize: Any = True,
    resume: bool = True,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Prediction:
    """Evaluate a network on overlapping tiles of a volume of any size, blend them, and write an OME-Zarr.

    Each chunk of the volume is read once.  Disk and memory are bounded: `OUT.partial` holds some rows of tiles.  The
    same call resumes after a kill at any moment, with the same bits for any number of workers.

    Args:
        network: (B, C, Z, Y, X) float32 -> (B, K, Z', Y', X') by one factor such as 1, 1/2 or 2: a module, which is
            copied to the device, in eval mode; another callable; the path of a TorchScript or torch.export file; or
            "module:function", which builds it.
        volume: a path or URL, an `ArrayConfig`, or a tuple of these: the C channels, aligned by their OME metadata.
        out: a name that ends in .zarr; (Z', Y', X') or, with several channels, (c, z, y, x), with a pyramid.
        patch_size: voxels (z, y, x) of a tile.
        overlap: share of a tile that its neighbor covers, as in MONAI's sliding window.
        batch_size: tiles per call of the network; "auto" = 1 on a CPU, up to 8 on a GPU.
        channels: channels of the network that are kept; None = all.
        box: ((z, y, x), (z, y, x)) in voxels of the volume; None = all.
        mask: path, `ArrayConfig` or `MaskConfig`: 0 outside its foreground; "stored" = only blocks over stored chunks.
        device: CPU or CUDA GPU; None = the current GPU, or the CPU without one.
        workers: None = this process, on a CPU with as many calls of the network at once as cores; N = N processes,
            one GPU each, for networks that are files or "module:function" (1 = this process).
        cluster: address of a Ray cluster whose nodes share the disk of `out`.
        blend: weights of overlapping tiles: "gaussian" (as MONAI and nnU-Net), "linear", "constant", or "crop" (each
            voxel from the tile whose center is nearest).
        activation: applied to blended outputs; "argmax" writes labels.
        threshold: writes 1 from this probability on, else 0; with argmax, labels of a lower probability become 0.
        dtype: float32, float16, or uint8 (0..1 -> 0..255); labels are uint8, or uint16 above 256 classes.
        mirror: axes such as "zyx": the mean over all combinations of flips.
        normalize: a `PatchLoader` or its `state_dict()`: as in training; True = as a loader estimates it for this
            volume; (low, high) -> -1, +1; False = as stored.
        resume: False = start again.
        on_progress: called with a unit ("tiles"), the number done, and the total.

    Raises:
        ConfigError: arguments are wrong, or `out` is another volume or being written.  After all other errors the same
        call resumes.  DataError: the volume cannot be read, or the disk is full.  NonFiniteError.  VesuviusError: the
        network raised, with the tile.
    """
    size = integers_of("patch_size", patch_size, 1)
    request = PredictRequest(
        network, volume, disk_path(out), size, overlap, batch_size, channels, box, mask, device, workers, cluster,
        blend, activation, threshold, dtype, mirror, normalize, resume,
    )  # fmt: skip
    return predict(request, on_progress)


def predict(
    request: PredictRequest, on_progress: OnProgress = lambda what, done, total: None, stop: StopRequest | None = None
) -> Prediction:
    """Predict a volume as `predict_volume`, with the same errors; VesuviusError if a stop is requested."""
    started, progress = time.monotonic(), ProgressReporter(stop, on_progress, resumable=True, name="prediction")
    with progress.unless_stopped(prepared(request)) as work:
        request, job, tiles, fetched = work.request, work.job, 0, 0
        if not request.resume:
            _restart(request.out)
        if not is_finished(request.out, work.record, KIND):
            target = replace(job.target, record=work.record)
            with (
                target.locked(),
                storage_errors(str(target.path), "free some space and run the same command again to resume"),
            ):
                job.folder.mkdir(exist_ok=True)
                delete_unflushed(job.folder, "[it]*")  # input and tiles
                active = work.active_blocks(progress, job.folder / ACTIVE)
                job = work.job_on(active, target)
                running, total = PredictRun(job, work.inputs, active), -(-len(job.tiles) // job.batch_size)
                done, blocks = total * running.done // max(1, len(active)), itertools.islice(active, running.done, None)
                with work.run_on(job, progress) as run_tasks:
                    for task in running.run(blocks, work.blocks_per_group(job, active), run_tasks):
                        fetched += task.fetched_bytes
                        if task.kind == "tiles":
                            tiles, done = tiles + len(job.tiles_of(task.index)), min(done + 1, total)
                            progress.report("batches of tiles", done, total)
                        refuse_moved(target.path)  # workers know no lock
                        progress.check()
                target.fill_coarser(lambda size: progress.check())
                target.publish(work.geometry)
        shape, dtype = job.tiling.shape_zyx, job.output.dtype
        return Prediction(request.out, shape, job.output.channels, dtype, tiles, fetched, time.monotonic() - started)


class Work:
    """A checked request with its opened inputs and network."""

    def __init__(self, request: PredictRequest, inputs: Inputs, network: Network, device: torch.device) -> None:
        self.request, self.inputs, self.network, self.device = request, inputs, network, device
        self.batch_size, self.probe = self._probe()
        factor = self.probe.factor
        output = make_output(
            self.probe.channels,
            request.activation,
            natural(request.threshold),
            natural(request.channels),
            request.dtype,
        )
        patch = request.patch_zyx
        source = sliding_tiling(inputs.shape_zyx, patch, request.overlap, request.blend, factor.denominator)
        tiling = source.scaled(factor, CHUNK)
        levels, channels = levels_to_one(tiling.shape_zyx, CHUNK), output.channels if output.channels > 1 else 0
        plan = Pyramid(tiling.shape_zyx, tiling.block_zyx, levels, output.dtype.itemsize, channels=channels)
        space = (inputs.volume.geometry or VOXELS).starting_at(inputs.box[0])
        self.geometry = replace(space, scale_zyx=triple(size / float(factor) for size in space.scale_zyx))
        self.job = PredictJob(
            tiling,
            self.batch_size,
            source,
            output,
            PartialCopy(request.out, {}, plan, output.dtype, 0, KIND, output.is_labels),
            request.network,
            os.getcwd() if self.uses_ray else "",
            str(device),
            tuple(_flips(request.mirror)),
            tuple(array.volume.spec for array in inputs.channels),
            inputs.ranges,
            inputs.mask.volume.spec if inputs.mask else None,
            inputs.box,
            range(source.tiles),
            channels=self.probe.channels if output.blended is None else len(output.blended),
        )
        cores = max(1, int(usable_cores(os.getpid())))
        in_process = cores if request.workers is None and device.type == "cpu" else 1
        self.evaluations = request.workers if request.workers is not None and self.uses_ray else in_process

    def _probe(self) -> tuple[int, Probe]:
        request, channels = self.request, len(self.inputs.channels)
        sizes: tuple[int, ...] = _CPU_BATCHES if self.device.type == "cpu" else _GPU_BATCHES
        if request.batch_size != "auto":
            sizes = (to_integer("batch_size", request.batch_size, 1),)
        elif request.resume and (started := _started_record(request.out)) and self.device.type == started.get("device"):
            sizes = (started["batch_size"],)
        for size in sizes:
            try:
                return size, probe_network(self.network, size, channels, request.patch_zyx, self.device)
            except torch.OutOfMemoryError:
                torch.accelerator.empty_cache()
                problem = ConfigError(
                    f"The GPU has too little memory for a batch of {size} tiles of "
                    f"{format_sizes(request.patch_zyx)}; lower the batch size or the patch size"
                )
            except ConfigError as error:
                problem = error
        raise problem

    @property
    def uses_ray(self) -> bool:
        return (self.request.workers or 1) > 1 or self.request.cluster is not None

    @property
    def record(self) -> dict[str, Any]:
        """Everything the voxels depend on, as plain JSON: a volume is resumed only with an equal record."""
        request, job = self.request, self.job
        record = {
            "network": fingerprint(request.network, self.network),
            "volume": self.inputs.record(),
            "box": job.box,
            "patch_zyx": job.source.patch_zyx,
            "overlap": float(request.overlap),
            "batch_size": self.batch_size,
            "blend": request.blend,
            "ranges": [each and (each.low, each.high) for each in job.ranges],
            "activation": job.output.activation,
            "threshold": job.output.threshold,
            "channels": job.output.kept,
            "dtype": job.output.dtype.name,
            "mirror": job.flips,
            "only_stored": request.mask == "stored",
            "device": self.device.type,
            "torch": torch.__version__,
        }
        plain: dict[str, Any] = json.loads(json.dumps(record))
        return plain

    def active_blocks(self, progress: ProgressReporter, note: Path | None = None) -> Blocks:
        """Return the blocks in which there is something to predict; `note` keeps the result for a resume."""
        job, blocks = self.job, range(self.job.tiling.blocks)
        if self.request.mask is None:
            return blocks
        if note is not None and note.exists():
            return dict.fromkeys(np.fromfile(note, np.int64).tolist())
        stored = chunk_occupancy(self.inputs.volume) if self.request.mask == "stored" else None
        reading = progress.track("blocks of the mask read", blocks, len(blocks))
        found = [block for block in reading if active_voxels(self.inputs, job, block, stored).any()]
        if note is not None:
            write_atomically(note, np.array(found, np.int64).tobytes())
        return dict.fromkeys(found)

    def job_on(self, active: Blocks, target: PartialCopy) -> PredictJob:
        tiling, tiles = self.job.tiling, self.job.needed
        if not isinstance(active, range):
            tiles = sorted({tile for block in active for tile in tiling.tiles_over(tiling.block_box(block))})
        return replace(self.job, needed=tiles, target=replace(target, record={}))

    def blocks_per_group(self, job: PredictJob, active: Blocks) -> int:
        tiles = max(1, len(job.tiles)) / max(1, len(active))
        batches = BATCHES_PER_GROUP * self.evaluations * self.batch_size
        return max(BLOCKS_PER_GROUP * self.evaluations, math.ceil(batches / tiles))

    def run_on(self, job: PredictJob, progress: ProgressReporter) -> AbstractContextManager[RunTasks]:
        """Return a context with a function that runs tasks: in this process or in Ray actors."""
        if not self.uses_ray:
            runner = PredictRunner(job, self.inputs, self.network, self.evaluations)
            return run_locally(lambda: runner, 2 * self.evaluations, progress.check)
        from vesuvius.predict.ray_workers import ray_workers  # imports Ray

        job = replace(job, device=self.device.type)
        gpus = int(self.device.type != "cpu")
        inputs = [*job.arrays, *([job.mask] if job.mask else [])]
        files = [each.path for each in inputs if not is_remote(each.path)]
        files += [str(job.network)] if os.path.exists(job.network) else []
        return ray_workers(
            partial(open_runner, job), self.evaluations, gpus, self.request.cluster, progress.check, job.folder, files
        )


@contextmanager
def prepared(request: PredictRequest) -> Iterator[Work]:
    """Check the arguments, and open the volume and the network.  Writes nothing."""
    check_name(request.out)
    workers = None if request.workers is None else to_integer("workers", request.workers, 1)
    if not isinstance(natural(request.resume), bool):
        raise ConfigError(f"resume {request.resume!r} is not valid; set it to True or False")
    request = replace(request, workers=workers, out=request.out.absolute())
    is_name = isinstance(request.network, (str, os.PathLike))
    if (request.workers or 1) > 1 and not is_name:
        raise ConfigError(
            f"workers={request.workers} processes cannot share a living network; save it with torch.export.save, or "
            'pass "module:function" that builds it; in this process leave workers out'
        )
    if is_name and os.path.exists(request.network):
        request = replace(request, network=os.path.abspath(request.network))  # workers may run in another folder
    if request.cluster is not None and (request.workers is None or not is_name):
        raise ConfigError("cluster needs workers, and a network that is a file or module:function; add them")
    check_blend(request.blend)
    if (request.workers or 1) > 1 or request.cluster is not None:
        with needs_extra("Prediction with several workers", "ray"):
            pass
    device, arrays = device_of(request.device), arrays_of(request.volume)
    mask: ArrayConfig | None = None
    if request.mask is not None and not (isinstance(request.mask, str) and request.mask == "stored"):
        mask, *more = [request.mask] if isinstance(request.mask, MaskConfig) else arrays_of(request.mask, "mask")
        if more:
            raise ConfigError(f"mask has {1 + len(more)} arrays; pass one")
    with one_thread():
        ranges = input_ranges(arrays, request.patch_zyx, request.normalize)
        with Inputs(arrays, ranges, mask, request.box, partial_path(request.out) / "state") as inputs:
            network = open_network(request.network, device, "")
            yield Work(request, inputs, network, device)


def _restart(out: Path) -> None:
    """Delete an unfinished prediction.  Raises ConfigError: it is written, finished, or something else."""
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists and would be replaced; remove it, or choose another name")
    path = partial_path(out)
    if path.is_dir():
        names = {name for name in os.listdir(path) if not name.startswith(".")} - {"lock"}  # . = being written
        if names and f"{KIND}.json" not in names:
            raise ConfigError(f"{path} was not begun by this command; choose another name or remove it")
        with (path / "lock").open("w") as lock:
            if not take_lock(lock.fileno(), path / "lock"):
                raise ConfigError(f"Cannot restart {path}: another process is writing it; wait for it or stop it")
            for folder in filter(os.path.isdir, (path / name for name in names)):  # the record last
                shutil.rmtree(folder)
            shutil.rmtree(path)


def _started_record(out: Path) -> dict[str, Any] | None:
    """Return the record of a finished or unfinished prediction, if there is one."""
    unfinished = partial_path(out) / f"{KIND}.json"
    found = parse_record(unfinished.read_text()) if unfinished.exists() else finished_record(out, KIND)
    return found if isinstance(found, dict) else None


def _flips(mirror: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield all combinations of the axes of (B, C, Z, Y, X) to mirror."""
    if not isinstance(mirror, (str, list, tuple)) or not set(mirror) <= {*"zyx"}:
        raise ConfigError(f"mirror {mirror!r} has not only axes among z, y and x; correct it")
    axes = sorted("zyx".index(axis) + 2 for axis in {*mirror})
    for count in range(len(axes), -1, -1):  # flips are copies; a network may change the batch itself, so it is last
        yield from itertools.combinations(axes, count)
