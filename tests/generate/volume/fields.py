"""Gaussian fields whose exact denoiser is known, and tiles blended in memory, to compare with what is done on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vesuvius.config import Triple
from vesuvius.diffusion.sampler import Estimate, NoiseLevel, rho_levels
from vesuvius.diffusion.schedule import Schedule, spectral_betas, x_0_and_eps
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.generate.volume.passes import Pass, SamplingJob, advance, block_noise, correct_known
from vesuvius.generate.volume.steps import SamplingRunner, TiledRun, active_blocks
from vesuvius.predict.progress import ProgressReporter
from vesuvius.predict.ray_workers import ray_workers
from vesuvius.predict.tasks import BlockArray, Blocks, run_locally
from vesuvius.predict.tiling import Tiling, overlap_slices
from vesuvius.volumes.box import Box, shape_of, slices

Correlation = Callable[[Tensor], Tensor]


def falling(length: float) -> Correlation:
    """exp(-r / length): power that falls as 1 / k^4 in 3D beyond 1 / length."""
    return lambda r: torch.exp(-r / length)


def covariance(correlation: Correlation, shape_zyx: Triple) -> Tensor:
    """Of all voxels of a box with each other, float64."""
    axes = [torch.arange(size, dtype=torch.float64) for size in shape_zyx]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(-1, 3)
    return correlation(torch.cdist(places, places))


def exact_estimate(correlation: Correlation, patch_zyx: Triple) -> Estimate:
    """E[x_0 | x_t] of a tile of the field that stands alone: [B, 1, *patch] -> the same."""
    power, modes = torch.linalg.eigh(covariance(correlation, patch_zyx))

    matrices: dict[tuple[NoiseLevel, torch.dtype], Tensor] = {}  # `functools.cache` cannot be pickled for Ray

    def matrix(level: NoiseLevel, dtype: torch.dtype) -> Tensor:
        if (level, dtype) not in matrices:
            gain = level.alpha * power / (level.alpha**2 * power + level.sigma**2)
            matrices[level, dtype] = ((modes * gain) @ modes.T).to(dtype)
        return matrices[level, dtype]

    def estimate(x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        x_0 = (x.reshape(-1, len(power)) @ matrix(level, x.dtype)).view_as(x)
        return x_0, x_0_and_eps("x_0", x_0, x, level.alpha, level.sigma)[1]

    return estimate


def field_levels(correlation: Correlation, patch_zyx: Triple, steps: int) -> tuple[NoiseLevel, ...]:
    """Noise levels as `diffusion.noise: spectral` has them for this field."""
    return levels_to(float(torch.linalg.eigvalsh(covariance(correlation, patch_zyx)).max()), steps)


def levels_to(peak: float, steps: int) -> tuple[NoiseLevel, ...]:
    """The same for the largest power of a mode."""
    spectrum = Spectrum(0.0, 1.0, np.full((1, 1, 1), peak, np.float32), 1)
    return rho_levels(Schedule.from_betas(spectral_betas(1000, 0.02, None, spectrum)), steps)


def tiled(tiling: Tiling, estimate: Estimate, tiles: Sequence[int] | None = None) -> Estimate:
    """Return the estimate of a volume's passes, in memory: the weighted mean of all tiles, or some, in order."""

    def estimated(x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        x_0 = torch.zeros_like(x)
        for tile in range(tiling.tiles) if tiles is None else tiles:
            box: Box = tiling.tile_box(tile)
            cut = (..., *slices(box))
            x_0[cut] += torch.from_numpy(tiling.weight(tile, box)).to(x.dtype) * estimate(x[cut], level)[0]
        return x_0, x_0_and_eps("x_0", x_0, x, level.alpha, level.sigma)[1]

    return estimated


def active_voxels(tiling: Tiling, gap: Tensor) -> tuple[Tensor, list[int]]:
    """Return the voxels of active blocks, and the tiles over them.

    Args:
        gap: bool, of the shape of the volume.
    """
    live, tiles = torch.zeros_like(gap), set()
    blocks = active_blocks(tiling, lambda box: gap[slices(box)].numpy(), ProgressReporter())
    for block in blocks:
        live[slices(tiling.block_box(block))] = True
        tiles |= set(tiling.tiles_over(tiling.block_box(block)))
    return live, sorted(tiles)


def filled(
    passes: Sequence[Pass], estimate: Estimate, noise: Tensor, known: Tensor, live: Tensor | None = None
) -> Tensor:
    """Fill the gaps of `known`, marked by NaN, in memory; any leading axes.

    Args:
        live: the voxels of active blocks; None = all.
    """
    level = passes[0].level
    gap, before = known.isnan(), None
    x = torch.where(gap, noise, level.alpha * known + level.sigma * noise)
    for step in passes:
        x_0 = estimate(x, step.level)[0]
        x = correct_known(step, x, x_0, known if live is None else torch.where(live, known, torch.nan))
        if step.row is not None:
            x_0 = torch.where(gap, x_0, known)
            x, before = advance(step, x, x_0, before, None), x_0
    return x


def runner_of(job: SamplingJob, folder: Path, estimate: Estimate) -> SamplingRunner:
    return SamplingRunner(job, folder, lambda step, x, condition: estimate(x, job.passes[step].level)[0])


def drawn(
    job: SamplingJob, folder: Path, estimate: Estimate, workers: int = 1, progress: ProgressReporter | None = None
) -> np.ndarray:
    """Return the last state of a volume started or resumed in `folder`, in Ray actors if `workers` is above 1."""
    folder.mkdir(parents=True, exist_ok=True)
    progress, whole = progress or ProgressReporter(), ((0, 0, 0), job.tiling.shape_zyx)
    live: Blocks = range(job.tiling.blocks)
    if job.inpaint:
        known = BlockArray(folder / "known", job.tiling)
        live = active_blocks(job.tiling, lambda box: np.isnan(known.read(box)), progress)
    sampling = TiledRun(job, folder, progress, live)

    def open_runner() -> SamplingRunner:
        return runner_of(job, folder, estimate)

    by = run_locally(open_runner) if workers == 1 else ray_workers(open_runner, workers, 0, None, progress.check)
    with by as run_tasks:
        x = sampling.run(run_tasks, workers).read(whole, sampling.used)
    for block in set(range(job.tiling.blocks)) - set(sampling.used):
        box = job.tiling.block_box(block)
        x[slices(box)] = known.read(box)
    return x


def box_noise(seed: int, stream: int, number: int, tiling: Tiling, box: Box) -> Tensor:
    """The noise of the blocks, over any box."""
    noise = torch.empty(shape_of(box), dtype=torch.float32)
    for block in tiling.blocks_over(box):
        _, there, here = overlap_slices(tiling.block_box(block), box)
        noise[here] = block_noise(seed, stream, number, tiling, block)[there]
    return noise


def expected_periodogram(correlation: Correlation, shape_zyx: Triple) -> Tensor:
    """E |FFT|^2 / voxels of a box of the field, float64: the transform of its windowed covariance."""
    total = torch.zeros(shape_zyx, dtype=torch.float64)
    lags = [torch.arange(-size + 1, size) for size in shape_zyx]
    distance = sum(
        lag.double().view(shape).square() for lag, shape in zip(lags, [(-1, 1, 1), (-1, 1), (-1,)], strict=True)
    )
    shares = [1 - lag.abs() / size for lag, size in zip(lags, shape_zyx, strict=True)]
    window = shares[0][:, None, None] * shares[1][:, None] * shares[2]
    values = correlation(distance.sqrt()) * window  # type: ignore[union-attr]
    places = torch.meshgrid(*[lag % size for lag, size in zip(lags, shape_zyx, strict=True)], indexing="ij")
    return torch.fft.fftn(total.index_put(places, values, accumulate=True)).real


def by_wavelength(power: Tensor, shape_zyx: Triple) -> dict[float, float]:
    """Mean power of the shells of 1, 2, 3, ... periods in the longest axis, by wavelength in voxels."""
    axes = torch.meshgrid(*[torch.fft.fftfreq(size, dtype=torch.float64) for size in shape_zyx], indexing="ij")
    longest = max(shape_zyx)
    periods = (sum(axis.square() for axis in axes).sqrt() * longest).round()  # type: ignore[union-attr]
    return {longest / k: float(power[periods == k].mean()) for k in range(1, longest // 2 + 1)}
