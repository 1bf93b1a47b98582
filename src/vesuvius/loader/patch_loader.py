"""Patches of zarr volumes as tensors on the device, for any PyTorch loop."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, Unpack
from weakref import WeakSet

import torch
from torch.utils.data import IterableDataset

from vesuvius.config.section import natural
from vesuvius.errors import ConfigError
from vesuvius.loader.arguments import Arrays, Volumes, data_of, device_of, dtype_of_labels, resident_of, tensor_dtype
from vesuvius.loader.device import DeviceFeed, PatchBatch
from vesuvius.loader.ranks import compare_positions, given_rank, launched_rank
from vesuvius.loader.resident import keeps_resident, open_resident
from vesuvius.monitor.clock import StepClock
from vesuvius.stream.events import check_process, check_state
from vesuvius.stream.options import StreamChanges, StreamOptions, to_integer
from vesuvius.stream.start.prepare import IntensityRange, amplified_reads, prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.threads import end_later
from vesuvius.volumes.box import Box
from vesuvius.volumes.errors import ClosedError
from vesuvius.volumes.volume import Volume

log = logging.getLogger(__name__)

_CLOSED = "The PatchLoader was closed during this loop; begin another one"


class PatchLoader(IterableDataset[PatchBatch]):
    """Batches of patches in a reproducible random order, read ahead by threads or processes.

    Patches and their order depend on `seed`, the volumes and the sampling arguments alone.  A context manager: on exit
    the workers, and Ray if the loader started it, end.  All loops share one sequence of batches, and each counts its
    own `batches_per_epoch`.  After an error the next loop, or `next`, goes on at the batch that failed.

    Args:
        volumes: OME-Zarr groups or zarr arrays: a path, a pattern (`images/*.zarr`: a volume for each match), a URL
            (https://, s3://, gs://, az://, hf://), a `VolumeConfig` (with level, weight and more), or a sequence of
            these; a YAML file that lists them; or a full data section, as a `DataConfig` or the YAML file of a run.
            A tuple in the sequence has the channels of one volume; patches are cut on the grid of the first.
        batch_size: batch size of this rank.
        patch_size: voxels (z, y, x); None = (72, 136, 136), or the value in `volumes`.
        num_workers: number of threads of this process that read, or of processes; 0 = a thread per core, at most 16.
        processes: True = the readers are Ray processes (needs the extra `train`).
        seed: random seed; by default 0, or that of the YAML file.
        labels: an array for each of `volumes`, or a tuple of them, cropped at the same position.  OME scale and
            translation align it with the volume, as they do channels.  One path with `{name}` stands for all: `{name}`
            is the volume's name without `.zarr`; so in `mask`.
        label_dtype: dtype of labels on the device; None = int64 for integers and bool, as stored for floats.
        class_weights: share of the patches that hold at least a voxel of a class, by its value in the (first) labels:
            {1: 0.3}.  The others come from everywhere, or as `min_foreground` says, which holds for all.
        ignore_label: value of voxels without annotation in the (first) labels: all others are the foreground.
        mask: an array for each of `volumes` whose nonzero voxels are foreground.
        min_foreground: minimum share of foreground in each patch: of the mask's voxels (estimated, with a warning, if
            they are more than 2^30) or, without one, of the stored chunks.  None = 0.5 with a mask or `ignore_label`,
            else 0.
        normalize: True = map the 0.5th and 99.5th percentile of each channel linearly to -1 and +1, without clipping;
            (low, high) = map these instead; False = intensities as stored.
        augment: mirror and rotate patches at random, labels with them; rotation needs y = x, in patch and voxel size.
        validation_fraction: share of each volume that no patch of any entry with its array touches: `validation_boxes`.
        transform: called with each batch on the device, on the thread that iterates; returns a `PatchBatch`.
        device: CPU or CUDA GPU; None = the current GPU, or the CPU without one.
        rank, world_size: rank r of n gets the samples i with i mod n = r; None = those of torch.distributed at the
            first loop.
        batches_per_epoch: per rank: what `len` returns and a `for` loop yields; None = endless.
        epochs: the loader is exhausted after `epochs` times `batches_per_epoch`, over all loops; None = unlimited.
        prefetch_factor: batches assembled ahead per worker.
        cache_in_memory: True = keep the decoded volumes in memory after the first pass, one copy for the ranks of a
            machine, in at most half of the free memory; False = never; None = False, or the GiB in a data section.

    Attributes:
        intensity_ranges: for each channel of each volume, in the order of `volumes`, the intensities mapped to -1 and
            +1; empty with `normalize=False`.
        validation_boxes: for each volume the box held out by `validation_fraction`, ((z, y, x), (z, y, x)), or None.

    Raises:
        ConfigError: an argument is invalid; on iterating in a forked process or a worker of a DataLoader, with an
            unknown rank (`WORLD_SIZE` is above 1, torch.distributed is not initialized), or elsewhere than other ranks.
        DataError: a volume cannot be used; also while iterating, if it can no longer be read.
        ClosedError: on iterating, the loader was closed since the loop began.
    """

    def __init__(
        self,
        volumes: Volumes,
        *,
        batch_size: int,
        patch_size: Sequence[int] | None = None,
        num_workers: int = 2,
        processes: bool = False,
        seed: int | None = None,
        labels: Arrays | None = None,
        label_dtype: torch.dtype | str | None = None,
        class_weights: Mapping[int, float] | None = None,
        ignore_label: int | None = None,
        mask: Arrays | None = None,
        min_foreground: float | None = None,
        normalize: bool | tuple[float, float] | None = None,
        augment: bool | None = None,
        validation_fraction: float | None = None,
        transform: Callable[[PatchBatch], PatchBatch] | None = None,
        device: torch.device | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        batches_per_epoch: int | None = None,
        epochs: int | None = None,
        prefetch_factor: int = 2,
        cache_in_memory: bool | None = None,
    ) -> None:
        if device is not None:
            device_of(device)
        given: dict[str, Any] = {"patch_size": patch_size, "labels": labels, "mask": mask, "augment": augment}
        given |= {"class_weights": class_weights, "ignore_label": ignore_label}
        given |= {"min_foreground": min_foreground, "normalize": normalize, "validation_fraction": validation_fraction}
        data, seed = data_of(volumes, given, seed)
        if data.context:
            text = "PatchLoader delivers labels at the patch, not a window around it"
            raise ConfigError(f"{text}; remove context from data.volumes[].condition")
        self._given_rank = given_rank(rank, world_size)
        self._options = StreamOptions(batch_size, num_workers, prefetch_factor, processes=processes)
        self._device = device
        self._batches_per_epoch = (
            None if batches_per_epoch is None else to_integer("batches_per_epoch", batches_per_epoch, 1)
        )
        self._epochs = None if epochs is None else to_integer("epochs", epochs, 1)
        if epochs is not None and batches_per_epoch is None:
            raise ConfigError(f"epochs={epochs} needs the length of an epoch; set batches_per_epoch")
        self._resident = resident_of(cache_in_memory, data)
        prepared = prepare_data(seed, data)
        self._job = prepared.job
        if self._resident:
            keeps_resident(self._job, self._resident, empty=True)  # ranks that share a copy fill it meanwhile
        self.validation_boxes: tuple[Box | None, ...] = tuple(split.validation for split in prepared.splits)
        self.intensity_ranges: tuple[IntensityRange, ...] = ()
        rule: bool | list[float | None] = False
        if natural(normalize) is not False:
            self.intensity_ranges = prepared.intensity_ranges(data.model_copy(update={"condition_classes": 1})).volumes
            rule = data.normalize.low is None or [data.normalize.low, data.normalize.high]
        images = (array for arrays in prepared.arrays for array in arrays[: self._job.channels])
        ranges = zip(map(array_key, images), self.intensity_ranges, strict=False)
        self._normalization: dict[str, Any] = {
            "normalize": rule,
            "intensity_ranges": {key: [each.low, each.high] for key, each in ranges},
        }
        stored, labeled = self._job.dtypes[: self._job.channels], self._job.dtypes[self._job.channels :]
        self._dtypes = dtype_of_labels(label_dtype, labeled), None if rule else tensor_dtype(stored)
        self._transform = transform
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform {transform!r} cannot be called; pass a function of a batch")
        self._state: dict[str, Any] = {
            "seed": seed,
            "sample_index": 0,
            "plan_hash": self._job.plan.hash,
            "quarantined": [],
        }
        self._in_epoch = 0  # samples of all ranks delivered in the epoch of the last batch
        self._continues = False  # whether the next loop continues that epoch
        self._begin()

    def _begin(self) -> None:
        """Begin in this process, without rank and stream."""
        self._pickled = tuple(vars(self))
        self._pid = os.getpid()
        self._feed: DeviceFeed | None = None  # None = the rank is unknown
        self._stream: PatchStream | None = None
        self._is_running = False  # else `_state` is the position
        self._is_new, self._num_batches, self._num_closed = True, 0, 0
        self._loops = WeakSet[_Loop]()
        self._reading = threading.RLock()  # held by the thread that takes a batch

    def __getstate__(self) -> dict[str, Any]:
        if self._is_running:
            raise ConfigError(
                "A PatchLoader cannot be pickled while its workers run; close() it first, or make it in the process "
                "that uses it (a DataLoader over it: set num_workers=0 and PatchLoader(num_workers=...))"
            )
        return {name: getattr(self, name) for name in self._pickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __del__(self) -> None:
        if (stream := vars(self).get("_stream")) is not None and self._is_running and os.getpid() == self._pid:
            end_later(stream.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        if self._batches_per_epoch is None:
            raise TypeError("An endless PatchLoader has no len(); set batches_per_epoch")
        return self._batches_per_epoch

    def __iter__(self) -> Iterator[PatchBatch]:
        """Return an iterator over the next `batches_per_epoch` batches; after `load_state_dict`, the rest of an epoch.

        Iterators that live at the same time share the batches: each batch goes to one of them.
        """
        check_process("PatchLoader", self._pid)
        with self._reading:
            self._join_ranks()
            loop = _Loop(self, self._in_epoch_now() if self._continues else 0, self._num_closed)
            self._continues = False
            self._loops.add(loop)
        return loop

    def _next(self, loop: "_Loop") -> PatchBatch:
        check_process("PatchLoader", self._pid)
        with self._reading:
            if loop.num_closed != self._num_closed:
                raise ClosedError(_CLOSED)
            if (total := self._samples_per_epoch) is not None and loop.samples >= total:
                raise StopIteration
            stream = self._stream if self._stream and self._is_running else self._open()
            assert self._feed is not None
            before = stream.state_dict()
            try:
                batch = self._transformed(self._feed.next(StepClock())[0])
            except BaseException as error:
                closed = loop.num_closed != self._num_closed
                if isinstance(error, StopIteration) and not closed:
                    raise
                self._stop(before["sample_index"])  # the next call begins anew with the batch that was not delivered
                if closed:
                    raise ClosedError(_CLOSED) from None
                raise
            self._num_batches, self._continues = self._num_batches + 1, False
            loop.turn = self._num_batches
            loop.samples += self._options.batch_size * self._job.world_size
            self._in_epoch = loop.samples
            return batch

    def _transformed(self, batch: PatchBatch) -> PatchBatch:
        if self._transform is None:
            return batch
        try:
            changed = self._transform(batch)
        except StopIteration as error:
            raise RuntimeError("transform raised StopIteration, which would end the loop") from error
        if not isinstance(changed, PatchBatch):
            raise ConfigError(
                f"transform returned {type(changed).__name__}, not a PatchBatch; return dataclasses.replace(batch, ...)"
            )
        return changed

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the normalization as plain data, for a checkpoint between two batches.

        `predict_volume` normalizes a volume by it; `load_state_dict` ignores the normalization.
        Identical on all ranks, except for the damaged chunks that each has met.
        """
        state = self._stream.state_dict() if self._stream and self._is_running else self._state
        return state | {"in_epoch": self._in_epoch_now()} | self._normalization

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly at the position of another loader over the same plan, with any workers and device.

        Also with another batch size, `batches_per_epoch` or number of ranks that divides the number of samples so far.
        Raises ConfigError: not a state, or one of other volumes, seed or sampling arguments; the loader is unchanged.
        """
        check_state(state, self._job)
        in_epoch = to_integer("in_epoch of a state", state.get("in_epoch", 0), 0)
        if self._stream and self._is_running:
            compare_positions(self._job, state["sample_index"])
            self._stream.load_state_dict(state)
        self._state = {key: state[key] for key in self._state}
        self._in_epoch, self._continues, self._is_new = in_epoch, True, not self._is_running
        for loop in self._loops:
            loop.samples = self._in_epoch_now()

    def close(self) -> None:
        """End the readers.  Safe to call again, and on any thread; a later loop starts new ones and continues at the
        next batch, but loops that have begun raise ClosedError."""
        if os.getpid() == self._pid:  # else everything belongs to the parent
            self._num_closed += 1
            self._stop()

    def _stop(self, sample_index: int | None = None) -> None:
        """Close the stream; the next one continues at its position, or at this one."""
        if (stream := self._stream) is not None:
            stream.close()  # ends the wait of a thread that holds the lock
            with self._reading:
                if self._is_running:
                    self._state = stream.state_dict()
                    if sample_index is not None:
                        self._state["sample_index"] = sample_index
                self._is_running = False

    @property
    def stream(self) -> PatchStream:
        """The underlying stream, with its events and statistics; a closed one after `close`.  Opens the first one."""
        if self._stream is None and self._num_closed:
            raise ConfigError("The PatchLoader is closed and has not read; iterate over it to open a stream")
        if self._stream is None:
            check_process("PatchLoader", self._pid)
            with self._reading:
                return self._stream or self._open()
        return self._stream

    def reconfigure(self, **changes: Unpack[StreamChanges]) -> None:
        """Change `num_workers`, `processes` or `prefetch_factor` between two batches; the batches do not change.

        Raises ConfigError if there is not enough memory; the loader is unchanged.
        """
        self.stream.reconfigure(**changes)
        assert self._feed is not None
        self._options = self._feed.options = replace(self._options, **changes)  # also after an error or `close`

    @property
    def _samples_per_epoch(self) -> int | None:
        if (batches := self._batches_per_epoch) is None:
            return None
        return batches * self._options.batch_size * self._job.world_size

    def _in_epoch_now(self) -> int:
        """Return the samples delivered in the current epoch, 0 if it is over: that of the last batch, or, if its loop
        was left, of the latest batch of a loop that goes on, such as the one around it."""
        total = None if self._feed is None else self._samples_per_epoch
        running = [loop for loop in self._loops if loop.turn and (total is None or loop.samples < total)]
        over = total is not None and self._in_epoch >= total
        if over or self._continues or not running:
            return 0 if over else self._in_epoch
        return max(running, key=lambda loop: loop.turn).samples

    def _join_ranks(self) -> None:
        """Take the rank from the arguments or torch.distributed, which may have been initialized meanwhile.

        Raises ConfigError: the rank is unknown, or starts elsewhere than the others.
        """
        known = None if self._feed is None else (self._job.rank, self._job.world_size)
        if (found := self._given_rank or launched_rank(known)) != known:
            self._stop()
            job = replace(self._job, rank=found[0], world_size=found[1])
            check_state(self._state, job)
            target, ranges = device_of(self._device), self.intensity_ranges
            self._job, self._feed = job, DeviceFeed(target, self._options, job, ranges, *self._dtypes)
            for line in amplified_reads(job.plan, found[1]):
                log.warning("%s", line)
        if self._is_new:
            compare_positions(self._job, self._state["sample_index"])
            self._is_new = False

    def _open(self) -> PatchStream:
        self._join_ranks()
        assert self._feed is not None
        stop, num_closed = None, self._num_closed
        if self._epochs is not None and self._samples_per_epoch is not None:
            stop = max(self._epochs * self._samples_per_epoch, self._state["sample_index"])
        self._stream = self._feed.open(
            first=self._state["sample_index"],
            stop=stop,
            quarantined=self._state["quarantined"],
            resident=open_resident(self._job, self._resident),
        )
        self._is_running = True
        if num_closed != self._num_closed:  # by another thread meanwhile
            self._stop()
            raise ClosedError(_CLOSED)
        return self._stream


def array_key(volume: Volume) -> str:
    """Return the address, level and selected channel of a volume, by which a state knows its intensity range."""
    return f"{volume.name} {list(volume.spec.select)}"


class _Loop(Iterator[PatchBatch]):
    """A loop over a loader."""

    def __init__(self, loader: PatchLoader, samples: int, num_closed: int) -> None:
        self._loader, self.num_closed = loader, num_closed
        self.samples = samples  # of all ranks, delivered in its epoch
        self.turn = 0  # grows with each batch, over all loops; 0 before the first

    def __next__(self) -> PatchBatch:
        return self._loader._next(self)
