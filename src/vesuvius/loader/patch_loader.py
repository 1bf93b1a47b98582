"""Patches of zarr volumes as tensors on the device, for any PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

import torch
from torch.utils.data import IterableDataset, get_worker_info

from vesuvius.config import ArrayConfig, AugmentConfig, DataConfig, NormalizeConfig, ValidationConfig, VolumeConfig
from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError, one_line
from vesuvius.loader.device import DeviceFeed, PatchBatch
from vesuvius.monitor.clock import HostClock
from vesuvius.stream.options import StreamChanges, StreamOptions, to_integer
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.start.prepare import IntensityRange, prepare_data
from vesuvius.stream.stream import PatchStream, check_state
from vesuvius.volumes.box import Box

Spec = TypeVar("Spec", bound=ArrayConfig)
PathLike = str | Path
Volumes = PathLike | VolumeConfig | Sequence[PathLike | VolumeConfig] | DataConfig
Arrays = PathLike | ArrayConfig | Sequence[PathLike | ArrayConfig]

_MASKED_FOREGROUND = 0.5


class PatchLoader(Iterable[PatchBatch]):
    """Batches of patches in a reproducible random order, read by separate processes.

    Patches and their order depend on `seed`, the volumes and the sampling arguments, not on `workers`,
    `prefetch_factor` or the device.  A context manager: on exit the readers, and Ray if the loader started it, end in
    about a second.  Without `with`, they end at `close()`, with the last reference to the loader, or when the
    interpreter exits.

    Args:
        volumes: OME-Zarr groups or zarr arrays: a path or URL (https://, s3://, gs://, az://, hf://), a `VolumeConfig`
            (with level, weight and more), or a sequence of these; or a full data section, as a `DataConfig` or the
            YAML file of a run.
        batch_size: batch size of this rank.
        patch_size: voxels (z, y, x); None = (72, 136, 136), or the value in `volumes`.
        workers: number of reader processes; 0 reads in this process, without Ray.
        seed: random seed; by default 0, or that of the YAML file.
        labels: a volume for each of `volumes`, cropped at the same position: labels, or a second scan.  Its OME scale
            and translation align it with the volume.
        mask: a volume for each of `volumes` whose nonzero voxels are foreground.
        min_foreground: minimum share of foreground in each patch: of the mask or, without one, of the stored chunks.
            None = 0.5 with a mask, else 0: patches from everywhere.
        normalize: True = map the 0.5th and 99.5th percentile of each volume linearly to -1 and +1, without clipping;
            (low, high) = map these instead; False = intensities as stored.
        augment: mirror and rotate patches at random, labels with them; rotation needs y = x.
        validation_fraction: share of each volume that no patch of any entry with its array touches: `validation_boxes`.
        device: CPU or CUDA GPU; None = the current GPU, or the CPU without one.
        rank, world: rank r of n gets the samples i with i mod n = r; None = from torch.distributed, if initialized.
        length: batches per epoch and rank: what `len` returns and a `for` loop yields; None = endless.
        epochs: number of epochs of `length` batches after which the loader is exhausted; None = unlimited.
        prefetch_factor: batches assembled ahead per worker.
        resident: keep the decoded volumes in memory after the first pass.

    Attributes:
        intensity_ranges: for each volume the intensities mapped to -1 and +1; empty with `normalize=False`.
        validation_boxes: for each volume the box held out by `validation_fraction`, ((z, y, x), (z, y, x)), or None.

    Raises:
        ConfigError: an argument is invalid or contradicts another.
        DataError: a volume cannot be used; also while iterating, if it can no longer be read.
    """

    def __init__(
        self,
        volumes: Volumes,
        *,
        batch_size: int,
        patch_size: Sequence[int] | None = None,
        workers: int = 2,
        seed: int | None = None,
        labels: Arrays | None = None,
        mask: Arrays | None = None,
        min_foreground: float | None = None,
        normalize: bool | tuple[float, float] | None = None,
        augment: bool | None = None,
        validation_fraction: float | None = None,
        device: torch.device | str | None = None,
        rank: int | None = None,
        world: int | None = None,
        length: int | None = None,
        epochs: int | None = None,
        prefetch_factor: int = 2,
        resident: bool = False,
    ) -> None:
        target = _device(device)
        sampling = {
            "patch_size": patch_size,
            "labels": labels,
            "mask": mask,
            "min_foreground": min_foreground,
            "normalize": None if normalize is False else normalize,
            "augment": augment,
            "validation_fraction": validation_fraction,
        }
        data, seed = _data(volumes, {key: value for key, value in sampling.items() if value is not None}, seed)
        self._rank, self._world = _rank_and_world(rank, world)
        options = StreamOptions(to_integer("batch_size", batch_size, 1), workers, prefetch_factor)
        self._length = None if length is None else to_integer("length", length, 1)
        self._epochs = None if epochs is None else to_integer("epochs", epochs, 1)
        if epochs is not None and length is None:
            raise ConfigError(f"epochs={epochs} needs the length of an epoch; set length to its number of batches")
        self._samples_per_batch = options.batch_size * self._world
        self._samples_per_epoch = None if self._length is None else self._length * self._samples_per_batch
        prepared = prepare_data(seed, data, self._rank, self._world)
        self._job, self._resident = prepared.job, resident
        self.validation_boxes: tuple[Box | None, ...] = tuple(split.validation for split in prepared.splits)
        self.intensity_ranges: tuple[IntensityRange, ...] = ()
        if normalize is not False:
            self.intensity_ranges = prepared.intensity_ranges(data.model_copy(update={"condition_classes": 1})).volumes
        self._feed = DeviceFeed(target, options, self._job, self.intensity_ranges)
        self._clock = HostClock()  # required by the feed, not read
        self._stream: PatchStream | None = None
        self._closing = ExitStack()
        self._state: dict[str, Any] = {
            "seed": seed,
            "sample_index": 0,
            "plan_hash": self._job.plan.hash,
            "quarantined": [],
        }
        self._in_epoch = 0  # samples of all ranks delivered in the current epoch
        self._continues = False  # whether the next `for` continues that epoch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("An endless PatchLoader has no len(); set its length=BATCHES per epoch")
        return self._length

    def __iter__(self) -> Iterator[PatchBatch]:
        """Yield the `length` batches of the next epoch; after `load_state_dict`, the rest of an unfinished one."""
        if not self._continues:
            self._in_epoch = 0
        self._continues = False
        total = self._samples_per_epoch
        while total is None or self._in_epoch < total:
            if self._stream is None:
                self._open()
            try:
                batch, _ = self._feed.next(self._clock)
            except StopIteration:
                return
            self._in_epoch += self._samples_per_batch
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data, for a checkpoint between two batches.

        Identical on all ranks, except for the damaged chunks that each has met.
        """
        state = self._state if self._stream is None else self._stream.state_dict()
        return state | {"in_epoch": self._wrap_epoch(self._in_epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly at the position of another loader over the same plan, with any workers and device.

        The samples continue also with another batch size, length or number of ranks, if it divides the number of
        samples so far; if the epoch would be over by then, the next one begins.

        Raises ConfigError: not a state, or one of other volumes, seed or sampling arguments; the loader is unchanged.
        """
        check_state(state, self._job)
        in_epoch = to_integer("in_epoch of a state", state.get("in_epoch", 0), 0)
        if self._stream is not None:
            self._stream.load_state_dict(state)
        self._state = {key: state[key] for key in self._state}
        self._in_epoch, self._continues = self._wrap_epoch(in_epoch), True

    def close(self) -> None:
        """End the readers.  Safe to call again; a later loop starts new ones and continues at the next batch."""
        if self._stream is not None:
            self._state = self._stream.state_dict()
        self._stream = None
        self._closing.close()

    @property
    def stream(self) -> PatchStream:
        """The underlying stream, with its events and statistics.  Opens it if necessary."""
        return self._stream or self._open()

    def reconfigure(self, **changes: Unpack[StreamChanges]) -> None:
        """Change `workers` or `prefetch_factor` between two batches; the batches do not change.

        Raises ConfigError if there is not enough memory; the loader is unchanged.
        """
        self.stream.reconfigure(**changes)

    def _wrap_epoch(self, samples: int) -> int:
        """Return the samples delivered in an epoch, or 0 if it is over."""
        return samples if self._samples_per_epoch is None or samples < self._samples_per_epoch else 0

    def _open(self) -> PatchStream:
        stop = None
        if self._epochs is not None and self._samples_per_epoch is not None:
            stop = max(self._epochs * self._samples_per_epoch, self._state["sample_index"])
        self._stream = self._closing.enter_context(
            self._feed.open(
                first=self._state["sample_index"],
                stop=stop,
                quarantined=self._state["quarantined"],
                resident=Resident(self._job) if self._resident else None,
            )
        )
        return self._stream


class PatchDataset(IterableDataset[PatchBatch]):
    """A `PatchLoader` for code that requires a DataLoader: `DataLoader(PatchDataset(loader), batch_size=None)`.

    The loader has its own readers: DataLoader workers raise a ConfigError.
    """

    def __init__(self, loader: PatchLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[PatchBatch]:
        if get_worker_info() is not None:
            raise ConfigError(_NO_WORKERS)
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(_NO_WORKERS)


_NO_WORKERS = "A DataLoader over a PatchDataset cannot have workers; set num_workers=0 and PatchLoader(workers=...)"


def _data(volumes: Volumes, sampling: dict[str, Any], seed: int | None) -> tuple[DataConfig, int]:
    """Make the data config and the seed from the arguments of a loader."""
    if isinstance(volumes, (str, Path)) and Path(volumes).suffix in (".yaml", ".yml"):
        config = read_config(Path(volumes))
        volumes, seed = config.data, config.seed if seed is None else seed
    seed = 0 if seed is None else to_integer("seed", seed, 0)
    if isinstance(volumes, DataConfig):
        if sampling:
            raise ConfigError(f"{', '.join(sampling)} cannot be combined with a data section; set it there")
        return volumes, seed
    named = _several("volumes", volumes, VolumeConfig)
    for argument, key in (("labels", "condition"), ("mask", "mask")):
        if argument not in sampling:
            continue
        arrays = _several(argument, sampling[argument], ArrayConfig)
        if len(arrays) != len(named):
            raise ConfigError(f"{argument} has {len(arrays)} entries for {len(named)} volumes; pass one for each")
        named = [volume.model_copy(update={key: each}) for volume, each in zip(named, arrays, strict=True)]
    keys: dict[str, Any] = {"volumes": tuple(named)}
    if "patch_size" in sampling:
        sizes = _numbers("patch_size", sampling["patch_size"], 3, "voxels (z, y, x)")
        keys["patch_size"] = tuple(to_integer("patch_size", size, 1) for size in sizes)
    square = "patch_size" not in sampling or len({*keys["patch_size"][1:]}) == 1
    augments = sampling.get("augment", True)
    keys["augment"] = AugmentConfig(flip=augments, rot90=augments and square)
    keys["min_foreground"] = sampling.get("min_foreground", _MASKED_FOREGROUND if "mask" in sampling else 0.0)
    if sampling.get("normalize", True) is not True:
        low, high = _numbers("normalize", sampling["normalize"], 2, "True, False or (low, high)")
        keys["normalize"] = NormalizeConfig(low=float(low), high=float(high))
    keys["validation"] = ValidationConfig(fraction=sampling.get("validation_fraction", 0.0))
    return DataConfig(**keys), seed


def _several(name: str, given: Any, kind: type[Spec]) -> list[Spec]:
    """Convert one or several paths or configs to configs.  Raises ConfigError for anything else."""
    configs = []
    for each in given if isinstance(given, (list, tuple)) else [given]:
        if not isinstance(each, (str, Path, kind)):
            raise ConfigError(f"{name} has an entry of type {type(each).__name__}; pass paths or {kind.__name__}s")
        configs.append(each if isinstance(each, kind) else kind(path=str(each)))
    return configs


def _numbers(name: str, value: Any, count: int, what: str) -> list[Any]:
    """Convert to a list of `count` numbers.  Raises ConfigError for anything else."""
    numbers = list(value) if isinstance(value, Iterable) else []
    if len(numbers) != count or not all(isinstance(each, Real) for each in numbers):
        raise ConfigError(f"{name} {value!r} is not valid; set it to {what}")
    return numbers


def _rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks.  Raises ConfigError for one without the other."""
    if (rank is None) != (world is None):
        raise ConfigError(f"rank={rank} and world={world} are incomplete; pass both or neither")
    if rank is None or world is None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return 0, 1
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world = to_integer("rank", rank, 0), to_integer("world", world, 1)
    if rank >= world:
        raise ConfigError(f"rank {rank} does not exist with world={world}; pass 0 to {world - 1}")
    return rank, world


def _device(device: torch.device | str | None) -> torch.device:
    """Return the device.  Raises ConfigError for one that does not exist or that batches cannot be copied to."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"torch does not recognize device {device!r}: {one_line(error)}; choose another") from error
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device {str(target)!r} is neither the CPU nor a CUDA GPU; use device='cpu' and batch.to({str(target)!r})"
        )
    if target.type == "cuda" and (target.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"device {str(target)!r} does not exist: torch finds {count} CUDA GPUs; choose another, 'cpu', or None, "
            "which uses a GPU if there is one"
        )
    return target
