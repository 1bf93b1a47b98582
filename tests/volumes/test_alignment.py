"""Alignment of two grids, compared with each voxel's position in space and with `np.repeat`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import textured, write_array, write_ome
from vesuvius.config import ArrayConfig, Triple
from vesuvius.errors import DataError
from vesuvius.volume_tools.copy import CopyRequest, copy_box
from vesuvius.volumes.alignment import Alignment, align, log_alignment
from vesuvius.volumes.box import Box, slices
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.geometry import Geometry
from vesuvius.volumes.volume import Volume, open_volume

Voxels = np.ndarray[Any, Any]
F = Fraction


# ---- what a placed array shows


def voxel_at(alignment: Alignment, axis: int, place: int) -> int | None:
    """The array voxel that contains the center of a voxel (on a boundary the lower one), by exhaustive search."""
    center, factor, offset = place + F(1, 2), alignment.factors[axis], alignment.offsets[axis]
    holding = [j for j in range(alignment.array_zyx[axis]) if offset + j * factor < center <= offset + (j + 1) * factor]
    return holding[0] if holding else None


FACTORS = [F(1), F(2), F(3), F(1, 2), F(1, 3), F(3, 2), F(5, 4), F(2, 3), F(13, 7)]


@st.composite
def placed(draw: st.DrawFn) -> Alignment:
    """Any offset by whole voxels of the finer grid, as from `align`, with coarser and finer voxels."""
    volume, array = (draw(st.tuples(*[st.integers(1, 12)] * 3)) for _ in range(2))
    factors = draw(st.tuples(*[st.sampled_from(FACTORS)] * 3))
    offsets = tuple(draw(st.integers(-9, 9)) * min(factor, F(1)) for factor in factors)
    return Alignment(volume, array, factors, offsets)  # type: ignore[arg-type]


def a_box(draw: Any, within: Box) -> Box:
    ends = [sorted(draw(st.sets(st.integers(lo, hi), min_size=2, max_size=2))) for lo, hi in zip(*within, strict=True)]
    box: Any = tuple(zip(*ends, strict=True))
    return box


@given(alignment=placed(), data=st.data())
def test_every_voxel_maps_to_the_array_voxel_at_its_center(alignment: Alignment, data: st.DataObject) -> None:
    array, covered = textured(alignment.array_zyx, seed=1), alignment.covered
    for axis, size in enumerate(alignment.volume_zyx):
        there = [place for place in range(size) if voxel_at(alignment, axis, place) is not None]
        if there and size - 1 - there[-1] < alignment.factors[axis]:
            there = list(range(there[0], size))  # a remainder shorter than a voxel of the array
        lo, hi = covered[0][axis], covered[1][axis]
        assert list(range(lo, hi)) == there
    if any(lo >= hi for lo, hi in zip(*covered, strict=True)):
        return
    box = a_box(data.draw, covered)
    asked: list[Box] = []

    def read(inner: Box, out: Voxels | None) -> Voxels:
        asked.append(inner)
        found = array[slices(inner)]
        if out is None:
            return found
        out[...] = found
        return out

    expected = repeated_end(alignment, array)[slices(box)]
    out = np.zeros_like(expected)
    assert alignment.read(box, read, out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(alignment.read(box, read), expected)
    lo, hi = np.array(asked[0])
    assert (lo >= 0).all()
    assert (hi <= alignment.array_zyx).all()


def repeated_end(alignment: Alignment, array: Voxels) -> Voxels:
    """As `voxel_at`, with the last voxel repeated over a remainder."""
    rows = []
    for axis, size in enumerate(alignment.volume_zyx):
        row = [voxel_at(alignment, axis, place) for place in range(size)]
        last = alignment.array_zyx[axis] - 1
        rows.append([last if j is None and place and last in row[:place] else j or 0 for place, j in enumerate(row)])
    return array[np.ix_(*rows)]


@given(alignment=placed(), data=st.data())
def test_damage_covers_all_voxels_that_map_to_damaged_ones(alignment: Alignment, data: st.DataObject) -> None:
    covered = alignment.covered
    if any(lo >= hi for lo, hi in zip(*covered, strict=True)):
        return
    damage = a_box(data.draw, ((0, 0, 0), alignment.array_zyx))
    marked = np.zeros(alignment.array_zyx, bool)
    marked[slices(damage)] = True
    seen = repeated_end(alignment, marked)[slices(covered)]
    found = np.zeros(alignment.volume_zyx, bool)
    found[slices(alignment.volume_box(damage))] = True
    assert (found[slices(covered)] >= seen).all()
    if seen.any():
        np.testing.assert_array_equal(found[slices(covered)], seen)

    def torn(box: Any, out: Any) -> Any:
        raise UnreadableChunkError("coarse.zarr level 2", box, (1, 2, 3), damage, "torn")

    with pytest.raises(
        UnreadableChunkError, match=r"chunk \[1, 2, 3\] of volume coarse.zarr level 2, .*: torn"
    ) as error:
        alignment.read(covered, torn)
    assert error.value.box == alignment.volume_box(damage)


# ---- what metadata say


RAW: Triple = (40, 72, 88)


def volume_of(
    path: Path,
    shape: tuple[int, ...],
    scale: Any = None,
    translation: Any = None,
    unit: str | None = "nanometer",
    pyramid: list[dict[str, Any]] | None = None,
) -> Volume:
    """A volume of one chunk; a bare array if `scale` is None."""
    if scale is None:
        zarr.create_array(str(path), shape=shape, chunks=(16, 16, 16), dtype="u1")[0, 0, 0] = 1
    else:
        entry = {"coordinateTransformations": pyramid} if pyramid else {}
        write_ome(path, {"0": tuple(shape)}, [scale], {0: translation}, unit, entry=entry)
    return open_volume(path)


ANY = (20, 36, 44)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, Any]] = {
    # name: (raw, array, factor, offset in voxels of raw), per axis or one of all
    "a crop": ({}, {"translation": (40, 60, 80)}, 1, (10, 15, 20)),
    "it begins before and ends after": ({}, {"shape": (60, 90, 99), "translation": (-40, -8, -4)}, 1, (-10, -2, -1)),
    "off by a third of a voxel": ({}, {"translation": (41, 59, 81.3)}, 1, (10, 15, 20)),
    "off by half a voxel": ({}, {"shape": RAW, "translation": 2}, 1, 0),
    "micrometers": ({}, {"scale": 0.004, "translation": (0.04, 0.06, 0.08), "unit": "micrometer"}, 1, (10, 15, 20)),
    "abbreviated units": ({"scale": 0.004, "unit": "um"}, {"unit": "nm", "translation": 40}, 1, 10),
    "twice as coarse": ({}, {"scale": 8, "translation": 0}, 2, 0),
    "twice as coarse, a crop between coarse voxels": (
        {}, {"scale": 8, "shape": (8, 9, 10), "translation": (44, 20, 4)}, 2, (11, 5, 1),
    ),
    "twice, four and three times, by centers": ({}, {"scale": (8, 16, 12), "translation": (2, 6, 4)}, (2, 4, 3), 0),
    "a coarse raw level by centers, finer labels": (
        {"scale": 8, "translation": 2}, {"shape": (80, 144, 176), "translation": 0}, F(1, 2), 0,
    ),
    "anisotropic": ({"scale": (8, 4, 4)}, {"scale": (8, 4, 8), "translation": (80, 60, 80)}, (1, 1, 2), (10, 15, 20)),
    "one and a half times": ({}, {"scale": 6, "shape": (20, 48, 58), "translation": (0, 12, 0)}, F(3, 2), (0, 3, 0)),
    "scales that are rounded": (
        {"scale": 3.24, "unit": "micrometer"}, {"scale": 6479.7, "translation": 32400}, 2, 10,
    ),
    "scales that are ratios of shapes": (
        {"shape": (41, 71, 88)},
        {"shape": (21, 35, 44), "scale": (164 / 21, 284 / 35, 8)},
        (F(41, 21), F(71, 35), 2), 0,
    ),
    "a translation of the pyramid": (
        {"pyramid": [{"type": "translation", "translation": [400, 0, 0]}]},
        {"translation": (40, 0, 0), "pyramid": [{"type": "translation", "translation": [420, 60, 0]}]},
        1, (15, 15, 0),
    ),
    "a scale of the pyramid": (
        {}, {"scale": 1, "translation": 10, "pyramid": [{"type": "scale", "scale": [4, 4, 4]}]}, 1, 10,
    ),
    "voxels of a bare array": (
        {"scale": None}, {"scale": 1, "translation": (10, 15, 20), "unit": None}, 1, (10, 15, 20),
    ),
    "a unit in one": ({}, {"unit": None, "translation": (40, 60, 80)}, 1, (10, 15, 20)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_metadata_align_an_array(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    raw, array, factors, offsets = CASES[case]
    volume = volume_of(tmp_path / "raw", **({"shape": RAW, "scale": 4, "translation": 0} | raw))
    labels = volume_of(tmp_path / "labels", **({"shape": ANY, "scale": 4} | array))
    found = log_alignment(volume, labels, "the condition")
    assert found.factors == tuple(np.broadcast_to(factors, 3))
    assert found.offsets == tuple(np.broadcast_to(offsets, 3))
    assert found.caveat is None
    assert all(record.levelno == logging.INFO for record in caplog.records)


@dataclass(frozen=True)
class Grid:
    """The attributes of a volume that `align` uses."""

    name: str
    shape_zyx: Triple
    geometry: Geometry
    level: object = None
    transform: object = None


@pytest.mark.parametrize("scale", [4.0, 8.0, 12.0, 6.0, 2.0, (16.0, 8.0, 4.0)])
@given(corners=st.tuples(*[st.tuples(*[st.integers(-5, 8)] * 3)] * 2))
def test_voxels_and_array_voxels_coincide_in_space(scale: Any, corners: tuple[Triple, Triple]) -> None:
    """The law of all cases: the center of each voxel lies in the array voxel to which it maps, for crops anywhere."""
    scales, units = np.broadcast_to(scale, 3), ("nanometer",) * 3
    grids = np.full(3, 4), np.minimum(scales, 4)
    begins = [tuple(corner * grid) for corner, grid in zip(corners, grids, strict=True)]
    raw: Any = Grid("raw", (24, 24, 24), Geometry((4, 4, 4), begins[0], units, True))
    labels: Any = Grid("labels", (30, 30, 30), Geometry(tuple(scales), begins[1], units, True))
    found = align(raw, labels, "labels")
    for axis in range(3):
        lo, hi = found.covered[0][axis], found.covered[1][axis]
        centers = begins[0][axis] + (np.arange(lo, hi) + 0.5) * 4
        corner = begins[1][axis]
        if scales[axis] == 12 and corner - begins[0][axis] == 4:
            corner -= 4  # interpreted as a translation of centers
        end = corner + 30 * scales[axis]
        at = corner + found.indices(axis, lo, hi) * scales[axis]
        assert (at <= centers).all()
        assert (centers[centers < end] <= at[centers < end] + scales[axis]).all()
        assert lo == 0 or centers[0] - 4 <= corner
        assert hi == 24 or centers[-1] + 4 > end


SHAPES = [
    (RAW, RAW, (1, 1, 1)),
    ((97, 128, 130), (48, 64, 65), (2, 2, 2)),
    ((100, 1000, 1000), (4, 32, 32), (32, 32, 32)),  # the sizes alone would also allow 21 to 33
    ((75784, 32693, 32693), (2369, 1022, 1022), (32, 32, 32)),
    ((50, 1000, 1000), (50, 32, 32), (1, 32, 32)),
    ((64, 2000, 2000), (7, 200, 200), (10, 10, 10)),  # 9 also reduces 64 to 7, but not 2000 to 200
]


@pytest.mark.parametrize(("fine", "coarse", "factors"), SHAPES)
@pytest.mark.parametrize("said", [(None, None), (4, None), (1, 1)])
def test_without_scales_the_shapes_decide_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fine: Any, coarse: Any, factors: Any, said: Any
) -> None:
    units = ["nanometer" if scale == 4 else None for scale in said]
    volume = volume_of(tmp_path / "raw", fine, said[0], unit=units[0])
    labels = volume_of(tmp_path / "labels", coarse, said[1], unit=units[1])
    with caplog.at_level("INFO"):
        found = log_alignment(volume, labels, "the condition")
    assert (found.factors, found.offsets) == (factors, (0, 0, 0))
    assert found.covered == ((0, 0, 0), fine)
    (record,) = caplog.records
    assert "by shape alone" in record.message
    assert record.levelname == ("INFO" if factors == (1, 1, 1) else "WARNING")


def test_equal_shapes_with_one_default_scale_align_with_a_caveat(tmp_path: Path) -> None:
    volume = volume_of(tmp_path / "raw", RAW, 4)
    found = align(volume, volume_of(tmp_path / "labels", RAW, 1, unit=None), "labels")
    assert found == Alignment(RAW, RAW)
    assert found.caveat is not None


def test_a_crop_without_a_translation_starts_at_the_first_voxel_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    volume, labels = volume_of(tmp_path / "raw", RAW, 4), volume_of(tmp_path / "labels", ANY, 4)
    assert log_alignment(volume, labels, "labels") == Alignment(RAW, ANY)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "because it has no translation" in record.message


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "elsewhere": ({}, {"translation": (400, 0, 0)}, "they do not overlap"),
    "no simple factor": ({}, {"scale": 4.3}, "the factor 1.075 along z is not a ratio of small integers"),
    "another unit by mistake": ({}, {"scale": 4, "unit": "micrometer"}, "the volume would lie in a single voxel"),
    "a unit in one, not the same": ({"unit": "micrometer"}, {"unit": None, "scale": 4000}, "only one has a unit"),
    "units that are not known": (
        {"unit": "voxel"}, {"unit": "pixel"}, "their units voxel and pixel cannot be compared",
    ),
    "a crop with a writer's default": ({}, {"scale": 1, "unit": None}, "one has voxels of size 1 without a unit"),
    "a box in voxels from 0, or coarser": (
        {"scale": None}, {"scale": 1, "unit": None, "translation": 0}, "start at 0, but their shapes differ",
    ),
    "a translation lost": ({"translation": (40, 0, 0)}, {"shape": RAW}, "only one has a translation"),
    "several factors fit": (
        {"scale": None, "shape": (64, 32, 32)}, {"scale": None, "shape": (7, 32, 32)}, "fits any of the factors",
    ),
    "finer by shape alone": ({"scale": None}, {"scale": None, "shape": (80, 144, 176)}, "its shape is not the vol"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_arrays_that_do_not_fit_are_refused_with_both_geometries(tmp_path: Path, case: str) -> None:
    raw, array, reason = REFUSED[case]
    volume = volume_of(tmp_path / "raw", **({"shape": RAW, "scale": 4, "translation": 0} | raw))
    labels = volume_of(tmp_path / "labels", **({"shape": ANY, "scale": 4} | array))
    with pytest.raises(DataError) as refused:
        align(volume, labels, "the condition")
    message = str(refused.value)
    assert f"Cannot align the condition {labels.name} with the volume {volume.name}: " in message
    assert reason in message
    assert f"it has {labels.shape_zyx} voxels" in message
    assert f"the volume {volume.shape_zyx} voxels" in message


@pytest.mark.parametrize("scaled", [True, False], ids=["ome", "bare"])
@pytest.mark.parametrize(("first", "second"), [((5, 6, 7), (0, 9, 9)), ((3, 4, 5), (3, 4, 5))])
def test_copied_boxes_keep_their_position(tmp_path: Path, scaled: bool, first: Triple, second: Triple) -> None:
    voxels = textured((32, 40, 48))
    write = (lambda p: write_ome(p, {"0": voxels})) if scaled else (lambda p: write_array(p, voxels))
    source, opened, sizes = write(tmp_path / "v.zarr"), [], [(24, 24, 24), (16, 20, 20)]
    for number, (start, size) in enumerate(zip((first, second), sizes, strict=True)):
        out = tmp_path / f"{number}.zarr"
        copy_box(CopyRequest(ArrayConfig(path=str(source)), out, start, size, levels=2))
        opened.append([open_volume(ArrayConfig(path=str(out), level=level)) for level in (0, 1)])
    found = align(opened[0][0], opened[1][0], "labels")
    at = np.array(second) - first
    assert (found.factors, found.offsets) == ((1, 1, 1), tuple(at))
    box = found.covered
    there = tuple(slice(lo + f, hi + f) for lo, hi, f in zip(*box, first, strict=True))
    np.testing.assert_array_equal(found.read(box, opened[1][0].read), voxels[there])
    if scaled:
        coarse = align(opened[0][0], opened[1][1], "labels")
        assert (coarse.factors, coarse.offsets) == ((2, 2, 2), tuple(at))
    else:  # scales 1 and 2 without a unit may be a writer's default
        with pytest.raises(DataError, match="one has voxels of size 1 without a unit"):
            align(opened[0][0], opened[1][1], "labels")
