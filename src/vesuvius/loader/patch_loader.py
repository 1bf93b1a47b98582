"""Patches of zarr volumes as tensors on the device, for any PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

import torch
from torch.utils.data import IterableDataset, get_worker_info

from vesuvius.config import ArrayConfig, AugmentConfig, DataConfig, NormalizeConfig, ValidationConfig, VolumeConfig
from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError, one_line
from vesuvius.loader.device import DeviceFeed, PatchBatch
from vesuvius.monitor.clock import HostClock
from vesuvius.stream.options import StreamChanges, StreamOptions
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
    """Batches of patches in a reproducible random order, read by processes of their own.

    Which patches come, and in which order, follows from `seed`, the volumes and what says how patches are drawn; not
    from `workers`, `prefetch_factor` or the device.  A context manager: at the end the readers, and Ray if the loader
    started it, end in about a second.  Without `with` they do at `close()`, with the last reference to the loader, or
    when the interpreter exits.

    Args:
        volumes: OME-Zarr groups or zarr arrays: a path or address (https://, s3://, gs://, az://, hf://),
            `VolumeConfig`s, which have level, weight and more, or several of both; or all of `data.*`, as a
            `DataConfig` or the YAML file of a run.
        batch_size: patches of a batch of this rank.
        patch_size: voxels (z, y, x); None = (72, 136, 136), or what `volumes` says.
        workers: reader processes; 0 reads in this process, without Ray.
        seed: of the order; by default 0, or that of the YAML file.
        labels: a volume for each of `volumes`, cut at the same place: labels, or a second scan.  Where it lies, OME
            scale and translation say.
        mask: a volume for each of `volumes` whose nonzero voxels are foreground.
        min_foreground: least share of foreground of each patch: of the mask, or without one of the stored chunks.
            None = 0.5 with a mask, else 0: patches from everywhere.
        normalize: True = grey values become -1 to +1 from the 0.5th to the 99.5th percentile of each volume, linear and
            not clipped; (low, high) = from these; False = grey values as stored.
        augment: mirror and turn patches at random, labels with them; turns need y = x.
        validation_fraction: share of each volume that no patch touches: `validation_boxes`.
        device: CPU or CUDA GPU; None = the current GPU, or the CPU where there is none.
        rank, world: rank r of n gets the samples i with i mod n = r; None = as torch.distributed says, if it runs.
        length: batches of an epoch, of each rank: what `len` returns and a `for` loop gets; None = endless.
        epochs: epochs of `length` batches after which nothing comes; None = any number.
        prefetch_factor: batches assembled ahead for each worker.
        resident: keep the decoded volumes in memory from their first pass on.

    Attributes:
        intensity_ranges: for each volume the grey values that become -1 and +1; empty with `normalize=False`.
        validation_boxes: for each volume what `validation_fraction` holds out, ((z, y, x), (z, y, x)), or None.

    Raises:
        ConfigError: an argument is wrong, or contradicts another.
        DataError: a volume cannot be used; also while iterating, where it can no longer be read.
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
        drawing = {
            "patch_size": patch_size,
            "labels": labels,
            "mask": mask,
            "min_foreground": min_foreground,
            "normalize": None if normalize is False else normalize,
            "augment": augment,
            "validation_fraction": validation_fraction,
        }
        data, seed = _data(volumes, {key: value for key, value in drawing.items() if value is not None}, seed)
        self._rank, self._world = _place(rank, world)
        options = StreamOptions(_whole("batch_size", batch_size, 1), workers, prefetch_factor)
        self._length = None if length is None else _whole("length", length, 1)
        self._epochs = None if epochs is None else _whole("epochs", epochs, 1)
        if epochs is not None and length is None:
            raise ConfigError(f"epochs={epochs} needs length, the batches of an epoch")
        self._samples_per_batch = options.batch_size * self._world
        self._samples_per_epoch = None if self._length is None else self._length * self._samples_per_batch
        prepared = prepare_data(seed, data, self._rank, self._world)
        self._job, self._keeps = prepared.job, resident
        self.validation_boxes: tuple[Box | None, ...] = tuple(split.validation for split in prepared.splits)
        self.intensity_ranges: tuple[IntensityRange, ...] = ()
        if normalize is not False:
            self.intensity_ranges = prepared.intensity_ranges(data.model_copy(update={"condition_classes": 1})).volumes
        self._feed = DeviceFeed(target, options, self._job, self.intensity_ranges)
        self._clock = HostClock()  # nobody asks where the time goes
        self._stream: PatchStream | None = None
        self._closing = ExitStack()
        self._state: dict[str, Any] = {
            "seed": seed,
            "sample_index": 0,
            "plan_hash": self._job.plan.hash,
            "quarantined": [],
        }
        self._in_epoch = 0  # samples of all ranks that the present epoch has delivered
        self._continues = False  # the next `for` goes on with that epoch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("an endless PatchLoader has no len(); give it length=BATCHES, those of an epoch")
        return self._length

    def __iter__(self) -> Iterator[PatchBatch]:
        """The batches of the next epoch: `length` of them, after `load_state_dict` those that are left of its epoch, if
        it was not at its end."""
        if not self._continues:
            self._in_epoch = 0
        self._continues = False
        whole = self._samples_per_epoch
        while whole is None or self._in_epoch < whole:
            if self._stream is None:
                self._open()
            try:
                batch, _ = self._feed.next(self._clock)
            except StopIteration:
                return
            self._in_epoch += self._samples_per_batch
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain data: for a checkpoint, between two batches.  The same for all ranks."""
        state = self._state if self._stream is None else self._stream.state_dict()
        return state | {"in_epoch": self._of_epoch(self._in_epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where another loader over the same plan was, also with other workers or on another device.

        With another batch size, length or number of ranks the samples go on, too; of an epoch that would already be
        over, the next one begins.

        Raises:
            ConfigError: it is not a state, or of other volumes, seed, patches or draws; the loader stays as it was.
        """
        check_state(state, self._job)
        in_epoch = _whole("in_epoch of a state", state.get("in_epoch", 0), 0)
        if self._stream is not None:
            self._stream.load_state_dict(state)
        self._state = {key: state[key] for key in self._state}
        self._in_epoch, self._continues = self._of_epoch(in_epoch), True

    def close(self) -> None:
        """End the readers.  Safe to call again; a later loop starts others, at the next batch."""
        if self._stream is not None:
            self._state = self._stream.state_dict()
        self._stream = None
        self._closing.close()

    @property
    def stream(self) -> PatchStream:
        """The stream of voxels below: its events, readers and figures.  Starts it where it has not started."""
        return self._stream or self._open()

    def reconfigure(self, **changes: Unpack[StreamChanges]) -> None:
        """Change `workers` or `prefetch_factor` between two batches, which stay what they are.

        Raises ConfigError where memory does not allow it; the loader stays as it was.
        """
        self.stream  # noqa: B018 - is opened
        self._feed.reconfigure(**changes)

    def _of_epoch(self, samples: int) -> int:
        """So many samples of an epoch, which are 0 of the next one once it is over."""
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
                resident=Resident(self._job) if self._keeps else None,
            )
        )
        return self._stream


