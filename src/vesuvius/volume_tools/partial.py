"""A volume on disk that is not whole yet, a copy or a drawn one; its process may be killed at any instant.

    OUT.zarr.partial/copy.json      the arguments, with which it is resumed; drawing.json of a drawn volume
    OUT.zarr.partial/lock           locked by the process that writes
    OUT.zarr.partial/air            one byte per chunk of all levels; 1 = done, and not stored because it is air
    OUT.zarr.partial/cache/         cached chunks of a remote source
    OUT.zarr.partial/volume.zarr/   OUT.zarr without metadata, so that nothing unfinished can be opened as a volume

Each chunk is written under a temporary name, synced and renamed.  A chunk is done when its file or its byte in `air` is
there.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import ConfigError, storage_errors
from vesuvius.runlog.files.file_lock import take_lock
from vesuvius.runlog.files.whole_file import write_whole
from vesuvius.runlog.records import parsed
from vesuvius.volume_tools.copy_plan import CopyPlan
from vesuvius.volume_tools.ome_writer import encoded, new_array
from vesuvius.volume_tools.pyramid import halve
from vesuvius.volumes.box import doubled, slices


@dataclass(frozen=True)
class Kind:
    """What is being written."""

    name: str  # as messages have it
    command: str  # what makes it

    @property
    def attribute(self) -> str:
        """Attribute of a finished volume that says what it was made from."""
        return f"vesuvius_{self.name}"

    @property
    def file(self) -> str:
        """The arguments, in the folder of an unfinished one."""
        return f"{self.name}.json"


COPY = Kind("copy", "vesuvius volume copy")


class PartialCopy:
    """The chunks of an unfinished volume; made by `open_partial`.

    Attributes:
        path: OUT.zarr.partial.
        cache: a folder in it for chunks of the source.
        done: whether a chunk is written or known to be air: bool over the chunk grid, of each level.
    """

    def __init__(
        self,
        out: Path,
        record: dict[str, Any],
        plan: CopyPlan,
        dtype: np.dtype[Any],
        fill_value: float,
        air: int,
        kind: Kind,
    ) -> None:
        self.path = partial_path(out)
        self.cache = self.path / "cache"
        self._out, self._record, self._plan, self._air, self._kind = out, record, plan, air, kind
        self._dtype, self._fill = dtype.newbyteorder("<"), dtype.type(fill_value)
        self._volume = self.path / "volume.zarr"
        self._first = np.cumsum([0, *map(math.prod, plan.counts)]).tolist()
        os.ftruncate(air, plan.chunk_count)
        flat = np.frombuffer(os.pread(air, plan.chunk_count, 0), np.uint8) != 0
        parts = np.split(flat, self._first[1:-1])
        self.done = [part.reshape(counts) for part, counts in zip(parts, plan.counts, strict=True)]
        for level, done in enumerate(self.done):
            for file in (self._volume / str(level)).glob("*/*/*"):
                if file.name.isdigit():
                    done[tuple(map(int, file.parts[-3:]))] = True
                else:
                    file.unlink()  # it was being written when the process was killed

    def write(self, level: int, chunk: Triple, voxels: NDArray[Any]) -> int:
        """Store a chunk, whole or not at all.  May be called from several threads.

        Args:
            voxels: of the volume's dtype; smaller than a chunk at the end of an axis.

        Returns:
            Bytes of its file; 0 for air, which is not stored.

        Raises:
            StorageError: the disk refuses.
        """
        z, y, x = chunk
        with _disk_errors(self._out, self._kind):
            if np.array_equal(voxels, np.broadcast_to(self._fill, voxels.shape), equal_nan=voxels.dtype.kind == "f"):
                data = b""
                place = self._first[level] + int(np.ravel_multi_index(chunk, self._plan.counts[level]))
                os.pwrite(self._air, b"\1", place)
            else:
                data = encoded(voxels, self._plan.chunk_zyx, self._fill)
                folder = self._volume / f"{level}/{z}/{y}"
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / str(x), data)
        self.done[level][chunk] = True
        return len(data)

    def finish_level(self, level: int) -> zarr.Array[Any]:
        """Write the metadata of a level whose chunks are all done; the array, to be read.  Raises StorageError."""
        folder = self._volume / str(level)
        with _disk_errors(self._out, self._kind):
            if not (folder / ".zarray").exists():
                shape, chunk = self._plan.shapes[level], self._plan.chunk_zyx
                new_array(self._volume, str(level), shape, self._dtype, chunk, self._fill.item())
            return zarr.open_array(str(folder), mode="r")

    def halved(self, level: int, chunk: Triple, finer: zarr.Array[Any]) -> NDArray[Any]:
        """The voxels of a chunk from those of the level before.  Reads them."""
        return halve(np.asarray(finer[slices(doubled(self._plan.box_of(level, chunk)))]))

    def publish(self, multiscale: dict[str, Any]) -> None:
        """Write the group's metadata and give the whole volume its name.  Raises StorageError."""
        with _disk_errors(self._out, self._kind):
            group = zarr.open_group(str(self._volume), mode="a", zarr_format=2)
            group.attrs.put({"multiscales": [multiscale], self._kind.attribute: self._record})
            self._volume.rename(self._out)
            shutil.rmtree(self.path)


