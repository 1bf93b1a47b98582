"""Conditions of a coarser level: the batches are those with a condition volume that was upsampled beforehand."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.stream.test_stream import open_stream
from tests.support.chunk_server import ChunkServer
from tests.volumes.test_alignment import volume_of
from vesuvius.config import ArrayConfig, DataConfig, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.stream.reading.quarantine import parse_damaged_box
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.validation.fixed_patches import read_fixed_patches
from vesuvius.volumes.alignment import Alignment
from vesuvius.volumes.box import box_at, intersects, slices

FINE = (97, 130, 127)
HALVES, UNEVEN = (49, 65, 64), (97, 32, 31)  # rounded up; rounded down, with factors 1, 4, 4


def repeated(array: Any, alignment: Alignment) -> Any:
    """What an array of whole factors shows, by numpy alone; continued to the end of the volume."""
    for axis, (factor, size) in enumerate(zip(alignment.factors, alignment.volume_zyx, strict=True)):
        array = np.repeat(array, int(factor), axis)
        beyond = max(size - array.shape[axis], 0)
        array = np.pad(array, [(0, beyond * (a == axis)) for a in range(3)], mode="edge").take(range(size), axis)
    return array


def upsampled(coarse: np.ndarray[Any, Any], fine: Any = FINE) -> np.ndarray[Any, Any]:
    factors: Any = tuple(Fraction(round(size / count)) for size, count in zip(fine, coarse.shape, strict=True))
    return repeated(coarse, Alignment(fine, coarse.shape, factors))  # type: ignore[arg-type]


def config_of(volume: Path, condition: Path | str, **keys: Any) -> DataConfig:
    spec = VolumeConfig(path=str(volume), condition=ArrayConfig(path=str(condition)))
    settings: dict[str, Any] = {"patch_size": (8, 16, 16), "patches_per_region": 4} | keys
    return DataConfig(volumes=(spec,), **settings)


def batches(config: DataConfig) -> list[bytes]:
    with open_stream(prepare_data(0, config).job) as stream:
        found = [next(stream) for _ in range(16)]
        assert not stream.events
        return [part.tobytes() for batch in found for part in (batch.patches, batch.condition) if part is not None]


@pytest.mark.parametrize(("shape", "reads"), [(HALVES, "disk"), (UNEVEN, "http")])
def test_batches_equal_those_with_an_upsampled_condition(
    tmp_path: Path, server: ChunkServer, shape: tuple[int, ...], reads: str
) -> None:
    volume = write_array(tmp_path / "v.zarr", textured(FINE))
    voxels = textured(shape, seed=1, dtype="uint16")
    explicit = config_of(volume, write_array(tmp_path / "fine.zarr", upsampled(voxels)))
    coarse = write_array(tmp_path / "coarse.zarr", voxels, chunk=16)
    config = config_of(volume, server.url_of(coarse) if reads == "http" else coarse)
    found = batches(config)
    assert len(found) == 32
    assert found == batches(explicit)


def test_damage_in_a_coarse_condition_is_quarantined_in_voxels_of_the_volume(tmp_path: Path) -> None:
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
    assert parse_damaged_box(record, 1) == (0, damage)
    assert (record["volume"], record["chunk"]) == (str(tmp_path / "coarse.zarr"), [0, 1, 1])


RAW, AT = (64, 96, 96), (11, 22, 34)


def rank_share(tmp_path: Path, factor: int = 1) -> tuple[Path, Path, np.ndarray[Any, Any]]:
    """A volume, labels of a part of it that begins at `AT`, and what they say of each of its voxels, 255 elsewhere."""
    raw, labels = textured(RAW), textured((40 // factor, 60 // factor, 60 // factor), seed=1) % 200
    said = np.full(RAW, 255, np.uint8)
    said[tuple(slice(at, at + size * factor) for at, size in zip(AT, labels.shape, strict=True))] = np.kron(
        labels, np.ones((factor,) * 3, np.uint8)
    )
    for name, voxels, scale, corner in (("raw", raw, 4, (0, 0, 0)), ("part", labels, 4 * factor, AT)):
        volume_of(tmp_path / name, voxels.shape, scale, [4 * at for at in corner])
        zarr.open_array(str(tmp_path / name / "0"), mode="r+")[:] = voxels
    return tmp_path / "raw", tmp_path / "part", said


@pytest.mark.sample(2)
@pytest.mark.parametrize("factor", [1, 2])
def test_partial_labels_restrict_patches_uniformly_to_their_box(tmp_path: Path, factor: int) -> None:
    raw, part, said = rank_share(tmp_path, factor)
    config = config_of(raw, part, validation={"fraction": 0.2, "gap": 0.5})
    data = prepare_data(0, config)
    (split,) = data.splits
    assert split.validation is not None
    part_box = AT, tuple(at + size for at, size in zip(AT, (40, 60, 60), strict=True))
    assert split.train[0] == part_box[0]
    assert split.validation[1] == part_box[1]
    volume = data.plan.volumes[0]
    wanted = [hi - lo - size + 1 for lo, hi, size in zip(*split.train, config.patch_size, strict=True)]
    assert [axis.count for axis in volume.cells.axes] == wanted, "every start of the part may come"
    with open_stream(data.job) as stream:
        for batch in (next(stream) for _ in range(16)):
            assert batch.condition is not None
            for patch, condition, sample in zip(batch.patches, batch.condition, batch.samples, strict=True):
                place = slices(sample.box)
                np.testing.assert_array_equal(patch, textured(RAW)[place])
                np.testing.assert_array_equal(condition, said[place])
    fixed = read_fixed_patches(data, config, 6)
    assert fixed.conditions is not None
    for start, condition in zip(fixed.starts_zyx, fixed.conditions, strict=True):
        np.testing.assert_array_equal(condition, said[slices(box_at(start, config.patch_size))])


def test_labels_smaller_than_a_patch_are_refused_with_their_box(tmp_path: Path) -> None:
    raw, part, _ = rank_share(tmp_path)
    with pytest.raises(
        DataError, match=r"does not fit into \(40, 60, 60\) of .*raw level 0, the box covered by its condition"
    ):
        prepare_data(0, config_of(raw, part, patch_size=(48, 48, 48)))
