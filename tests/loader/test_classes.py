"""`class_weights` and `ignore_label`: the shares of the patches, and where they come from, by counting voxels."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from tests.conftest import textured, write_array
from tests.plan.layouts import chi_square_p
from vesuvius import ConfigError, DataError, PatchLoader, VolumeConfig
from vesuvius.config import MaskConfig
from vesuvius.loader.arguments import data_of
from vesuvius.plan.plan import Plan
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.volumes import occupancy
from vesuvius.volumes.box import slices

SHAPE, PATCH = (24, 30, 36), (8, 12, 12)
Voxels = np.ndarray[Any, Any]


def labels_of(*boxes: tuple[int, tuple[int, int, int], tuple[int, int, int]]) -> Voxels:
    labels = np.zeros(SHAPE, np.int16)
    for label, first, stop in boxes:
        labels[slices((first, stop))] = label
    return labels


ONE, TWO = (1, (2, 3, 4), (5, 9, 12)), (-2, (17, 20, 30), (18, 21, 31))  # class -2 is a single voxel


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return write_array(tmp_path / "v.zarr", textured(SHAPE), 16)


def stored(path: Path, voxels: Voxels) -> Path:
    return write_array(path, voxels, 16, config={"write_empty_chunks": True})


def plan_of(volumes: Any, **given: Any) -> Plan:
    data, seed = data_of(volumes, {"patch_size": PATCH} | given, 0)
    return prepare_data(seed, data.model_copy(update={"patches_per_region": 1})).plan


def held(marked: Voxels) -> Voxels:
    """Number of marked voxels in the patch at each start."""
    found: Voxels = sliding_window_view(marked, PATCH).sum((3, 4, 5))
    return found


def assert_uniform(plan: Plan, entry: int, qualifying: Voxels) -> None:
    """Check that the starts of an entry are the qualifying ones, all alike, counted in blocks of 6 x 6 x 6."""
    of_visits = [visit for visit in map(plan.visit, range(24)) if visit.entry == entry]
    starts, rng = [plan.sample_of(visit, visit.slot).start_zyx for visit in of_visits], np.random.default_rng(0)
    assert starts
    assert qualifying[tuple(zip(*starts, strict=True))].all()
    foreground = plan.volumes[entry].foreground
    assert foreground is not None
    drawn = Counter(tuple(at // 6 for at in foreground.draw(rng)) for _ in range(250))
    expected = Counter(tuple(at // 6 for at in start) for start in np.argwhere(qualifying).tolist())
    assert set(drawn) <= set(expected)
    counts = np.array(list(expected.values())) * 250 / qualifying.sum()
    assert len(counts) == 1 or chi_square_p([drawn[key] for key in expected], counts) > 1e-4


def test_each_class_has_its_share_of_patches_and_these_lie_anywhere_around_it(tmp_path: Path, volume: Path) -> None:
    labels = labels_of(ONE, TWO)
    plan = plan_of(volume, labels=stored(tmp_path / "l", labels), class_weights={1: 0.3, -2: 0.1})
    visits = [plan.visit(slot) for slot in range(2000)]
    counts = Counter(visit.entry for visit in visits)
    assert [counts[entry] for entry in range(3)] == pytest.approx([1200, 600, 200], abs=1), "slots are dealt exactly"
    assert {visit.volume for visit in visits} == {0}
    for entry, label in enumerate((1, -2), 1):
        assert_uniform(plan, entry, held(labels == label) > 0)
    everywhere = np.array([plan.sample_of(visit, visit.slot).start_zyx for visit in visits if not visit.entry])
    assert chi_square_p(np.bincount(everywhere[:, 2] // 5), np.full(5, len(everywhere) / 5)) > 1e-4


def test_volumes_keep_their_weights_and_a_class_comes_from_those_that_hold_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries, marked = [], []
    for number, boxes in enumerate(([ONE], [], [ONE, TWO])):
        path = write_array(tmp_path / f"{number}.zarr", textured(SHAPE, number), 16)
        entries.append(VolumeConfig(path=path, weight=(1, 2, 3)[number]))
        marked.append(stored(tmp_path / f"{number}.labels", labels_of(*boxes)))
    plan = plan_of(entries, labels=marked, class_weights={1: 0.3})
    found = Counter((visit.volume, visit.entry > 2) for visit in map(plan.visit, range(2400)))
    expected = {(0, False): 220, (0, True): 180, (1, False): 800, (2, False): 660, (2, True): 540}
    assert found == {key: pytest.approx(count, abs=1) for key, count in expected.items()}
    assert f"class 1 (data.class_weights) is in no training patch of {entries[1].path}" in caplog.text
    with pytest.raises(DataError, match=r"No training patch holds class 7 of data.class_weights in .*0.zarr, .*2.zarr"):
        plan_of(entries, labels=marked, class_weights={7: 0.3})
    with pytest.raises(DataError, match=r"ask for more patches than those of .*2.zarr"):
        plan_of(entries, labels=marked, class_weights={-2: 0.6})


@pytest.mark.parametrize(
    "dtype", ["uint64", *(pytest.param(dtype, marks=pytest.mark.long) for dtype in ("int16", "f4"))]
)
def test_patches_are_annotated_and_those_of_a_class_too(tmp_path: Path, volume: Path, dtype: str) -> None:
    ignored = 2**64 - 1 if dtype == "uint64" else -5
    labels = labels_of(ONE).astype(dtype)
    labels[8:, :, :] = labels[:, 14:, :] = ignored
    given = {"labels": stored(tmp_path / "l", labels), "ignore_label": ignored}
    (everywhere,) = plan_of(volume, **given).volumes
    assert everywhere.foreground
    assert everywhere.foreground.min_fraction == 0.5
    plan = plan_of(volume, **given, min_foreground=0.9, class_weights={1: 0.5})
    annotated, of_class = held(labels != ignored) >= 0.9 * np.prod(PATCH), held(labels == 1) > 0
    assert_uniform(plan, 0, annotated)
    assert_uniform(plan, 1, annotated & of_class)
    assert annotated.sum() > (annotated & of_class).sum() < of_class.sum()


def test_a_mask_selects_values_and_large_labels_are_estimated(
    tmp_path: Path, volume: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    labels = labels_of(ONE, TWO)
    path = stored(tmp_path / "l", labels)
    for selects, marked in (({"labels": (1, -2)}, labels != 0), ({"ignore": (1, -2)}, labels == 0), ({}, labels != 0)):
        plan = plan_of(volume, mask=MaskConfig(path=path, **selects), min_foreground=0.01)
        assert_uniform(plan, 0, held(marked) >= 0.01 * np.prod(PATCH))
    with pytest.raises(ConfigError, match="exclude each other"):
        MaskConfig(path=path, labels=(1,), ignore=(2,))
    monkeypatch.setattr(occupancy, "_VOXELS_MAX", np.prod(SHAPE) - 1)
    plan = plan_of(volume, labels=path, class_weights={1: 0.3})
    assert "has more than 25919 voxels: the foreground of patches of" in caplog.text
    near = [(labels[slices(plan.sample_of(v, v.slot).box)] == 1).any() for v in map(plan.visit, range(40)) if v.entry]
    assert np.mean(near) > 0.8


def test_batches_are_those_of_one_volume_kept_once(tmp_path: Path, volume: Path) -> None:
    labels = labels_of(ONE, TWO)
    given: Any = {"labels": stored(tmp_path / "l", labels), "class_weights": {1: 0.3, -2: 0.3}, "patch_size": PATCH}
    given |= {"batch_size": 4, "num_workers": 0, "device": "cpu", "validation_fraction": 0.0}
    with PatchLoader(volume, **given) as plain, PatchLoader(volume, **given, cache_in_memory=True) as cached:
        assert len(plain.intensity_ranges) == len(plain.validation_boxes) == 1
        for one, other in islice(zip(plain, cached, strict=True), 12):
            assert one.samples == other.samples
            assert (one.image == other.image).all()
            assert one.label is not None
            for label, sample in zip(one.label, one.samples, strict=True):
                assert sorted(label.flatten().tolist()) == sorted(labels[slices(sample.box)].flatten().tolist())
        assert len(cached.stream._resident.volumes) == 1


def test_a_mask_of_one_entry_asks_nothing_of_the_others() -> None:
    """Only entries with a mask, and no share of their own, get the default; a given share is that of all others."""
    masked = [{"path": "v.zarr", "mask": "m.zarr"}, {"path": "v.zarr", "mask": "m.zarr", "min_foreground": 0.1}]
    for given, shares in ((None, [0.0, 0.5, 0.1]), (0.2, [0.2, 0.2, 0.1])):
        data, _ = data_of(["v.zarr", *masked], {"min_foreground": given}, None)  # type: ignore[list-item]
        assert [data.min_foreground_of(each) for each in data.volumes] == shares


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"class_weights": {1: 0.6, 2: 0.4}},
            "1: 0.6, 2: 0.4 are not distinct classes whose shares sum to less than 1",
        ),
        ({"class_weights": {1: 1.0}}, "class_weights.0.share"),
        ({"class_weights": {1: 0.0}}, "class_weights.0.share"),
        ({"class_weights": {"ink": 0.5}}, "class_weights.0.label"),
        ({"class_weights": [1]}, r"class_weights.0: Input should be a valid dict"),
        ({"class_weights": {1: 0.5}, "labels": None}, "class_weights need labels"),
        ({"ignore_label": 2, "labels": None}, "ignore_label needs labels"),
        ({"ignore_label": 2, "mask": "m.zarr"}, "ignore_label needs labels, and no mask"),
        ({"ignore_label": 1.5}, "mask.ignore.0: Input should be a valid integer"),
        ({"ignore_label": 2, "min_foreground": 0.0}, "has no effect with min_foreground 0"),
        ({"ignore_label": 2, "labels": MaskConfig(path="l", labels=(1,))}, "use ArrayConfig for them"),
    ],
)
def test_contradictory_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        data_of("v.zarr", {"labels": "l.zarr"} | given, None)
