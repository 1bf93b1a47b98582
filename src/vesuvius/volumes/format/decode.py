"""Decodes the bytes of a chunk with the codecs of numcodecs; zarr-python decodes what needs other codecs.

Every chunk is decoded here completely, whatever part of it is needed and wherever its bytes come from.  So all
checksums in its codec chain are verified, and whether a chunk is damaged depends on its bytes alone.  zarr's pipelines
guarantee neither: zarrs skips checksums when it reads part of a shard, and numcodecs reads memory past a truncated
blosc frame.
"""

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
_WIDENING = 16  # filters widen voxels at most from packed bits to int16; a frame that claims more is damaged


class ChunkDecoder:
    """Decodes the chunks of one array (the inner chunks of a sharded one)."""

    def __init__(self, array: zarr.Array[Any]) -> None:
        metadata: Any = array.metadata
        self._dtype = array.dtype
        self._foreign: Any = None  # metadata of a one-chunk array, with codecs that only zarr-python decodes
        self._key = "/".join("0" * array.ndim)  # of that chunk
        self._steps: list[tuple[Any, int, bool]] = []  # codecs, decoded bytes of each, and whether that is exact
        axes = list(range(array.ndim))  # axes of the voxels in the order of the chunk's bytes
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
            *filters, last = codecs
            # Whether the remaining codecs only reorder axes and bytes.
            exact = isinstance(last, BytesCodec) and all(isinstance(codec, TransposeCodec) for codec in filters)
            if exact:
                for codec in filters:
                    axes = [axes[i] for i in codec.order]
                endian = last.to_dict().get("configuration", {}).get("endian", "=")
                self._dtype = self._dtype.newbyteorder(endian)
            else:
                self._foreign = _one_chunk(array, codecs)
            self._steps = [(codec, size, exact and codec is own[-1]) for codec in own]
        self._stored_shape = [array.chunks[axis] for axis in axes]
        self._to_array = [axes.index(axis) for axis in range(array.ndim)]

    def __call__(self, data: bytes) -> NDArray[Any]:
        """Decode all voxels of a chunk, in stored order; may be read-only.  Raises anything if the bytes are wrong."""
        value: Any = data
        for codec, size, exact in self._steps:
            _check_frame(codec, value, size, exact)
            value = codec.decode(value)
        if self._foreign is not None:
            store = MemoryStore({self._key: cpu.Buffer.from_bytes(bytes(value))})
            return np.asarray(zarr.Array(zarr.AsyncArray(self._foreign, StorePath(store)))[...])
        voxels = ensure_ndarray_like(value).view(self._dtype).reshape(-1, order="A")
        return np.asarray(voxels.reshape(self._stored_shape).transpose(self._to_array))


def _of_numcodecs(codec: Any) -> Any:
    """The numcodecs codec that decodes like a bytes-to-bytes codec of zarr v3; None if there is none."""
    if not isinstance(codec, BytesBytesCodec):
        return None
    written: Any = codec.to_dict()
    name = written["name"]
    if name in ("blosc", "crc32c", "gzip", "zstd"):
        return numcodecs.get_codec({"id": name})  # the data contain the settings
    if name.startswith("numcodecs."):
        return numcodecs.get_codec(written.get("configuration", {}) | {"id": name.removeprefix("numcodecs.")})
    return None


def _one_chunk(array: zarr.Array[Any], codecs: Sequence[Any]) -> Any:
    """Metadata of an array that consists of one chunk of another, stored with some of its codecs."""
    document: Any = array.metadata.to_dict() | {
        "shape": array.chunks,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunks}},
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "/"}},
        "codecs": [codec.to_dict() for codec in codecs],
    }
    return zarr.AsyncArray(document, StorePath(MemoryStore())).metadata


def _check_frame(codec: Any, frame: Any, size: int, exact: bool) -> None:
    """Raise ValueError if a blosc frame is truncated, or its header gives a wrong decoded size.

    `size` is exact or an estimate.  The decoders of all other codecs stop at the end of their bytes and raise.
    """
    if codec.codec_id != "blosc":
        return
    data = memoryview(frame).cast("B")
    length = len(data)
    decoded, stored = (int.from_bytes(data[at : at + 4], "little") for at in (4, 12))
    if not _BLOSC_HEADER_BYTES <= stored <= length:
        raise ValueError(f"the chunk has {length} bytes, but {stored} according to its header")
    if decoded != size if exact else decoded > _WIDENING * size:
        raise ValueError(f"the chunk decodes to {decoded} bytes according to its header, instead of {size}")
