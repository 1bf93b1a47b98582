"""Writes an OME-Zarr that can be resumed (copied, imported, drawn or synthetic); its process may be killed at any time.

    OUT.zarr.partial/copy.json      the arguments, needed to resume; drawing.json for a drawn volume
    OUT.zarr.partial/lock           locked by the writing process
    OUT.zarr.partial/volume.zarr/   OUT.zarr without metadata, so that an unfinished volume cannot be opened

Each chunk or shard is written under a temporary name, synced, read back and renamed, so an existing file is complete
and is skipped.  Air is not stored; a resumed process computes it again.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any, Self, TypeVar

import google_crc32c
import numpy as np
import zarr
from numcodecs import Blosc
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec

from vesuvius.config import Triple
from vesuvius.errors import ConfigError, storage_errors
from vesuvius.runlog.files import flush_to_disk, take_lock, write_atomically
from vesuvius.runlog.held import holding, refuse_moved
from vesuvius.runlog.records import parse_record
from vesuvius.threads import started_ahead
from vesuvius.volume_tools.pyramid import Pyramid, downsample_mean, downsample_mode, multiscale
from vesuvius.volume_tools.shard_file import ShardFile, check_written
from vesuvius.volumes.box import Box, chunk_box, chunk_ranges, grid_shape, intersection, shape_of, slices, triple
from vesuvius.volumes.geometry import Geometry

T = TypeVar("T")

log = logging.getLogger(__name__)

COPY, IMPORT = "copy", "import"  # kinds: names of the record file and, with a prefix, of the attribute
_WRITERS = min(4, os.cpu_count() or 1)
_LONGEST_NAME = 255 - len(".partial")  # bytes, in most file systems


@dataclass(frozen=True)
class PartialCopy:
    """The chunks of an unfinished volume, written while it is `locked`.  Methods that write raise StorageError."""

    out: Path
    record: dict[str, Any]  # the arguments as plain JSON
    plan: Pyramid
    dtype: np.dtype[Any]
    fill_value: Any  # of all levels
    kind: str = COPY  # "copy", "import", "drawing", "phantom", ...
    labels: bool = False  # coarser levels have the most frequent voxel instead of the mean

    @property
    def path(self) -> Path:
        """OUT.zarr.partial."""
        return partial_path(self.out)

    @contextmanager
    def locked(self) -> Iterator[Self]:
        """Start or resume the volume, and lock its folder until the context ends.

        Raises ConfigError: another process is writing it, or it was started with other arguments.
        """
        recorded = self.path / f"{self.kind}.json"
        with ExitStack() as held:
            with disk_errors(self.out):
                self.path.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context((self.path / "lock").open("w"))
                if not take_lock(lock.fileno(), self.path / "lock"):
                    raise ConfigError(
                        f"Cannot write {self.path}: another process is writing it; wait for that process or stop it"
                    )
                if recorded.exists():
                    check_record(self.path, parse_record(recorded.read_text()), self.record)
                elif any(name != "lock" and name[0] != "." for name in os.listdir(self.path)):
                    check_record(self.path, None, self.record)
                else:
                    write_atomically(recorded, json.dumps(self.record, indent=2).encode())
                held.enter_context(holding(self.path, lock.fileno(), "lock"))
            yield self

    def missing(self, level: int) -> list[Triple]:
        """The chunks of a level without a file, shard by shard, including those of air, or air in some channel."""
        counts, found = self.plan.counts[level], list[Triple]()
        for file in map(triple, np.ndindex(grid_shape(counts, self._per_file))):
            if not all(self._file(level, (*channel, *file)).exists() for channel in self._channels):
                found += product(*triple(map(range, *chunk_box(file, self._per_file, counts))))
        return found

    def fill(
        self,
        level: int,
        read: Callable[[Box], NDArray[Any] | None],
        on_chunk: Callable[[int], None] = lambda size: None,
        ahead: Callable[[Sequence[Box], int], None] = lambda boxes, number: None,
    ) -> None:
        """Write the missing chunks of a level while the next ones are read; calls its arguments on this thread.

        `read` returns the voxels of a box, None to skip the chunk.  `on_chunk` is called with the stored bytes of each
        finished chunk (0 = air), `ahead` before each read with all boxes and the position of the next one.
        """
        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="write") as writers:
            if not (per := self.plan.per_shard):
                for _, size in self._in_order(level, read, ahead, writers, partial(self.write, level)):
                    on_chunk(size)
                return
            wait_for_last: Callable[[], None] = lambda: None  # noqa: E731
            encoded = self._in_order(level, read, ahead, writers, lambda _, voxels: self._encoded(voxels))
            with disk_errors(self.out):
                for shard, chunks in groupby(encoded, lambda item: triple(i // per for i in item[0])):
                    file = ShardFile(self._file(level, shard), per**3)
                    for chunk, stored in chunks:
                        file.add(int(np.ravel_multi_index([i % per for i in chunk], self._per_file)), stored)
                        on_chunk(len(stored))
                    wait_for_last()
                    wait_for_last = writers.submit(file.finish).result
                wait_for_last()

    def _in_order(
        self,
        level: int,
        read: Callable[[Box], NDArray[Any] | None],
        ahead: Callable[[Sequence[Box], int], None],
        writers: ThreadPoolExecutor,
        work: Callable[[Triple, NDArray[Any]], T],
    ) -> Iterator[tuple[Triple, T]]:
        """The missing chunks of a level, each with the result of `work` on its voxels."""
        chunks = self.missing(level)
        boxes = [self.plan.box_of(level, chunk) for chunk in chunks]

        def working() -> Iterator[tuple[Triple, Future[T]]]:
            for number, (chunk, box) in enumerate(zip(chunks, boxes, strict=True)):
                ahead(boxes, number)
                if (voxels := read(box)) is not None:
                    yield chunk, writers.submit(work, chunk, voxels)

        yield from ((chunk, done.result()) for chunk, done in started_ahead(working(), _WRITERS))

    def fill_coarser(self, on_chunk: Callable[[int], None] = lambda size: None) -> None:
        """Write the metadata of the finest level, whose chunks are complete, then each coarser level from the finer."""
        finer = self._finish_level(0)
        for level in range(1, self.plan.levels):
            self.fill(level, partial(self._halved, finer), on_chunk)
            finer = self._finish_level(level)

    def _halved(self, finer: zarr.Array[Any], box: Box) -> NDArray[Any]:
        """A chunk of the next level, one finer chunk at a time, because all eight and their sums take much memory."""
        shape, half = shape_of(box), triple(-(-size // 2) for size in self.plan.chunk_zyx)
        voxels = np.empty((self.plan.channels, *shape) if self.plan.channels else shape, self.dtype)
        downsample = downsample_mode if self.labels else downsample_mean
        for channel, index in product(self._channels, product(*chunk_ranges(box, half))):
            part = intersection(chunk_box(index, half, box[1]), box)
            twice = tuple(slice(2 * lo, 2 * hi) for lo, hi in zip(*part, strict=True))  # may end past the array
            voxels[channel + slices(part, box[0])] = downsample(np.asarray(finer[channel + twice]))
        return voxels

    def write(self, level: int, chunk: Triple, voxels: NDArray[Any], air: bool = False) -> int:
        """Store a chunk atomically, from any thread.  Returns the bytes of its file; 0 = air, not stored.

        Args:
            voxels: of the volume's dtype; smaller than a chunk at the end of an axis; all channels, if there are any.
            air: store air too; with shards, one with this chunk alone.
        """
        return sum(self._write(level, (*channel, *chunk), voxels[channel], air) for channel in self._channels)

    def flush_names(self, level: int, chunks: Iterable[Triple]) -> None:
        """Flush the folders of chunks to the disk: their voxels were flushed when they were written."""
        files = (self._file(level, (*channel, *chunk)) for channel in self._channels for chunk in chunks)
        with disk_errors(self.out):
            for folder in {above for file in files for above in file.parents if above.is_relative_to(self.path)}:
                if folder.exists():  # air has none
                    flush_to_disk(folder)

    def _write(self, level: int, chunk: tuple[int, ...], voxels: NDArray[Any], air: bool) -> int:
        if data := self._encoded(voxels, air):
            with disk_errors(self.out):
                file = self._file(level, chunk)
                if self.plan.per_shard:
                    shard = ShardFile(file, self.plan.per_shard**3)
                    shard.add(0, data)
                    shard.finish()
                    return len(data)
                refuse_moved(file)
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, data, lambda written: check_written(written, google_crc32c.value(data)))
        return len(data)

    def _encoded(self, voxels: NDArray[Any], air: bool = False) -> bytes:
        """The stored form of a chunk; b"" for air, unless that is stored too."""
        fill = self.dtype.type(self.fill_value)
        if not air and np.array_equal(voxels, np.broadcast_to(fill, voxels.shape), equal_nan=voxels.dtype.kind == "f"):
            return b""
        padded = np.full(self.plan.chunk_zyx, fill, voxels.dtype.newbyteorder("<"))
        padded[tuple(map(slice, voxels.shape))] = voxels
        return bytes(_codec_for(voxels.dtype).encode(padded))

    def publish(self, geometry: Geometry) -> None:
        """Write the group's metadata and rename the complete volume."""
        image = multiscale(self.out.stem, self.plan.levels, geometry, self.plan.channels > 0)
        with disk_errors(self.out):
            for torn in self._volume.rglob(".*.tmp"):  # left by a killed process
                torn.unlink()
            ome: dict[str, Any] = {"multiscales": [image]}
            if self.plan.per_shard:
                del image["version"]
                ome = {"ome": {"version": "0.5"} | ome}
            group = zarr.open_group(self._volume, mode="a", zarr_format=3 if self.plan.per_shard else 2)
            group.attrs.put(ome | {attribute(self.kind): self.record})
            refuse_moved(self._volume)
            self._volume.rename(self.out)
            shutil.rmtree(self.path)

    def _finish_level(self, level: int) -> zarr.Array[Any]:
        """Write the metadata of a level whose chunks are complete; returns the array for reading."""
        folder = self._volume / str(level)
        with disk_errors(self.out):
            if not any(
                file.is_file() and file.name[0] != "." for file in folder.rglob("*")
            ):  # a volume without any chunk could not be opened
                if level == 0:
                    log.warning("%s: all voxels are %s", self.out, self.fill_value)
                voxels = np.full(self.plan.chunk_zyx, self.fill_value, self.dtype)
                self._write(level, (*self._channels[0], 0, 0, 0), voxels, air=True)
            if not (folder / ("zarr.json" if self.plan.per_shard else ".zarray")).exists():
                shape, fill = self.plan.shapes[level], self.dtype.type(self.fill_value).item()
                c, one = ((self.plan.channels,), (1,)) if self.plan.channels else ((), ())
                about = self._volume, str(level), (*c, *shape), self.dtype, (*one, *self.plan.chunk_zyx), fill
                new_array(*about, per_shard=self.plan.per_shard)
            return zarr.open_array(folder, mode="r")

    @property
    def _volume(self) -> Path:
        return self.path / "volume.zarr"

    @property
    def _per_file(self) -> Triple:
        """Chunks in a file along each axis."""
        return (self.plan.per_shard or 1,) * 3

    @property
    def _channels(self) -> list[tuple[int, ...]]:
        """Index of each channel, () without channels."""
        return [(channel,) for channel in range(self.plan.channels)] or [()]

    def _file(self, level: int, index: tuple[int, ...]) -> Path:
        return self._volume.joinpath(str(level), *("c" * bool(self.plan.per_shard)), *map(str, index))


