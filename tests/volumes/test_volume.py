"""Opening volumes: every layout of real scrolls, and clear errors for everything else."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numcodecs import blosc
from zarr.codecs import BytesCodec

from tests.conftest import SCROLL_DATA, needs_scroll_data, textured, write_array, write_ome
from tests.support.chunk_server import ChunkServer
from vesuvius.config import ArrayConfig, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.volumes.volume import Volume, open_volume
from vesuvius.volumes.voxels import percentiles


def whole(volume: Volume) -> np.ndarray[Any, Any]:
    return volume.read(((0, 0, 0), volume.shape_zyx))


def open_at(path: Path, **options: Any) -> Volume:
    return open_volume(VolumeConfig(path=str(path), **options))


DTYPES = [
    "bool",
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "v2": {},
    "v2-dots": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "v2-raw": {"compressors": None},
    "v3": {"zarr_format": 3},
    "v3-sharded": {"zarr_format": 3, "shards": (64, 64, 64)},
}


def full_range(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Voxels across the dtype's range, including those that a conversion would round, wrap or clip."""
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith("float"):
        limits = np.finfo(dtype)
        return (rng.uniform(-1, 1, shape) * 10.0 ** rng.integers(0, limits.maxexp // 4, shape)).astype(dtype)
    ends = np.iinfo(dtype)
    voxels = rng.integers(ends.min, ends.max, shape, dtype, endpoint=True)
    voxels.flat[:2] = ends.min, ends.max
    return voxels


@pytest.mark.parametrize(
    ("dtype", "layout"), [*((dtype, "v2") for dtype in DTYPES), *(("float32", layout) for layout in LAYOUTS)]
)
def test_every_layout_and_dtype_reads_back_what_was_written(tmp_path: Path, dtype: str, layout: str) -> None:
    voxels = full_range(dtype, (70, 50, 64))
    path = write_array(tmp_path / "v.zarr", voxels, **LAYOUTS[layout])
    volume = open_at(path)
    assert volume.shape_zyx == (70, 50, 64)
    assert volume.chunk_zyx == (32, 32, 32), "the unit of decoding is the inner chunk, not the shard"
    assert volume.dtype == np.dtype(dtype)
    read = whole(volume)
    assert read.dtype == np.dtype(dtype)
    assert read.tobytes() == voxels.tobytes()
    np.testing.assert_array_equal(volume.read(((31, 0, 5), (34, 50, 64))), voxels[31:34, :, 5:])


BIG_ENDIAN: dict[str, dict[str, Any]] = {
    "v2": {},
    "v3": {"zarr_format": 3, "serializer": BytesCodec(endian="big")},
    "v3-sharded": {"zarr_format": 3, "serializer": BytesCodec(endian="big"), "shards": (64, 64, 64)},
}


@pytest.mark.parametrize("options", BIG_ENDIAN.values(), ids=BIG_ENDIAN)
@pytest.mark.parametrize("dtype", ["int16", "float64"])
def test_big_endian_voxels_are_returned_in_native_order(
    server: ChunkServer, tmp_path: Path, dtype: str, options: dict[str, Any]
) -> None:
    voxels = full_range(dtype, (40, 32, 32))
    path = write_array(tmp_path / "v.zarr", voxels.astype(np.dtype(dtype).newbyteorder(">")), **options)
    for address in (str(path), server.url_of(path)):
        volume = open_volume(VolumeConfig(path=address))
        assert volume.dtype == np.dtype(dtype)
        out = np.empty_like(voxels)
        assert volume.read(((0, 0, 0), volume.shape_zyx), out) is out
        assert out.tobytes() == voxels.tobytes()
        volume.close()


@pytest.mark.parametrize(
    ("dtype", "fill"), [("int16", -1024), ("uint64", 2**64 - 1), ("bool", True), ("float16", -0.5)]
)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_an_absent_chunk_has_exactly_the_fill_value(tmp_path: Path, dtype: str, fill: Any, zarr_format: int) -> None:
    path = write_array(tmp_path / "v.zarr", np.zeros((32, 32, 64), dtype), fill_value=fill, zarr_format=zarr_format)
    (path / ("0/0/1" if zarr_format == 2 else "c/0/0/1")).unlink()
    volume = open_at(path)
    assert volume.fill_value == fill
    assert (whole(volume)[:, :, 32:] == volume.fill_value).all()
    assert not (whole(volume)[:, :, :32] == volume.fill_value).any()


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_the_path_of_a_level_comes_from_the_metadata(tmp_path: Path, version: str) -> None:
    fine, coarse = textured((64, 64, 64)), textured((32, 32, 32), seed=1)
    path = write_ome(tmp_path / "v.zarr", {"fine": fine, "0": coarse}, version=version)
    np.testing.assert_array_equal(whole(open_at(path, level=0)), fine)
    np.testing.assert_array_equal(whole(open_at(path, level=1)), coarse)
    assert open_at(path, level=1).voxel_size_um == (4.8, 4.8, 4.8)


REFUSALS = [
    ("missing", {}, "does not exist"),
    ("empty directory", {}, "neither"),
    ("ome", {"level": 2}, "its levels are 0..1"),
    ("ome with a missing level", {"level": 1}, "Cannot open level 1 of .* is not there"),
    ("array", {"level": 1}, "only level 0"),
    ("2D", {}, "the axes z, y, x, not 2 axes"),
    ("5D", {}, r"set data.volumes\[\].select to 2 indices, e.g. \[0, 0\]"),
    ("5D", {"select": (0, 9)}, r"select=\[0, 9\] does not fit"),
    ("array", {"select": (0,)}, "set data.volumes"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSALS, ids=[f"{k} {o or ''}" for k, o, _ in REFUSALS])
def test_anything_but_a_volume_is_refused_with_a_remedy(
    tmp_path: Path, kind: str, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "v.zarr"
    _write_wrong(kind, path)
    with pytest.raises(DataError, match=message):
        open_at(path, **options)


def _write_wrong(kind: str, path: Path) -> None:
    voxels = textured((32, 32, 32))
    match kind:
        case "empty directory":
            path.mkdir()
        case "ome":
            write_ome(path, {"0": voxels, "1": voxels})
        case "ome with a missing level":
            write_ome(path, {"0": voxels, "1": voxels})
            (path / "1" / ".zarray").unlink()
        case "array":
            write_array(path, voxels)
        case "2D":
            write_array(path, textured((32, 32)))
        case "5D":
            write_array(path, textured((1, 1, 32, 32, 32)))


@needs_scroll_data
@pytest.mark.parametrize(
    ("store", "shape", "chunk"),
    [
        ("scroll_v2_blosc.zarr", (256, 256, 256), 128),
        ("scroll_v3_sharded.zarr", (256, 256, 256), 64),
        ("scroll_v2_sparse_ragged.zarr", (250, 200, 230), 128),
    ],
)
def test_real_scroll_stores_open_with_the_expected_voxels(store: str, shape: tuple[int, int, int], chunk: int) -> None:
    volume = open_at(SCROLL_DATA / store)
    assert volume.shape_zyx == shape
    assert volume.chunk_zyx == (chunk,) * 3
    assert volume.voxel_size_um == (2.4, 2.4, 2.4)
    reference = whole(open_at(SCROLL_DATA / "scroll_v2_blosc.zarr"))
    corner = volume.read(((0, 0, 0), (128, 128, 128)))
    np.testing.assert_array_equal(corner, reference[:128, :128, :128])
    if "ragged" in store:
        assert not volume.read(((128, 128, 128), (250, 200, 230))).any(), "the absent chunk is air"


# ---- settings of the process


@pytest.mark.parametrize(("layout", "where"), [("v2", "disk"), ("v3-sharded", "http")])
def test_opening_and_reading_a_volume_changes_no_process_settings(
    server: ChunkServer, tmp_path: Path, layout: str, where: str
) -> None:
    path = write_array(tmp_path / "v.zarr", textured((64, 64, 64)), **LAYOUTS[layout])
    mine = {"threading.max_workers": 7, "async.concurrency": 13, "codec_pipeline.batch_size": 3}
    threads = blosc.set_nthreads(3)
    try:
        with zarr.config.set(mine):
            settings, environment = copy.deepcopy(zarr.config.config), dict(os.environ)
            volume = open_volume(ArrayConfig(path=str(path) if where == "disk" else server.url_of(path)))
            assert zarr.config.config == settings
            np.testing.assert_array_equal(volume.read(((0, 0, 0), (32, 64, 64))), textured((64, 64, 64))[:32])
            volume.close()
            assert zarr.config.config == settings
            assert dict(os.environ) == environment
    finally:
        assert blosc.set_nthreads(threads) == 3


# ---- percentiles

NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]


@pytest.mark.parametrize("dtype", NUMBERS)
def test_percentiles_across_the_range_of_a_dtype_do_not_overflow(dtype: str) -> None:
    limits = np.finfo(dtype) if dtype.startswith("float") else np.iinfo(dtype)
    least, most = (0.0, 1000.0) if dtype.startswith("float") else (limits.min, limits.max)
    (found,) = percentiles(np.array([least, most], dtype), [25])
    assert found == pytest.approx(0.75 * int(least) + 0.25 * int(most), rel=1e-6)
