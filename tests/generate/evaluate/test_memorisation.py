"""Copies of training voxels are found wherever they are from and however they are turned; other patches are far."""

from __future__ import annotations

import numpy as np
import pytest

from tests.generate.evaluate.scrolls import patches, scroll, search_in

TRAINED = scroll(0, (24, 48, 48))


def test_a_copy_is_found_at_any_place_whatever_its_brightness_and_contrast() -> None:
    """A search at some places alone, or of grey values as they are, would miss most of them."""
    trained = scroll(0, (24, 48, 48), air=False)
    distances = search_in(trained).distances(list(0.4 * patches(trained, 24, 1) + 0.3))
    assert np.mean(distances < 0.02) > 0.9, "air is clipped, so a little is left"


@pytest.mark.parametrize(("flips", "turns"), [((), 0), ((0,), 1), ((1, 2), 3), ((0, 2), 2)])
def test_a_copy_is_found_in_the_symmetries_of_training_and_in_no_other(flips: tuple[int, ...], turns: int) -> None:
    turned = [np.rot90(np.flip(patch, flips), turns, (1, 2)) for patch in patches(TRAINED, 8, 2)]
    assert np.mean(search_in(TRAINED).distances(turned) < 1e-3) > 0.8
    plain = search_in(TRAINED, flip=False, turn=False).distances(turned)
    assert (np.nanmedian(plain) < 1e-3) == (not flips and not turns)


def test_patches_of_another_volume_are_far_and_those_without_texture_are_not_judged() -> None:
    other = [*patches(scroll(9, air=False), 16, 3), np.full((8, 16, 16), -3, np.float32)]
    distances = search_in(scroll(0, (24, 48, 48), air=False)).distances(other)
    assert distances[:-1].min() > 0.3
    assert np.isnan(distances[-1])
