"""Remote volumes: the bytes of the disk, each chunk asked for once; faults that pass cost time and nothing else."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.stream.test_stream import collect, make_job, open_stream
from tests.support.chunk_server import ChunkServer
from tests.support.rank_runs import ends_of, output_of, started_ranks
from tests.volumes.test_volume import LAYOUTS
from vesuvius.config import StoreConfig, VolumeConfig
from vesuvius.stream.reading.reader_stats import ReaderTotals
from vesuvius.volumes.errors import ClosedError
from vesuvius.volumes.volume import open_volume

SHAPE = (96, 128, 128)
FAST = StoreConfig()
CHUNK_KEYS = r"\.zarr/(c/)?\d"


def batches_of(address: Path | str, count: int = 16, **data: Any) -> tuple[bytes, ReaderTotals]:
    """The patches of the first batches, read in this process; nothing may go into quarantine meanwhile."""
    with open_stream(make_job(address, **data), stop=4 * count) as stream:
        patches, _ = collect(stream, count)
        assert not stream.events
        return patches.tobytes(), stream.reader_totals


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_over_http_equal_those_from_disk(server: ChunkServer, tmp_path: Path, layout: str) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS[layout])
    expected, _ = batches_of(path)
    server.set_faults([{"path": CHUNK_KEYS, "kind": "delay", "delay_s": 0.01}])
    patches, figures = batches_of(server.url_of(path), store=FAST)
    assert patches == expected
    assert server.stats()["max_in_flight"] > 4, "chunks are asked for at once, not one after the other"
    asked = server.reads_of(path)
    reads = sum(count for key, count in asked.items() if not key.startswith(".z")) - asked["zarr.json"]
    assert figures.requests == reads
    assert figures.retries == 0
    assert figures.read_s is not None
    if "sharded" not in layout:
        assert figures.bytes_fetched == sum(
            (path / key).stat().st_size * asked[key] for key in asked if key[0] not in ".z"
        )


# A box of 2x2x3 chunks; of the shards of 2x2x2 it covers the second and half of the first.
BOX = ((0, 0, 32), (64, 64, 128))
V2_KEYS = {f"{z}/{y}/{x}": 1 for z in (0, 1) for y in (0, 1) for x in (1, 2, 3)}
KEYS = {
    "v2": V2_KEYS,
    "v2-raw": V2_KEYS,
    "v2-dots": {key.replace("/", "."): 1 for key in V2_KEYS},
    "v3": {f"c/{key}": 1 for key in V2_KEYS},
    "v3-sharded": {"c/0/0/0": 4, "c/0/0/1": 1},
}


@pytest.mark.parametrize(
    ("layout", "staged"), [*((name, True) for name in LAYOUTS), ("v2", False), ("v3-sharded", False)]
)
def test_each_chunk_of_a_region_is_fetched_once(server: ChunkServer, tmp_path: Path, layout: str, staged: bool) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS[layout])
    volume = open_volume(VolumeConfig(path=server.url_of(path)))
    volume.read(((0, 0, 0), (1, 1, 1)))  # with the index of the shard
    for _ in range(2):
        server.reset()
        if staged:
            volume.stage(BOX)
        np.testing.assert_array_equal(volume.read(BOX), textured(SHAPE)[:64, :64, 32:])
        assert server.asked_for(path) == KEYS[layout]
    volume.close()


def test_regions_staged_together_fetch_shared_chunks_once(server: ChunkServer, tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    volume = open_volume(VolumeConfig(path=server.url_of(path)))
    boxes = [((0, 0, x), (32, 32, x + 64)) for x in (0, 32, 64)]
    server.reset()
    for box in boxes:
        volume.stage(box)
    for (_, _, x), stop in boxes:
        np.testing.assert_array_equal(volume.read(((0, 0, x), stop)), textured(SHAPE)[:32, :32, x : x + 64])
    assert server.asked_for(path) == {f"0/0/{x}": 1 for x in range(4)}
    volume.read(boxes[0])
    assert server.asked_for(path)["0/0/0"] == 2, "bytes are held no longer than regions wait for them"


def test_a_region_whose_staging_is_slow_still_shares_the_chunks_of_one_read_before(
    server: ChunkServer, tmp_path: Path
) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS["v3-sharded"])
    volume = open_volume(VolumeConfig(path=server.url_of(path)))
    server.reset()
    server.set_faults([{"path": "c/0/0/1", "kind": "delay", "delay_s": 0.5}])
    boxes = [((0, 0, x), (32, 32, x + 64)) for x in (0, 32)]
    for box in boxes:
        volume.stage(box)
    for box in boxes:
        volume.read(box)
    assert server.asked_for(path)["c/0/0/0"] == 3, "the index, and one request for each chunk"
    volume.close()


RANK = """
import os, sys
from dataclasses import replace
from tests.stream.test_stream import make_job
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading import reader
from vesuvius.stream.stream import PatchStream
reader.STAGED_BYTES_MAX = 0  # else regions that wait together share chunks
job = replace(make_job(sys.argv[1]), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
with PatchStream(job, StreamOptions(4, 1), stop=320) as stream:
    print("read", [index for batch in stream for index in batch.indices.tolist()], flush=True)
"""


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 4])
def test_ranks_ask_for_each_chunk_as_often_as_regions_hold_it(server: ChunkServer, tmp_path: Path, world: int) -> None:
    """Counted by the server: no region is read by two ranks."""
    path, expected = write_array(tmp_path / "v.zarr", textured(SHAPE)), Counter[str]()
    plan = make_job(path).plan
    for slot in {plan.mixing.slot_of(index) for index in range(320)}:
        ends = zip(*plan.visit(slot).region, strict=True)
        expected.update(
            "/".join(map(str, index))
            for index in itertools.product(*(range(lo // 32, -(-hi // 32)) for lo, hi in ends))
        )
    server.reset()
    with started_ranks(None, tmp_path, world, program=("-c", RANK, server.url_of(path))) as ranks:
        assert ends_of(ranks) == [0] * world, output_of(tmp_path, world)
    samples = [json.loads(line) for line in re.findall(r"^read (.*)$", output_of(tmp_path, world), re.MULTILINE)]
    assert samples == [[*range(rank, 320, world)] for rank in range(world)]
    assert {key: count for key, count in server.reads_of(path).items() if key[0].isdigit()} == expected


FAULTS: dict[str, dict[str, Any]] = {
    "unavailable": {"path": ".", "kind": "status", "status": 503, "every": 2},
    "reset": {"path": ".", "kind": "reset", "every": 3},
    "truncated": {"path": ".", "kind": "truncate", "every": 3},
    "stalled": {"path": CHUNK_KEYS, "kind": "stall", "every": 9},
    "corrupt": {"path": CHUNK_KEYS, "kind": "corrupt", "times": 1},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize(("fault", "layout"), [*((fault, "v2") for fault in FAULTS), ("corrupt", "v3-sharded")])
def test_a_transient_error_changes_no_byte_and_is_counted(
    server: ChunkServer, tmp_path: Path, fault: str, layout: str
) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS[layout])
    expected, _ = batches_of(path)
    server.set_faults([FAULTS[fault]])
    store = StoreConfig(outage_minutes=0.02) if fault == "stalled" else FAST  # a timeout of 0.6 s
    patches, figures = batches_of(server.url_of(path), store=store)
    assert patches == expected
    assert server.stats()["faults"][FAULTS[fault]["kind"]] > 0
    assert figures.retries > 0


@pytest.mark.parametrize("staged", [True, False])
def test_closing_a_volume_during_a_read_does_not_make_it_unreadable(
    server: ChunkServer, tmp_path: Path, staged: bool
) -> None:
    """Of 36 chunks 4 are under way and the others wait when the stream that reads them is closed."""
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    volume = open_volume(VolumeConfig(path=server.url_of(path)), StoreConfig(requests=4))
    server.set_faults([{"path": CHUNK_KEYS, "kind": "delay", "delay_s": 0.2}])
    box = ((0, 0, 0), (96, 128, 96))
    if staged:
        volume.stage(box)
    closing = threading.Timer(0.1, volume.close)
    closing.start()
    started = time.monotonic()
    with pytest.raises(ClosedError):
        volume.read(box)
    assert time.monotonic() - started < 1, "no longer than what was under way"


# ---- the disk cache


def cached(directory: Path, mib: float = 64) -> StoreConfig:
    return FAST.model_copy(update={"cache_dir": str(directory), "cache_gib": mib / 1024})


@pytest.mark.long
@pytest.mark.parametrize("layout", ["v2", "v3-sharded"])
def test_a_second_stream_reads_from_the_disk_cache(server: ChunkServer, tmp_path: Path, layout: str) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS[layout])
    expected, _ = batches_of(path)
    url, store = server.url_of(path), cached(tmp_path / "cache")
    patches, figures = batches_of(url, store=store)
    assert patches == expected
    assert figures.cache_misses > 0
    chunks = {key for key in server.reads_of(path) if key[0] not in ".z"}
    server.reset()
    patches, figures = batches_of(url, store=store)
    assert patches == expected
    assert not [key for key in server.reads_of(path) if key[0] not in ".z"], "metadata only"
    assert (figures.bytes_fetched, figures.cache_misses) == (0, 0)
    assert figures.cache_hits >= len(chunks), "each is looked at, once by each region that it lies in"


# The layout, what is read while all is well, and what is read when the fault comes.
CORRUPT_ONCE = {
    "chunk": ("v2", None, ((0, 0, 0), (32, 32, 32))),
    "chunk of a shard": ("v3-sharded", ((32, 0, 0), (64, 32, 32)), ((0, 0, 0), (32, 32, 32))),
    "index": ("v3-sharded", None, ((0, 0, 0), (32, 32, 32))),
    "shard": ("v3-sharded", None, ((0, 0, 0), (64, 64, 64))),
}


@pytest.mark.parametrize(("what", "cache"), [*((what, True) for what in CORRUPT_ONCE), ("index", False)])
def test_corrupt_chunks_are_fetched_again_counted_and_leave_the_cache(
    server: ChunkServer, tmp_path: Path, what: str, cache: bool
) -> None:
    layout, first, box = CORRUPT_ONCE[what]
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS[layout])
    spec, store = VolumeConfig(path=server.url_of(path)), cached(tmp_path / "cache") if cache else FAST
    volume = open_volume(spec, store)
    if first:
        volume.read(first)
    server.set_faults([{"path": CHUNK_KEYS, "kind": "corrupt", "times": 1}])
    expected = textured(SHAPE)[tuple(slice(*pair) for pair in zip(*box, strict=True))]
    np.testing.assert_array_equal(volume.read(box), expected)
    chunks = 8 if what == "shard" else 1  # of a shard that was read whole each chunk is fetched again
    assert (volume.source.stats.retries, server.stats()["faults"]["corrupt"]) == (chunks, 1)
    again = open_volume(spec, store)
    np.testing.assert_array_equal(again.read(box), expected)
    assert again.source.stats.retries == 0


# ---- how often, and how many at once


SHARDED = {"zarr_format": 3, "chunks": (16, 16, 16), "shards": (32, 32, 32)}
INNER = ((16, 16, 16), (80, 80, 80))  # 64 chunks, in 27 shards, of which it covers one of 8 chunks


def write_shards(path: Path) -> Path:
    array = zarr.create_array(str(path), shape=(96, 96, 96), dtype="uint8", fill_value=0, **SHARDED)  # type: ignore[arg-type]
    array[:] = textured((96, 96, 96))
    return path


@pytest.mark.parametrize("missing_chunk", ["air", "error"])
def test_shard_indices_of_a_region_are_fetched_concurrently_and_once(
    server: ChunkServer, tmp_path: Path, missing_chunk: Literal["air", "error"]
) -> None:
    path = write_shards(tmp_path / "v.zarr")
    volume = open_volume(VolumeConfig(path=server.url_of(path)), StoreConfig(requests=32), missing_chunk)
    server.set_faults([{"path": "/c/", "kind": "delay", "delay_s": 0.4}])
    server.reset()
    volume.grid.requests(INNER)
    assert server.stats()["max_in_flight"] > 16, "of 26; 16 by default"
    assert sorted(server.asked_for(path).values()) == [1] * 26
    server.set_faults([])
    for _ in range(2):
        np.testing.assert_array_equal(volume.read(INNER), textured((96, 96, 96))[16:80, 16:80, 16:80])
    of_whole = 1 if missing_chunk == "error" else 0
    assert sum(server.asked_for(path).values()) <= 26 + of_whole + 2 * (64 - 8 + 1), "an index once"
    volume.close()
