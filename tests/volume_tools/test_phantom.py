"""The synthetic scroll: reproducible voxels that resemble papyrus."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from vesuvius.volume_tools.phantom import Phantom

SHAPE = (40, 70, 66)


@pytest.fixture(scope="module")
def scroll():
    """A phantom of several windings, on demand."""
    return Phantom(0, (96, 160, 160))


def test_any_box_is_a_crop_of_the_volume():
    phantom = Phantom(5, SHAPE)
    intensity, winding = phantom.box((0, 0, 0), SHAPE)
    rng = np.random.default_rng((0, 0))
    for _ in range(10):
        start = tuple(int(rng.integers(0, size)) for size in SHAPE)
        stop = tuple(int(rng.integers(low, size)) + 1 for low, size in zip(start, SHAPE, strict=True))
        window = tuple(slice(low, high) for low, high in zip(start, stop, strict=True))
        box_intensity, box_winding = phantom.box(start, stop)
        np.testing.assert_array_equal(box_intensity, intensity[window])
        np.testing.assert_array_equal(box_winding, winding[window])


def test_voxels_are_pinned(scroll):
    """Pinned: changing these bytes changes every published figure measured on a phantom."""
    intensity, winding = scroll.box((10, 30, 40), (34, 94, 104))
    assert hashlib.sha256(intensity.tobytes() + (winding > 0).tobytes()).hexdigest()[:16] == "7e86598016966948"


def test_papyrus_is_brighter_than_gaps_and_only_masked_air_is_zero(scroll):
    intensity, winding = scroll.box((0, 0, 0), (96, 160, 160))
    assert intensity[(winding == 0) & (intensity > 0)].mean() + 40 < intensity[winding > 0].mean()
    assert intensity[winding > 0].min() > 0
    assert 0.05 < (intensity == 0).mean() < 0.35
    assert intensity[:, 0, 0].max() == 0  # a corner
