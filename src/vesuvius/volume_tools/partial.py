"""A volume on disk that is not whole yet, a copy or a drawn one; its process may be killed at any instant.

    OUT.zarr.partial/copy.json      the arguments, with which it is resumed; drawing.json of a drawn volume
    OUT.zarr.partial/lock           locked by the process that writes
    OUT.zarr.partial/volume.zarr/   OUT.zarr without metadata, so that nothing unfinished can be opened as a volume

Each chunk is written under a temporary name, synced and renamed: a file that is there is whole.  Air is not stored, and
made again by the next process.
"""

from __future__ import annotations

import json
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
from vesuvius.runlog.files import take_lock, write_whole
from vesuvius.runlog.records import parsed
from vesuvius.volume_tools.ome_writer import encoded, new_array
from vesuvius.volume_tools.pyramid import Pyramid, halve
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


@dataclass(frozen=True)
class PartialCopy:
    """The chunks of an unfinished volume; made by `open_partial`."""

    out: Path
    record: dict[str, Any]
    plan: Pyramid
    dtype: np.dtype[Any]
    fill_value: Any  # of all levels
    kind: Kind

    @property
    def path(self) -> Path:
        """OUT.zarr.partial."""
        return partial_path(self.out)

    def is_done(self, level: int, chunk: Triple) -> bool:
        """Whether a chunk is written; False for air."""
        return self._file(level, chunk).exists()

    def write(self, level: int, chunk: Triple, voxels: NDArray[Any]) -> int:
        """Store a chunk, whole or not at all.  May be called from several threads.

        Args:
            voxels: of the volume's dtype; smaller than a chunk at the end of an axis.

        Returns:
            Bytes of its file; 0 for air, which is not stored.

        Raises:
            StorageError: the disk refuses.
        """
        fill = self.dtype.type(self.fill_value)
        if np.array_equal(voxels, np.broadcast_to(fill, voxels.shape), equal_nan=voxels.dtype.kind == "f"):
            return 0
        data, file = encoded(voxels, self.plan.chunk_zyx, fill), self._file(level, chunk)
        with _disk_errors(self.out, self.kind):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, data)
        return len(data)

    def finish_level(self, level: int) -> zarr.Array[Any]:
        """Write the metadata of a level whose chunks are all done; the array, to be read.  Raises StorageError."""
        folder = self._volume / str(level)
        with _disk_errors(self.out, self.kind):
            if not (folder / ".zarray").exists():
                shape, fill = self.plan.shapes[level], self.dtype.type(self.fill_value).item()
                new_array(self._volume, str(level), shape, self.dtype, self.plan.chunk_zyx, fill)
            return zarr.open_array(str(folder), mode="r")

    def halved(self, level: int, chunk: Triple, finer: zarr.Array[Any]) -> NDArray[Any]:
        """The voxels of a chunk from those of the level before.  Reads them."""
        return halve(np.asarray(finer[slices(doubled(self.plan.box_of(level, chunk)))]))

    def publish(self, multiscale: dict[str, Any]) -> None:
        """Write the group's metadata and give the whole volume its name.  Raises StorageError."""
        with _disk_errors(self.out, self.kind):
            for torn in self._volume.rglob(".*.tmp"):  # was being written when its process was killed
                torn.unlink()
            group = zarr.open_group(str(self._volume), mode="a", zarr_format=2)
            group.attrs.put({"multiscales": [multiscale], self.kind.attribute: self.record})
            self._volume.rename(self.out)
            shutil.rmtree(self.path)

    @property
    def _volume(self) -> Path:
        return self.path / "volume.zarr"

    def _file(self, level: int, chunk: Triple) -> Path:
        return self._volume.joinpath(str(level), *map(str, chunk))


@contextmanager
def open_partial(
    out: Path,
    record: dict[str, Any],
    plan: Pyramid,
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
    recorded = path / kind.file
    with ExitStack() as held:
        with _disk_errors(out, kind):
            path.mkdir(parents=True, exist_ok=True)
            foreign = sorted(name for name in os.listdir(path) if name != "lock" and name[0] != ".")
            if foreign and kind.file not in foreign:
                raise ConfigError(
                    f"an unfinished {kind.name} holds {kind.file}; got {path} with {foreign[0]!r} and without it; "
                    "remove that folder or choose another name"
                )
            lock = held.enter_context((path / "lock").open("w"))
            if not take_lock(lock.fileno(), path / "lock"):
                raise ConfigError(
                    f"one process may write a volume; got another one writing {path}; wait for it or stop it"
                )
            if recorded.exists():
                check_record(path, parsed(recorded.read_text()), record, kind)
            else:
                write_whole(recorded, json.dumps(record, indent=2).encode())
        yield PartialCopy(out, record, plan, dtype.newbyteorder("<"), fill_value, kind)


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


def _disk_errors(out: Path, kind: Kind) -> AbstractContextManager[None]:
    rule = f"a {kind.name} needs a writable disk with enough space"
    remedy = "free space or choose another place: what is done is kept, and the same command continues"
    return storage_errors(rule, remedy, f"while writing {out}")
