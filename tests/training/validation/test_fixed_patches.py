"""The fixed patches: held out, the same in every run, replaced where they cannot be read or are air."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import textured, write_array
from vesuvius.config import ArrayConfig, AugmentConfig, DataConfig, ValidationConfig, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.validation.fixed_patches import FixedPatches, read_fixed_patches

SHAPE = (96, 128, 128)
PATCH = (8, 16, 16)
# Of SHAPE, a slab of one patch is held out across z, the axis that is longest in patches; chunks are 32^3.
SLAB_START = 88


def data_config(*paths: Path, **options: Any) -> DataConfig:
    volumes = options.pop("volumes", tuple(VolumeConfig(path=str(path)) for path in paths))
    return DataConfig(**{"volumes": volumes, "patch_size": PATCH} | options)


def fixed(config: DataConfig, count: int = 16, seed: int = 0) -> FixedPatches:
    return read_fixed_patches(prepare_data(seed, config), config, count)


def cut(voxels: np.ndarray[Any, Any], found: FixedPatches) -> np.ndarray[Any, Any]:
    """The patches, taken from the voxels at the places that are said to be theirs."""
    z_size, y_size, x_size = found.patches.shape[1:]
    return np.stack([voxels[z : z + z_size, y : y + y_size, x : x + x_size] for z, y, x in found.starts_zyx])


def replaced_at(config: DataConfig, count: int, caplog: pytest.LogCaptureFixture) -> tuple[FixedPatches, set[int]]:
    """The patches, and the numbers of those that the log says have been passed over."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        found = fixed(config, count)
    return found, {record.args[0] for record in caplog.records if "is replaced" in record.msg}  # type: ignore[index]


@settings(max_examples=25, deadline=None)
@given(
    # 36 hold the largest patch, guard and slab: 8 + 1.5 * 8 + 0.4 * 36 voxels, rounded up
    shape=st.tuples(*[st.integers(36, 150)] * 3),
    patch=st.tuples(*[st.integers(2, 8)] * 3),
    fraction=st.floats(0.01, 0.4),
    least_gap=st.floats(0, 1.5),
)
def test_patches_lie_in_the_held_out_slab_a_gap_away_from_training(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int, int],
    patch: tuple[int, int, int],
    fraction: float,
    least_gap: float,
) -> None:
    path = tmp_path_factory.mktemp("sizes") / "v.zarr"
    zarr.create_array(str(path), shape=shape, dtype="uint8", chunks=(32, 32, 32), fill_value=0)[0, 0, 0] = 1
    validation = ValidationConfig(fraction=fraction, gap=least_gap)
    config = data_config(path, patch_size=patch, validation=validation, augment=AugmentConfig(rot90=False))
    data = prepare_data(0, config)
    found = read_fixed_patches(data, config, 8)
    assert found.held_out
    train, slab = np.array(data.splits[0].train), np.array(data.splits[0].validation)
    starts = np.array(found.starts_zyx)
    assert (starts >= slab[0]).all()
    assert (starts + patch <= slab[1]).all()
    gap = (starts - train[1]) / patch  # in patches, along each axis
    assert (gap.max(axis=1) >= least_gap).all()


@pytest.mark.parametrize(
    "other",
    [
        {"patches_per_region": 9, "stream_gib": 0.1},
        {"augment": AugmentConfig(flip=False, rot90=False), "max_quarantined": 0},
    ],
)
def test_patches_do_not_depend_on_seed_mixing_readers_or_count(volume: Path, other: dict[str, Any]) -> None:
    one, two = fixed(data_config(volume)), fixed(data_config(volume, **other), 40, seed=7)
    assert np.array_equal(one.patches, cut(textured(SHAPE), one))
    assert len(set(one.starts_zyx)) == 16
    assert one.starts_zyx == two.starts_zyx[:16]
    assert np.array_equal(one.patches, two.patches[:16])


def test_without_a_split_patches_come_from_the_training_box(volume: Path) -> None:
    config = data_config(volume, validation=ValidationConfig(fraction=0))
    found = fixed(config)
    assert not found.held_out
    assert np.array_equal(found.patches, cut(textured(SHAPE), found))
    assert min(z for z, _, _ in found.starts_zyx) < SLAB_START
    assert found.starts_zyx == fixed(config, seed=3).starts_zyx


# ---- air and unreadable chunks


def test_a_volume_whose_slab_is_air_is_excluded_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    voxels = textured(SHAPE)
    ends_in_air = voxels.copy()
    ends_in_air[64:] = 0  # chunks of the fill value alone are not stored
    paths = [write_array(tmp_path / "air.zarr", ends_in_air), write_array(tmp_path / "full.zarr", voxels)]
    with caplog.at_level(logging.WARNING):
        found = fixed(data_config(*paths, min_foreground=0.5))
    assert found.volumes == (1,) * 16
    assert np.array_equal(found.patches, cut(voxels, found))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "air.zarr is not validated" in caplog.text
    with pytest.raises(DataError, match=r"No held-out patch .* raise data.validation.fraction, or .*validate_every=0"):
        fixed(data_config(paths[0], min_foreground=0.5))


def test_an_unreadable_patch_is_always_replaced_by_the_same_one(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = fixed(data_config(volume), 32)
    (volume / "2/1/1").write_bytes(b"torn")
    config = data_config(volume)
    found, replaced = replaced_at(config, 32, caplog)
    # The slab lies in the last chunks of z; a patch of 16 voxels touches those of 32 to 64 along y and x.
    touched = {n for n, (_, y, x) in enumerate(whole.starts_zyx) if 16 < y < 64 and 16 < x < 64}
    assert replaced == touched
    assert 0 < len(touched) < 32
    kept = sorted(set(range(32)) - replaced)
    assert [found.starts_zyx[n] for n in kept] == [whole.starts_zyx[n] for n in kept]
    assert np.array_equal(found.patches, cut(textured(SHAPE), found))
    assert min(z for z, _, _ in found.starts_zyx) == SLAB_START
    assert fixed(config, 32).starts_zyx == found.starts_zyx


def test_a_patch_with_an_unreadable_condition_is_replaced(
    tmp_path: Path, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = write_array(tmp_path / "c.zarr", textured(SHAPE, seed=1))
    (labels / "2/1/1").write_bytes(b"torn")
    condition = ArrayConfig(path=str(labels))
    found, replaced = replaced_at(
        data_config(volumes=(VolumeConfig(path=str(volume), condition=condition),)), 32, caplog
    )
    assert replaced
    assert found.conditions is not None
    assert np.array_equal(found.patches, cut(textured(SHAPE), found))
    assert np.array_equal(found.conditions, cut(textured(SHAPE, seed=1), found))


def test_too_many_unreadable_patches_are_refused(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    for chunk in (volume / "2").glob("*/*"):
        chunk.write_bytes(b"torn")
    with pytest.raises(
        DataError, match=r"Fixed patch 0 of .*volume.zarr .*data.max_quarantined=3 replacements; restore"
    ):
        fixed(data_config(volume, max_quarantined=3))
    assert caplog.text.count("is replaced") == 4, "the patch itself and three others"
