"""An OME-Zarr that is being written (copied, drawn, made up); its process may be killed at any instant, and continued.

Before that, its levels: shapes, voxels and OME-Zarr metadata, all of it pure.

    OUT.zarr.partial/copy.json      the arguments, with which it is resumed; drawing.json of a drawn volume
    OUT.zarr.partial/lock           locked by the process that writes
    OUT.zarr.partial/volume.zarr/   OUT.zarr without metadata, so that nothing unfinished can be opened as a volume

Each chunk, or shard, is written under a temporary name, synced, read back and renamed: a file that is there is whole,
and is skipped.  Air is not stored, and made again by the next process.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, product
from pathlib import Path
from typing import Any, TypeVar

import google_crc32c
import numpy as np
import zarr
from numcodecs import Blosc
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec

from vesuvius.config import Triple
from vesuvius.errors import ConfigError, storage_errors
from vesuvius.runlog.files import take_lock, write_whole
from vesuvius.runlog.records import parsed
from vesuvius.runlog.units import format_sizes
from vesuvius.volume_tools.shard_file import ShardFile, check_written
from vesuvius.volumes.box import (
    Box,
    chunk_box,
    chunk_ranges,
    doubled,
    grid_shape,
    intersection,
    moved,
    shape_of,
    slices,
    triple,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Pyramid:
    """The levels of a volume that is written, all of the same chunks."""

    shape_zyx: Triple  # voxels of the finest level
    chunk_zyx: Triple
    levels: int
    voxel_bytes: int
    per_shard: int = 0  # chunks of a shard of zarr v3, along each axis; 0 = zarr v2, each chunk a file

    @cached_property
    def shapes(self) -> list[Triple]:
        """Voxels of each level from the finest; each half of the one above, rounded up."""
        return [triple(-(-size // 2**level) for size in self.shape_zyx) for level in range(self.levels)]

    @cached_property
    def counts(self) -> list[Triple]:
        """Chunks of each level along each axis."""
        return [grid_shape(shape, self.chunk_zyx) for shape in self.shapes]

    @property
    def raw_bytes(self) -> int:
        """Voxels of all levels, uncompressed."""
        return self.voxel_bytes * sum(map(math.prod, self.shapes))

    @property
    def chunk_count(self) -> int:
        """Chunks of all levels."""
        return sum(map(math.prod, self.counts))

    def box_of(self, level: int, chunk: Triple) -> Box:
        """The voxels of a chunk."""
        return chunk_box(chunk, self.chunk_zyx, self.shapes[level])


def levels_to_one(shape_zyx: Triple, chunk: int) -> int:
    """Levels down to the one that fits into a chunk."""
    return max(1, (-(-max(shape_zyx) // chunk) - 1).bit_length() + 1)


def multiscale(
    name: str,
    levels: int,
    scale_zyx: Sequence[float],
    units_zyx: Sequence[str | None],
    translation_zyx: Sequence[float] | None = None,
) -> dict[str, Any]:
    """OME-Zarr 0.4 metadata of a pyramid whose levels are called 0, 1, ... and begin at the same corner.

    Args:
        scale_zyx: of the finest level.
        translation_zyx: of all levels; None = none is written.
    """
    axes = [
        {"name": axis, "type": "space"} | ({"unit": unit} if unit else {})
        for axis, unit in zip("zyx", units_zyx, strict=True)
    ]
    shift = [] if translation_zyx is None else [{"type": "translation", "translation": list(translation_zyx)}]
    datasets = [
        {
            "path": str(level),
            "coordinateTransformations": [
                {"type": "scale", "scale": [size * 2**level for size in scale_zyx]},
                *shift,
            ],
        }
        for level in range(levels)
    ]
    return {"version": "0.4", "name": name, "axes": axes, "datasets": datasets}


def halve(voxels: NDArray[Any]) -> NDArray[Any]:
    """Mean of 2x2x2 voxels, or of as many as exist at an odd end; of whole numbers rounded half up.

    Args:
        voxels: (Z, Y, X) of any stored dtype.

    Returns:
        The same dtype, each axis half as long, rounded up.  Of labels 0 and 1, or bool, that is the majority.
    """
    per_axis = [np.minimum(2, size - np.arange(0, size, 2)) for size in voxels.shape]
    z, y, x = np.ix_(*per_axis)
    count: NDArray[Any] = (z * y * x).astype(np.uint8)
    if voxels.dtype.kind == "f":
        mean: NDArray[Any] = _pair_sums(voxels.astype(_sum_dtype(voxels.dtype))) / count
    elif voxels.dtype.itemsize < 8:
        mean = (_pair_sums(voxels.astype(_sum_dtype(voxels.dtype))) + count // 2) // count
    else:  # integers of 8 bytes have no larger dtype to be summed in: eighths and remainders are; count divides 8
        mean = _pair_sums(voxels >> 3) * (8 // count) + (_pair_sums(voxels & 7) + count // 2) // count
    return mean.astype(voxels.dtype, copy=False)


def halve_labels(labels: NDArray[Any]) -> NDArray[Any]:
    """The label that most of 2x2x2 voxels have, or of as many as exist at an odd end; of several the largest.

    Args:
        labels: (Z, Y, X) of any stored dtype.
    """
    classes = np.unique(labels)[::-1]
    votes = [_pair_sums((labels == each).astype(np.uint8)) for each in classes]
    most: NDArray[Any] = classes[np.argmax(votes, axis=0)]
    return most


def _sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What eight voxels are summed in."""
    kind = "u" if dtype.kind == "b" else dtype.kind
    return np.dtype(f"{kind}{max(4, dtype.itemsize) if kind == 'f' else 2 * dtype.itemsize}")


