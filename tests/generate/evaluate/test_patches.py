"""The patches that are compared: real ones come from the places that are said to be theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.conftest import write_array
from vesuvius.config import AugmentConfig, DataConfig, ValidationConfig, VolumeConfig
from vesuvius.errors import ConfigError
from vesuvius.generate.evaluate import metrics
from vesuvius.generate.evaluate.evaluate import verdict
from vesuvius.generate.evaluate.metrics import Comparison, compare
from vesuvius.generate.evaluate.patches import PatchSet, RealSource, disjoint_sides, generated_set, open_generated
from vesuvius.generate.sample_zarr import to_intensities
from vesuvius.loader.device import apply_symmetries
from vesuvius.loader.intensity import intensity_scales, normalized
from vesuvius.plan.plan import augmentation_of
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.volumes.box import box_at

INTENSITY = IntensityRange(0, 255)


PATCH, COUNT = (8, 16, 16), 48
UNTURNED = AugmentConfig(flip=False, rot90=False)


def grained(shape: tuple[int, int, int], seed: int) -> NDArray[np.uint8]:
    """Voxels that are alike over 4 voxels along x, and hardly along y and z."""
    noise = np.random.default_rng(seed).standard_normal(np.add(shape, (0, 0, 7)))
    along = sum(noise[:, :, k : k + shape[2]] for k in range(8)) / np.sqrt(8)
    return np.clip(120 + 30 * along, 1, 255).astype(np.uint8)


@pytest.fixture(autouse=True)
def _no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every patch is equally far from training."""
    monkeypatch.setattr(metrics, "nearest_distances", lambda _, sought, __: 0.9 + 0.01 * np.arange(len(sought)))


def source_of(
    folder: Path, augment: AugmentConfig, held_out: float = 0.35, stored_as: IntensityRange = INTENSITY
) -> RealSource:
    scan = write_array(folder / "v.zarr", grained((32, 64, 192), 0))
    config = DataConfig(
        volumes=(VolumeConfig(path=str(scan)),),
        patch_size=PATCH,
        augment=augment,
        validation=ValidationConfig(fraction=held_out),
    )
    return RealSource(0, config, None, [INTENSITY], (stored_as, np.dtype(np.uint8)))


def as_drawn(source: RealSource, augment: AugmentConfig) -> NDArray[np.uint8]:
    """Augmented training patches in intensities, as `vesuvius sample` stores generated ones.

    Far apart in its order: neighbors are cut from the same regions.
    """
    samples = [source.data.plan.sample(97 * index) for index in range(COUNT)]
    raw = torch.from_numpy(np.stack([source.data.read_patch(0, sample.box) for sample in samples]))
    shown = [augmentation_of(source.data.plan.seed, augment, sample.index) for sample in samples]
    values = normalized(apply_symmetries(raw, shown), np.repeat(intensity_scales([INTENSITY]), COUNT, 0)).numpy()
    return to_intensities(values, INTENSITY, np.dtype(np.uint8)).astype(np.uint8)


def judged(source: RealSource, found: PatchSet) -> Comparison:
    return compare(generated_set(found, source, has_condition=False), source.read(COUNT), AugmentConfig(), (2,))


def test_a_generated_patch_that_equals_a_real_one_has_its_values_exactly(tmp_path: Path) -> None:
    """All are rounded to the integers of the generated volume; finer values would tell real ones apart."""
    coarse = IntensityRange(0, 40)
    source = source_of(tmp_path, UNTURNED, stored_as=coarse)
    real = source.read(16).held_out.values
    stored = to_intensities(real, coarse, np.dtype(np.uint8))
    assert len(np.unique(stored)) > 20
    np.testing.assert_array_equal(generated_set(PatchSet(stored, None), source, has_condition=False).values, real)


@pytest.mark.long
@pytest.mark.parametrize("augment", [AugmentConfig(), AugmentConfig(rot90=False)])
def test_augmented_training_patches_are_at_the_floor_in_every_metric(tmp_path: Path, augment: AugmentConfig) -> None:
    source = source_of(tmp_path, augment)
    stored = as_drawn(source, augment)
    found = judged(source, PatchSet(stored, None))
    unclear = {metric.key for metric in found.metrics if metric.differs is not False}
    assert unclear <= {"frechet"}, verdict(found)  # too few rows on most sides, as swapped cells differ in size


