"""Bytes of a chunk -> its voxels, with the codecs of zarr and numcodecs.

Every chunk that is read is decoded here, whole, whatever part of it is wanted and wherever its bytes come from.  So all
checksums in its chain of codecs are checked, and whether a chunk is damaged depends on its bytes alone.  The pipelines
of zarr promise neither: zarrs skips checksums where it reads a part of a shard, and numcodecs reads what lies in memory
behind a truncated blosc frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import zarr
from numcodecs.compat import ensure_ndarray_like
from numpy.typing import NDArray
from zarr.abc.codec import SupportsSyncCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

_BLOSC_HEADER_BYTES = 16
_WIDENING = 16  # filters may widen voxels, at most from packed bits to int16: a frame that promises more is damaged


class ChunkDecoder:
    """Decodes the chunks of one array (the inner chunks of a sharded one)."""

    def __init__(self, array: zarr.Array[Any]) -> None:
        metadata: Any = array.metadata
        prototype, config = default_buffer_prototype(), array.async_array.config
        spec = ArraySpec(array.chunks, metadata.dtype, metadata.fill_value, config, prototype)
        self._chain = _V2Chain(spec, metadata) if metadata.zarr_format == 2 else _Chain(spec, metadata.inner_codecs)

    def __call__(self, data: bytes) -> NDArray[Any]:
        """The voxels of a chunk, all of it, in stored order; may be read-only.

        Raises Exception: the bytes are damaged. Codecs raise whatever they like.
        """
        return self._chain.decode(data)


class _V2Chain:
    """Filters and a compressor of numcodecs."""

    def __init__(self, spec: ArraySpec, metadata: Any) -> None:
        self._spec, self._order = spec, metadata.order
        self._dtype = spec.dtype.to_native_dtype()
        filters = metadata.filters or ()
        self._codecs = [codec for codec in (metadata.compressor, *reversed(filters)) if codec is not None]
        self._exact = not filters

    def decode(self, data: Any) -> NDArray[Any]:
        for codec in self._codecs:
            _check_frame(codec, data, _raw_bytes(self._spec), self._exact)
            data = codec.decode(data)
        voxels = ensure_ndarray_like(data).view(self._dtype).reshape(-1, order="A")
        return np.asarray(voxels.reshape(self._spec.shape, order=self._order))


class _Chain:
    """Codecs of zarr v3."""

    def __init__(self, spec: ArraySpec, codecs: Sequence[Any]) -> None:
        self._prototype = spec.prototype
        self._steps: list[tuple[Any, ArraySpec, int, bool, bool]] = []  # with the bytes that the codec decodes to
        size, exact = _raw_bytes(spec), True
        for codec in codecs:
            codec = codec.evolve_from_array_spec(spec)
            self._steps.append((codec, spec, size, exact, isinstance(codec, SupportsSyncCodec)))
            exact = exact and getattr(codec, "is_fixed_size", False)
            size = codec.compute_encoded_size(size, spec) if exact else size
            spec = codec.resolve_metadata(spec)
        self._steps.reverse()

    def decode(self, data: bytes) -> NDArray[Any]:
        value: Any = self._prototype.buffer.from_bytes(data)
        for codec, spec, size, exact, on_this_thread in self._steps:
            _check_frame(codec, value, size, exact)
            if on_this_thread:
                value = codec._decode_sync(value, spec)
            else:
                (value,) = sync(codec.decode([(value, spec)]))
        return np.asarray(value.as_numpy_array())


def _raw_bytes(spec: ArraySpec) -> int:
    return math.prod(spec.shape) * spec.dtype.to_native_dtype().itemsize


def _check_frame(codec: Any, frame: Any, size: int, exact: bool) -> None:
    """Raises ValueError for a frame that is shorter than its header says, or promises another size than is due.

    Only blosc needs it: the decoders of all other codecs stop where their bytes end, and raise.

    Args:
        size, exact: bytes that the frame decodes to; an estimate where not exact.
    """
    if type(codec).__name__ not in ("Blosc", "BloscCodec"):
        return
    data = memoryview(frame.as_numpy_array() if hasattr(frame, "as_numpy_array") else frame).cast("B")
    length = len(data)
    decoded, promised = (int.from_bytes(data[at : at + 4], "little") for at in (4, 12))
    if not _BLOSC_HEADER_BYTES <= promised <= length:
        raise ValueError(f"a chunk of {length} bytes that says it has {promised}")
    if decoded != size if exact else decoded > _WIDENING * size:
        raise ValueError(f"a chunk that says it decodes to {decoded} bytes, of a chunk of {size}")