@contextmanager
def open_partial(
    out: Path,
    record: dict[str, Any],
    plan: CopyPlan,
    dtype: np.dtype[Any],
    fill_value: float,
    kind: Kind = COPY,
) -> Iterator[PartialCopy]:
    """Begin or resume a volume, alone: the folder is locked until the context ends.

    Args:
        out: where the whole volume will be.
        record: the arguments; plain JSON.
        dtype, fill_value: of all levels.

    Raises:
        ConfigError: another process writes it, or it was begun with other arguments.
        StorageError: the disk refuses.
    """
    path = partial_path(out)
    with ExitStack() as held:
        with _disk_errors(out, kind):
            path.mkdir(parents=True, exist_ok=True)
            _check_ours(path, kind)
            lock = held.enter_context((path / "lock").open("w"))
            if not take_lock(lock.fileno(), path / "lock"):
                raise ConfigError(
                    f"one process may write a volume; got another one writing {path}; wait for it or stop it"
                )
            recorded = path / kind.file
            if recorded.exists():
                check_record(path, parsed(recorded.read_text()), record, kind)
            else:
                write_whole(recorded, json.dumps(record, indent=2).encode())
            air = os.open(path / "air", os.O_RDWR | os.O_CREAT, 0o666)
            held.callback(os.close, air)
            partial = PartialCopy(out, record, plan, dtype, fill_value, air, kind)
        yield partial


def partial_path(out: Path) -> Path:
    """Where a volume is while it is not whole."""
    return out.with_name(f"{out.name}.partial")


def is_begun(out: Path, kind: Kind = COPY) -> bool:
    """Whether there is an unfinished volume to resume."""
    return (partial_path(out) / kind.file).exists()


def finished_record(out: Path, kind: Kind = COPY) -> Any:
    """The arguments that a finished volume was made with; None for any other volume."""
    try:
        attributes = parsed((out / ".zattrs").read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return attributes.get(kind.attribute) if attributes else None


def check_record(path: Path, there: Any, wanted: dict[str, Any], kind: Kind = COPY) -> None:
    """Raises ConfigError where the volume at `path` was made with other arguments, or is none of this kind."""
    if not isinstance(there, dict):
        raise ConfigError(
            f"a {kind.name} does not replace files; got {path}, which is not a {kind.name} "
            f"made by `{kind.command}`; choose another name, or remove it"
        )
    differing = [key for key in wanted if there.get(key) != wanted[key]]
    if differing:
        got = ", ".join(f"{key} {json.dumps(wanted[key])} (there: {json.dumps(there.get(key))})" for key in differing)
        raise ConfigError(
            f"a {kind.name} continues with the arguments it was started with; got {got} for {path}; use the "
            "same ones, choose another name, or remove it"
        )


def _check_ours(path: Path, kind: Kind) -> None:
    names = {entry.name for entry in path.iterdir()}
    foreign = sorted(name for name in names if name != "lock" and not name.startswith(f".{kind.file}."))
    if foreign and kind.file not in names:
        raise ConfigError(
            f"an unfinished {kind.name} holds {kind.file}; got {path} with {foreign[0]!r} and without it; remove "
            "that folder or choose another name"
        )


def _disk_errors(out: Path, kind: Kind) -> AbstractContextManager[None]:
    rule = f"a {kind.name} needs a writable disk with enough space"
    remedy = "free space or choose another place: what is done is kept, and the same command continues"
    return storage_errors(rule, remedy, f"while writing {out}")
