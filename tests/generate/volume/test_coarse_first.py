"""A Gaussian field drawn coarse first, with the exact denoiser of tiles, compared with the field itself.

As in `test_gaussian_field.py`, all is linear in the noise, so power follows without chance.  The table of
docs/sampling.md is from `power_beyond_the_patch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.generate.volume.fields import by_wavelength, covariance, expected_periodogram, falling, levels_to
from vesuvius.config import Triple
from vesuvius.diffusion.sampler import NoiseLevel, sample
from vesuvius.diffusion.schedule import x_0_and_eps
from vesuvius.predict.tiling import Tiling, even_tiling
from vesuvius.volumes.alignment import Alignment
from vesuvius.volumes.box import Box, intersection, slices, triple
from vesuvius.volumes.context import ContextAlignment

STEPS = 20


def box_means(shape: Triple, factor: int) -> tuple[Triple, Tensor]:
    """The grid of boxes of `factor` voxels along each axis that is longer than 1, and the matrix to their means."""
    by = [min(factor, size) for size in shape]
    coarse = triple(size // f for size, f in zip(shape, by, strict=True))
    boxes = torch.arange(math.prod(coarse)).view(coarse)
    for axis, factor_along in enumerate(by):
        boxes = boxes.repeat_interleave(factor_along, axis)
    of_box = torch.nn.functional.one_hot(boxes.flatten()).T.double()
    return coarse, of_box / of_box.sum(1, keepdim=True)


def drawn_tiles(
    tiling: Tiling,
    of_field: Tensor,
    noise: Tensor,
    steps: int,
    known: Tensor | None = None,
    seen: Callable[[Box], Tensor] | None = None,
    joint: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Draw a field of this covariance with the exact denoiser of tiles that see their voxels and some known values.

    Args:
        noise: responses of the first state to the inputs, [inputs, voxels].
        known: responses of the known values, [inputs, values].
        seen: the values that the tile of a box sees.
        joint: covariance of the field with the values, and of the values, as the denoiser takes it to be.
    """
    numbers, tiles = torch.arange(noise.shape[1]).view(tiling.shape_zyx), []
    for tile in range(tiling.tiles):
        box = tiling.tile_box(tile)
        weight = torch.from_numpy(tiling.weight(tile, box)).flatten().to(noise.dtype)
        tiles.append((numbers[slices(box)].flatten(), weight, seen(box) if seen else numbers.new_zeros(0)))
    first = tiles[0][0]
    peak = float(torch.linalg.eigvalsh(of_field[first][:, first]).max())

    def estimate(x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        x_0 = torch.zeros_like(x)
        for own, weight, values in tiles:
            inside = of_field[own][:, own]
            across = joint[0][own][:, values] if joint else inside[:, :0]
            of_values = joint[1][values][:, values] if joint else inside[:0, :0]
            observed = level.alpha**2 * inside + level.sigma**2 * torch.eye(len(own), dtype=torch.float64)
            both = torch.cat([torch.cat([observed, level.alpha * across], 1),
                              torch.cat([level.alpha * across.T, of_values], 1)])  # fmt: skip
            gain = torch.linalg.solve(both, torch.cat([level.alpha * inside, across], 1).T).to(x.dtype)
            given = x[:, own] if known is None else torch.cat([x[:, own], known[:, values]], 1)
            x_0[:, own] += weight * (given @ gain)
        return x_0, x_0_and_eps("x_0", x_0, x, level.alpha, level.sigma)[1]

    return sample(estimate, levels_to(peak, steps), noise, "dpmpp2m")


def coarse_to_fine(patch: Triple, factor: int, context: bool, noise: float = 0.0, steps: int = STEPS) -> Tensor:
    """Response of a volume of four patches per axis that is drawn coarse first, then with the coarse values known.

    A tile sees the coarse voxels that it touches or, with `context`, a window of as many voxels as it has around it.
    `noise` on them is relative to the deviation of the field.
    """
    shape = triple(4 * size if size > 1 else 1 for size in patch)
    coarse, means = box_means(shape, factor)
    of_field = covariance(falling(patch[1] / 4), shape)
    of_coarse, voxels, values = means @ of_field @ means.T, math.prod(shape), math.prod(coarse)
    tiling = even_tiling(coarse, triple(map(min, patch, coarse)), 0.5 if coarse > patch else 0.0)
    drawn = drawn_tiles(tiling, of_coarse, torch.eye(values), steps)
    known = torch.cat([torch.zeros(voxels, values), drawn, noise * torch.eye(values)])
    first = torch.cat([torch.eye(voxels), torch.zeros(2 * values, voxels)])
    alignment = ContextAlignment(shape, coarse, triple(Fraction(s, c) for s, c in zip(shape, coarse, strict=True)),
                                 patch_zyx=patch)  # fmt: skip
    numbers = torch.arange(values).view(coarse)

    def seen(box: Box) -> Tensor:
        touched = Alignment.array_box(alignment, box)
        window = intersection(alignment.window(box[0]), ((0, 0, 0), coarse))
        return numbers[slices(window if context else touched)].flatten()

    joint = of_field @ means.T, of_coarse + noise**2 * torch.eye(values, dtype=torch.float64)
    return drawn_tiles(even_tiling(shape, patch, 0.5), of_field, first, steps, known, seen, joint)


def alone(patch: Triple, steps: int = STEPS) -> Tensor:
    """Response of the same volume drawn with tiles that see nothing else."""
    shape = triple(4 * size if size > 1 else 1 for size in patch)
    first = torch.eye(math.prod(shape))
    return drawn_tiles(even_tiling(shape, patch, 0.5), covariance(falling(patch[1] / 4), shape), first, steps)


def power_beyond_the_patch(response: Tensor, patch: Triple) -> dict[float, float]:
    """Power of what is drawn over that of the field, by wavelength in patches."""
    shape = triple(4 * size if size > 1 else 1 for size in patch)
    spectra = torch.fft.fftn(response.view(-1, *shape).double(), dim=(-3, -2, -1))
    power = spectra.abs().square().sum(0) / math.prod(shape)
    found, truth = (by_wavelength(each, shape) for each in (power, expected_periodogram(falling(patch[1] / 4), shape)))
    return {wavelength / patch[1]: found[wavelength] / truth[wavelength] for wavelength in found}


@pytest.mark.parametrize("patch", [(1, 4, 4), pytest.param((4, 4, 4), marks=pytest.mark.long)])
def test_drawn_coarse_first_a_volume_keeps_its_power_at_four_patches(patch: Triple) -> None:
    lost = power_beyond_the_patch(alone(patch), patch)
    assert lost[4] < 0.9
    kept = power_beyond_the_patch(coarse_to_fine(patch, 4, context=True), patch)
    assert kept[4] == pytest.approx(1, abs=0.1)
    noisy = power_beyond_the_patch(coarse_to_fine(patch, 4, context=True, noise=0.25), patch)
    assert noisy[4] > 0.9, "the window tells what the noise hides"
    assert noisy[4] > power_beyond_the_patch(coarse_to_fine(patch, 4, context=False, noise=0.25), patch)[4]
