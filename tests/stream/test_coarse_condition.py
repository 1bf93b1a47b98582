"""Conditions of a coarser level: the batches are those with a condition volume that was upsampled beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import textured, write_array
from tests.stream.test_stream import open_stream
from tests.support.chunk_server import ChunkServer
from tests.volumes.test_coarser import repeated
from vesuvius.config import ArrayConfig, DataConfig, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.stream.reading.quarantine import damaged_box
from vesuvius.stream.start.fixed_patches import read_fixed_patches
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.start.spot_check import spot_check
from vesuvius.volumes.box import intersects
from vesuvius.volumes.coarser import Upsampling, factors_between

FINE = (97, 130, 127)
HALVES, UNEVEN = (49, 65, 64), (97, 32, 63)  # rounded up; rounded down, with factors 1, 4, 2


def upsampled(coarse: np.ndarray[Any, Any], fine: Any = FINE) -> np.ndarray[Any, Any]:
    factors = factors_between(fine, coarse.shape)  # type: ignore[arg-type]
    assert factors is not None
    return repeated(coarse, Upsampling(fine, coarse.shape, factors))  # type: ignore[arg-type]


def config_of(volume: Path, condition: Path | str, **keys: Any) -> DataConfig:
    spec = VolumeConfig(path=str(volume), condition=ArrayConfig(path=str(condition)))
    settings: dict[str, Any] = {"patch_size": (8, 16, 16), "patches_per_region": 4, "regions_per_task": 4} | keys
    return DataConfig(volumes=(spec,), **settings)


def batches(config: DataConfig, workers: int = 0) -> list[bytes]:
    with open_stream(prepare_data(0, config).job, workers=workers) as stream:
        found = [next(stream) for _ in range(16)]
        assert not stream.events
        return [part.tobytes() for batch in found for part in (batch.patches, batch.condition) if part is not None]


@pytest.mark.parametrize("shape", [HALVES, UNEVEN], ids=["halves", "uneven"])
@pytest.mark.parametrize("reads", ["disk", "http", pytest.param("ray", marks=pytest.mark.long)])
def test_batches_are_those_with_an_upsampled_condition(
    tmp_path: Path, request: pytest.FixtureRequest, server: ChunkServer, shape: tuple[int, ...], reads: str
) -> None:
    if reads == "ray":
        request.getfixturevalue("ray_cluster")
    volume = write_array(tmp_path / "v.zarr", textured(FINE))
    voxels = textured(shape, seed=1, dtype="uint16")
    explicit = config_of(volume, write_array(tmp_path / "fine.zarr", upsampled(voxels)))
    coarse = write_array(tmp_path / "coarse.zarr", voxels, chunk=16)
    config = config_of(volume, server.url_of(coarse) if reads == "http" else coarse)
    found = batches(config, workers=1 if reads == "ray" else 0)
    assert len(found) == 32
    assert found == batches(explicit)


def test_what_is_known_before_a_run_is_that_of_an_upsampled_condition(tmp_path: Path) -> None:
    volume = write_array(tmp_path / "v.zarr", textured(FINE))
    voxels = textured(HALVES, seed=1)
    configs = [
        config_of(volume, write_array(tmp_path / "coarse.zarr", voxels)),
        config_of(volume, write_array(tmp_path / "fine.zarr", upsampled(voxels))),
    ]
    data = [prepare_data(0, config) for config in configs]
    assert data[0].plan.hash == data[1].plan.hash
    coarse, explicit = (each.grey_ranges(config) for each, config in zip(data, configs, strict=True))
    assert coarse == explicit
    first, second = (read_fixed_patches(each, config, 6) for each, config in zip(data, configs, strict=True))
    assert first.starts_zyx == second.starts_zyx
    assert first.conditions is not None
    np.testing.assert_array_equal(first.conditions, second.conditions)


def test_decoded_bytes_are_the_chunks_of_the_coarse_array(tmp_path: Path) -> None:
    """Of a condition in one chunk, each block decodes that chunk."""
    volume, shape = write_array(tmp_path / "v.zarr", textured((96, 128, 128))), (48, 64, 64)
    read = []
    for chunk, voxels in ((64, textured(shape)), (128, upsampled(textured(shape), (96, 128, 128)))):
        condition = write_array(tmp_path / f"{chunk}.zarr", voxels, chunk)
        with open_stream(prepare_data(0, config_of(volume, condition)).job, stop=64) as stream:
            assert sum(len(batch.indices) for batch in stream) == 64
            read.append((stream.reader_totals.blocks, stream.reader_totals.bytes_read))
    (blocks, coarse), (same, explicit) = read
    assert blocks == same > 1
    assert explicit - coarse == blocks * (128**3 - 64**3)


def test_a_damaged_chunk_is_quarantined_in_voxels_of_the_volume_and_found_by_a_spot_check(tmp_path: Path) -> None:
    fine, voxels = textured((96, 128, 128)), textured((48, 64, 64), seed=1)
    config = config_of(write_array(tmp_path / "v.zarr", fine), write_array(tmp_path / "coarse.zarr", voxels))
    (tmp_path / "coarse.zarr/0/1/1").write_bytes(b"torn")
    data, shown, damage = prepare_data(0, config), upsampled(voxels, fine.shape), ((0, 64, 64), (64, 128, 128))

    def place(index: int) -> Any:
        """Of the patch that comes for a sample: that of its first attempt whose region is readable."""
        samples = (data.plan.sample(index, attempt) for attempt in range(100))
        z, y, x = next(sample.start_zyx for sample in samples if not intersects(sample.region, damage))
        return slice(z, z + 8), slice(y, y + 16), slice(x, x + 16)

    replaced = {index for index in range(64) if intersects(data.plan.sample(index).region, damage)}
    assert 0 < len(replaced) < 48
    with open_stream(data.job) as stream:
        for batch in (next(stream) for _ in range(16)):
            assert batch.condition is not None
            for patch, condition, index in zip(batch.patches, batch.condition, batch.indices, strict=True):
                np.testing.assert_array_equal(patch, fine[place(int(index))])
                np.testing.assert_array_equal(condition, shown[place(int(index))])
        (record,) = stream.quarantined
    assert damaged_box(record) == (0, damage)
    assert (record["volume"], record["chunk"]) == (str(tmp_path / "coarse.zarr"), [0, 1, 1])

    _, found = spot_check(data, config, data.read)
    assert [error.chunk for error in found.broken] == [(0, 1, 1)]
    _, found = spot_check(data, config, data.read, frozenset({(0, damage)}))
    assert (found.broken, found.quarantined, found.read) == ([], 1, found.chunks - 1)


def test_conditions_that_are_not_coarser_by_whole_factors_are_refused(tmp_path: Path) -> None:
    volume = write_array(tmp_path / "v.zarr", textured((96, 128, 128)))
    for number, shape in enumerate([(96, 128, 120), (192, 256, 256), (64, 85, 85)]):
        condition = write_array(tmp_path / f"{number}.zarr", textured(shape))
        with pytest.raises(DataError) as refused:
            prepare_data(0, config_of(volume, condition))
        assert str(refused.value) == (
            "a condition must have the shape of its volume, or be smaller by a whole factor per axis; got "
            f"{shape} of {condition} for (96, 128, 128) of {volume}; take another level, or resample it"
        )
