"""The requests for a box: exactly the chunks that zarr itself requests from a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, RangeByteRequest
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec
from zarr.storage import LocalStore

from tests.conftest import textured
from tests.support.chunk_server import ChunkServer
from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.box import Box
from vesuvius.volumes.chunks import ChunkGrid, Request
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.geometry import Axes
from vesuvius.volumes.occupancy import list_chunks
from vesuvius.volumes.store.objects import ByteRange
from vesuvius.volumes.store.source import Source
from vesuvius.volumes.volume import open_volume


class Recorder(LocalStore):
    """A store that records zarr's requests."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, read_only=True)
        self.asked: list[Request] = []

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if byte_range is None or isinstance(byte_range, RangeByteRequest):
            self.asked.append((key, byte_range and ByteRange(byte_range.start, byte_range.end)))
        return await super().get(key, prototype, byte_range)


ZYX = Axes((0, 1, 2))


def asked_by_zarr(path: Path, name: str, axes: Axes, box: Box) -> Counter[Request]:
    """zarr-python's requests for a box, without the indices of shards."""
    recorder = Recorder(path)
    with zarr.config.set({"array.sharding_coalesce_max_bytes": 0}):  # one request per chunk, as before zarr 3.3
        array = zarr.open_array(recorder, path=name, mode="r")
        recorder.asked.clear()
        array[axes.stored([slice(*pair) for pair in zip(*box, strict=True)], axes.select)]
    index = grid_of(path, name, axes).index_range
    return Counter(request for request in recorder.asked if index is None or request[1] != index)


def grid_of(path: Path, name: str = "", axes: Axes = ZYX) -> ChunkGrid:
    array = zarr.open_array(LocalStore(str(path), read_only=True), path=name, mode="r")
    return ChunkGrid(array, axes, Source(str(path), StoreConfig()))


@dataclass(frozen=True)
class Layout:
    """A stored array, and a box in it.

    Attributes:
        others: axes other than z, y, x: size, chunk, chunks per shard and the index that is read.
        zyx: where z, y and x are among all axes.
        holes: chunks of zyx that are not stored.
    """

    options: dict[str, Any]
    name: str
    others: tuple[tuple[int, int, int, int], ...]
    zyx: tuple[int, int, int]
    shape: tuple[int, int, int]
    chunk: tuple[int, int, int]
    per_shard: tuple[int, int, int] | None
    box: Box
    holes: frozenset[tuple[int, int, int]]

    @property
    def axes(self) -> Axes:
        return self.at(tuple(index for *_, index in self.others))

    def at(self, select: tuple[int, ...]) -> Axes:
        return Axes(self.zyx, select)

    def write(self, path: Path) -> None:
        """Write the array: ones, with zeros (which zarr does not store) in the holes."""
        sizes, chunks, per_shard, _ = zip(*self.others, strict=True) if self.others else ((),) * 4
        voxels = np.ones(self.axes.stored(self.shape, sizes), np.uint8)
        everywhere = [slice(None)] * len(sizes)
        for hole in self.holes:
            part = [slice(i * c, (i + 1) * c) for i, c in zip(hole, self.chunk, strict=True)]
            voxels[self.axes.stored(part, everywhere)] = 0
        stored_chunks, shards = self.axes.stored(self.chunk, chunks), None
        if self.per_shard:
            counts = self.axes.stored(self.per_shard, per_shard)
            shards = tuple(c * n for c, n in zip(stored_chunks, counts, strict=True))
        array = zarr.create_array(
            str(path),
            name=self.name or None,
            shape=voxels.shape,
            dtype="uint8",
            chunks=stored_chunks,
            shards=shards,
            fill_value=0,
            **self.options,
        )
        array[...] = voxels


ENCODINGS: list[dict[str, Any]] = [
    {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "."}},
    {"zarr_format": 3},
    {"zarr_format": 3, "chunk_key_encoding": {"name": "default", "separator": "."}},
    {"zarr_format": 3, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    options = draw(st.sampled_from(ENCODINGS))
    sharded = options["zarr_format"] == 3 and draw(st.booleans())
    others = []
    for _ in range(draw(st.integers(0, 2))):
        size = draw(st.integers(1, 3))
        others.append((size, draw(st.integers(1, size)), draw(st.integers(1, 2)), draw(st.integers(0, size - 1))))
    axes = []
    for _ in range(3):
        size = draw(st.integers(1, 9))
        start = draw(st.integers(0, size - 1))
        axes.append((size, draw(st.integers(1, 4)), draw(st.integers(1, 3)), start, draw(st.integers(start + 1, size))))
    shape, chunk, per_shard, start, stop = zip(*axes, strict=True)
    counts = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
    holes = draw(st.sets(st.tuples(*(st.integers(0, n - 1) for n in counts)), max_size=6))
    name = draw(st.sampled_from(["", "0", "a/1"]))
    shards = per_shard if sharded else None
    zyx = tuple(draw(st.permutations(range(3 + len(others))))[:3])
    return Layout(options, name, tuple(others), zyx, shape, chunk, shards, (start, stop), frozenset(holes))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts())
