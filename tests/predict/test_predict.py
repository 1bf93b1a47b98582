"""A predicted volume is what MONAI's sliding window makes of the same network in memory, and reads each chunk once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from monai.inferers import sliding_window_inference
from numpy.typing import NDArray
from torch import nn

import vesuvius
from tests.conftest import write_array
from tests.support.chunk_server import ChunkServer
from vesuvius.volumes.box import slices

RNG = np.random.default_rng(0)
VOXELS = RNG.integers(0, 256, (37, 45, 52)).astype(np.uint8)
PATCH = (16, 20, 16)


def network(channels: int = 1, out: int = 2, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv3d(channels, 4, 5, padding=2), nn.ReLU(), nn.Conv3d(4, out, 3, padding=1))


def write(path: Path, voxels: NDArray[Any], chunk: int = 16, **options: Any) -> Path:
    return write_array(path, voxels, chunk, zarr_format=3, **options)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return write(tmp_path / "v.zarr", VOXELS)


def level(path: Path, number: int = 0) -> NDArray[Any]:
    return np.asarray(zarr.open_array(path / str(number), mode="r")[:])  # type: ignore[arg-type]


def by_monai(voxels: NDArray[Any], net: Any, patch: tuple[int, ...] = PATCH, **options: Any) -> NDArray[Any]:
    """MONAI's sliding window over voxels that are normalized as by (0, 255): [K, Z, Y, X]."""
    image = torch.from_numpy(voxels.astype(np.float32) / 127.5 - 1)
    image = image[None, None] if image.ndim == 3 else image[None]
    with torch.inference_mode():
        found = sliding_window_inference(image, patch, 2, net, padding_mode="replicate", **options)
    return np.asarray(found[0])  # type: ignore[index]


@pytest.mark.parametrize("blend", ["gaussian", "constant"])
@pytest.mark.parametrize(
    ("shape", "overlap"), [((37, 45, 52), 0.25), ((32, 20, 31), 0.5), ((9, 45, 17), 0.25)], ids=["any", "even", "small"]
)
def test_a_predicted_volume_equals_a_sliding_window_in_memory(
    tmp_path: Path, blend: Any, shape: tuple[int, int, int], overlap: float
) -> None:
    voxels, net = VOXELS[tuple(map(slice, shape))], network()
    done = vesuvius.predict_volume(
        net, write(tmp_path / "v.zarr", voxels), tmp_path / "o.zarr",
        patch_size=PATCH, overlap=overlap, blend=blend, batch_size=2, normalize=(0, 255),
    )  # fmt: skip
    found = level(done.path)
    np.testing.assert_allclose(found, by_monai(voxels, net, overlap=overlap, mode=blend), atol=1e-5)
    assert done.shape_zyx == shape
    assert not (tmp_path / "o.zarr.partial").exists()


def test_the_output_lies_where_the_box_was_and_has_a_pyramid(tmp_path: Path) -> None:
    wide = np.tile(VOXELS, (4, 4, 4))
    group = zarr.open_group(tmp_path / "v.zarr", mode="w", zarr_format=2)
    group.create_array("0", data=wide, chunks=(64, 64, 64), chunk_key_encoding={"name": "v2", "separator": "/"})
    transforms = [{"type": "scale", "scale": [2, 3, 3]}, {"type": "translation", "translation": [10, 20, 30]}]
    axes = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"]
    datasets = [{"path": "0", "coordinateTransformations": transforms}]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]
    box, net = ((5, 7, 11), (30, 60, 161)), network(out=3)
    done = vesuvius.predict_volume(
        net, tmp_path / "v.zarr", tmp_path / "o.zarr", patch_size=PATCH, box=box, normalize=(0, 255), channels=[2, 0]
    )
    expected = by_monai(wide[slices(box)], net, overlap=0.25, mode="gaussian")[[2, 0]]
    np.testing.assert_allclose(level(done.path), expected, atol=1e-5)
    for channel in (0, 1):
        with vesuvius.open_volume(vesuvius.ArrayConfig(path=str(done.path), select=(channel,))) as found:
            assert found.voxel_size_um == (2, 3, 3)
            assert found.geometry is not None
            assert found.geometry.translation_zyx == (10 + 2 * 5, 20 + 3 * 7, 30 + 3 * 11)
            np.testing.assert_array_equal(found[:], level(done.path)[channel])
        with vesuvius.open_volume(vesuvius.ArrayConfig(path=str(done.path), level=1, select=(channel,))) as coarse:
            assert coarse.shape_zyx == (13, 27, 75)
            np.testing.assert_allclose(coarse[1, 1, 1], level(done.path)[channel][2:4, 2:4, 2:4].mean(), atol=1e-6)


def test_each_chunk_is_fetched_once_from_disk_and_over_http(tmp_path: Path, server: ChunkServer) -> None:
    path, net = write(tmp_path / "v.zarr", np.tile(VOXELS, (1, 2, 2))), network(out=1)
    sharded = write(tmp_path / "s.zarr", np.tile(VOXELS, (1, 2, 2)), shards=(32, 32, 32))
    box = ((3, 17, 20), (30, 80, 99))
    touched = [chunk for chunk in np.ndindex(3, 6, 7) if all(
        lo < 16 * (i + 1) and 16 * i < hi for i, lo, hi in zip(chunk, *box, strict=True)
    )]  # fmt: skip
    unique = sum((path / "c" / "/".join(map(str, chunk))).stat().st_size for chunk in touched)
    options: Any = {"patch_size": PATCH, "normalize": (0, 255), "box": box}
    done = vesuvius.predict_volume(net, path, tmp_path / "a.zarr", **options)
    assert done.fetched_bytes == unique
    server.reset()
    done = vesuvius.predict_volume(net, server.url_of(path), tmp_path / "b.zarr", **options)
    assert done.fetched_bytes == unique
    chunks = {key: count for key, count in server.reads_of(path).items() if key.startswith("c/")}
    assert set(chunks.values()) == {1}
    assert len(chunks) == len(touched)
    server.reset()
    done = vesuvius.predict_volume(net, server.url_of(sharded), tmp_path / "c.zarr", **options)
    assert done.fetched_bytes <= 1.1 * unique, "with the indices of 27 tiny shards"
    for name in ("b.zarr", "c.zarr"):
        np.testing.assert_array_equal(level(tmp_path / name), level(tmp_path / "a.zarr"))