def new_array(
    root: Path,
    name: str,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    chunks: tuple[int, ...],
    fill_value: Any = 0,
    write_empty_chunks: bool = False,
    per_shard: int = 0,
) -> zarr.Array[Any]:
    """Create an empty array in the OME-Zarr group at `root`: 0.4, or 0.5 with shards.  Raises OSError."""
    form: dict[str, Any] = {
        "compressors": _codec_for(dtype),
        "order": "C",
        "zarr_format": 2,
        "chunk_key_encoding": {"name": "v2", "separator": "/"},
    }
    if per_shard:
        shuffle: Any = "shuffle" if dtype.itemsize > 1 else "noshuffle"
        compressor = BloscCodec(cname="zstd", clevel=3, shuffle=shuffle, typesize=dtype.itemsize)  # as _codec_for
        form = {
            "compressors": [compressor, Crc32cCodec()],
            "shards": [size * per_shard for size in chunks],
            "zarr_format": 3,
            "dimension_names": list("zyx"),
        }
    return zarr.create_array(
        root,  # not a str, in which zarr 3.4 parses # and ? as in a URL
        name=name,
        shape=tuple(shape),
        dtype=dtype.newbyteorder("<"),
        chunks=chunks,
        fill_value=fill_value,
        config={"write_empty_chunks": write_empty_chunks},
        **form,
    )


