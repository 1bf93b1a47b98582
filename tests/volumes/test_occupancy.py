"""Sidecars, listings, coarse levels and masks, compared with the voxels themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import STORED_AIR, textured, write_array, write_ome
from tests.stream.test_stream import collect, open_stream
from tests.support.chunk_server import ChunkServer
from tests.volumes.test_volume import LAYOUTS
from vesuvius.config import ArrayConfig, DataConfig, ForegroundConfig, MaskConfig, StoreConfig, Triple, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.volumes import occupancy
from vesuvius.volumes.occupancy import SIDECAR, chunk_occupancy, coarse_maps, foreground_map, list_chunks, write_sidecar
from vesuvius.volumes.volume import Volume, open_volume

Voxels = np.ndarray[Any, Any]

FAST = StoreConfig(outage_minutes=0.01)
SHAPE = (96, 128, 70)  # 3x4x3 chunks of 32, the last along x cut
GRID = (3, 4, 3)


def opened(address: Path | str, **options: Any) -> Volume:
    return open_volume(address, FAST, **options)


def some_chunks(seed: int = 0) -> Voxels:
    """A grid of chunks, a third of them absent."""
    found: Voxels = np.random.default_rng(seed).random(GRID) < 0.66
    assert 0 < found.sum() < found.size
    return found


def voxels_of(chunks: Voxels, shape: tuple[int, ...] = SHAPE) -> Voxels:
    """Texture in the given chunks, 0 elsewhere, which zarr does not store."""
    mask = chunks
    for axis in range(3):
        mask = np.repeat(mask, 32, axis).take(range(shape[axis]), axis)
    return np.where(mask, textured(shape), 0).astype(np.uint8)


# ---- listings


@pytest.mark.parametrize(("layout", "separator"), [("v2", "/"), ("v2", "."), ("v3", "."), ("v3-sharded", "/")])
def test_a_listing_finds_exactly_the_stored_chunks(tmp_path: Path, layout: str, separator: str) -> None:
    name = {"v2": "v2", "v3": "default", "v3-sharded": "default"}[layout]
    options = LAYOUTS[layout] | {"chunk_key_encoding": {"name": name, "separator": separator}}
    path = tmp_path / "v.zarr"
    for seed in (0, 1):  # a program that caches listings fails at the second state
        shutil.rmtree(path, ignore_errors=True)
        write_array(path, voxels_of(some_chunks(seed)), **options)
        for stray in ("7/7/7", "7.7.7", "c/9/0/0", "0/0/0.partial", "notes/0/0/0"):
            (path / stray).parent.mkdir(parents=True, exist_ok=True)
            (path / stray).write_bytes(b"stray")
        np.testing.assert_array_equal(chunk_occupancy(opened(path)), some_chunks(seed))


def test_no_patch_comes_from_a_shard_with_a_damaged_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Readers do not get it as a list of absent chunks: after a repair, its chunks would count as gone."""
    path = write_array(tmp_path / "v.zarr", voxels_of(some_chunks()), **LAYOUTS["v3-sharded"])
    shard = path / "c/0/0/0"
    sound = shard.read_bytes()
    shard.write_bytes(sound[:-2] + b"no")
    expected = some_chunks()
    expected[:2, :2, :2] = False
    refused = r"Cannot read the index of c/0/0/0: .* in .*v.zarr.*; restore them"
    with pytest.raises(DataError, match=refused):
        list_chunks(opened(path))
    with pytest.raises(DataError, match=refused):
        prepare_data(0, data_config(path, min_foreground=0.5, max_quarantined=0))
    np.testing.assert_array_equal(chunk_occupancy(opened(path), max_damaged=1), expected)
    assert "Cannot read the index of c/0/0/0:" in caplog.text
    job = prepare_data(0, data_config(path, min_foreground=0.5)).job
    with open_stream(job) as stream:
        collect(stream, 6)
        shard.write_bytes(sound)
        reached_before = {tuple(record["chunk"]) for record in stream.quarantined}
        collect(stream, 60)
        assert len(stream.quarantined) == len(reached_before)
    np.testing.assert_array_equal(chunk_occupancy(opened(path)), some_chunks())


