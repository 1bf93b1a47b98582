"""First stop of a patch: open one level of a zarr volume and read boxes of it.

Reads zarr v2 and v3, sharded or not, OME-Zarr groups (levels looked up in their metadata) and bare arrays, from disk
and from remote stores.  The bytes of chunks are fetched ahead (of remote stores those of whole regions).  Chunks are
decoded on the thread that reads, or on several ahead of it.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.errors import UnstableSpecificationWarning, ZarrUserWarning

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import DataError, one_line
from vesuvius.volumes.box import Box, box_along, indexed_box, intersection, shape_of, slices
from vesuvius.volumes.chunks import ChunkGrid, ShardIndexError, Staging
from vesuvius.volumes.errors import ClosedError, FetchError, RefusedError, ReplacedError, UnreadableChunkError
from vesuvius.volumes.format.decode import ChunkDecoder
from vesuvius.volumes.format.metadata import Level, Node, no_zarr_error, open_array, pick_level, read_node
from vesuvius.volumes.geometry import Axes, FloatTriple, Geometry, Names, find_axes, space_of
from vesuvius.volumes.missing import MetadataCheck, MissingChunks, StoredChunks, check_keys
from vesuvius.volumes.store.objects import ByteRange, is_remote
from vesuvius.volumes.store.source import Source
from vesuvius.volumes.voxels import Nan, Nonfinite, check_finite

log = logging.getLogger(__name__)

# Chunks of a disk whose bytes are fetched while another one is decoded: enough to hide the latency of a network mount.
_AHEAD = 4
# Chunks whose voxels other threads decode while one is copied.
_DECODED_AHEAD = 8
# A damaged chunk is fetched again, past all caches, before it is quarantined.
_TRIES = 3


@dataclass(eq=False)
class Volume:
    """One level of one volume, opened for reading."""

    name: str  # path and level as the user gave them, for messages
    array: zarr.Array[Any]  # of zarr-python; describes the chunks, and reads none
    axes: Axes
    axis_names: Names  # of the array, in stored order; None where an axis has no name
    geometry: Geometry | None  # where its voxels lie in space; None where the metadata do not say
    level: Level | None  # of its pyramid; None for a bare array
    source: Source
    node: Node
    missing_chunk: Literal["air", "error"]
    nan: Nan
    stored: StoredChunks | None

    def __post_init__(self) -> None:
        self.grid = ChunkGrid(self.array, self.axes, self.source)
        self.wait_s = 0.0  # for which `read` has waited for bytes from a remote store, in all
        self.metadata = MetadataCheck(self.source, self.node.key, self.node.stored)  # whether the volume is still there
        self.missing = MissingChunks(self.name, self.grid, self.metadata, self.missing_chunk, self.stored)
        self._voxels_read = self._nonfinite = 0
        self._decode = ChunkDecoder(self.array)
        self._staging = Staging(self.grid) if self.source.remote else None

    @cached_property
    def shape_zyx(self) -> Triple:
        """Voxels."""
        return self.grid.shape_zyx

    @property
    def chunk_zyx(self) -> Triple:
        """Voxels of the unit that is decoded at once: of a sharded array the inner chunk."""
        return self.grid.chunk_zyx

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """As stored, in native byte order: bool, or integers or floats of up to 8 bytes."""
        return np.dtype(self.array.dtype).newbyteorder("=")

    @property
    def voxel_size_um(self) -> FloatTriple | None:
        """Edge lengths (z, y, x) where the metadata give them in units of length, else None."""
        return None if self.geometry is None else self.geometry.voxel_size_um

    @cached_property
    def fill_value(self) -> float:
        """Grey value of an absent chunk: air.  Of integer dtypes an int, as large ones are no exact floats.

        Where the array's own fill value is NaN or infinite, what these are read as.
        """
        value: float = self.dtype.type(self.array.fill_value or 0).item()
        return value if math.isfinite(value) or self.nan == "keep" else self.nan_value

    @cached_property
    def nan_value(self) -> float:
        """What NaN and infinity are read as: the number of `data.nan`, or air: the array's fill value, if that is a
        number, else 0.  No meaning for other dtypes than floats, and where they are kept."""
        if not isinstance(self.nan, str):
            return float(self.nan)
        value = float(self.array.fill_value or 0)
        return value if math.isfinite(value) else 0.0

    @property
    def nonfinite(self) -> Nonfinite | None:
        """The NaN and infinities that `read` has replaced; None where there were none."""
        return Nonfinite(self.name, self._nonfinite / self._voxels_read, self.nan_value) if self._nonfinite else None

    def material(self, voxels: NDArray[Any]) -> NDArray[Any]:
        """Those of some voxels that are neither air nor in place of NaN, flat."""
        wanted = voxels != self.fill_value
        if self.dtype.kind == "f":
            wanted &= np.isfinite(voxels) & (voxels != self.nan_value)
        found: NDArray[Any] = voxels[wanted]
        return found

    def stage(self, box: Box) -> None:
        """Start to fetch the chunks of a box from a remote store; on disk nothing.  Does not wait."""
        if self._staging is not None:
            self._staging.stage(box)

    def unstage(self) -> None:
        """Forget what was staged and will not be read."""
        if self._staging is not None:
            self._staging.unstage()

    def release(self, box: Box) -> None:
        """Forget what was staged for a box that is not read after all."""
        if self._staging is not None:
            self._staging.release(box)

    def read(
        self,
        box: Box,
        out: NDArray[Any] | None = None,
        before: Callable[[Triple], None] = lambda chunk: None,
        decoders: Executor | None = None,
    ) -> NDArray[Any]:
        """Read and decode a box; absent chunks come as the fill value.  Waits for as long as an outage may last.

        Whether it fails, and because of which chunk, depends on the stored bytes alone: each chunk that the box touches
        is decoded whole, in order, up to the first that is damaged.

        Args:
            out: where to, of the volume's dtype and the shape of the box; a new array by default.
            before: told of each chunk before it is decoded; what it raises ends the read.
            decoders: threads that decode chunks ahead of the one that is copied, told or not; None = this one decodes.

        Returns:
            `out`, or an array of the stored dtype, shape stop - start.

        Raises:
            UnreadableChunkError: a chunk cannot be decoded, does not match its checksum, holds NaN or infinity where
                `data.nan` is 'error', or is gone: it was there when this volume read it before, or when its chunks
                were listed.
            DataError: a chunk is absent and `data.missing_chunk` is 'error', the whole volume is gone or has changed,
                or its store refuses, or has not answered for `data.store.outage_minutes`.
            ClosedError: another thread has closed the volume.
        """
        out = np.empty(shape_of(box), self.dtype) if out is None else out
        try:
            for chunk, load in self._loads(box, decoders):
                covered = self.grid.box_of(chunk)
                part = intersection(covered, box)
                before(chunk)
                voxels = self._chunk(chunk, box, load)
                into = out[slices(part, box[0])]
                into[...] = self.fill_value if voxels is None else voxels[slices(part, covered[0])]
                self._replace_nonfinite(into)
        finally:
            self.release(box)
        return out

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """Read as an array is indexed, with integers and slices of step 1: `volume[10, 0:128, :128]`.

        Raises as `read`, IndexError, and TypeError for any other index.
        """
        ends, whole = indexed_box(index, self.shape_zyx)
        box = box_along(ends)
        voxels = self.read(box) if all(lo < hi for lo, hi in ends) else np.empty(shape_of(box), self.dtype)
        return voxels[whole]

    def close(self) -> None:
        """End the threads that fetch."""
        self.source.close()

    def _loads(self, box: Box, decoders: Executor | None) -> Iterator[tuple[Triple, Callable[[], NDArray[Any] | None]]]:
        """The chunks of a box, each with what waits for its voxels."""
        ahead: deque[tuple[Triple, Future[NDArray[Any] | None]]] = deque()
        for chunk, fetch in self._fetches(box):
            if decoders is None:
                yield chunk, partial(self._load, fetch)
                continue
            ahead.append((chunk, self._start_decoding(fetch, decoders)))
            if len(ahead) > _DECODED_AHEAD:
                first, voxels = ahead.popleft()
                yield first, voxels.result
        yield from ((chunk, voxels.result) for chunk, voxels in ahead)

    def _start_decoding(self, fetch: Callable[[], bytes | None], decoders: Executor) -> Future[NDArray[Any] | None]:
        """Wait for the bytes here, as decoders never wait; an error comes when it is the chunk's turn."""
        try:
            data = fetch()
        except Exception as error:
            failed: Future[NDArray[Any] | None] = Future()
            failed.set_exception(error)
            return failed
        return decoders.submit(self._load, lambda: data)

    def _load(self, fetch: Callable[[], bytes | None]) -> NDArray[Any] | None:
        """The voxels of a whole chunk as stored; None for an absent one."""
        if (data := fetch()) is None:
            return None
        voxels = self._decode(data)
        if self.nan == "error":
            check_finite(voxels)
        return voxels

    def _fetches(self, box: Box) -> Iterator[tuple[Triple, Callable[[], bytes | None]]]:
        """The chunks of a box, each with what waits for its bytes."""
        chunks = self.grid.chunks_of(box)
        if (staging := self._staging) is not None:
            started = time.perf_counter()
            staging.stage(box)
            staging.settle(box)
            self.wait_s += time.perf_counter() - started
            whole = self.grid.whole_shards(box)
            for chunk in chunks:
                yield chunk, partial(self.grid.fetch, chunk, self._staged_bytes, self.grid.key_of(chunk) in whole)
            return
        self.grid.forget_indices()
        if self.grid.shard_zyx is not None:  # handing small chunks of few files over would cost more than it hides
            for chunk in chunks:
                yield chunk, partial(self.grid.fetch, chunk, self.source.get)
            return
        ahead: deque[tuple[Triple, Future[bytes | None]]] = deque()
        while True:
            for chunk in itertools.islice(chunks, _AHEAD + 1 - len(ahead)):
                ahead.append((chunk, self.source.start(self.grid.fetch, chunk, self.source.get)))
            if not ahead:
                return
            chunk, future = ahead.popleft()
            yield chunk, future.result

    def _staged_bytes(self, key: str, byte_range: ByteRange | None) -> bytes | None:
        assert self._staging is not None
        started = time.perf_counter()
        try:
            return self._staging.fetch(key, byte_range)
        finally:
            self.wait_s += time.perf_counter() - started

    def _chunk(self, chunk: Triple, box: Box, load: Callable[[], NDArray[Any] | None]) -> NDArray[Any] | None:
        """The voxels of a whole chunk, as stored but for the order of axes; None where it is air.

        A chunk that seems damaged is fetched again, past all caches.  Raises as `read`.
        """
        for tries_left in reversed(range(_TRIES)):
            try:
                voxels = load()
                if voxels is None:
                    self.missing.check_absent(chunk, box)
                    return None
                self.missing.mark_present(chunk)
                return self._to_zyx(voxels)
            except (DataError, ClosedError):
                raise
            except CancelledError:
                raise ClosedError(f"{self.source.shown} was closed; open it again") from None
            except Exception as error:  # codecs and stores raise whatever they like
                if not tries_left:
                    if isinstance(error.__cause__ or error, ReplacedError):
                        raise RefusedError(
                            f"{one_line(error, 400)}, again and again: {self.source.shown} is being written; wait "
                            "until that has ended, or copy it to a disk"
                        ) from error
                    raise self._unreadable(box, chunk, error) from error
                log.debug("chunk %s of %s is fetched again after %s", list(chunk), self.name, one_line(error))
                self.source.count(retries=1)
                self.metadata.check(at_once=True)  # of a volume that is gone no chunk is to blame
                self.grid.forget(self.grid.box_of(chunk))
                load = partial(self._load, partial(self.grid.fetch, chunk, self.source.get))
        raise AssertionError("the last try returns or raises")

    def _to_zyx(self, voxels: NDArray[Any]) -> NDArray[Any]:
        """A chunk's voxels along z, y, x, at the index at which each other axis is fixed."""
        others = [i % c for i, c in zip(self.axes.select, self.axes.others_of(self.array.chunks), strict=True)]
        where: Any = self.axes.stored((slice(None),) * 3, others)
        return self.axes.to_zyx(voxels[where])

    def _replace_nonfinite(self, voxels: NDArray[Any]) -> None:
        """Have NaN and infinity read as a number, in place, and count them."""
        self._voxels_read += voxels.size
        if self.dtype.kind != "f" or self.nan == "keep":
            return
        bad = ~np.isfinite(voxels)
        if bad.any():
            self._nonfinite += int(np.count_nonzero(bad))
            voxels[bad] = self.nan_value

    def _unreadable(self, box: Box, chunk: Triple, error: Exception) -> UnreadableChunkError:
        kind = "" if isinstance(error, (FetchError, ShardIndexError)) else f"{type(error).__name__}: "
        damaged = self.grid.object_box(chunk) if isinstance(error, ShardIndexError) else self.grid.box_of(chunk)
        return UnreadableChunkError(self.name, box, chunk, damaged, kind + one_line(error, 400))