def _pair_sums(voxels: NDArray[Any]) -> NDArray[Any]:
    """Sums of 2x2x2, or of as many as exist."""
    for axis in range(3):
        pairs = np.moveaxis(voxels, axis, 0)
        folded = pairs[::2].copy()
        folded[: len(pairs) // 2] += pairs[1::2]
        voxels = np.moveaxis(folded, 0, axis)
    return voxels


_WRITERS = min(4, os.cpu_count() or 1)

COPY, IMPORT = "copy", "import"  # what is being written, as the file of its arguments and the attribute are called


@dataclass(frozen=True)
class PartialCopy:
    """The chunks of an unfinished volume; made by `open_partial`.  What writes raises StorageError."""

    out: Path
    record: dict[str, Any]
    plan: Pyramid
    dtype: np.dtype[Any]
    fill_value: Any  # of all levels
    kind: str
    halved: Callable[[NDArray[Any]], NDArray[Any]] = halve  # voxels of a level -> of the next

    @property
    def path(self) -> Path:
        """OUT.zarr.partial."""
        return partial_path(self.out)

    def missing(self, level: int) -> list[Triple]:
        """The chunks of a level that are not written, shard by shard; those of air too."""
        counts, found = self.plan.counts[level], list[Triple]()
        for file in map(triple, np.ndindex(grid_shape(counts, self._per_file))):
            if not self._file(level, file).exists():
                start, stop = chunk_box(file, self._per_file, counts)
                found += (moved(start, place) for place in np.ndindex(shape_of((start, stop))))
        return found

    def fill(
        self,
        level: int,
        read: Callable[[Box], NDArray[Any] | None],
        on_chunk: Callable[[int], None] = lambda size: None,
        ahead: Callable[[Sequence[Box], int], None] = lambda boxes, number: None,
    ) -> None:
        """Write the missing chunks of a level, each while the next ones are read.

        Args:
            read: the voxels of a box, in this thread; None skips it.
            on_chunk: told of the bytes of each chunk that is done, 0 = air, from this thread.
            ahead: told of all boxes and the number of the next one, before that is read.
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
        """The missing chunks of a level, and what threads make of the voxels of each."""
        chunks = self.missing(level)
        boxes = [self.plan.box_of(level, chunk) for chunk in chunks]
        working = deque[tuple[Triple, Future[T]]]()
        for number, (chunk, box) in enumerate(zip(chunks, boxes, strict=True)):
            ahead(boxes, number)
            if (voxels := read(box)) is None:
                continue
            working.append((chunk, writers.submit(work, chunk, voxels)))
            if len(working) > _WRITERS:
                first, done = working.popleft()
                yield first, done.result()
        yield from ((chunk, done.result()) for chunk, done in working)

    def fill_coarser(self, on_chunk: Callable[[int], None] = lambda size: None) -> None:
        """Write the metadata of the finest level, whose chunks are done, and each coarser one from the one before."""
        finer = self._finish_level(0)
        for level in range(1, self.plan.levels):
            self.fill(level, partial(self._halved, finer), on_chunk)
            finer = self._finish_level(level)

    def _halved(self, finer: zarr.Array[Any], box: Box) -> NDArray[Any]:
        """A chunk of the next level; of each finer chunk at a time, as all eight and their sums take much memory."""
        voxels, half = np.empty(shape_of(box), self.dtype), triple(-(-size // 2) for size in self.plan.chunk_zyx)
        for place in product(*chunk_ranges(box, half)):
            part = intersection(chunk_box(place, half, box[1]), box)
            voxels[slices(part, box[0])] = self.halved(np.asarray(finer[slices(doubled(part))]))
        return voxels

    def write(self, level: int, chunk: Triple, voxels: NDArray[Any]) -> int:
        """Store a chunk, whole or not at all; any thread may call.  Returns the bytes of its file; 0 = air, not stored.

        Args:
            voxels: of the volume's dtype; smaller than a chunk at the end of an axis.
        """
        if data := self._encoded(voxels):
            with disk_errors(self.out):
                file = self._file(level, chunk)
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, data, lambda written: check_written(written, google_crc32c.value(data)))
        return len(data)

    def _encoded(self, voxels: NDArray[Any]) -> bytes:
        """As it is stored; b"" for air."""
        fill = self.dtype.type(self.fill_value)
        if np.array_equal(voxels, np.broadcast_to(fill, voxels.shape), equal_nan=voxels.dtype.kind == "f"):
            return b""
        padded = np.full(self.plan.chunk_zyx, fill, voxels.dtype.newbyteorder("<"))
        padded[tuple(map(slice, voxels.shape))] = voxels
        return bytes(_codec_for(voxels.dtype).encode(padded))

    def publish(self, multiscale: dict[str, Any]) -> None:
        """Write the group's metadata and give the whole volume its name."""
        with disk_errors(self.out):
            for torn in self._volume.rglob(".*.tmp"):  # was being written when its process was killed
                torn.unlink()
            ome: dict[str, Any] = {"multiscales": [multiscale]}
            if self.plan.per_shard:
                del multiscale["version"]
                ome = {"ome": {"version": "0.5"} | ome}
            group = zarr.open_group(self._volume, mode="a", zarr_format=3 if self.plan.per_shard else 2)
            group.attrs.put(ome | {attribute(self.kind): self.record})
            self._volume.rename(self.out)
            shutil.rmtree(self.path)

    def _finish_level(self, level: int) -> zarr.Array[Any]:
        """Write the metadata of a level whose chunks are all done; the array, to be read."""
        folder = self._volume / str(level)
        with disk_errors(self.out):
            if not (folder / ("zarr.json" if self.plan.per_shard else ".zarray")).exists():
                shape, fill = self.plan.shapes[level], self.dtype.type(self.fill_value).item()
                about = self._volume, str(level), shape, self.dtype, self.plan.chunk_zyx, fill
                new_array(*about, per_shard=self.plan.per_shard)
            return zarr.open_array(folder, mode="r")

    @property
    def _volume(self) -> Path:
        return self.path / "volume.zarr"

    @property
    def _per_file(self) -> Triple:
        """Chunks of a file along each axis."""
        return (self.plan.per_shard or 1,) * 3

    def _file(self, level: int, place: Triple) -> Path:
        """That of a chunk, or of a shard."""
        return self._volume.joinpath(str(level), *("c" * bool(self.plan.per_shard)), *map(str, place))


def check_name(out: Path) -> None:
    """Raises ConfigError for one that does not end in .zarr."""
    if out.suffix != ".zarr":
        raise ConfigError(f"the name of a volume must end in .zarr; got {out}; add the ending")


def check_levels(levels: int, shape_zyx: Triple) -> None:
    """Raises ConfigError for more levels than there can be, or none."""
    most = (max(shape_zyx) - 1).bit_length() + 1
    if not 1 <= levels <= most:
        raise ConfigError(
            f"--levels {levels} is impossible for {format_sizes(shape_zyx)} voxels; choose 1 to {most}, with which "
            "the last level is a single voxel"
        )


@contextmanager
def open_partial(
    out: Path,
    record: dict[str, Any],
    plan: Pyramid,
    dtype: np.dtype[Any],
    fill_value: float,
    kind: str = COPY,
) -> Iterator[PartialCopy]:
    """Begin or resume a volume, alone: the folder is locked until the context ends.

    Args:
        out: where the whole volume will be.
        record: the arguments; plain JSON.
        dtype, fill_value: of all levels.
        kind: "copy", "import", "drawing" or "phantom".

    Raises:
        ConfigError: another process writes it, or it was begun with other arguments.
        StorageError: the disk refuses.
    """
    path = partial_path(out)
    recorded = path / f"{kind}.json"
    with ExitStack() as held:
        with disk_errors(out):
            path.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((path / "lock").open("w"))
            if not take_lock(lock.fileno(), path / "lock"):
                raise ConfigError(
                    f"one process may write a volume; got another one writing {path}; wait for it or stop it"
                )
            if recorded.exists():
                check_record(path, parsed(recorded.read_text()), record)
            elif any(name != "lock" and name[0] != "." for name in os.listdir(path)):
                check_record(path, None, record)
            else:
                write_whole(recorded, json.dumps(record, indent=2).encode())
        yield PartialCopy(out, record, plan, dtype.newbyteorder("<"), fill_value, kind)


def attribute(kind: str) -> str:
    """Attribute of a finished volume that says what it was made from."""
    return f"vesuvius_{kind}"


def partial_path(out: Path) -> Path:
    """Where a volume is while it is not whole."""
    return out.with_name(f"{out.name}.partial")


def is_begun(out: Path, kind: str = COPY) -> bool:
    """Whether there is an unfinished volume to resume."""
    return (partial_path(out) / f"{kind}.json").exists()


def is_finished(out: Path, record: dict[str, Any], kind: str = COPY) -> bool:
    """Whether the whole volume is there, made with these arguments; removes what a kill has left beside it.

    Raises ConfigError where something else is there.
    """
    if not os.path.lexists(out):
        return False
    check_record(out, finished_record(out, kind), record)
    shutil.rmtree(partial_path(out), ignore_errors=True)
    return True


def finished_record(out: Path, kind: str = COPY) -> Any:
    """The arguments that a finished volume was made with; None for any other volume."""
    for name in (".zattrs", "zarr.json"):
        try:
            found: Any = parsed((out / name).read_text())
        except (OSError, UnicodeDecodeError):
            continue
        attributes = found.get("attributes") if found and name == "zarr.json" else found
        return attributes.get(attribute(kind)) if attributes else None
    return None


def check_record(path: Path, there: Any, wanted: dict[str, Any]) -> None:
    """Raises ConfigError if what lies at `path` was begun with other arguments, or `there` is no record of any."""
    if not isinstance(there, dict):
        raise ConfigError(f"{path} exists and was not made by this command; choose another name, or remove it")
    differing = [key for key in wanted if there.get(key) != wanted[key]]
    if differing:
        got = ", ".join(f"{key} {json.dumps(wanted[key])} (there: {json.dumps(there.get(key))})" for key in differing)
        raise ConfigError(
            f"{path} was begun with other arguments: {got}; use the same ones, choose another name, or remove it"
        )


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
    """An array without voxels yet in the OME-Zarr group at `root`: 0.4, or 0.5 where it has shards.  Raises OSError."""
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
        root,  # no str: zarr 3.4 takes what follows a # or ? in it for parts of a URL
        name=name,
        shape=tuple(shape),
        dtype=dtype.newbyteorder("<"),
        chunks=chunks,
        fill_value=fill_value,
        config={"write_empty_chunks": write_empty_chunks},
        **form,
    )


def _codec_for(dtype: np.dtype[Any]) -> Blosc:
    """As the published scrolls are compressed."""
    return Blosc(cname="zstd", clevel=3, shuffle=Blosc.SHUFFLE if dtype.itemsize > 1 else Blosc.NOSHUFFLE)


def disk_errors(out: Path) -> AbstractContextManager[None]:
    """Turns what the disk says into a StorageError."""
    remedy = "free space or choose another place: what is done is kept, and the same command continues"
    return storage_errors(f"{out} needs a writable disk with enough space", remedy)
