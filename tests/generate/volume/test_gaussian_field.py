"""A Gaussian field drawn with the exact denoiser of tiles, against the field itself.

Every sampler step is linear in the noise, so the covariance of what is drawn follows from the responses to unit
noise, without chance.  Figures beyond the patch are printed by the long test, in 3D and by chance.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.generate.volume.fields import (
    by_wavelength,
    covariance,
    exact_estimate,
    expected_periodogram,
    falling,
    field_levels,
    filled,
    tiled,
)
from vesuvius.config import Triple
from vesuvius.diffusion.sampler import sample
from vesuvius.generate.volume import passes as passes_module
from vesuvius.generate.volume.passes import passes_of
from vesuvius.generate.volume.tiling import Tiling
from vesuvius.volumes.box import slices

PATCH, SHAPE, STEPS = (1, 6, 6), (1, 24, 24), 40
FIELD = falling(1.5)


def responses(tiling: Tiling) -> Tensor:
    """What tiles that are blended in each step make of unit noise at each voxel: [voxels, 1, Z, Y, X]."""
    unit = torch.eye(int(np.prod(tiling.shape_zyx)), dtype=torch.float64).view(-1, 1, *tiling.shape_zyx)
    estimate = exact_estimate(FIELD, tiling.patch_zyx)
    return sample(tiled(tiling, estimate), field_levels(FIELD, tiling.patch_zyx, STEPS), unit, "dpmpp2m")


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


def test_blended_tiles_draw_the_spectrum_up_to_the_patch_and_no_seams() -> None:
    blended, apart = responses(Tiling(SHAPE, PATCH, 0.5)), drawn_apart(Tiling(SHAPE, PATCH, 0.0))
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


def border_ratio(values: Tensor) -> float:
    """Mean squared difference across the border of the gap at y 8 to 16, x 7 to 17, over that inside it."""
    down = (values[..., 1:, :] - values[..., :-1, :]).square().flatten(0, -3).mean(0)
    right = (values[..., 1:] - values[..., :-1]).square().flatten(0, -3).mean(0)
    across = [down[7, 7:17], down[15, 7:17], right[8:16, 6], right[8:16, 16]]
    inside = [down[8:15, 7:17].flatten(), right[8:16, 7:16].flatten()]
    return float(torch.cat(across).mean() / torch.cat(inside).mean())


def test_filled_gaps_fit_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    patch, field, volumes = (1, 8, 8), falling(2.0), 500
    modes = torch.linalg.cholesky(covariance(field, SHAPE))
    draws = torch.randn((2, volumes, len(modes)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth, noise = (draws[0] @ modes.T).view(-1, 1, *SHAPE), draws[1].view(-1, 1, *SHAPE)
    known = truth.clone()
    known[..., 8:16, 7:17] = torch.nan
    levels, estimate = field_levels(field, patch, STEPS), tiled(Tiling(SHAPE, patch, 0.5), exact_estimate(field, patch))

    def found(rounds: int) -> float:
        values = filled(passes_of(levels, "dpmpp2m", rounds=rounds), estimate, noise, known)
        return border_ratio(values) / border_ratio(truth)

    once, again = found(1), found(4)
    # 36 faces of 500 volumes, not independent: 2 % of chance
    assert once < 1.2
    assert again == pytest.approx(1, abs=0.07)
    monkeypatch.setattr(passes_module, "_PULL", 0.0)
    assert found(1) > 1.5, "known voxels with independent noise alone"


@pytest.mark.long
@pytest.mark.parametrize("overlap", [0.5, 0.25])
def test_in_3d_too(overlap: float, capsys: pytest.CaptureFixture[str]) -> None:
    shape, patch, volumes = (32, 32, 32), (8, 8, 8), 48
    field = falling(2.0)
    noise = torch.randn((volumes, 1, *shape), generator=torch.Generator().manual_seed(0))
    estimate = tiled(Tiling(shape, patch, overlap), exact_estimate(field, patch))
    found = sample(estimate, field_levels(field, patch, STEPS), noise, "dpmpp2m")[:, 0].double()
    power = torch.fft.fftn(found, dim=(-3, -2, -1)).abs().square().mean(0) / found[0].numel()
    truth = by_wavelength(expected_periodogram(field, shape), shape)
    ratio = {wavelength: value / truth[wavelength] for wavelength, value in by_wavelength(power, shape).items()}
    with capsys.disabled():
        print(f"\noverlap {overlap}:", {round(wavelength, 1): round(value, 3) for wavelength, value in ratio.items()})
    # 48 volumes have 5000 modes of wavelength 8: a standard error of 1.4 % at most
    limit = 0.05 if overlap == 0.5 else 0.08
    assert all(abs(value - 1) < limit for wavelength, value in ratio.items() if wavelength <= 8), ratio
