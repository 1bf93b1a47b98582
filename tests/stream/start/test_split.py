"""Held-out slabs of volumes that share their voxels."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.conftest import write_array
from vesuvius.config import ArrayConfig, DataConfig, Triple, ValidationConfig, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.plan.make_plan import Split, split_shared, split_volume
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.volumes.alignment import Alignment
from vesuvius.volumes.box import Box, intersects, shape_of, triple

PATCH = (4, 8, 8)
SHAPE = (64, 48, 40)


def pyramid(path: Path, translation: tuple[float, ...] = (0.0, 0.0, 0.0), shape: Triple = SHAPE) -> Path:
    """Two levels, halved along all axes."""
    group = zarr.open_group(path, mode="w", zarr_format=2)
    datasets = []
    for level in range(2):
        voxels = np.ones([size >> level for size in shape], np.uint8)
        group.create_array(str(level), shape=voxels.shape, chunks=(16, 16, 16), dtype="uint8")[...] = voxels
        scale = {"type": "scale", "scale": [8.0 * 2**level] * 3}
        shift = {"type": "translation", "translation": [8.0 * t for t in translation]}
        datasets.append({"path": str(level), "coordinateTransformations": [scale, shift]})
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]
    return path


def prepared(*volumes: VolumeConfig, fraction: float = 0.1, gap: float = 1.0) -> PreparedData:
    validation = ValidationConfig(fraction=fraction, gap=gap)
    return prepare_data(0, DataConfig(volumes=volumes, patch_size=PATCH, validation=validation))


def physical(data: PreparedData, index: int, box: Box) -> Box:
    """A box in voxels of level 0."""
    factor = SHAPE[0] // data.volumes[index].shape_zyx[0]
    return triple(factor * at for at in box[0]), triple(factor * at for at in box[1])


def assert_no_leak(data: PreparedData) -> None:
    held = [physical(data, n, split.validation) for n, split in enumerate(data.splits) if split.validation]
    assert held
    for index in range(200):
        sample = data.plan.sample(index)
        box = physical(data, sample.volume, sample.box)
        assert not any(intersects(box, slab) for slab in held), (index, sample.volume, box, held)


def as_it_is(path: Path) -> dict[str, Any]:
    return {"path": str(path)}


def through_a_link(path: Path) -> dict[str, Any]:
    link = path.with_name("link")
    link.symlink_to(path.name)
    return {"path": str(link)}


def relative(path: Path) -> dict[str, Any]:
    return {"path": os.path.relpath(path)}


def with_slashes(path: Path) -> dict[str, Any]:
    return {"path": f"{path.parent}/./../{path.parent.name}//{path.name}/"}


def array_of_the_level(path: Path) -> dict[str, Any]:
    return {"path": str(path / "0")}


def other_level(path: Path) -> dict[str, Any]:
    return {"path": str(path), "level": 1}


def array_of_the_other_level(path: Path) -> dict[str, Any]:
    return {"path": str(path / "1")}


def linked_level_of_another_group(path: Path) -> dict[str, Any]:
    other = pyramid(path.with_name("other.zarr"))
    for file in sorted((other / "0").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (other / "0").rmdir()
    (other / "0").symlink_to(path / "0")
    return {"path": str(other)}


SPELLINGS = [as_it_is, through_a_link, relative, with_slashes, array_of_the_level, other_level]
SPELLINGS += [array_of_the_other_level, linked_level_of_another_group]


@pytest.mark.sample(5)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("first", [as_it_is, array_of_the_level])
@pytest.mark.parametrize("at", [44])
def test_entries_of_one_array_train_on_no_held_out_voxel_of_any(
    tmp_path: Path, first: Callable[[Path], dict[str, Any]], spelling: Callable[[Path], dict[str, Any]], at: int
) -> None:
    """A mask covers 20 of 64 planes of the second entry, so the two entries have different boxes to split."""
    scan = pyramid(tmp_path / "scan.zarr")
    one = VolumeConfig(**first(scan), weight=2)
    other = spelling(scan)
    if spelling in (array_of_the_level, array_of_the_other_level):  # without a position in space
        size = triple(n >> int(Path(other["path"]).name) for n in SHAPE)
        mask = write_array(tmp_path / "mask.zarr", np.ones(size, np.uint8), 16)
    else:
        mask = pyramid(tmp_path / "part.zarr", (at, 0, 0), (20, *SHAPE[1:]))
    two = VolumeConfig(**other, min_foreground=0.1, mask=ArrayConfig(path=str(mask)))
    data = prepared(one, two)
    assert_no_leak(data)
    assert any(split.validation for split in data.splits)


def test_a_scan_that_a_transform_places_elsewhere_shares_no_slab(tmp_path: Path) -> None:
    """Its held-out voxels would lie at other positions of the entry that has it as a channel; alike, they do not."""
    old, new = (str(pyramid(tmp_path / name)) for name in ("old.zarr", "new.zarr"))
    matrix = [[0.98, 0.199, 0, 0], [-0.199, 0.98, 0, 8], [0, 0, 1, 6]]
    document = {"fixed_volume": "old", "transformation_matrix": matrix}
    (tmp_path / "t.json").write_text(json.dumps(document))
    moved = VolumeConfig(path=new, channels=(ArrayConfig(path=old, transform=str(tmp_path / "t.json")),))
    plain = VolumeConfig(path=old, channels=(ArrayConfig(path=old),))
    with pytest.raises(
        DataError, match=r"new.zarr level 0 and .*old.zarr level 0: a transform places the voxels that "
    ):
        prepared(moved, plain)
    assert [split.validation for split in prepared(moved, plain, fraction=0).splits] == [None, None]
    first, second = prepared(moved, moved).splits
    assert first == second
    assert first.validation


def test_copies_of_a_scan_and_other_scans_are_split_on_their_own(tmp_path: Path) -> None:
    entries = [VolumeConfig(path=str(pyramid(tmp_path / name))) for name in ("a.zarr", "b.zarr")]
    alone = prepared(entries[1]).splits
    assert prepared(*entries).splits[1:] == alone


def test_a_shared_array_without_room_for_a_slab_is_refused_with_both_entries(tmp_path: Path) -> None:
    scan = str(pyramid(tmp_path / "scan.zarr"))
    masks = [str(pyramid(tmp_path / f"{at}", (at, 0, 0), (4, 10, 10))) for at in (0, 2)]
    entries = [VolumeConfig(path=scan, min_foreground=0.5, mask=ArrayConfig(path=mask)) for mask in masks]
    with pytest.raises(DataError, match=r"No slab can be held out of the voxels that .*scan.zarr level 0 share"):
        prepared(*entries)
    assert [split.validation for split in prepared(*entries, fraction=0).splits] == [None, None]


@st.composite
def entries(draw: st.DrawFn) -> tuple[list[Box], list[Alignment], Triple, ValidationConfig]:
    """Boxes of levels of one scan, the first of which is level 0."""
    size, patch = (draw(st.tuples(*[st.integers(*ends)] * 3)) for ends in ((30, 120), (2, 9)))
    boxes, grids = [], []
    for number in range(draw(st.integers(2, 4))):
        factor = 1 if number == 0 else draw(st.sampled_from([Fraction(1, 2), 1, 1, 2, Fraction(3, 2)]))
        shape = triple(int(n / factor) for n in size)
        offset = draw(st.integers(-2, 2)) if number else 0
        starts = [draw(st.integers(0, n // 2)) for n in shape]
        stops = [draw(st.integers(start + 1, n)) for start, n in zip(starts, shape, strict=True)]
        boxes.append((triple(starts), triple(stops)))
        grids.append(Alignment(size, shape, (Fraction(factor),) * 3, (Fraction(offset),) * 3))
    fraction = draw(st.floats(0.01, 0.6))
    return boxes, grids, triple(patch), ValidationConfig(fraction=fraction, gap=draw(st.floats(0, 1.5)))


def on_first(box: Box, grid: Alignment) -> list[tuple[Fraction, Fraction]]:
    ends = zip(*box, grid.offsets, grid.factors, strict=True)
    return [(offset + factor * lo, offset + factor * hi) for lo, hi, offset, factor in ends]


@given(entries())
def test_no_training_voxel_of_any_entry_lies_in_a_held_out_box_of_any(
    drawn: tuple[list[Box], list[Alignment], Triple, ValidationConfig],
) -> None:
    boxes, grids, patch, config = drawn
    try:
        splits = split_shared([f"v{n}" for n in range(len(boxes))], boxes, grids, patch, config)
    except DataError:
        return assume(False)
    assert any(split.validation for split in splits)
    for split, box in zip(splits, boxes, strict=True):
        for part in (split.train, split.validation or split.train):
            assert all(n >= p for n, p in zip(shape_of(part), patch, strict=True)), "room for a patch"
            assert all(lo <= a and b <= hi for lo, a, b, hi in zip(box[0], *part, box[1], strict=True))
    for (one, one_grid), (two, two_grid) in product(zip(splits, grids, strict=True), repeat=2):
        if two.validation is None:
            continue
        train, held = on_first(one.train, one_grid), on_first(two.validation, two_grid)
        gaps = [max(a - d, c - b) for (a, b), (c, d) in zip(train, held, strict=True)]
        wanted = [int(np.ceil(config.gap * p)) * f for p, f in zip(patch, one_grid.factors, strict=True)]
        assert any(g >= w for g, w in zip(gaps, wanted, strict=True)), (train, held)
    return None


@given(entries())
def test_a_single_entry_is_split_as_without_sharing(
    drawn: tuple[list[Box], list[Alignment], Triple, ValidationConfig],
) -> None:
    boxes, grids, patch, config = drawn
    try:
        expected: list[Split] = [split_volume("v", grids[0].array_zyx, patch, config, boxes[0])]
    except DataError:
        return assume(False)
    assert split_shared(["v"], boxes[:1], grids[:1], patch, config) == expected
    return None