def test_a_reader_takes_an_absent_chunk_for_damage_if_it_was_listed(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", voxels_of(some_chunks()))
    job = prepare_data(0, data_config(path, min_foreground=0.1)).job
    gone = tuple(map(int, np.argwhere(some_chunks())[0]))
    path.joinpath(*map(str, gone)).unlink()
    with open_stream(job) as stream:
        collect(stream, 60)
    causes = [(tuple(record["chunk"]), record["cause"]) for record in stream.quarantined]
    assert causes == [(gone, "it is listed, but is now missing")]


# ---- sidecars


def put_sidecar(path: Path, chunks: Any, name: str = "occupancy", **more: Any) -> None:
    with (path / SIDECAR).open("wb") as out:
        np.savez_compressed(out, **{name: chunks}, **more)


def test_a_sidecar_is_found_next_to_its_level(tmp_path: Path) -> None:
    path = write_ome(tmp_path / "v.zarr", {"0": textured(SHAPE), "1": textured(SHAPE)})
    put_sidecar(path / "1", some_chunks())
    for level, expected in ((0, np.ones(GRID, bool)), (1, some_chunks())):
        volume = open_volume(ArrayConfig(path=str(path), level=level))
        np.testing.assert_array_equal(chunk_occupancy(volume), expected)


def test_a_sidecar_may_list_shards(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS["v3-sharded"])
    shards = np.array([[[1, 1], [0, 1]], [[1, 0], [1, 1]]], bool)
    put_sidecar(path, shards)
    config = data_config(path, min_foreground=0.5)
    found = foreground_map(opened(path), config.volumes[0], config)
    assert found is not None
    assert found.stored((32, 32, 32)) is None, "of a stored shard any chunk may be absent"
    np.testing.assert_array_equal(found.fraction, 255 * shards)
    assert found.cell_zyx == (64, 64, 64)


BAD_SIDECARS: dict[str, tuple[Callable[[Path], None], str]] = {
    "other shape": (
        lambda path: put_sidecar(path, np.ones((3, 4, 4), bool)),
        r"has bool \(3, 4, 4\) instead of bool over the chunk grid \(3, 4, 3\)",
    ),
    "counts": (lambda path: put_sidecar(path, np.ones(GRID, int)), r"has int64 \(3, 4, 3\)"),
    "objects": (lambda path: put_sidecar(path, np.array([None])), "is not an npz with `occupancy`"),
    "other name": (lambda path: put_sidecar(path, np.ones(GRID, bool), "chunks"), "is not an npz with `occupancy`"),
    "empty": (lambda path: (path / SIDECAR).write_bytes(b""), "is not an npz with `occupancy`"),
    "of another array": (
        lambda path: put_sidecar(path, some_chunks(), signature=np.array("vesuvius:0123")),
        "belongs to another array: its signature is vesuvius:0123",
    ),
    "nothing": (lambda path: put_sidecar(path, np.zeros(GRID, bool)), "lists no chunk, but some are stored"),
}


@pytest.mark.parametrize("bad", BAD_SIDECARS)
def test_a_sidecar_of_another_volume_is_refused(tmp_path: Path, bad: str) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    write, words = BAD_SIDECARS[bad]
    write(path)
    with pytest.raises(DataError, match=rf"The sidecar .*v\.zarr .*{words}.*; rebuild it with"):
        chunk_occupancy(opened(path))


@pytest.mark.parametrize(("layout", "remote"), [("v2", True), ("v3-sharded", False)])
def test_a_sidecar_from_before_the_volume_grew_is_refused(
    server: ChunkServer, tmp_path: Path, layout: str, remote: bool
) -> None:
    """A sidecar made by hand may omit chunks; one of ours lists what was stored, and is out of date."""
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS[layout])
    half = np.ones(GRID, bool)
    half[:, :, 2:] = False
    address = server.url_of(path) if remote else path
    put_sidecar(path, half)
    np.testing.assert_array_equal(chunk_occupancy(opened(address)), half)
    write_sidecar(path / SIDECAR, opened(path), half)
    with pytest.raises(DataError, match=r"is out of date: \S+ is stored but not listed; rebuild it with"):
        chunk_occupancy(opened(address))


def test_a_plan_on_a_web_server_needs_a_sidecar(server: ChunkServer, tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured((96, 128, 128)))
    config = data_config(server.url_of(path), min_foreground=0.5)
    with pytest.raises(DataError, match=r"Cannot list the chunks of http.* put a `\.chunk_occupancy\.npz` next to"):
        prepare_data(0, config)
    put_sidecar(path, np.ones((3, 4, 4), bool))
    assert prepare_data(0, config).plan.volumes[0].foreground is not None


# ---- coarse levels and masks


