"""A volume on disk that is written chunk by chunk, by a process that may be killed at any instant.

    OUT.zarr.partial/copy.json      what is being written: the arguments, which must be the same when it goes on
    OUT.zarr.partial/lock           its flock is held by the one process that writes
    OUT.zarr.partial/air.txt        chunks that are done and not stored, because they are air; a line each
    OUT.zarr.partial/incoming/      chunks that are being written, renamed into place when they are whole
    OUT.zarr.partial/cache/         chunks of a remote source that are needed more than once
    OUT.zarr.partial/volume.zarr/   OUT.zarr to be, without metadata until it is whole

So nothing unfinished can be opened as a volume, and a chunk that is in place, or in air.txt, is done.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import zarr
from numcodecs import Blosc
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import ConfigError, StorageError
from vesuvius.file_lock import take_lock

RECORD = "vesuvius_copy"
"""Attribute of a finished volume that says what it is a copy of."""


class PartialVolume:
    """`with PartialVolume(...)`: holds OUT.zarr.partial for this process.

    Attributes:
        path: OUT.zarr.partial.
        cache: a folder in it for whoever reads the source.
    """

    def __init__(
        self, out: Path, record: dict[str, Any], dtype: np.dtype[Any], chunk_zyx: Triple, fill_value: float
    ) -> None:
        """Nothing is touched yet.

        Args:
            out: the name of the whole volume.
            record: what is written; plain JSON.
            dtype, chunk_zyx, fill_value: of all levels.
        """
        self.path = partial_path(out)
        self.cache = self.path / "cache"
        self._out, self._record = out, record
        self._dtype, self._chunk, self._fill = dtype.newbyteorder("<"), chunk_zyx, dtype.type(fill_value)
        shuffle = Blosc.SHUFFLE if dtype.itemsize > 1 else Blosc.NOSHUFFLE
        self._codec = Blosc(cname="zstd", clevel=3, shuffle=shuffle)
        self._air: set[str] = set()
        self._names = itertools.count()

    def __enter__(self) -> PartialVolume:
        """Raises ConfigError: another process writes it, or it is another copy; StorageError: the disk refuses."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_ours()
            self._lock = (self.path / "lock").open("w")
            try:
                self._claim()
            except BaseException:
                self._lock.close()
                raise
        except OSError as error:
            raise _disk_error(self._out, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # a full disk: what was not noted is read again
            self._journal.close()
        self._lock.close()

    def stored_bytes(self, level: int, index: Triple) -> int | None:
        """Bytes of a chunk that is done, 0 for air; None where it is yet to be written."""
        if _key(level, index) in self._air:
            return 0
        try:
            return self._file(level, index).stat().st_size
        except FileNotFoundError:
            return None

    def write(self, level: int, index: Triple, voxels: NDArray[Any]) -> int:
        """Store a chunk, whole or not at all; its bytes, or 0 where it is air and therefore not stored.

        May be called from several threads.  Air is forgotten unless `note_air` is told.

        Args:
            voxels: of the volume's dtype; smaller than a chunk at the end of an axis.

        Raises:
            StorageError: the disk refuses.
        """
        if (voxels == self._fill).all():
            return 0
        if voxels.shape != self._chunk:
            padded = np.full(self._chunk, self._fill, self._dtype)
            padded[tuple(slice(size) for size in voxels.shape)] = voxels
            voxels = padded
        data = self._codec.encode(np.ascontiguousarray(voxels, self._dtype))
        incoming, file = self.path / "incoming" / str(next(self._names)), self._file(level, index)
        try:
            with incoming.open("wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            file.parent.mkdir(parents=True, exist_ok=True)
            incoming.rename(file)
        except OSError as error:
            raise _disk_error(self._out, error) from error
        return len(data)

    def note_air(self, level: int, indices: Iterable[Triple]) -> None:
        """Remember chunks that are air, so that they are not read again.  Raises StorageError."""
        keys = [_key(level, index) for index in indices]
        self._air.update(keys)
        try:
            self._journal.write("".join(f"{key}\n" for key in keys))
            self._journal.flush()
        except OSError as error:
            raise _disk_error(self._out, error) from error

    def finish_level(self, level: int, shape_zyx: Triple) -> zarr.Array[Any]:
        """Write the metadata of a level whose chunks are all done; the array, to be read.  Raises StorageError."""
        folder = self._volume / str(level)
        try:
            if not (folder / ".zarray").exists():
                zarr.create_array(
                    str(folder),
                    shape=shape_zyx,
                    dtype=self._dtype,
                    chunks=self._chunk,
                    compressors=self._codec,
                    fill_value=self._fill.item(),
                    order="C",
                    zarr_format=2,
                    chunk_key_encoding={"name": "v2", "separator": "/"},
                )
            return zarr.open_array(str(folder), mode="r")
        except OSError as error:
            raise _disk_error(self._out, error) from error

    def publish(self, multiscale: dict[str, Any]) -> None:
        """Write the group's metadata and give the whole volume its name.  Raises StorageError."""
        try:
            group = zarr.open_group(str(self._volume), mode="a", zarr_format=2)
            group.attrs.put({"multiscales": [multiscale], RECORD: self._record})
            self._volume.rename(self._out)
            shutil.rmtree(self.path)
        except OSError as error:
            raise _disk_error(self._out, error) from error

    @property
    def _volume(self) -> Path:
        return self.path / "volume.zarr"

    def _file(self, level: int, index: Triple) -> Path:
        return self._volume / _key(level, index)

    def _check_ours(self) -> None:
        names = {entry.name for entry in self.path.iterdir()}
        foreign = sorted(names - {"lock", "copy.json.new"})
        if foreign and "copy.json" not in names:
            raise ConfigError(
                f"an unfinished copy holds copy.json; got {self.path} with {foreign[0]!r} and without it; remove that "
                "folder or choose another name"
            )

    def _claim(self) -> None:
        """Lock, compare the arguments, remove what a killed process left half-written, read the list of air."""
        if not take_lock(self._lock.fileno(), self.path / "lock"):
            raise ConfigError(
                f"one process may write a volume; got another one that writes {self.path}; wait for it or end it"
            )
        recorded = _record_path(self._out)
        if recorded.exists():
            check_record(self.path, _parsed(recorded.read_text()), self._record)
        else:
            new = self.path / "copy.json.new"
            with new.open("w") as out:
                json.dump(self._record, out, indent=2)
                out.flush()
                os.fsync(out.fileno())
            new.rename(recorded)
        shutil.rmtree(self.path / "incoming", ignore_errors=True)
        (self.path / "incoming").mkdir()
        journal = self.path / "air.txt"
        journal.touch()
        text = journal.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # a line that was being written when the process died has no end
        os.truncate(journal, len(whole))
        self._air = set(re.findall(r"^\d+/\d+/\d+/\d+$", whole.decode(errors="replace"), re.MULTILINE))
        self._journal = journal.open("a")


def partial_path(out: Path) -> Path:
    """Where a volume is while it is not whole."""
    return out.with_name(f"{out.name}.partial")


def is_begun(out: Path) -> bool:
    """Whether an unfinished copy is there, to go on with."""
    return _record_path(out).exists()


def finished_record(out: Path) -> Any:
    """What a finished volume says it is a copy of; None for any other."""
    try:
        attributes = _parsed((out / ".zattrs").read_text())
    except OSError:
        return None
    return attributes.get(RECORD) if isinstance(attributes, dict) else None


def check_record(path: Path, there: Any, wanted: dict[str, Any]) -> None:
    """Raises ConfigError where what is at `path` was written with other arguments."""
    if not isinstance(there, dict):
        raise ConfigError(
            f"a copy does not replace what exists; got {path}, which is no copy made by `vesuvius volume copy`; choose "
            "another name, or remove it"
        )
    differing = [key for key in wanted if there.get(key) != wanted[key]]
    if differing:
        got = ", ".join(f"{key} {json.dumps(wanted[key])} (there: {json.dumps(there.get(key))})" for key in differing)
        raise ConfigError(
            f"a copy goes on with the arguments that it was begun with; got {got} for {path}; give the same ones, "
            "choose another name, or remove it"
        )


def _record_path(out: Path) -> Path:
    return partial_path(out) / "copy.json"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _key(level: int, index: Triple) -> str:
    z, y, x = index
    return f"{level}/{z}/{y}/{x}"


def _disk_error(out: Path, error: OSError) -> StorageError:
    return StorageError(
        f"a copy needs a writable disk with enough room; got {error} while writing {out}; free space or choose another "
        "place: what is done stays, and the same command goes on"
    )
