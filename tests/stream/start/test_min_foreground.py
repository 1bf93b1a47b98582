"""Each patch holds `min_foreground`, counted voxel by voxel, and each start whose patch does is equally likely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from tests.conftest import write_array
from tests.plan.layouts import chi_square_p
from vesuvius.config import ArrayConfig, DataConfig, ValidationConfig, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.plan.plan import Plan
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.volumes import occupancy
from vesuvius.volumes.alignment import Alignment
from vesuvius.volumes.box import slices
from vesuvius.volumes.occupancy import ForegroundVoxels

Voxels = np.ndarray[Any, Any]
SHAPE, PATCH = (24, 30, 36), (8, 12, 12)


def one_voxel(at: tuple[int, int, int]) -> Callable[[], Voxels]:
    def made() -> Voxels:
        mask = np.zeros(SHAPE, np.uint8)
        mask[at] = 1
        return mask

    return made


def a_sheet() -> Voxels:
    mask = np.zeros(SHAPE, np.uint8)
    mask[:, :, 17] = 1
    return mask


def a_blob() -> Voxels:
    mask = np.zeros(SHAPE, np.uint8)
    mask[7:12, 11:19, 10:17] = 3
    return mask


def dust() -> Voxels:
    return (np.random.default_rng(0).random(SHAPE) < 0.002).astype(np.uint8)


MASKS: dict[str, tuple[Callable[[], Voxels], float]] = {
    "a corner": (one_voxel((0, 0, 0)), 1e-6),
    "the last voxel": (one_voxel((23, 29, 35)), 1e-6),
    "one voxel in the middle": (one_voxel((12, 15, 18)), 1e-6),
    "a sheet": (a_sheet, 1 / 12),
    "a blob": (a_blob, 0.2),
    "dust": (dust, 3 / 1152),
}


def write_level(path: Path, voxels: Voxels, scale: float) -> Path:
    group = zarr.open_group(path, mode="w", zarr_format=2)
    group.create_array("0", shape=voxels.shape, chunks=(16, 16, 16), dtype=voxels.dtype)[...] = voxels
    transforms = [{"type": "scale", "scale": [scale] * 3}, {"type": "translation", "translation": [0.0] * 3}]
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    datasets = [{"path": "0", "coordinateTransformations": transforms}]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]
    return path


def plan_of(path: Path, mask: Path, share: float, volume: Path | None = None) -> Plan:
    volume = volume or write_array(path / "v.zarr", np.ones(SHAPE, np.uint8), 16)
    spec = VolumeConfig(path=str(volume), mask=ArrayConfig(path=str(mask)), min_foreground=share)
    validation = ValidationConfig(fraction=0)
    return prepare_data(0, DataConfig(volumes=(spec,), patch_size=PATCH, validation=validation)).plan


def held(mask: Voxels) -> Voxels:
    """Share of foreground of the patch at each start."""
    found: Voxels = sliding_window_view(mask != 0, PATCH).mean((3, 4, 5))
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ["the last voxel", "a corner", "a sheet", "a blob", "one voxel in the middle", "dust"])
def test_every_start_whose_patch_holds_the_share_is_equally_likely_and_no_other(tmp_path: Path, case: str) -> None:
    make, share = MASKS[case]
    mask = make()
    qualifying = set(map(tuple, np.argwhere(held(mask) >= share).tolist()))
    assert qualifying
    plan = plan_of(tmp_path, write_array(tmp_path / "mask.zarr", mask, 16), share)
    counts = Counter(plan.uniform_patch(0, draw)[0] for draw in range(300))
    assert set(counts) <= qualifying
    assert {plan.sample(index).start_zyx for index in range(8)} <= qualifying
    groups = Counter[tuple[int, ...]]()
    for start in qualifying:
        groups[tuple(at // 8 for at in start)] += 1
    drawn = Counter[tuple[int, ...]]()
    for start, count in counts.items():
        drawn[tuple(at // 8 for at in start)] += count
    keys = sorted(groups)
    expected = np.array([groups[key] for key in keys]) * 300 / len(qualifying)
    if len(keys) > 1:
        assert chi_square_p([drawn[key] for key in keys], expected) > 1e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize("factor", [0.5, 2.0, 1.5])
def test_a_mask_of_another_resolution_counts_as_it_is_cut(tmp_path: Path, factor: float) -> None:
    shape = tuple(round(n / factor) for n in SHAPE)
    coarse = (np.random.default_rng(1).random(shape) < 0.02).astype(np.uint8)
    volume = write_level(tmp_path / "v.zarr", np.ones(SHAPE, np.uint8), 2)
    mask = write_level(tmp_path / "mask.zarr", coarse, 2 * factor)
    plan = plan_of(tmp_path, mask, 0.02, volume)
    (found,) = plan.volumes
    assert found.foreground
    assert found.foreground.map.voxels
    rows = [found.foreground.map.voxels.alignment.indices(axis, 0, size) for axis, size in enumerate(SHAPE)]
    seen = coarse[np.ix_(*rows)]
    assert min(seen[slices(plan.sample(index).box)].mean() for index in range(10)) >= 0.02


def test_a_share_that_no_patch_holds_is_refused(tmp_path: Path) -> None:
    mask = a_blob()
    best = float(held(mask).max())
    path = write_array(tmp_path / "mask.zarr", mask, 16)
    plan = plan_of(tmp_path, path, best)
    assert plan.sample(0)
    with pytest.raises(DataError, match=r"No patch with data.min_foreground=\S+ of foreground was found among 8075"):
        plan_of(tmp_path, path, best + 1 / 1152, tmp_path / "v.zarr")


def test_a_mask_too_large_to_be_counted_is_estimated_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(occupancy, "_VOXELS_MAX", np.prod(SHAPE) - 1)
    assert plan_of(tmp_path, write_array(tmp_path / "mask.zarr", a_blob(), 16), 0.1).sample(0)
    assert "has more than 25919 voxels: the foreground of patches of" in caplog.text


@given(
    factors=st.tuples(*[st.sampled_from([0.5, 1, 1, 1.5, 2, 3])] * 3),
    offsets=st.tuples(*[st.integers(-6, 6)] * 3),
    ends=st.tuples(*[st.tuples(st.integers(0, 10), st.integers(11, 25))] * 3),
    seed=st.integers(0, 99),
)
def test_counted_voxels_are_those_of_the_patch_that_is_cut(factors: Any, offsets: Any, ends: Any, seed: int) -> None:
    array = np.random.default_rng(seed).random((20, 19, 21)) < 0.4
    alignment = Alignment((25, 25, 25), array.shape, tuple(map(Fraction, factors)), tuple(map(Fraction, offsets)))
    lows, highs = zip(*ends, strict=True)
    box = tuple(map(max, lows, alignment.covered[0])), tuple(map(min, highs, alignment.covered[1]))
    found = ForegroundVoxels(alignment, np.packbits(array, axis=-1)).count((lows, highs))
    if any(lo >= hi for lo, hi in zip(*box, strict=True)):
        assert found == 0
        return
    cut = alignment.read(box, lambda inner, out: array[slices(inner)].copy())  # type: ignore[arg-type]
    assert found == np.count_nonzero(cut)


def test_the_one_start_around_a_solid_mask_is_found_without_counting_all_that_touch_it(tmp_path: Path) -> None:
    mask = np.zeros((128,) * 3, np.uint8)
    mask[10:106, 20:116, 5:101] = 1
    volume, path = (write_array(tmp_path / name, each, 64) for name, each in (("v", np.ones_like(mask)), ("m", mask)))
    spec = VolumeConfig(path=str(volume), mask=ArrayConfig(path=str(path)), min_foreground=0.995)
    data = DataConfig(volumes=(spec,), patch_size=(96, 96, 96), validation=ValidationConfig(fraction=0))
    plan = prepare_data(0, data).plan
    assert {plan.uniform_patch(0, draw)[0] for draw in range(3)} == {(10, 20, 5)}
