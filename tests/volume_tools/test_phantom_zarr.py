"""A phantom on disk: layout of the published volumes, bounded memory, resumable."""

from __future__ import annotations

import itertools
import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zarr

from vesuvius.errors import ConfigError
from vesuvius.volume_tools.phantom import Phantom, write_phantom
from vesuvius.volume_tools.pyramid import downsample_mean, downsample_mode

SHAPE = (40, 70, 66)  # every level has an odd axis: 40x70x66, 20x35x33, 10x18x17
CHUNK = 32


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A small phantom and its labels on disk, shared by the tests that only read them."""
    report = write_phantom(tmp_path_factory.mktemp("phantom") / "small.zarr", SHAPE, seed=3, chunk=CHUNK)
    return report["path"], report["labels_path"]


def levels_of(path: Path) -> list[np.ndarray]:
    group = zarr.open_group(path, mode="r")
    return [group[str(level)][:] for level in range(3)]


# Layout


@pytest.mark.long
def test_voxels_do_not_depend_on_the_chunk_size(written, tmp_path):
    write_phantom(tmp_path / "other.zarr", SHAPE, seed=3, chunk=18)
    for path, name in zip(written, ("other.zarr", "other.labels.zarr"), strict=True):
        for voxels, other_voxels in zip(levels_of(path), levels_of(tmp_path / name), strict=True):
            np.testing.assert_array_equal(voxels, other_voxels)


def test_array_metadata_equals_the_published_layout(written):
    for path in written:
        for level, shape in enumerate(([40, 70, 66], [20, 35, 33], [10, 18, 17])):
            assert json.loads((path / str(level) / ".zarray").read_text()) == {
                "zarr_format": 2,
                "shape": shape,
                "chunks": [CHUNK] * 3,
                "dtype": "|u1",
                "fill_value": 0,
                "order": "C",
                "filters": None,
                "dimension_separator": "/",
                "compressor": {"id": "blosc", "cname": "zstd", "clevel": 3, "shuffle": 0, "blocksize": 0},
            }
        assert json.loads((path / ".zgroup").read_text()) == {"zarr_format": 2}


def test_group_metadata_is_ome_zarr_0_4(written):
    assert json.loads((written[0] / ".zattrs").read_text()) == {
        "vesuvius_phantom": {"seed": 3, "shape_zyx": list(SHAPE), "chunk": CHUNK},
        "multiscales": [
            {
                "version": "0.4",
                "name": "small",
                "axes": [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"],
                "datasets": [
                    {"path": path, "coordinateTransformations": [{"type": "scale", "scale": [scale] * 3}]}
                    for path, scale in (("0", 7.91), ("1", 15.82), ("2", 31.64))
                ],
            }
        ],
    }


def test_each_level_is_the_mean_of_the_one_above(written):
    for path in written:
        for above, below in itertools.pairwise(levels_of(path)):
            np.testing.assert_array_equal(below, downsample_mean(above))


def test_exactly_the_chunks_of_air_are_absent(tmp_path):
    path = write_phantom(tmp_path / "air.zarr", (16, 96, 96), seed=0, chunk=16)["path"]
    voxels = levels_of(path)[0]
    present = 0
    for y in range(6):
        for x in range(6):
            file = path / "0" / "0" / str(y) / str(x)
            assert file.exists() == voxels[:, 16 * y : 16 * y + 16, 16 * x : 16 * x + 16].any()
            present += file.exists()
    assert 0 < present < 36


@pytest.mark.long
def test_memory_does_not_grow_with_the_volume(tmp_path):
    """Twelve times the depth, 5.8 MB more intensities and labels at level 0; buffers of several writers vary."""
    Phantom(0, SHAPE).box((0, 0, 0), (8, 8, 8))
    peaks = []
    for number, depth in enumerate((64, 64, 768)):  # the first also imports what it needs
        tracemalloc.start()
        write_phantom(tmp_path / f"{number}.zarr", (depth, 64, 64), seed=0, chunk=32)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] - min(peaks[:2]) < 4 * 2**20


@pytest.mark.parametrize("name", ["scan#1.zarr", "q?v=2.zarr"])
def test_names_that_look_like_parts_of_a_url_are_literal(tmp_path, name):
    write_phantom(tmp_path / name, (16, 16, 16), seed=3, chunk=16)
    assert {path.name for path in tmp_path.iterdir()} == {name, name.replace(".zarr", ".labels.zarr")}
    assert levels_of(tmp_path / name)[0].any()


def test_windings_are_exact_where_sheets_touch(tmp_path):
    """Added to a phantom that is there; a number is one sheet, and neighbors in the scroll differ by one."""
    write_phantom(tmp_path / "v.zarr", (24, 96, 96), seed=2, chunk=32)
    write_phantom(tmp_path / "v.zarr", (24, 96, 96), seed=2, chunk=32, instances=True)
    ids = levels_of(tmp_path / "v.instances.zarr")
    np.testing.assert_array_equal(ids[0] > 0, levels_of(tmp_path / "v.labels.zarr")[0])
    np.testing.assert_array_equal(ids[1], downsample_mode(ids[0]))
    right = ids[0][:, :, 56:].astype(int)  # away from the ray where windings change
    touching = [np.moveaxis(right, axis, 0) for axis in range(3)]
    steps = np.concatenate([abs(np.diff(v, axis=0))[(v[1:] > 0) & (v[:-1] > 0)] for v in touching])
    assert set(steps.tolist()) == {0, 1}
    assert 0.0001 < steps.mean() < 0.1, "sheets touch, but seldom"
    assert set(np.unique(ids[0])) == {0, 1, 2, 3}


def test_existing_files_are_never_replaced(tmp_path):
    for name in ("v.zarr", "v.labels.zarr"):
        zarr.create_group(tmp_path / name, zarr_format=2, attributes={"mine": 1})
        with pytest.raises(ConfigError, match="was not made by this command"):
            write_phantom(tmp_path / "v.zarr", SHAPE, seed=0, chunk=CHUNK)
        assert zarr.open_group(tmp_path / name).attrs["mine"] == 1
        (tmp_path / name).rename(tmp_path / f"aside-{name}")
        assert not list(tmp_path.glob("*.partial")), "which would bind the next command to these arguments"


@pytest.mark.long
@pytest.mark.parametrize(("chunks", "lost"), [(3, None), (20, "v.zarr.partial"), (37, "v.labels.zarr.partial")])
def test_an_interrupted_write_resumes_with_the_same_voxels(tmp_path, chunks, lost):
    """Or restarted, if one of the two is lost."""

    def stop(_what: str, done: int, _total: int) -> None:
        if done == chunks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_phantom(tmp_path / "v.zarr", (32, 48, 48), seed=1, chunk=16, on_progress=stop)
    assert not (tmp_path / "v.zarr").exists(), "where the intensities have their name, all is there"
    if lost and (tmp_path / lost).exists():
        shutil.rmtree(tmp_path / lost)
    report = write_phantom(tmp_path / "v.zarr", (32, 48, 48), seed=1, chunk=16)
    intensity, winding = Phantom(1, (32, 48, 48)).box((0, 0, 0), (32, 48, 48))
    np.testing.assert_array_equal(levels_of(report["path"])[0], intensity)
    np.testing.assert_array_equal(levels_of(report["labels_path"])[0], winding > 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.labels.zarr", "v.zarr"]
    assert write_phantom(tmp_path / "v.zarr", (32, 48, 48), seed=1, chunk=16)["stored_bytes"] == 0
    with pytest.raises(ConfigError, match="started with other arguments: seed 2"):
        write_phantom(tmp_path / "v.zarr", (32, 48, 48), seed=2, chunk=16)


def test_wrong_arguments_are_refused_with_the_reason(tmp_path):
    for name, chunk, rule in (("v.zarr", 33, "even number"), ("scroll", CHUNK, r"end in \.zarr")):
        with pytest.raises(ConfigError, match=rule):
            write_phantom(tmp_path / name, SHAPE, seed=0, chunk=chunk)
    assert list(tmp_path.iterdir()) == []
