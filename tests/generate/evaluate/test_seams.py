"""Seams of volumes made of tiles, against volumes without."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.generate.evaluate.test_metrics import scroll
from vesuvius.errors import ConfigError
from vesuvius.generate.evaluate.metrics import _seams
from vesuvius.generate.evaluate.seams import find_seams, plane_changes

Voxels = NDArray[np.float32]


def side_by_side(volume: Voxels, tile: tuple[int, int, int], tiles: tuple[int, int, int], seed: int) -> Voxels:
    """Patches of a volume, from random places, next to each other."""
    rng, pasted = np.random.default_rng(seed), np.empty(np.multiply(tile, tiles), np.float32)
    for index in np.ndindex(*tiles):
        at = rng.integers(0, np.subtract(volume.shape, tile), endpoint=True)
        to, place = np.multiply(index, tile), np.array(tile)
        pasted[tuple(map(slice, to, to + place))] = volume[tuple(map(slice, at, at + place))]
    return pasted


@pytest.mark.parametrize(("tile", "tiles"), [((8, 16, 16), (4, 5, 5)), ((12, 20, 24), (4, 4, 3))])
def test_real_patches_side_by_side_are_recognized_without_knowing_their_size(
    tile: tuple[int, int, int], tiles: tuple[int, int, int]
) -> None:
    """Each patch is real, so all that is measured within patches of another size cannot tell."""
    pasted = side_by_side(scroll(0), tile, tiles, 1)
    found = _seams(pasted, scroll(1))
    assert found.differs
    assert found.values["generated"] > 1.5
    assert found.note.split()[1] in map(str, tile)
    assert not _seams(pasted, side_by_side(scroll(1), tile, tiles, 2)).differs, "the training volume has them, too"


@pytest.mark.long
def test_a_volume_without_tiles_is_recognized_at_the_nominal_rate() -> None:
    told = sum(bool(_seams(scroll(20 + 2 * n), scroll(21 + 2 * n)).differs) for n in range(40))
    assert told <= 6, "5 % of 40; 7 or more have a chance of 0.3 %"


def test_sheets_at_regular_distances_are_no_seams() -> None:
    """Of a volume of such sheets, the changes of planes are periodic, too."""
    z, y, _ = np.indices((64, 64, 64))
    sheets = [np.sin(2 * np.pi * (z + tilt * y) / 12) + 0.2 * scroll(5 + k, z.shape, air=False)
              for k, tilt in enumerate((0, 0, 0.1))]  # fmt: skip
    flat, training, tilted = (np.clip(3 * each, -1, 1).astype(np.float32) for each in sheets)
    assert not _seams(flat, training).differs
    assert not _seams(tilted, scroll(1)).differs


def test_changes_are_those_of_neighboring_planes_and_flat_volumes_are_unknown() -> None:
    volume = np.random.default_rng(0).integers(0, 255, (9, 10, 11)).astype(np.uint8)
    for axis, change in enumerate(plane_changes(volume)):
        difference = np.diff(volume.astype(float), axis=axis)
        np.testing.assert_allclose(change, (difference**2).mean(tuple({0, 1, 2} - {axis})), rtol=1e-5)
    flat = _seams(np.ones((32, 32, 32), np.uint8), scroll(0))
    assert (flat.reading, flat.note) == ("unknown", "flat, or too few planes")
    assert np.isnan(find_seams(plane_changes(np.ones((3, 3, 3)))).ratio)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_voxel_that_is_not_finite_ends_the_evaluation_of_a_volume(value: float) -> None:
    """Patches cut at random rarely hold it, and all planes' changes would be unknown."""
    volume = scroll(0)
    volume[3, 5, 7] = value
    with pytest.raises(ConfigError, match="generated volume contains NaN or infinity"):
        _seams(volume, scroll(1))
