"""Opens one level of a zarr volume and reads boxes of it: the first stop of a patch.

Reads zarr v2 and v3, sharded or not, OME-Zarr groups (levels come from their metadata) and bare arrays, from disk and
from remote stores.  Bytes are fetched ahead: a few chunks from disk, whole regions from remote stores.  Chunks are
decoded on the reading thread.
"""

import hashlib
import itertools
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.errors import UnstableSpecificationWarning, ZarrUserWarning

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import DataError, broken_link, one_line
from vesuvius.threads import started_ahead
from vesuvius.volumes import errors
from vesuvius.volumes.affine import Floats, read_transform
from vesuvius.volumes.box import Box, format_box, indexed_box, intersection, shape_of, slices
from vesuvius.volumes.chunks import ChunkGrid, ShardIndexError, Staging
from vesuvius.volumes.format.decode import ChunkDecoder
from vesuvius.volumes.format.metadata import Level, Node, find_array, no_zarr_error, open_array, pick_level, read_node
from vesuvius.volumes.geometry import Axes, FloatTriple, Geometry, Names, contradictions, find_axes, space_of
from vesuvius.volumes.missing import MissingChunks
from vesuvius.volumes.store.objects import ByteRange, is_remote
from vesuvius.volumes.store.source import Source
from vesuvius.volumes.voxels import Nan, Nonfinite, check_finite

log = logging.getLogger(__name__)

_AHEAD = 4  # chunks fetched from disk while another one is decoded: hides the latency of a network mount
_SAME_SIZE = 0.02  # of a voxel size: writers round it
_TRIES = 3  # reads of a chunk, bypassing all caches after the first, before it counts as damaged