class PatchDataset(IterableDataset[PatchBatch]):
    """A `PatchLoader` for code that insists on a DataLoader: `DataLoader(PatchDataset(loader), batch_size=None)`.

    The readers are the loader's own: DataLoader workers are refused with a ConfigError.
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


_NO_WORKERS = "num_workers must be 0 in a DataLoader over a PatchDataset: set PatchLoader(workers=...) instead"


def _data(volumes: Volumes, drawing: dict[str, Any], seed: int | None) -> tuple[DataConfig, int]:
    """The config of the volumes and of how patches are drawn, and the seed."""
    if isinstance(volumes, (str, Path)) and Path(volumes).suffix in (".yaml", ".yml"):
        config = read_config(Path(volumes))
        volumes, seed = config.data, config.seed if seed is None else seed
    seed = 0 if seed is None else _whole("seed", seed, 0)
    if isinstance(volumes, DataConfig):
        if drawing:
            raise ConfigError(f"{', '.join(drawing)} cannot be given beside a whole data section: set it there")
        return volumes, seed
    named = _several("volumes", volumes, VolumeConfig)
    for argument, key in (("labels", "condition"), ("mask", "mask")):
        if argument not in drawing:
            continue
        arrays = _several(argument, drawing[argument], ArrayConfig)
        if len(arrays) != len(named):
            raise ConfigError(f"{len(arrays)} {argument} for {len(named)} volumes: give one for each volume")
        named = [volume.model_copy(update={key: each}) for volume, each in zip(named, arrays, strict=True)]
    keys: dict[str, Any] = {"volumes": tuple(named)}
    if "patch_size" in drawing:
        sizes = _numbers("patch_size", drawing["patch_size"], 3, "voxels (z, y, x)")
        keys["patch_size"] = tuple(_whole("patch_size", size, 1) for size in sizes)
    square = "patch_size" not in drawing or len({*keys["patch_size"][1:]}) == 1
    augments = drawing.get("augment", True)
    keys["augment"] = AugmentConfig(flip=augments, rot90=augments and square)
    keys["min_foreground"] = drawing.get("min_foreground", _MASKED_FOREGROUND if "mask" in drawing else 0.0)
    if drawing.get("normalize", True) is not True:
        low, high = _numbers("normalize", drawing["normalize"], 2, "True, False or (low, high)")
        keys["normalize"] = NormalizeConfig(low=float(low), high=float(high))
    keys["validation"] = ValidationConfig(fraction=drawing.get("validation_fraction", 0.0))
    return DataConfig(**keys), seed


def _several(name: str, given: Any, kind: type[Spec]) -> list[Spec]:
    """One or several paths or configs, as configs.  Raises ConfigError for anything else."""
    found = []
    for each in given if isinstance(given, (list, tuple)) else [given]:
        if not isinstance(each, (str, Path, kind)):
            raise ConfigError(
                f"{name} must be paths or {kind.__name__}s; got {type(each).__name__}; give where it lies"
            )
        found.append(each if isinstance(each, kind) else kind(path=str(each)))
    return found


def _whole(name: str, value: Any, least: int) -> int:
    """An integer of any kind as int.  Raises ConfigError for anything else, and below `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise ConfigError(f"{name} must be an integer of at least {least}; got {value!r}; change it")
    return int(value)


def _numbers(name: str, value: Any, count: int, what: str) -> list[Any]:
    """So many numbers.  Raises ConfigError for anything else."""
    found = list(value) if isinstance(value, Iterable) else []
    if len(found) != count or not all(isinstance(each, Real) for each in found):
        raise ConfigError(f"{name} must be {what}; got {value!r}; change it")
    return found


def _place(rank: int | None, world: int | None) -> tuple[int, int]:
    """The rank of this process and the number of ranks.  Raises ConfigError for one without the other."""
    if (rank is None) != (world is None):
        raise ConfigError(f"rank and world go together: give both or neither, not rank={rank}, world={world}")
    if rank is None or world is None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return 0, 1
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world = _whole("rank", rank, 0), _whole("world", world, 1)
    if rank >= world:
        raise ConfigError(f"rank {rank} is not one of world={world} ranks: give 0 to {world - 1}")
    return rank, world


def _device(device: torch.device | str | None) -> torch.device:
    """Raises ConfigError for one that is not there, or that batches cannot be copied to."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be one that torch knows; got {device!r}: {one_line(error)}") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device must be the CPU or a CUDA GPU; got {str(found)!r}; take device='cpu' and batch.to({str(found)!r})"
        )
    if found.type == "cuda" and (found.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"device must be there; got {str(found)!r} where torch finds {count} CUDA GPUs; choose another, 'cpu', or "
            "None, which takes a GPU if there is one"
        )
    return found
