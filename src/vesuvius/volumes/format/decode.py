"""Bytes of a chunk -> its voxels, with the codecs of numcodecs; what is left for other codecs, zarr-python decodes.

Every chunk that is read is decoded here, whole, whatever part of it is wanted and wherever its bytes come from.  So all
checksums in its chain of codecs are checked, and whether a chunk is damaged depends on its bytes alone.  The pipelines
of zarr promise neither: zarrs skips checksums where it reads a part of a shard, and numcodecs reads what lies in memory
behind a truncated blosc frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numcodecs
import numpy as np
import zarr
from numcodecs.compat import ensure_ndarray_like
from numpy.typing import NDArray
from zarr.abc.codec import BytesBytesCodec
from zarr.buffer import cpu
from zarr.codecs import BytesCodec, ShardingCodec, TransposeCodec
from zarr.storage import MemoryStore, StorePath

_BLOSC_HEADER_BYTES = 16
_WIDENING = 16  # filters may widen voxels, at most from packed bits to int16: a frame that promises more is damaged


class ChunkDecoder:
    """Decodes the chunks of one array (the inner chunks of a sharded one)."""

    def __init__(self, array: zarr.Array[Any]) -> None:
        metadata: Any = array.metadata
        self._dtype = array.dtype
        self._foreign: Any = None  # metadata of an array of one chunk, with codecs that zarr-python alone decodes
        self._key = "/".join("0" * array.ndim)  # of that chunk
        self._steps: list[tuple[Any, int, bool]] = []  # codecs with the bytes that each decodes to, and if exactly
        axes = list(range(array.ndim))  # of the voxels, as they lie in a chunk's bytes
        size = math.prod(array.chunks) * self._dtype.itemsize
        if metadata.zarr_format == 2:
            filters = metadata.filters or ()
            codecs = [codec for codec in (*filters, metadata.compressor) if codec is not None]
            self._steps = [(codec, size, not filters) for codec in reversed(codecs)]
            axes = axes[::-1] if metadata.order == "F" else axes
        else:
            first = metadata.codecs[0]
            codecs = list(first.codecs if isinstance(first, ShardingCodec) else metadata.codecs)
            own: list[Any] = []
            while codecs and (codec := _of_numcodecs(codecs[-1])) is not None:
                own.append(codec)
                del codecs[-1]
            exact = _is_plain(codecs)
            if exact:
                for codec in codecs[:-1]:
                    axes = [axes[i] for i in codec.order]
                endian = codecs[-1].to_dict().get("configuration", {}).get("endian", "=")
                self._dtype = self._dtype.newbyteorder(endian)
            else:
                self._foreign = _one_chunk(array, codecs)
            self._steps = [(codec, size, exact and codec is own[-1]) for codec in own]
        self._stored_shape = [array.chunks[axis] for axis in axes]
        self._to_array = [axes.index(axis) for axis in range(array.ndim)]

    def __call__(self, data: bytes) -> NDArray[Any]:
        """The voxels of a chunk, all of it, in stored order; may be read-only.

        Raises Exception: the bytes are damaged. Codecs raise whatever they like.
        """
        value: Any = data
        for codec, size, exact in self._steps:
            _check_frame(codec, value, size, exact)
            value = codec.decode(value)
        if self._foreign is not None:
            store = MemoryStore({self._key: cpu.Buffer.from_bytes(bytes(value))})
            return np.asarray(zarr.Array(zarr.AsyncArray(self._foreign, StorePath(store)))[...])
        voxels = ensure_ndarray_like(value).view(self._dtype).reshape(-1, order="A")
        return np.asarray(voxels.reshape(self._stored_shape).transpose(self._to_array))


def _is_plain(codecs: Sequence[Any]) -> bool:
    """Whether these are voxels in some order of axes and bytes."""
    *filters, last = codecs
    return isinstance(last, BytesCodec) and all(isinstance(codec, TransposeCodec) for codec in filters)


def _of_numcodecs(codec: Any) -> Any:
    """The codec of numcodecs that decodes as one of zarr v3 does, bytes to bytes; None where there is none."""
    if not isinstance(codec, BytesBytesCodec):
        return None
    written: Any = codec.to_dict()
    name = written["name"]
    if name in ("blosc", "crc32c", "gzip", "zstd"):
        return numcodecs.get_codec({"id": name})  # what they decode says how
    if name.startswith("numcodecs."):
        return numcodecs.get_codec(written.get("configuration", {}) | {"id": name.removeprefix("numcodecs.")})
    return None


def _one_chunk(array: zarr.Array[Any], codecs: Sequence[Any]) -> Any:
    """Metadata of an array that is a chunk of another, stored with some of its codecs."""
    document: Any = array.metadata.to_dict() | {
        "shape": array.chunks,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunks}},
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "/"}},
        "codecs": [codec.to_dict() for codec in codecs],
    }
    return zarr.AsyncArray(document, StorePath(MemoryStore())).metadata


def _check_frame(codec: Any, frame: Any, size: int, exact: bool) -> None:
    """Raises ValueError for a frame that is shorter than its header says, or promises another size than is due.

    Only blosc needs it: the decoders of all other codecs stop where their bytes end, and raise.

    Args:
        size, exact: bytes that the frame decodes to; an estimate where not exact.
    """
    if codec.codec_id != "blosc":
        return
    data = memoryview(frame).cast("B")
    length = len(data)
    decoded, promised = (int.from_bytes(data[at : at + 4], "little") for at in (4, 12))
    if not _BLOSC_HEADER_BYTES <= promised <= length:
        raise ValueError(f"a chunk of {length} bytes that says it has {promised}")
    if decoded != size if exact else decoded > _WIDENING * size:
        raise ValueError(f"a chunk that says it decodes to {decoded} bytes, of a chunk of {size}")
