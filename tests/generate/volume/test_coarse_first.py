"""A Gaussian field drawn coarse first, with the exact denoiser of tiles, compared with the field itself.

As in `test_gaussian_field.py`, all is linear in the noise, so power follows without chance.  The table of
docs/sampling.md is what `python -m tests.generate.volume.test_coarse_first 4,4,4` prints.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.generate.volume.fields import covariance, expected_periodogram, falling, levels_to
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


def drawn(
    tiling: Tiling,
    of_field: Tensor,
    noise: Tensor,
    known: Tensor | None = None,
    seen: Callable[[Box], Tensor] | None = None,
    joint: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Draw fields of this covariance with the exact denoiser of tiles that see their voxels and some known values.

    Args:
        noise: of the first states, [fields, voxels].
        known: the known values, [fields, values].
        seen: the values that the tile of a box sees.
        joint: covariance of the field with the values, and of the values, as the denoiser takes it to be.
    """
    numbers, tiles = torch.arange(noise.shape[1]).view(tiling.shape_zyx), []
    for tile in range(tiling.tiles):
        box = tiling.tile_box(tile)
        weight = torch.from_numpy(tiling.weight(tile, box)).flatten()
        tiles.append((numbers[slices(box)].flatten(), weight, seen(box) if seen else numbers[:0, 0, 0]))
    first = tiles[0][0]
    peak = float(torch.linalg.eigvalsh(of_field[first][:, first]).max())

    def estimate(x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        x_0 = torch.zeros_like(x)
        for own, weight, values in tiles:
            inside = of_field[own][:, own]
            across = joint[0][own][:, values] if joint else inside[:, :0]
            of_values = joint[1][values][:, values] if joint else inside[:0, :0]
            observed = level.alpha**2 * inside + level.sigma**2 * torch.eye(len(own), dtype=torch.float64)
            both = [[observed, level.alpha * across], [level.alpha * across.T, of_values]]
            both_seen = torch.cat([torch.cat(row, 1) for row in both])
            gain = torch.linalg.solve(both_seen, torch.cat([level.alpha * inside, across], 1).T)
            given = x[:, own] if known is None else torch.cat([x[:, own], known[:, values]], 1)
            x_0 = x_0.index_add(1, own, weight * (given @ gain))
        return x_0, x_0_and_eps("x_0", x_0, x, level.alpha, level.sigma)[1]

    with_gradients = inspect.unwrap(sample)
    return with_gradients(estimate, levels_to(peak, STEPS), noise, "dpmpp2m")


Draw = Callable[[Tensor], Tensor]
"""Maps standard normal numbers [fields, inputs] to fields [fields, voxels], linearly."""


def alone(patch: Triple) -> tuple[Draw, int]:
    """A volume of four patches per axis, drawn with tiles that see nothing else; also the number of its inputs."""
    shape, of_field = field_of(patch)
    return lambda noise: drawn(even_tiling(shape, patch, 0.5), of_field, noise), math.prod(shape)


def coarse_first(patch: Triple, factor: int, context: bool, noise: float = 0.0) -> tuple[Draw, int]:
    """The same, drawn coarse first, then with the coarse values known.

    A tile sees the coarse voxels that it touches or, with `context`, a window of as many voxels as it has around it.
    `noise` on them is relative to the deviation of the field.
    """
    shape, of_field = field_of(patch)
    coarse, means = box_means(shape, factor)
    of_coarse, voxels, values = means @ of_field @ means.T, math.prod(shape), math.prod(coarse)
    factors = triple(Fraction(size, count) for size, count in zip(shape, coarse, strict=True))
    alignment, numbers = ContextAlignment(shape, coarse, factors, patch_zyx=patch), torch.arange(values).view(coarse)
    tiling = even_tiling(coarse, triple(map(min, patch, coarse)), 0.5 if coarse > patch else 0.0)
    joint = of_field @ means.T, of_coarse + noise**2 * torch.eye(values, dtype=torch.float64)

    def seen(box: Box) -> Tensor:
        window = intersection(alignment.window(box[0]), ((0, 0, 0), coarse))
        return numbers[slices(window if context else Alignment.array_box(alignment, box))].flatten()

    def draw(inputs: Tensor) -> Tensor:
        first, of_coarse_noise, disturbing = inputs.split([voxels, values, values], 1)
        known = drawn(tiling, of_coarse, of_coarse_noise) + noise * disturbing
        return drawn(even_tiling(shape, patch, 0.5), of_field, first, known, seen, joint)

    return draw, voxels + 2 * values


def field_of(patch: Triple) -> tuple[Triple, Tensor]:
    shape = triple(4 * size if size > 1 else 1 for size in patch)
    return shape, covariance(falling(patch[1] / 4), shape)


def power_ratios(of: tuple[Draw, int], patch: Triple, periods: Sequence[int] = (1,)) -> list[float]:
    """Power of what is drawn over that of the field, at wavelengths of 4 patches over these numbers of periods.

    The variance of a wave's amplitude is the sum of squares of its derivatives by the inputs.
    """
    draw, count = of
    shape = field_of(patch)[0]
    expected = expected_periodogram(falling(patch[1] / 4), shape)
    places = torch.stack(torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij"), -1).double()
    steps = [torch.fft.fftfreq(size, dtype=torch.float64) for size in shape]
    frequencies = torch.stack(torch.meshgrid(*steps, indexing="ij"), -1).view(-1, 3)
    found = []
    for period in periods:
        rows = ((frequencies.norm(dim=1) * shape[1]).round() == period).nonzero()[:, 0]
        phases = 2 * math.pi * (places.view(-1, 3) @ frequencies[rows].T).T
        waves = torch.cat([phases.cos(), phases.sin()])
        inputs = torch.zeros(len(waves), count, dtype=torch.float64, requires_grad=True)
        (derivatives,) = torch.autograd.grad((draw(inputs) * waves).sum(), inputs)
        power = derivatives.square().sum() / len(rows) / math.prod(shape)
        found.append(float(power / expected.flatten()[rows].mean()))
    return found


@pytest.mark.parametrize("patch", [(1, 4, 4), pytest.param((4, 4, 4), marks=pytest.mark.long)])
def test_drawn_coarse_first_a_volume_keeps_its_power_at_four_patches(patch: Triple) -> None:
    (lost,) = power_ratios(alone(patch), patch)
    assert lost < 0.9
    (kept,), (noisy,) = (power_ratios(coarse_first(patch, 4, True, noise), patch) for noise in (0.0, 0.125))
    assert kept == pytest.approx(1, abs=0.1)
    assert noisy > 0.9
    (without,) = power_ratios(coarse_first(patch, 4, context=False, noise=0.125), patch)
    assert without > 0.9


if __name__ == "__main__":  # the table of docs/sampling.md
    import sys

    size = tuple(map(int, sys.argv[1].split(",")))
    cases = [("alone", alone(size))]
    for factor, around, level in [(2, False, 0), (4, False, 0), (4, True, 0), (4, True, 0.125), (4, True, 0.25),
                                  (4, False, 0.125), (4, False, 0.25), (2, True, 0)]:  # fmt: skip
        cases.append((f"factor {factor}, context {around}, noise {level}", coarse_first(size, factor, around, level)))
    for name, case in cases:
        print(f"{name:35s}", *(f"{ratio:.2f}" for ratio in power_ratios(case, size, (1, 2, 3, 4))), flush=True)