def counted_by_hand(coarse: Voxels, threshold: float, merged: tuple[int, ...]) -> Voxels:
    """Share of each cell of `merged` coarse voxels above the threshold, in 255ths, rounded up."""
    counts = [-(-size // m) for size, m in zip(coarse.shape, merged, strict=True)]
    shares = np.zeros(counts, np.uint8)
    for cell in np.ndindex(*counts):
        part = coarse[tuple(slice(i * m, (i + 1) * m) for i, m in zip(cell, merged, strict=True))]
        shares[cell] = -(-255 * int((part > threshold).sum()) // part.size)
    return shares


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(*[st.integers(5, 30)] * 3),
    factor=st.sampled_from([1, 2, 4]),
    floor=st.booleans(),
    patch=st.tuples(*[st.integers(1, 20)] * 3),
    threshold=st.integers(0, 150),
    seed=st.integers(0, 9),
)
def test_a_coarse_map_is_the_share_of_voxels_above_the_threshold(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    factor: int,
    floor: bool,
    patch: tuple[int, int, int],
    threshold: int,
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("v")
    shape = tuple(factor * size - (factor - 1 if not floor else 1 - factor) for size in sizes)
    coarse = textured(sizes, seed=seed)
    monkeypatch.setattr(occupancy, "_BLOCK_BYTES", 8**3)  # many blocks, not one
    fine = zarr.create_array(str(path / "fine"), shape=shape, dtype="uint8", chunks=(32, 32, 32), fill_value=0)
    fine[0, 0, 0] = 1  # a volume of one chunk
    voxels = opened(write_array(path / "coarse", coarse, 7))
    (found,) = coarse_maps(opened(path / "fine"), voxels, [lambda v: v > threshold], patch)
    merged = tuple(max(p // (4 * factor), 1) for p in patch)
    assert found.cell_zyx == tuple(m * factor for m in merged)
    expected = counted_by_hand(coarse, threshold, merged)
    covered = found.fraction[tuple(slice(n) for n in expected.shape)]
    np.testing.assert_array_equal(covered, expected)
    assert found.fraction.sum() == covered.sum(), "what the coarse array leaves out at the end is background"


# ---- patches with enough foreground


def data_config(path: Path | str, **options: Any) -> DataConfig:
    mask = options.pop("mask", None)
    settings: dict[str, Any] = {"patch_size": (8, 16, 16), "patches_per_region": 4}
    return DataConfig(volumes=(VolumeConfig(path=str(path), mask=mask),), store=FAST, **(settings | options))


def blob(shape: tuple[int, int, int]) -> Voxels:
    """A ragged body in the middle of half the volume, 0 and 1."""
    z, y, x = (
        np.linspace(-1, 1, size).reshape([-1 if a == axis else 1 for a in range(3)]) for axis, size in enumerate(shape)
    )
    wobble = 0.15 * np.sin(9 * z + 7 * x) * np.cos(8 * y)
    return ((z + 0.4) ** 2 / 0.3 + y**2 / 0.4 + (x - 0.3) ** 2 / 0.2 + wobble < 1).astype(np.uint8)


def shares_of(prepared: PreparedData, voxels: Voxels, mask: Voxels, batches: int) -> list[float]:
    """Foreground share of each delivered patch, by counting its voxels in the mask."""
    size = prepared.plan.patch_zyx
    with open_stream(prepared.job) as stream:
        patches, indices = collect(stream, batches)
    shares = []
    for patch, index in zip(patches, indices, strict=True):
        part = tuple(slice(s, s + p) for s, p in zip(prepared.plan.sample(int(index)).start_zyx, size, strict=True))
        np.testing.assert_array_equal(patch, voxels[part])
        shares.append(float(mask[part].mean()))
    return shares


def qualifying_by_counting(prepared: PreparedData, mask: Voxels, least: float) -> set[tuple[int, ...]]:
    """Starts in the training box whose patch contains enough foreground."""
    size = prepared.plan.patch_zyx
    total = np.pad(mask.astype(np.int64).cumsum(0).cumsum(1).cumsum(2), ((1, 0),) * 3)
    for axis, length in enumerate(size):  # the sum of each window, from sums over all before
        stop = total.take(range(length, total.shape[axis]), axis)
        total = stop - total.take(range(total.shape[axis] - length), axis)
    enough = total >= least * np.prod(size)
    axes = prepared.plan.volumes[0].cells.axes
    box = tuple(slice(axis.first, axis.first + axis.count) for axis in axes)
    return {tuple(axis.first + i for axis, i in zip(axes, at, strict=True)) for at in np.argwhere(enough[box]).tolist()}


def qualifying_of(prepared: PreparedData) -> set[Triple]:
    """The starts that the plan draws from."""
    found = prepared.plan.volumes[0].foreground
    assert found is not None
    return {start for position in range(found.num_positions) if (start := found.at(position))}


@pytest.mark.parametrize(
    ("source", "remote"),
    [
        pytest.param("mask", False, marks=pytest.mark.long),
        pytest.param("level", True, marks=pytest.mark.long),
        ("chunks", False),
    ],
)
def test_every_patch_contains_enough_foreground_at_the_resolution_of_its_map(
    server: ChunkServer, tmp_path: Path, source: str, remote: bool
) -> None:
    """A binary map with cells of 16 or 32 voxels is exact, so it can be compared with the voxels."""
    cell = 32 if source == "chunks" else 16
    shape = (96, 96, 128) if source == "chunks" else (48, 64, 64)  # in cells of 32 the body needs the larger one
    coarse = blob((shape[0] // cell, shape[1] // cell, shape[2] // cell))
    mask = coarse.repeat(cell, 0).repeat(cell, 1).repeat(cell, 2)
    path = tmp_path / "v.zarr"
    write_ome(path, {"0": textured(shape), "1": 100 * coarse.repeat(4, 0).repeat(4, 1).repeat(4, 2)[:: cell // 4]})
    options: dict[str, Any] = {}
    match source:
        case "mask":
            options["mask"] = ArrayConfig(path=str(write_array(tmp_path / "mask.zarr", coarse)))
        case "level":
            options["foreground"] = ForegroundConfig(level=1, threshold=50)
        case "chunks":
            put_sidecar(path / "0", coarse.astype(bool))
            options["patch_size"] = (16, 48, 48)  # of fewer starts
    prepared = prepare_data(0, data_config(server.url_of(path) if remote else path, min_foreground=0.4, **options))
    shares = shares_of(prepared, textured(shape), mask, 12)
    assert 0.4 <= min(shares) < 0.99
    assert qualifying_of(prepared) == qualifying_by_counting(prepared, mask, 0.4)


def test_a_volume_without_enough_foreground_is_refused(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured((96, 128, 128)))
    mask = write_array(tmp_path / "mask.zarr", np.zeros((96, 128, 128), "u1"), **STORED_AIR)
    config = data_config(path, min_foreground=0.5)
    masked = config.volumes[0].model_copy(update={"mask": MaskConfig(path=str(mask))})
    with pytest.raises(DataError, match=r"No patch with data.min_foreground=0.5 .* among 932137 starts in"):
        prepare_data(0, config.model_copy(update={"volumes": (masked,)}))
    for chunk in mask.glob("[0-9]/*/*"):
        chunk.unlink()
    with pytest.raises(DataError, match=r"No chunk of \S+mask.zarr is stored"):
        prepare_data(0, config.model_copy(update={"volumes": (masked,)}))


# ---- the largest scroll

LARGEST = """
import sys, time
from dataclasses import replace
started = time.monotonic()
import numpy as np
import zarr
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.stream.options import StreamOptions

config = DataConfig(volumes=(VolumeConfig(path=sys.argv[1]),), min_foreground=0.5)
prepared = prepare_data(0, config)
prepared_s = time.monotonic() - started
(volume,) = prepared.plan.volumes
unlisted = replace(volume.foreground, map=replace(volume.foreground.map, listed=False))  # they are not really stored
job = replace(prepared.job, plan=replace(prepared.plan, volumes=(replace(volume, foreground=unlisted),)))
with PatchStream(job, StreamOptions(batch_size=2, num_workers=0)) as stream:
    batch = next(stream)
assert batch.patches.shape == (2, 72, 136, 136) and not batch.patches.any(), "air"
(peak_kib,) = (int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak_kib * 1024, volume.num_visits_per_pass, prepared_s, time.monotonic() - started)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_planning_the_largest_scroll_takes_little_memory(tmp_path: Path) -> None:
    """75784 x 32693 x 32693 voxels in 39 million chunks, a quarter of them stored according to a sidecar."""
    path, shape, counts = tmp_path / "v.zarr", (75784, 32693, 32693), (593, 256, 256)
    zarr.create_array(
        str(path), shape=shape, dtype="uint8", chunks=(128, 128, 128), zarr_format=2, fill_value=0, compressors=None
    )[-1, -1, -1] = 1
    stored = np.zeros(counts, bool)
    y, x = np.mgrid[:256, :256]
    for z in range(593):  # a disc of a quarter of the plane that wanders
        stored[z] = (y - 128 - 50 * np.sin(z / 90)) ** 2 + (x - 128 - 50 * np.cos(z / 70)) ** 2 < 72.2**2
    assert 0.24 < stored.mean() < 0.26
    put_sidecar(path, stored)
    done = subprocess.run([sys.executable, "-c", LARGEST, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak_bytes, regions, prepared_s, total_s = map(float, done.stdout.split())
    print(f"{peak_bytes / 2**30:.2f} GiB, {regions:.0f} regions, planned in {prepared_s:.1f} s, {total_s:.1f} s in all")
    assert 2.2e6 < regions < 2.7e6, "a quarter of 9.6 million"
    assert peak_bytes < 1.5e9