@pytest.mark.long
def test_a_model_that_ignores_the_rotations_of_training_differs_from_real(tmp_path: Path) -> None:
    """If all that is compared were turned, it would not show."""
    source = source_of(tmp_path, AugmentConfig())
    stored = as_drawn(source, UNTURNED)
    found = judged(source, PatchSet(stored, None))
    differing = {metric.key for metric in found.metrics if metric.differs}
    assert {"correlation_distance"} <= differing <= {"correlation_distance", "chord_distance", "auc"}
    measured = sum(metric.differs is not None for metric in found.metrics)
    said = f"Generated patches fail {len(differing)} of {measured} metrics: correlation distance"
    assert verdict(found).startswith(said)


@pytest.mark.long
def test_patches_cut_from_one_volume_are_at_the_floor_despite_its_single_orientation(tmp_path: Path) -> None:
    source = source_of(tmp_path, AugmentConfig())
    drawn = write_array(tmp_path / "drawn.zarr", grained((32, 64, 96), 7))
    found = open_generated(drawn, PATCH, COUNT, None, 0)
    comparison = judged(source, found)
    assert not [metric.name for metric in comparison.metrics if metric.differs], verdict(comparison)
    assert [metric.name for metric in comparison.metrics if metric.differs is None] == [
        "classifier AUC at 2 steps", "AUC of fixed features"
    ], "too few"  # fmt: skip


def test_real_patches_are_flipped_and_rotated_independently(tmp_path: Path) -> None:
    turned = source_of(tmp_path / "turned", AugmentConfig()).read(16).held_out
    plain = source_of(tmp_path / "plain", UNTURNED).read(16).held_out
    ways = [
        [
            bool(np.array_equal(np.rot90(np.flip(upright, axes), turns, (1, 2)), shown))
            for axes in ((), (0,), (1,), (0, 1))
            for turns in range(4)
        ]
        for upright, shown in zip(plain.values, turned.values, strict=True)
    ]
    assert all(map(any, ways))
    assert len({way.index(True) for way in ways}) > 5


def test_samples_with_conditions_that_training_never_draws_are_dropped(tmp_path: Path) -> None:
    """`vesuvius sample` draws conditions anywhere in the held-out part, training and evaluation where material is."""
    scan = np.zeros((16, 32, 128), np.uint8)
    scan[:, 16:] = 200
    volume = VolumeConfig(path=str(write_array(tmp_path / "v.zarr", scan, chunk=8)))
    config = DataConfig(
        volumes=(volume,),
        patch_size=PATCH,
        validation=ValidationConfig(fraction=0.5),
        min_foreground=0.5,
    )
    source = RealSource(0, config, None, [INTENSITY], (INTENSITY, np.dtype(np.uint8)))
    places = np.array([(0, 0, y, 100) for y in (0, 4, 8, 12, 16) * 8])
    stored = np.stack([scan[:8, y : y + 16, :16] for _, _, y, _ in places])
    shown = generated_set(PatchSet(stored, places), source, has_condition=True)
    assert shown.locations is not None
    assert set(shown.locations[:, 2].tolist()) == {8, 12, 16}
    assert len(shown) == 24
    assert shown.is_conditional
    assert set(shown.side.tolist()) <= {0, 1, -1}
    training = PatchSet(stored[:16], np.array([(0, 0, y, 0) for y in (8, 12) * 8]))
    assert set(generated_set(training, source, has_condition=True).side.tolist()) == {-1}
    few = PatchSet(stored[:16], np.array([(0, 0, y, 0) for y in (0, 8) * 8]))
    with pytest.raises(ConfigError, match="Only 8 of 16 samples have conditions with enough foreground"):
        generated_set(few, source, has_condition=True)


def test_a_run_without_held_out_patches_cannot_be_evaluated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The run has no held-out patches"):
        source_of(tmp_path, UNTURNED, held_out=0.0)


def test_sides_share_no_voxel_and_are_interleaved(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for shape, count in (((16, 64, 64), 128), ((64, 256, 96), 256), ((8, 16, 64), 40), ((8, 16, 16), 20)):
        starts = rng.integers(0, np.array(shape) - PATCH, (count, 3), endpoint=True)
        places = np.column_stack([rng.integers(0, 2, count), starts])
        side, seen = disjoint_sides(places, PATCH, count), [np.zeros((2, *shape), bool) for _ in range(2)]
        for row in np.flatnonzero(side >= 0):
            number, *start = places[row].tolist()
            (z, y, x), (z1, y1, x1) = box_at(tuple(start), PATCH)
            seen[side[row]][number, z:z1, y:y1, x:x1] = True
        assert not (seen[0] & seen[1]).any()
        if shape[1] == 256:
            middles = [starts[side == k, 1].mean() for k in (0, 1)]
            assert abs(middles[0] - middles[1]) < 30, "halves would be 120 apart"
            assert min((side == 0).sum(), (side == 1).sum()) > 60
