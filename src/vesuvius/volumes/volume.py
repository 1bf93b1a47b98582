"""First stop of a patch: open one level of a zarr volume and read boxes of it.

Reads zarr v2 and v3, sharded or not, OME-Zarr groups (levels looked up in their metadata) and bare arrays, from disk
and from remote stores.  On disk shards are decoded by the zarrs codec pipeline where it supports the array, all
else by zarr-python; remote chunks are fetched ahead, many at once, and decoded by zarr-python.  One codec thread per
reader.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zarr
from numcodecs import blosc
from numpy.typing import NDArray
from zarr.abc.store import Store
from zarr.core.array import AsyncArray
from zarr.core.buffer import default_buffer_prototype
from zarr.errors import UnstableSpecificationWarning, ZarrUserWarning
from zarr.storage import LocalStore, StorePath

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import DataError, one_line
from vesuvius.volumes.axes import Axes, Names, find_axes
from vesuvius.volumes.box import Box, format_box, intersection, shape_of, slices
from vesuvius.volumes.chunks import ChunkGrid, ShardIndexError
from vesuvius.volumes.errors import ClosedError, FetchError, UnreadableChunkError
from vesuvius.volumes.geometry import FloatTriple, Geometry, space_of
from vesuvius.volumes.key_form import as_stored
from vesuvius.volumes.levels import Level, pick_level
from vesuvius.volumes.metadata import open_array, open_group, read_node
from vesuvius.volumes.missing import MetadataCheck, MissingChunks
from vesuvius.volumes.no_zarr import no_zarr_error
from vesuvius.volumes.staged import StagedStore
from vesuvius.volumes.store.object_store import is_remote
from vesuvius.volumes.store.source import Source

log = logging.getLogger(__name__)

_PYTHON_PIPELINE = {"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}


class Volume:
    """One level of one volume, opened for reading.

    Attributes:
        name: path and level as the user gave them, for messages.
        shape_zyx: voxels.
        chunk_zyx: voxels of the unit that is decoded at once (the inner chunk of a sharded array).
        dtype: stored dtype in native byte order: bool, or integers or floats of up to 8 bytes.
        axis_names: of the array, in stored order; None where an axis has no name.
        geometry: where its voxels lie in space; None where the metadata do not say.
        level_paths: the arrays of its pyramid from the finest; empty for a bare array.
        metadata: whether the volume is still there.
        missing: its chunks that are not stored, air or gone.
        wait_s: seconds for which `read` has waited for staged bytes, in all.
    """

    def __init__(
        self,
        name: str,
        array: zarr.Array[Any],
        axes: Axes,
        axis_names: Names,
        geometry: Geometry | None,
        level_paths: tuple[str, ...],
        source: Source,
        missing_chunk: Literal["air", "error"],
    ) -> None:
        self.name = name
        self.array = array
        self.axes = axes
        self.axis_names = axis_names
        self.geometry = geometry
        self.level_paths = level_paths
        self.source = source
        self.grid = ChunkGrid(array, axes, source)
        self.wait_s = 0.0
        self._staged = array.store if isinstance(array.store, StagedStore) else None
        if self._staged is not None:
            self._staged.grid = self.grid
        self.metadata = MetadataCheck(source)
        self.missing = MissingChunks(name, self.grid, self._staged, self.metadata, self.fill_value, missing_chunk)

    @cached_property
    def shape_zyx(self) -> Triple:
        return self.grid.shape_zyx

    @property
    def chunk_zyx(self) -> Triple:
        return self.grid.chunk_zyx

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.array.dtype).newbyteorder("=")

    @property
    def voxel_size_um(self) -> FloatTriple | None:
        """Edge lengths (z, y, x) where the metadata give them in units of length, else None."""
        return None if self.geometry is None else self.geometry.voxel_size_um

    @property
    def fill_value(self) -> float:
        """Grey value of an absent chunk: air.  Of integer dtypes an int, as large ones are no exact floats.

        0 where the array's own fill value is NaN or infinite: no network could be trained on it, and scanners write
        air as 0 or near it.
        """
        value: float = self.dtype.type(self.array.fill_value or 0).item()
        return value if math.isfinite(value) else 0.0

    @property
    def codec_pipeline(self) -> str:
        """Which library decodes the chunks: 'zarrs' or 'zarr-python'."""
        return "zarrs" if getattr(self.array.async_array.codec_pipeline, "impl", None) is not None else "zarr-python"

    def stage(self, box: Box) -> None:
        """Start to fetch the chunks of a box from a remote store; on disk nothing.  Does not wait."""
        if self._staged is not None:
            self._staged.stage(self.grid, box)

    def unstage(self) -> None:
        """Forget what was staged and will not be read."""
        if self._staged is not None:
            self._staged.unstage()

    def release(self, box: Box) -> None:
        """Forget what was staged for a box that is not read after all."""
        if self._staged is not None:
            self._staged.release(box)

    def read(self, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read and decode a box; absent chunks come as the fill value.  Waits for as long as an outage may last.

        Args:
            out: where to, C-contiguous, of the volume's dtype and the shape of the box; a new array by default.

        Returns:
            `out`, or an array of the stored dtype, shape stop - start.  Another one than `out` where reading all at
            once has failed; then, as after UnreadableChunkError, `out` must not be used again.

        Raises:
            UnreadableChunkError: a chunk cannot be decoded, holds NaN or infinity, or is gone: it was there when this
                volume read it before, or when its chunks were listed.
            DataError: a chunk is absent and `data.missing_chunk` is 'error', the whole volume is gone or has changed,
                or its store refuses, or has not answered for `data.store.outage_minutes`.
            ClosedError: another thread has closed the volume.
        """
        out = np.empty(shape_of(box), self.dtype) if out is None else out
        try:
            self._settle(box)
            self.missing.check_present(box)
            _read_into(self._checked_array, self.axes, box, out)
            self.missing.treat(box, out)
            _check_finite(out)
        except (DataError, ClosedError):
            raise
        except Exception as error:  # codecs and stores raise whatever they like; here it is found which chunk it was
            log.debug("reading %s of %s chunk by chunk after %s", format_box(box), self.name, one_line(error))
            self.source.count(retries=1)
            self.metadata.check(at_once=True)  # of a volume that is gone no chunk is to blame
            # zarr does not end the other chunks of a read that has failed: they go on into `out`.
            out = np.empty_like(out)
            self._read_chunk_by_chunk(box, out)
        finally:
            self.release(box)
        return out

    def read_with_care(
        self, box: Box, around: Callable[[Triple], AbstractContextManager[None]], out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """As `read`, one chunk after the other, with the codecs of zarr-python.

        Args:
            around: what each chunk is read in.
        """
        out = np.empty(shape_of(box), self.dtype) if out is None else out
        try:
            self._read_chunk_by_chunk(box, out, around)
        finally:
            self.release(box)
        return out

    def close(self) -> None:
        """End the threads that fetch."""
        self.source.close()

    def _settle(self, box: Box) -> None:
        """Have all bytes of the box here, where they come from a remote store."""
        if self._staged is not None:
            started = time.perf_counter()
            self._staged.stage(self.grid, box)
            self._staged.settle(box)
            self.wait_s += time.perf_counter() - started

    def _read_chunk_by_chunk(
        self,
        box: Box,
        out: NDArray[Any],
        around: Callable[[Triple], AbstractContextManager[None]] = lambda chunk: nullcontext(),
    ) -> None:
        """The careful way: each chunk is fetched again, past all caches, and decoded by itself."""
        for chunk in self.grid.chunks_of(box):
            part = intersection(self.grid.box_of(chunk), box)
            for tries_left in reversed(range(max(self.source.config.retries, 1))):
                self.grid.forget(part)
                try:
                    with around(chunk):
                        self._read_one(chunk, part, out[slices(part, box[0])])
                    break
                except (DataError, ClosedError):
                    raise
                except Exception as error:
                    if not tries_left:
                        raise self._unreadable(box, chunk, error) from error
                    self.source.count(retries=1)

    def _read_one(self, chunk: Triple, part: Box, voxels: NDArray[Any]) -> None:
        self.missing.check_present(part)
        if self.grid.shard_zyx is not None:
            self.grid.shard_index(self.grid.key_of(chunk))
        _read_into(self._plain_array, self.axes, part, voxels)
        self.missing.treat(part, voxels)
        _check_finite(voxels)

    def _unreadable(self, box: Box, chunk: Triple, error: Exception) -> UnreadableChunkError:
        whole_object = isinstance(error, (ShardIndexError, FetchError))
        kind = "" if isinstance(error, FetchError) else f"{type(error).__name__}: "
        damaged = self.grid.object_box(chunk) if whole_object else self.grid.box_of(chunk)
        return UnreadableChunkError(self.name, box, chunk, damaged, kind + one_line(error, 400))

    @cached_property
    def _plain_array(self) -> zarr.Array[Any]:
        """The same array without staging, its bytes read by our source: with retries, and with errors that tell fetch
        from decode."""
        store = StagedStore(self.source)
        store.grid = self.grid
        return _decoded_by_python(self.array, store)

    @cached_property
    def _checked_array(self) -> zarr.Array[Any]:
        """What a whole box is read from: zarrs checks the length of chunks itself, our store does for zarr-python."""
        return self.array if self._staged or self.codec_pipeline == "zarrs" else self._plain_array


def open_volume(
    spec: ArrayConfig,
    store: StoreConfig = StoreConfig(),
    missing_chunk: Literal["air", "error"] = "air",
    known: bool = False,
) -> Volume:
    """Open what `data.volumes[]` names.  Reads metadata only.

    Args:
        known: it has been opened before, by another process: where its store does not answer that is an outage.  A
            store that never has is given up after a minute.

    Raises:
        DataError: nothing there, not a zarr, no such level, no axes z, y, x, or a dtype that is not supported.
    """
    _use_one_codec_thread()
    if not is_remote(spec.path) and not Path(spec.path).exists():
        raise DataError(f"a volume must exist; got {spec.path}, which does not exist; {_how_to_get_data(spec.path)}")
    source = Source(spec.path, store, known=known)
    try:
        with warnings.catch_warnings():
            # Where zarrs does not support an array it falls back to zarr-python and warns on every open;
            # `Volume.codec_pipeline` says which one is at work, and the run's log repeats it once.
            warnings.filterwarnings("ignore", message="Array is unsupported by ZarrsCodecPipeline")
            warnings.simplefilter("ignore", ZarrUserWarning)  # on codecs that zarr v3 does not specify, and the like
            warnings.simplefilter("ignore", UnstableSpecificationWarning)
            return _open_volume(source, spec, missing_chunk, known)
    except BaseException:
        source.close()
        raise


def _open_volume(source: Source, spec: ArrayConfig, missing_chunk: Literal["air", "error"], known: bool) -> Volume:
    store = StagedStore(source) if source.remote else LocalStore(source.address, read_only=True)
    node, path = read_node(source, ""), ""
    if node is None:
        raise no_zarr_error(source)
    level: Level | None = None
    name = source.shown
    if not node.is_array:
        level = pick_level(open_group(node, store), spec)
        node, path, name = read_node(source, level.path), level.path, f"{source.shown} level {spec.level}"
        if node is None or not node.is_array:
            what = "which is not there" if node is None else "which is a group"
            raise DataError(
                f"each level in the metadata must exist; got level {spec.level} ({path!r}) of {source.shown}, {what}; "
                "copy the missing level or choose another"
            )
    elif spec.level:
        raise DataError(
            f"a bare array has level 0 only; got level {spec.level} of {source.shown}; set level to 0 or point "
            "path at the OME-Zarr group"
        )
    array = open_array(source, node, store, path)
    space = space_of(level.entry, level.dataset, array.ndim, name) if level else None
    axes, axis_names = find_axes(name, array, space.array_names(array.ndim) if space else None, spec.select)
    array = as_stored(name, array, axes, source, quiet=known)
    # zarrs decodes native byte order only, and says so at the first read.  Parts of chunks, as regions have at their
    # faces, it decodes more slowly than zarr-python does (docs/performance.md); in shards as fast.
    if not np.dtype(array.dtype).isnative or array.shards is None:
        array = _decoded_by_python(array, array.store)
    source.cache_scope = f"{spec.path.rstrip('/')}#{metadata_hash(array)}"
    geometry, paths = (space.geometry(axes.zyx), level.paths) if space and level else (None, ())
    volume = Volume(name, array, axes, axis_names, geometry, paths, source, missing_chunk)
    volume.metadata.note(node.key, node.stored)
    return volume


def _decoded_by_python(array: zarr.Array[Any], store: Store) -> zarr.Array[Any]:
    """The same array, decoded by zarr-python."""
    with zarr.config.set(_PYTHON_PIPELINE):
        return zarr.Array(AsyncArray(array.metadata, StorePath(store, array.path)))


def metadata_hash(array: zarr.Array[Any]) -> str:
    """Changes with shape, chunks, dtype and codecs; not with attributes."""
    metadata = {key: value for key, value in array.metadata.to_dict().items() if key != "attributes"}
    return hashlib.sha256(json.dumps(metadata, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _read_into(array: zarr.Array[Any], axes: Axes, box: Box, out: NDArray[Any]) -> None:
    """Decode a box into `out`, without a copy where z, y, x are stored in this order and zarr can."""
    selection: Any = axes.stored(slices(box), axes.select)
    if array.dtype == out.dtype and out.flags.c_contiguous and not axes.permuted:
        buffer = default_buffer_prototype().nd_buffer.from_numpy_array(out)
        array.get_basic_selection(selection, out=buffer)
    else:
        out[...] = axes.to_zyx(np.asarray(array[selection]))


def _check_finite(voxels: NDArray[Any]) -> None:
    if voxels.dtype.kind == "f" and not np.isfinite(voxels).all():
        raise ValueError("NaN or infinity")


def _use_one_codec_thread() -> None:
    """Set zarr's process-wide configuration: readers are processes, so a pool of threads in each would only contend."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # zarrs itself; read when it is first used
    blosc.set_nthreads(1)
    settings: dict[str, Any] = {"threading.max_workers": 1, "async.concurrency": 4}
    if importlib.util.find_spec("zarrs") is not None:
        settings |= {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.chunk_concurrent_maximum": 1}
    zarr.config.set(settings)


def _how_to_get_data(path: str) -> str:
    return (
        f"write a synthetic scroll there with `vesuvius volume synth {path}`, download a real one (its address is in "
        'configs/exp001_full.yaml), or name another: "data.volumes=[{path: PATH.zarr, level: 0}]"'
    )
