"""A Gaussian field generated with the exact denoiser of tiles, compared with the field itself.

Every sampler step is linear in the noise, so the covariance of what is drawn follows from the responses to unit
noise, without chance.  The tables of docs/sampling.md are from the functions here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.generate.volume.fields import (
    active_voxels,
    by_wavelength,
    covariance,
    exact_estimate,
    expected_periodogram,
    falling,
    field_levels,
    filled,
    tiled,
)
from vesuvius.config import DiffusionConfig, SamplerMethod, Triple
from vesuvius.diffusion.sampler import sample
from vesuvius.generate.volume.passes import make_passes
from vesuvius.generate.volume.run import VolumeRequest
from vesuvius.predict.tiling import Tiling, even_tiling
from vesuvius.volumes.box import slices

PATCH, SHAPE, STEPS = (1, 6, 6), (1, 24, 24), 40
FIELD = falling(1.5)
Places = list[list[int]]


def responses(tiling: Tiling, steps: int = STEPS, method: SamplerMethod = "dpmpp2m") -> Tensor:
    """Return the response of sampling with blended tiles to unit noise at each voxel: [voxels, 1, Z, Y, X]."""
    unit = torch.eye(int(np.prod(tiling.shape_zyx)), dtype=torch.float64).view(-1, 1, *tiling.shape_zyx)
    estimate = exact_estimate(FIELD, tiling.patch_zyx)
    return sample(tiled(tiling, estimate), field_levels(FIELD, tiling.patch_zyx, steps), unit, method)


def drawn_apart(tiling: Tiling) -> Tensor:
    """The same of tiles that are drawn to their ends, side by side: naive tiling."""
    unit = torch.eye(int(np.prod(tiling.shape_zyx)), dtype=torch.float64).view(-1, 1, *tiling.shape_zyx)
    estimate, levels = exact_estimate(FIELD, tiling.patch_zyx), field_levels(FIELD, tiling.patch_zyx, STEPS)
    for tile in range(tiling.tiles):
        cut = (..., *slices(tiling.tile_box(tile)))
        unit[cut] = sample(estimate, levels, unit[cut], "dpmpp2m")
    return unit


def power_ratio(response: Tensor, shape: Triple) -> dict[float, float]:
    """Power of what is drawn over that of the field, by wavelength."""
    power = torch.fft.fftn(response[:, 0], dim=(-3, -2, -1)).abs().square().sum(0) / np.prod(shape)
    found, truth = by_wavelength(power, shape), by_wavelength(expected_periodogram(FIELD, shape), shape)
    return {wavelength: found[wavelength] / truth[wavelength] for wavelength in found}


def face_ratio(response: Tensor) -> Tensor:
    """Variance of the difference across each face along y, over that of the field."""
    across = (response[:, 0, 0, 1:] - response[:, 0, 0, :-1]).square().sum(0).mean(-1)
    return across / float(2 * (1 - FIELD(torch.tensor(1.0))))


def test_blended_tiles_reproduce_the_spectrum_up_to_the_patch_without_seams() -> None:
    blended, apart = responses(even_tiling(SHAPE, PATCH, 0.5)), drawn_apart(even_tiling(SHAPE, PATCH, 0.0))
    ratio = power_ratio(blended, SHAPE)
    short = {wavelength: value for wavelength, value in ratio.items() if wavelength <= PATCH[1]}
    assert len(short) == 9
    assert all(value == pytest.approx(1, abs=0.05) for value in short.values()), ratio
    assert 0.7 < ratio[24] < 0.95, "a wave of four patches is more than a tile can know"

    faces = face_ratio(blended)
    inner = faces[6:17]
    assert float(inner.max() / inner.min()) < 1.03, "faces of tiles, at 3, 6, 9, ..., are as all others"
    naive = face_ratio(apart)
    assert float(naive[5::6].min() / naive[6:11].mean()) > 2, "side by side their faces are seams"
    assert max(abs(value - 1) for wavelength, value in power_ratio(apart, SHAPE).items() if wavelength <= 6) > 0.1


def test_the_default_overlap_and_steps_leave_no_visible_tiles() -> None:
    """Without chance: with Hann windows the ratio is 1.012, with none 1.18."""
    used = VolumeRequest.overlap, DiffusionConfig().sampler_steps
    faces = face_ratio(responses(even_tiling((1, 52, 8), (1, 16, 4), used[0]), used[1]))[8:43]
    assert float(faces.max() / faces.min()) < 1.006


LOW, HIGH = 9, 15  # of the gap, along y and x


def border_ratio(difference: Callable[[Places, Places], Tensor]) -> float:
    """Return the mean squared difference across the border of the gap, relative to that inside it.

    Args:
        difference: of voxels at places (y, x) from those at other ones.
    """

    def mean(ys: range, xs: range) -> float:
        """Over voxels and the ones above them, and over the same turned by a right angle."""
        pairs = list(itertools.product(ys, xs))
        below, above = [list(p) for p in zip(*pairs, strict=True)], [[y - 1 for y, _ in pairs], [x for _, x in pairs]]
        return float(difference(below, above).mean() + difference(below[::-1], above[::-1]).mean())

    along = range(LOW, HIGH)
    across = (mean(range(LOW, LOW + 1), along) + mean(range(HIGH, HIGH + 1), along)) / 2
    return across / mean(range(LOW + 1, HIGH), along)


def filled_border(rounds: int, *, corrects: bool = True, steps: int = STEPS) -> float:
    """Return the border ratio of a gap filled as by the command, in a volume with blocks too far from it.

    All is linear in the noise and the known voxels, so the mean squared differences follow from the responses to each.
    Those of the field itself have the ratio 1.
    """
    tiling, voxels, of_field = even_tiling(SHAPE, PATCH, 0.5), SHAPE[1] * SHAPE[2], covariance(FIELD, SHAPE)
    unit = torch.eye(voxels, dtype=torch.float64).view(-1, 1, *SHAPE)
    gap = torch.zeros(SHAPE, dtype=torch.bool)
    gap[0, LOW:HIGH, LOW:HIGH] = True
    live, tiles = active_voxels(tiling, gap)
    assert int(live.sum()) == 12 * 12, "known voxels three from the gap are in no live block"
    passes = make_passes(field_levels(FIELD, PATCH, steps), "dpmpp2m", rounds=rounds)
    if not corrects:
        passes = tuple(replace(step, relaxation=0.0) for step in passes)
    noise, values = (torch.cat(pair) for pair in ((unit, 0 * unit), (0 * unit, unit)))
    estimate = tiled(tiling, exact_estimate(FIELD, PATCH), tiles)
    drawn = filled(passes, estimate, noise, torch.where(gap, torch.nan, values), live)[:, 0, 0].unflatten(0, (2, -1))

    def squares(here: Places, there: Places) -> Tensor:
        of_noise, of_known = (each[:, here[0], here[1]] - each[:, there[0], there[1]] for each in drawn)
        return of_noise.square().sum(0) + (of_known * (of_field @ of_known)).sum(0)

    return border_ratio(squares)


@pytest.mark.long
def test_filled_gaps_fit_the_known_voxels() -> None:
    assert filled_border(4, steps=12) == pytest.approx(1, abs=0.06)
    assert filled_border(1, corrects=False, steps=12) > 1.4, "known voxels with independent noise alone"