def open_volume(
    spec: ArrayConfig | str | Path,
    store: StoreConfig = StoreConfig(),
    missing_chunk: Literal["air", "error"] = "air",
    nan: Nan = "air",
    reopened: bool = False,
    stored: StoredChunks | None = None,
) -> Volume:
    """Open what `data.volumes[]` names, or level 0 of a path or address.  Reads metadata, and looks for a few chunks.

    Args:
        reopened: it has been opened before, by another process: no chunks are looked for, and where its store does not
            answer that is an outage.  A store that never has is given up after a minute.
        stored: the chunks that a listing has found; of these none may be absent.

    Raises:
        DataError: nothing there, not a zarr, no such level, no axes z, y, x, or a dtype that is not supported.
    """
    spec = spec if isinstance(spec, ArrayConfig) else ArrayConfig(path=str(spec))
    if not is_remote(spec.path) and not Path(spec.path).exists():
        raise DataError(
            f"a volume must exist; got {spec.path}, which does not exist; write a synthetic scroll there with "
            f"`vesuvius volume synth {spec.path}`, download a real one (its address is in configs/exp001_full.yaml), "
            'or name another: "data.volumes=[{path: PATH.zarr, level: 0}]"'
        )
    source = Source(spec.path, store, has_answered=reopened)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZarrUserWarning)  # on codecs that zarr v3 does not specify, and the like
            warnings.simplefilter("ignore", UnstableSpecificationWarning)
            node, level, name = _find_array(source, spec)
            array = open_array(source, node, level.path if level else "")
            space = space_of(level.entry, level.dataset, array.ndim, name) if level else None
            axes, axis_names = find_axes(name, array, space.names if space else None, spec.select)
            geometry = space.geometry(axes.zyx) if space else None
            _check_nan(nan, array, name)
            volume = Volume(name, array, axes, axis_names, geometry, level, source, node, missing_chunk, nan, stored)
            if not reopened:
                check_keys(name, volume.grid)
            return volume
    except BaseException:
        source.close()
        raise


def _find_array(source: Source, spec: ArrayConfig) -> tuple[Node, Level | None, str]:
    """The metadata of the array that a config names, its level if it has one, and its name."""
    node = read_node(source, "")
    if node is None:
        raise no_zarr_error(source)
    if node.is_array:
        if spec.level:
            raise DataError(
                f"a bare array has level 0 only; got level {spec.level} of {source.shown}; set level to 0 or point "
                "path at the OME-Zarr group"
            )
        return node, None, source.shown
    level = pick_level(source, node.document["attributes"], spec)
    node = read_node(source, level.path)
    if node is None or not node.is_array:
        what = "which is not there" if node is None else "which is a group"
        raise DataError(
            f"each level in the metadata must exist; got level {spec.level} ({level.path!r}) of {source.shown}, "
            f"{what}; copy the missing level or choose another"
        )
    return node, level, f"{source.shown} level {spec.level}"


def _check_nan(nan: Nan, array: zarr.Array[Any], name: str) -> None:
    if not isinstance(nan, str) and array.dtype.kind == "f" and not abs(nan) <= float(np.finfo(array.dtype).max):
        raise DataError(f"data.nan={nan:g} does not fit into the {array.dtype} voxels of {name}; take a smaller number")