def test_the_grid_requests_what_zarr_requests(tmp_path_factory: pytest.TempPathFactory, layout: Layout) -> None:
    path = tmp_path_factory.mktemp("v")
    layout.write(path)
    grid = grid_of(path, layout.name, layout.axes)
    expected = asked_by_zarr(path, layout.name, layout.axes, layout.box)
    assert Counter(grid.requests(layout.box)) == expected
    assert Counter(grid.requests(layout.box)) == expected, "the same again, from the indices that it keeps"
    within = set(grid.chunks_of(layout.box))
    assert set(grid.absent(layout.box)) == within & layout.holes
    if not layout.holes:
        assert grid.count_requests(layout.box)[:2] == (len(within), expected.total())


# ---- the index of a shard

CHECKED = (BytesCodec(), Crc32cCodec())
INDICES: dict[str, dict[str, Any]] = {
    "end": {"index_codecs": CHECKED},
    "start": {"index_codecs": CHECKED, "index_location": "start"},
    "unchecked": {"index_codecs": (BytesCodec(),)},
    "unchecked at the start": {"index_codecs": (BytesCodec(),), "index_location": "start"},
    "big-endian": {"index_codecs": (BytesCodec(endian="big"), Crc32cCodec())},
    "big-endian, unchecked, at the start": {"index_codecs": (BytesCodec(endian="big"),), "index_location": "start"},
}
SHAPE = (32, 32, 32)
CORNER: Box = ((0, 0, 0), (8, 8, 8))


def write_sharded(path: Path, **index: Any) -> Path:
    """One shard of 4x4x4 chunks, those at z = 3 absent."""
    codec = ShardingCodec(chunk_shape=(8, 8, 8), codecs=[BytesCodec(), ZstdCodec(level=1)], **index)
    voxels = textured(SHAPE)
    voxels[24:] = 0
    array = zarr.create(store=str(path), shape=SHAPE, dtype="uint8", chunk_shape=SHAPE, codecs=[codec], zarr_format=3)
    array[...] = voxels
    return path


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "flipped": (lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:], "checksum"),
    "shortened": (lambda data: data[-100:], "has 100 bytes instead of 1028"),
}


@pytest.mark.parametrize(("damage", "where"), [("flipped", "end"), ("shortened", "big-endian")])
def test_a_damaged_index_makes_its_region_unreadable(
    server: ChunkServer, tmp_path: Path, damage: str, where: str
) -> None:
    change, words = DAMAGES[damage]
    path = write_sharded(tmp_path / "v.zarr", **INDICES[where])
    shard = path / "c/0/0/0"
    whole = shard.read_bytes()
    shard.write_bytes(change(whole))
    grid = grid_of(path)
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            grid.shard_index("c/0/0/0")
    for address in (str(path), server.url_of(path)):
        volume = open_volume(address)
        with pytest.raises(
            UnreadableChunkError, match=r"chunk \[0, 0, 0\] of volume .*v\.zarr, region z 0:8, y 0:8, x 0:8: "
        ):
            volume.read(CORNER)
    shard.write_bytes(whole)
    np.testing.assert_array_equal(volume.read(CORNER), textured(SHAPE)[:8, :8, :8])


@pytest.mark.parametrize(("where", "remote"), [*((where, False) for where in INDICES), ("end", True), ("start", True)])
def test_a_complete_volume_is_read_with_every_index_format(
    server: ChunkServer, tmp_path: Path, where: str, remote: bool
) -> None:
    path = write_sharded(tmp_path / "v.zarr", **INDICES[where])
    address = server.url_of(path) if remote else str(path)
    volume = open_volume(address, missing_chunk="error")
    stored = ((3, 0, 0), (24, 20, 32))
    listed = np.broadcast_to(np.arange(4)[:, None, None] < 3, (4, 4, 4))
    np.testing.assert_array_equal(list_chunks(open_volume(path)), listed)
    volume.stage(stored)
    np.testing.assert_array_equal(volume.read(stored), textured(SHAPE)[3:24, :20])
    with pytest.raises(DataError, match=r"Chunk \[3, 0, 0\] of volume .*v\.zarr is absent"):
        volume.read(((0, 0, 0), SHAPE))


def test_an_index_is_read_once_and_again_after_forget(tmp_path: Path) -> None:
    grid = grid_of(write_sharded(tmp_path / "v.zarr"))
    for _ in range(3):
        grid.shard_index("c/0/0/0")
    assert grid.source.stats.requests == 1
    grid.forget(CORNER)
    grid.shard_index("c/0/0/0")
    assert grid.source.stats.requests == 2