def _codec_for(dtype: np.dtype[Any]) -> Blosc:
    """The compression of the published scrolls."""
    return Blosc(cname="zstd", clevel=3, shuffle=Blosc.SHUFFLE if dtype.itemsize > 1 else Blosc.NOSHUFFLE)


def disk_errors(out: Path) -> AbstractContextManager[None]:
    remedy = "finished chunks are kept: free some space and run the same command again, or choose another disk"
    return storage_errors(str(out), remedy)


# ---- the record of a volume's arguments, which decides whether a command may resume it


def check_name(out: Path) -> None:
    if out.suffix != ".zarr":
        raise ConfigError(f"The name {out} does not end in .zarr; add the ending")
    if (size := len(os.fsencode(out.name))) > _LONGEST_NAME:
        raise ConfigError(f"The name of {size} bytes of {out} is too long; choose one of at most {_LONGEST_NAME}")


def attribute(kind: str) -> str:
    """The attribute of a finished volume that holds its record."""
    return f"vesuvius_{kind}"


def partial_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def has_partial(out: Path, kind: str = COPY) -> bool:
    return (partial_path(out) / f"{kind}.json").exists()


def is_finished(out: Path, record: dict[str, Any], kind: str = COPY) -> bool:
    """Whether it is complete; removes what a killed process left.  Raises ConfigError: something else is there."""
    if not os.path.lexists(out):
        return False
    check_record(out, finished_record(out, kind), record)
    if has_partial(out, kind):
        shutil.rmtree(partial_path(out), ignore_errors=True)
    return True


def finished_record(out: Path, kind: str = COPY) -> Any:
    """The arguments of a finished volume; None for a volume of another kind."""
    for name in (".zattrs", "zarr.json"):
        try:
            found: Any = parse_record((out / name).read_text())
        except (OSError, UnicodeDecodeError):
            continue
        attributes = found.get("attributes") if found and name == "zarr.json" else found
        return attributes.get(attribute(kind)) if attributes else None
    return None


def check_record(path: Path, there: Any, wanted: dict[str, Any]) -> None:
    """Raise ConfigError if `there` is not a record, or has other arguments than `wanted`."""
    if not isinstance(there, dict):
        raise ConfigError(f"{path} exists and was not made by this command; choose another name or remove it")
    differing = [key for key in wanted if there.get(key) != wanted[key]]
    if differing:
        changes = ", ".join(f"{key} {json.dumps(wanted[key])} (was {json.dumps(there.get(key))})" for key in differing)
        raise ConfigError(
            f"{path} was started with other arguments: {changes}; use the same ones, choose another name or remove it"
        )
