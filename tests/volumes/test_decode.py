"""No truncated chunk is decoded, and every checksum is verified, however a chunk is read."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec
from zarr.registry import register_codec

from tests.conftest import textured
from tests.support.chunk_server import ChunkServer
from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.box import Box
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.volume import Volume, open_volume

SHAPE = (16, 16, 16)
VOXELS = textured(SHAPE)
WHOLE: Box = ((0, 0, 0), SHAPE)
PART: Box = ((2, 3, 4), (15, 14, 13))  # touches all chunks, but covers none completely
FAST = StoreConfig(outage_minutes=0.01)
Address = Callable[[Path], str]


@pytest.fixture(params=["disk", "http"])
def address(request: pytest.FixtureRequest, server: ChunkServer) -> Address:
    return str if request.param == "disk" else server.url_of


class Touch:
    """Unpickled, it makes the file `executed`."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    "codecs",
    [
        {"compressor": {"id": "pickle"}, "filters": None},
        {"compressor": None, "filters": [{"id": "pickle"}]},
        {"compressor": {"id": "pickle"}, "filters": [{"id": "shuffle"}]},
        {"compressor": {"id": "pickle"}, "filters": [{"id": "vlen-bytes"}]},
        {"dtype": "|O", "compressor": None, "filters": [{"id": "pickle"}]},
        [{"name": "bytes"}, {"name": "numcodecs.pickle"}],
        [{"name": "numcodecs.pickle"}],
    ],
    ids=str,
)
def test_no_volume_chooses_a_codec_that_executes_code(
    codecs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numcodecs has one that unpickles, and the metadata of a volume are a stranger's."""
    monkeypatch.chdir(tmp_path)
    name, key, document = ".zarray", "0.0.0", {"shape": [8, 8, 8], "fill_value": 0}
    if isinstance(codecs, dict):
        document |= {"zarr_format": 2, "chunks": [8, 8, 8], "dtype": "|u1", "order": "C"} | codecs
    else:
        grid = {"name": "regular", "configuration": {"chunk_shape": [8, 8, 8]}}
        document |= {"zarr_format": 3, "node_type": "array", "data_type": "uint8", "chunk_grid": grid, "codecs": codecs}
        document |= {"chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}}}
        name = "zarr.json"
    (tmp_path / name).write_text(json.dumps(document))
    (tmp_path / key).write_bytes(pickle.dumps(Touch()))
    with pytest.raises(DataError, match=rf"Cannot read the metadata {name}"):
        open_at(str(tmp_path)).read(((0, 0, 0), (8, 8, 8)))
    assert not (tmp_path / "executed").exists()


def open_at(address: str) -> Volume:
    return open_volume(address, FAST)


def write_v2(path: Path, **options: Any) -> None:
    array = zarr.create_array(str(path), shape=SHAPE, chunks=(8, 8, 8), dtype="uint8", zarr_format=2, **options)
    array[...] = VOXELS


def write_v3(path: Path, *codecs: Any, chunk: int = 8) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr: its v3 specification does not know numcodecs' codecs
        array = zarr.create(
            store=str(path), shape=SHAPE, dtype="uint8", chunk_shape=(chunk,) * 3, codecs=codecs, zarr_format=3
        )
        array[...] = VOXELS


def shards(*codecs: Any, chunk: int = 8, **index: Any) -> ShardingCodec:
    return ShardingCodec(chunk_shape=(chunk,) * 3, codecs=[BytesCodec(), *codecs], **index)


def numcodecs_of(name: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(zarr.codecs.numcodecs, name)(**options)


CHECKED: dict[str, Callable[[Path], None]] = {
    "v2 crc32": lambda path: write_v2(path, filters=[numcodecs.CRC32()], compressors=None),
    "v2 adler32 in zstd": lambda path: write_v2(path, filters=[numcodecs.Adler32()], compressors=numcodecs.Zstd(0)),
    "v2 fletcher32": lambda path: write_v2(path, filters=[numcodecs.Fletcher32()], compressors=None),
    "v2 zstd with its checksum": lambda path: write_v2(path, compressors=numcodecs.Zstd(1, checksum=True)),
    "v3 crc32c": lambda path: write_v3(path, BytesCodec(), Crc32cCodec()),
    "v3 crc32c outside of blosc": lambda path: write_v3(path, BytesCodec(), BloscCodec(clevel=0), Crc32cCodec()),
    "v3 numcodecs.crc32": lambda path: write_v3(path, BytesCodec(), numcodecs_of("CRC32")),
    "shards, crc32c": lambda path: write_v3(path, shards(Crc32cCodec()), chunk=16),
    "shards, crc32c inside of zstd": lambda path: write_v3(path, shards(Crc32cCodec(), ZstdCodec(level=1)), chunk=16),
    "shards, zstd with its checksum": lambda path: write_v3(path, shards(ZstdCodec(checksum=True)), chunk=16),
    "shards, gzip": lambda path: write_v3(path, shards(GzipCodec()), chunk=16),
    "shards, numcodecs.adler32": lambda path: write_v3(path, shards(numcodecs_of("Adler32")), chunk=16),
    "shards, index at the start": lambda path: write_v3(
        path, shards(Crc32cCodec(), index_location="start", index_codecs=[BytesCodec()]), chunk=16
    ),
}


def data_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith((".z", "zarr")))


@pytest.mark.sample(5)
@pytest.mark.parametrize(("layout", "remote"), [*((layout, False) for layout in CHECKED), ("shards, crc32c", True)])
def test_no_flipped_bit_becomes_a_wrong_voxel(tmp_path: Path, server: ChunkServer, layout: str, remote: bool) -> None:
    """Any bit of any object: of a chunk, its checksum, or an index with or without one."""
    address: Address = server.url_of if remote else str
    path = tmp_path / "v.zarr"
    CHECKED[layout](path)
    np.testing.assert_array_equal(open_at(address(path)).read(WHOLE), VOXELS)
    expected = VOXELS[2:15, 3:14, 4:13]
    refused = tried = 0
    rng = np.random.default_rng(0)
    for file in data_files(path)[:2]:
        sound = file.read_bytes()
        for at in rng.integers(len(sound), size=8).tolist():
            broken = bytearray(sound)
            broken[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(broken)
            for box, voxels in ((WHOLE, VOXELS), (PART, expected)):
                tried += 1
                try:
                    found = open_at(address(path)).read(box)
                except UnreadableChunkError:
                    refused += 1
                else:
                    np.testing.assert_array_equal(found, voxels, err_msg=f"byte {at} of {file.name}")
        file.write_bytes(sound)
    assert refused > 0.75 * tried, "nearly all of them are noticed"


@pytest.mark.sample(5)
@pytest.mark.parametrize("cut", [1, 500, 10**6])
@pytest.mark.parametrize("where", ["start", "end"])
def test_a_truncated_blosc_shard_gives_intact_chunks_or_none(
    tmp_path: Path, address: Address, where: str, cut: int
) -> None:
    path = tmp_path / "v.zarr"
    codec = shards(BloscCodec(cname="lz4", clevel=0), index_location=where, index_codecs=[BytesCodec()])
    write_v3(path, codec, chunk=16)
    (shard,) = data_files(path)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-cut])
    for box in (WHOLE, PART):
        with pytest.raises(UnreadableChunkError):
            open_at(address(path)).read(box)
    readable = 0
    for corner in np.ndindex(2, 2, 2):
        part = tuple(slice(8 * i, 8 * i + 8) for i in corner)
        try:
            voxels = open_at(address(path)).read((tuple(8 * i for i in corner), tuple(8 * i + 8 for i in corner)))
        except UnreadableChunkError:
            continue
        np.testing.assert_array_equal(voxels, VOXELS[part])
        readable += 1
    last = len(whole) - (len(whole) - 8 * 16) // 8  # start of the last of eight equal chunks
    most = 8 if where == "end" else sum(len(whole) - cut >= len(whole) - i * (len(whole) - last) for i in range(8))
    assert readable <= most
    if where == "start" and cut == 500:
        assert readable == 7, "only the chunk that is cut is lost"


ENTRIES = {
    "outside": (10**6, 100, "outside an object of|416 Range Not Satisfiable"),
    "no bytes": (200, 0, "0 bytes from byte 200"),
    "half absent": (2**64 - 1, 100, "bytes from byte 18446744073709551615"),
    "beyond all": (2**63, 2**63 + 7, "bytes from byte"),
}


@pytest.mark.parametrize("entry", [*ENTRIES, "index"])
@pytest.mark.parametrize("where", ["start", "end"])
def test_an_invalid_index_entry_damages_only_its_chunk(
    tmp_path: Path, address: Address, entry: str, where: str
) -> None:
    path = tmp_path / "v.zarr"
    write_v3(path, shards(index_location=where, index_codecs=[BytesCodec()]), chunk=16)
    (shard,) = data_files(path)
    data = bytearray(shard.read_bytes())
    index = 0 if where == "start" else len(data) - 128
    offset, size, words = ENTRIES.get(entry, (index, 512, "bytes" if where == "start" else "are its index"))
    if entry == "index" and where == "end":
        offset -= 448
    data[index + 80 : index + 96] = np.array([offset, size], "<u8").tobytes()
    shard.write_bytes(data)
    for box in (WHOLE, PART):
        with pytest.raises(UnreadableChunkError, match=words) as caught:
            open_at(address(path)).read(box)
        assert caught.value.box == ((8, 0, 8), (16, 8, 16))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("promise", [0, 2**20])
def test_a_blosc_frame_with_a_wrong_size_is_damaged(tmp_path: Path, sharded: bool, promise: int) -> None:
    path, codec = tmp_path / "v.zarr", BloscCodec(cname="lz4", clevel=0)
    if sharded:
        write_v3(path, shards(codec), chunk=16)
    else:
        write_v3(path, BytesCodec(), codec)
    file = data_files(path)[0]
    data = bytearray(file.read_bytes())
    data[4:8] = promise.to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(UnreadableChunkError, match=f"the chunk decodes to {promise} bytes"):
        open_at(str(path)).read(PART)


# ---- codecs in any order


@dataclass(frozen=True)
class Inverted(BytesBytesCodec):
    """A codec of another package, unknown to numcodecs."""

    @classmethod
    def from_dict(cls, data: Any) -> Inverted:
        return cls()

    def to_dict(self) -> Any:
        return {"name": "tests.inverted"}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        return input_byte_length

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        return type(chunk_data).from_bytes(bytes(255 - byte for byte in chunk_data.to_bytes()))

    async def _encode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        return await self._decode_single(chunk_data, chunk_spec)


BIG, LITTLE = BytesCodec(endian="big"), BytesCodec(endian="little")
TRANSPOSED = (TransposeCodec(order=(1, 2, 0)), TransposeCodec(order=(0, 2, 1)))
CHAINS: dict[str, tuple[str, Callable[[], tuple[Any, ...]]]] = {
    "transposed, crc32c in blosc in gzip": (
        "int16", lambda: (*TRANSPOSED, BIG, Crc32cCodec(), BloscCodec(), GzipCodec())
    ),
    "a filter": ("int16", lambda: (numcodecs_of("Delta", dtype="<i2"), LITTLE, BloscCodec())),
    "a filter of transposed voxels": ("int16", lambda: (*TRANSPOSED, numcodecs_of("Delta", dtype="<i2"), LITTLE)),
    "a filter to another dtype": (
        "float32",
        lambda: (
            numcodecs_of("FixedScaleOffset", dtype="<f4", astype="<u2", scale=1, offset=0),
            LITTLE, numcodecs_of("Shuffle"), numcodecs_of("LZ4"),
        ),
    ),
    "a codec from elsewhere in zstd": ("uint16", lambda: (*TRANSPOSED, BIG, Inverted(), ZstdCodec())),
    "zstd in a codec from elsewhere": ("uint16", lambda: (BIG, ZstdCodec(), Inverted())),
}  # fmt: skip


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
def test_codecs_in_any_order_decode_what_zarr_wrote(tmp_path: Path, chain: str, sharded: bool) -> None:
    register_codec("tests.inverted", Inverted)
    dtype, codecs = CHAINS[chain][0], list(CHAINS[chain][1]())
    shape, chunk = (8, 12, 20), (4, 6, 10)  # no two axes alike
    voxels = np.random.default_rng(0).integers(0, 1000, shape).astype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        codecs = [ShardingCodec(chunk_shape=chunk, codecs=codecs)] if sharded else codecs
        array = zarr.create(
            store=str(tmp_path / "v.zarr"), shape=shape, dtype=dtype, chunk_shape=shape if sharded else chunk,
            codecs=codecs, zarr_format=3,
        )  # fmt: skip
        array[...] = voxels
    np.testing.assert_array_equal(open_at(str(tmp_path / "v.zarr")).read(((0, 0, 0), shape)), voxels)