@dataclass(eq=False, repr=False)
class Volume:
    """One level of a volume, open for reading: indexed like a numpy array, closed by `with`.

    `shape_zyx` is in voxels, `chunk_zyx` the shape of the unit of decoding: the chunk, or the inner chunk of a sharded
    array.  `dtype` is in native byte order: bool, or an integer or float of up to 8 bytes.  `wait_s` is the total time
    that `read` has waited for a remote store.
    """

    name: str  # path and level as the user gave them, for messages
    array: zarr.Array[Any]  # zarr-python's; describes the chunks but does not read them
    axes: Axes
    axis_names: Names  # in stored order; None for an axis without a name
    geometry: Geometry | None  # position in space; None if the metadata do not give it
    level: Level | None  # None for a bare array
    source: Source
    node: Node
    spec: ArrayConfig
    missing_chunk: Literal["air", "error"]
    nan: Nan

    def __post_init__(self) -> None:
        self.grid = ChunkGrid(self.array, self.axes, self.source)
        self.shape_zyx, self.chunk_zyx = self.grid.shape_zyx, self.grid.chunk_zyx
        self.shape, self.ndim, self.size = self.shape_zyx, 3, math.prod(self.shape_zyx)  # numpy's names
        self.dtype = np.dtype(self.array.dtype).newbyteorder("=")
        self.wait_s = 0.0
        self.missing = MissingChunks(self.name, self.grid, (self.node.key, self.node.stored), self.missing_chunk)
        self._voxels_read = self._nonfinite = 0
        self._decode = ChunkDecoder(self.array)
        # Within a chunk, the selected index of each axis other than z, y, x.
        self._others = [i % c for i, c in zip(self.axes.select, self.axes.others_of(self.array.chunks), strict=True)]
        self._staging = staging = Staging(self.grid)
        self.stage, self.unstage, self.release = staging.stage, staging.unstage, staging.release

    @property
    def voxel_size_um(self) -> FloatTriple | None:
        """Edge lengths (z, y, x); None if the metadata do not give them in units of length."""
        return None if self.geometry is None else self.geometry.voxel_size_um

    @cached_property
    def transform(self) -> tuple[Floats, str] | None:
        """As `read_transform`, of the file in its config; None without one.  I/O at the first use."""
        return read_transform(self.spec.transform, self.source.config) if self.spec.transform else None

    @cached_property
    def contradictions(self) -> dict[str, str]:
        """Why the scale of a level of its pyramid cannot be right, by path.  Reads the metadata of all levels."""
        levels, entry = {}, self.level.entry if self.level else {"datasets": ()}
        for dataset in entry["datasets"]:
            with suppress(DataError, KeyError, IndexError, TypeError):  # a level that cannot be opened either
                node = read_node(self.source, path := str(dataset["path"]))
                geometry = space_of(entry, dataset, self.array.ndim, self.name).geometry(self.axes.zyx)
                if node and node.is_array and geometry:
                    levels[path] = self.axes.zyx_of(node.document["shape"]), geometry
        return contradictions(levels)

    @cached_property
    def fill_value(self) -> float:
        """Intensity of absent chunks (air); `nan_value` if the array's own fill value is NaN or infinite.

        An int for integer dtypes, because large ones are not exact in float64.
        """
        value: float = self.dtype.type(self.array.fill_value or 0).item()
        return value if math.isfinite(value) or self.nan == "keep" else self.nan_value

    @cached_property
    def nan_value(self) -> float:
        """The value that replaces NaN and infinity: the number in `data.nan`, or air (0 if that is not finite)."""
        if not isinstance(self.nan, str):
            return float(self.nan)
        value = float(self.array.fill_value or 0)
        return value if math.isfinite(value) else 0.0

    @property
    def nonfinite(self) -> Nonfinite | None:
        return Nonfinite(self.name, self._nonfinite / self._voxels_read, self.nan_value) if self._nonfinite else None

    def material(self, voxels: NDArray[Any]) -> NDArray[Any]:
        """The voxels that are neither air nor a replacement for NaN, flattened."""
        wanted = voxels != self.fill_value
        if self.dtype.kind == "f":
            wanted &= np.isfinite(voxels) & (voxels != self.nan_value)
        found: NDArray[Any] = voxels[wanted]
        return found

    def read(
        self, box: Box, out: NDArray[Any] | None = None, before: Callable[[Triple], None] = lambda chunk: None
    ) -> NDArray[Any]:
        """Read and decode a box into `out`; absent chunks have the fill value.  Blocks and retries during an outage.

        Whether it fails, and at which chunk, depends on the stored bytes alone: each chunk that the box touches is
        decoded completely, in order, up to the first damaged one.

        Args:
            out: destination, of the volume's dtype or one that holds all its values, and of the shape of the box; by
                default a new array.
            before: called with each chunk before it is decoded; an exception ends the read.

        Raises:
            UnreadableChunkError: a chunk cannot be decoded, fails its checksum, contains NaN or infinity while
                `data.nan` is 'error', or is gone although this volume has read it before or a listing contains it.
            DataError: a chunk is absent and `data.missing_chunk` is 'error', the volume is gone or has changed, or
                its store refuses or has not answered for `data.store.outage_minutes`.
            ClosedError: another thread closed the volume.
            IndexError: the box is not inside the volume; ValueError: it does not fit `out`.
        """
        if not all(0 <= lo <= hi <= size for lo, hi, size in zip(*box, self.shape_zyx, strict=True)):
            raise IndexError(f"The box {format_box(box)} is not inside {self.name} of shape {self.shape_zyx}; clip it")
        out = np.empty(shape_of(box), self.dtype) if out is None else out
        if out.shape != shape_of(box) or not np.can_cast(self.dtype, out.dtype):
            given, needed = f"{out.shape} {out.dtype}", f"{shape_of(box)} {self.dtype}"
            raise ValueError(f"The array `out` of {given} cannot hold a box of {needed}; change its shape or dtype")
        if not out.size:
            return out
        try:
            for chunk, fetch in self._fetches(box):
                covered = self.grid.box_of(chunk)
                part = intersection(covered, box)
                before(chunk)
                voxels = self._chunk(chunk, box, fetch)
                into = out[slices(part, box[0])]
                into[...] = self.fill_value if voxels is None else voxels[slices(part, covered[0])]
                self._replace_nonfinite(into)
        finally:
            self.release(box)
        return out

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """Read by numpy's rules for integers, slices and `...`: `volume[10, 0:128, :128]`.

        A step other than 1 reads the box that its slice spans.  Raises as `read`, and TypeError for other indices.
        """
        box, rest = indexed_box(index, self.shape_zyx)
        voxels: NDArray[Any] = self.read(box)[rest]
        return voxels

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("A volume is read into a new array; use copy=None or copy=True")
        return self[:] if dtype is None else self[:].astype(dtype, copy=False)

    def __len__(self) -> int:
        return self.shape_zyx[0]

    def __repr__(self) -> str:
        return f"<Volume {self.name}: {self.shape_zyx} {self.dtype}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        """Pickle the address and the settings: the copy is opened again, with the same errors as `open_volume`."""
        return open_volume, (self.spec, self.source.config, self.missing_chunk, self.nan, True)

    def close(self) -> None:
        self.source.close()

    def _fetches(self, box: Box) -> Iterator[tuple[Triple, Callable[[], bytes | None]]]:
        chunks = self.grid.chunks_of(box)
        if self.source.remote:
            started = time.perf_counter()
            self.stage(box)
            self._staging.wait_for(box)
            self.wait_s += time.perf_counter() - started
            whole = self.grid.whole_shards(box)
            for chunk in chunks:
                yield chunk, partial(self.grid.fetch, chunk, self._staged_bytes, self.grid.key_of(chunk) in whole)
            return
        self.grid.forget_indices()
        if self.grid.shard_zyx is not None:  # small chunks of few files: threads would cost more than they hide
            for chunk in chunks:
                yield chunk, partial(self.grid.fetch, chunk, self.source.get)
            return
        fetching = ((chunk, self.source.start(self.grid.fetch, chunk, self.source.get)) for chunk in chunks)
        yield from ((chunk, future.result) for chunk, future in started_ahead(fetching, _AHEAD))

    def stored_stamp(self, box: Box) -> str | None:
        """Return a hash of the sizes and times of the files in a box; None for a remote volume."""
        if self.source.remote:
            return None
        root, found = Path(self.source.address), hashlib.sha256()
        for key, _ in itertools.groupby(map(self.grid.key_of, self.grid.chunks_of(box))):
            if (root / key).exists():
                stat = (root / key).stat()
                found.update(f"{key} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return found.hexdigest()[:16]

    def _staged_bytes(self, key: str, byte_range: ByteRange | None) -> bytes | None:
        started = time.perf_counter()
        try:
            return self._staging.fetch(key, byte_range)
        finally:
            self.wait_s += time.perf_counter() - started

    def _chunk(self, chunk: Triple, box: Box, fetch: Callable[[], bytes | None]) -> NDArray[Any] | None:
        """The voxels of a chunk, None if it is air; one that seems damaged is fetched again, bypassing all caches."""
        for tries_left in reversed(range(_TRIES)):
            try:
                if (data := fetch()) is None:
                    self.missing.check_absent(chunk, box)
                    return None
                voxels = self._decode(data)
                if self.nan == "error":
                    check_finite(voxels)
                self.missing.mark_present(chunk)
                return self.axes.slab(voxels, self._others)
            except (DataError, errors.ClosedError):
                raise
            except CancelledError:
                raise errors.ClosedError(f"{self.source.display_address} was closed; open it again") from None
            except Exception as error:  # codecs and stores may raise anything
                if not tries_left:
                    if isinstance(error.__cause__ or error, errors.ReplacedError):
                        raise errors.RefusedError(
                            f"{one_line(error, 400)}, {_TRIES} times in a row: {self.source.display_address} is being "
                            "written; wait until that is finished, or copy the volume to a disk"
                        ) from error
                    raise self._unreadable(box, chunk, error) from error
                log.debug("fetching chunk %s of %s again after %s", list(chunk), self.name, one_line(error))
                self.source.count(retries=1)
                self.missing.check_metadata(at_once=True)  # if the volume is gone, its chunks are not damaged
                self.grid.forget(self.grid.box_of(chunk))
                fetch = partial(self.grid.fetch, chunk, self.source.get)
        raise AssertionError("the last attempt returns or raises")

    def _replace_nonfinite(self, voxels: NDArray[Any]) -> None:
        self._voxels_read += voxels.size
        if self.dtype.kind != "f" or self.nan == "keep":
            return
        bad = ~np.isfinite(voxels)
        if bad.any():
            self._nonfinite += int(np.count_nonzero(bad))
            voxels[bad] = self.nan_value

    def _unreadable(self, box: Box, chunk: Triple, error: Exception) -> errors.UnreadableChunkError:
        kind = "" if isinstance(error, (errors.FetchError, ShardIndexError)) else f"{type(error).__name__}: "
        damaged = self.grid.object_box(chunk) if isinstance(error, ShardIndexError) else self.grid.box_of(chunk)
        return errors.UnreadableChunkError(self.name, box, chunk, damaged, kind + one_line(error, 400))


def open_volume(
    spec: ArrayConfig | str | os.PathLike[str],
    store: StoreConfig = StoreConfig(),
    missing_chunk: Literal["air", "error"] = "air",
    nan: Nan = "air",
    reopened: bool = False,
) -> Volume:
    """Open an entry of `data.volumes[]`, or level 0 of a path or address.  Reads metadata.

    The volume's `spec` has the number of the level, also if a voxel size picked it.

    If another process has opened the volume before (`reopened`), a store that does not answer is an outage; otherwise
    it is given up after a minute.  Raises DataError: there is nothing, no zarr, no such level or voxel size, no axes z,
    y, x, or an unsupported dtype.
    """
    spec = spec if isinstance(spec, ArrayConfig) else ArrayConfig(path=os.fspath(spec))
    if not is_remote(spec.path) and not Path(spec.path).exists():
        if link := broken_link(Path(spec.path)):
            raise DataError(f"Cannot open {spec.path}: {link}")
        written = getattr(spec.path, "written", spec.path)
        start = "" if os.path.isabs(written) else f"{written} starts in the working directory: change to its own, or "
        raise DataError(
            f"Cannot open {spec.path}: it does not exist; {start}create a synthetic scroll with `vesuvius volume synth "
            f"{spec.path}`, download a real one (the address is in configs/exp001_full.yaml), or choose another volume "
            'with "data.volumes=[{path: PATH.zarr, level: 0}]"'
        )
    source = Source(spec.path, store, has_answered=reopened)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZarrUserWarning)  # about codecs outside the zarr v3 specification, etc.
            warnings.simplefilter("ignore", UnstableSpecificationWarning)
            if (root := read_node(source, "")) is None:
                raise no_zarr_error(source)
            spec = spec if spec.voxel_size_um is None else _with_level(source, root, spec)
            return _open_level(source, root, spec, missing_chunk, nan)
    except BaseException:
        source.close()
        raise


def _open_level(
    source: Source, root: Node, spec: ArrayConfig, missing_chunk: Literal["air", "error"], nan: Nan
) -> Volume:
    node, level, name = find_array(source, root, spec)
    array = open_array(source, node, level.path if level else "")
    space = space_of(level.entry, level.dataset, array.ndim, name) if level else None
    axes, axis_names = find_axes(name, array, space.names if space else None, spec.select)
    geometry = space.geometry(axes.zyx) if space else None
    if array.dtype.kind == "f" and not isinstance(nan, str) and not abs(nan) <= float(np.finfo(array.dtype).max):
        raise DataError(f"data.nan={nan:g} does not fit the {array.dtype} voxels of {name}; choose a smaller number")
    return Volume(name, array, axes, axis_names, geometry, level, source, node, spec, missing_chunk, nan)


def _with_level(source: Source, root: Node, spec: ArrayConfig) -> ArrayConfig:
    """Return the config with the level that has its voxel size.  Reads the metadata of all levels."""
    numbers = [] if root.is_array else range(len(pick_level(source, root.document["attributes"], spec).paths))
    levels = [spec.model_copy(update={"level": number, "voxel_size_um": None}) for number in numbers]
    sizes: dict[int, FloatTriple] = {}
    for level in levels:
        try:
            size_um = _open_level(source, root, level, "air", "keep").voxel_size_um
        except DataError as error:
            if isinstance(error, (errors.OutageError, errors.RefusedError)) or (level is levels[-1] and not sizes):
                raise
            continue  # a level that was not copied
        sizes |= {} if size_um is None else {level.level: size_um}
    wanted = np.broadcast_to(spec.voxel_size_um or 0, 3)
    found = [number for number, size in sizes.items() if np.allclose(size, wanted, rtol=_SAME_SIZE, atol=0)]
    if len(found) == 1:
        return levels[found[0]]
    known = ", ".join(f"level {number}: {' x '.join(f'{um:.6g}' for um in size)}" for number, size in sizes.items())
    raise DataError(
        f"Cannot pick a level of {source.display_address} by its voxel size, {' x '.join(map(str, wanted))} µm: "
        f"{known or 'it has no OME scale with a unit of length'}; change voxel_size_um, or set level instead"
    )
