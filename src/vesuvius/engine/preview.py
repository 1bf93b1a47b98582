"""The sample picture: three orthogonal slices of generated patches beside the same of real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from vesuvius.config import Config
from vesuvius.data.plan import Plan
from vesuvius.data.prepare import GreyRange, PreparedData
from vesuvius.diffusion.randomness import Purpose, sample_noise
from vesuvius.diffusion.sampler import ddim_sample
from vesuvius.diffusion.schedule import Schedule
from vesuvius.engine.device import apply_symmetries

_GAP, _HEADING = 4, 16
_SMALLEST_SIDE = 96


def generate_patches(
    config: Config, denoise: Callable[[Tensor, Tensor], Tensor], schedule: Schedule
) -> NDArray[np.float32]:
    """Patches drawn with the network `denoise(x_t, t) -> v`: float32 [preview_count, Z, Y, X], model values.

    Patch n follows from (seed, n): the pictures of one run show the same patches growing.
    """
    patches = []
    for number in range(config.training.preview_count):
        shape = (1, *config.data.patch_size)
        noise = sample_noise(config.seed, [number], shape, schedule.device, purpose=Purpose.PREVIEW)
        patches.append(ddim_sample(denoise, schedule, noise, config.diffusion.sampler_steps)[0, 0].cpu().numpy())
    return np.stack(patches)


def real_patches(config: Config, data: PreparedData, greys: list[GreyRange]) -> NDArray[np.float32]:
    """The plan's first training patches, mirrored as in training: float32 [preview_count, Z, Y, X], model values."""
    return np.stack([_read_patch(data.plan, data, greys, i) for i in range(config.training.preview_count)])


def _read_patch(plan: Plan, data: PreparedData, greys: list[GreyRange], index: int) -> NDArray[np.float32]:
    sample = plan.sample(index)
    z, y, x = (start + size for start, size in zip(sample.start_zyx, plan.patch_zyx, strict=True))
    voxels = data.volumes[sample.volume].read((sample.start_zyx, (z, y, x)))
    voxels = apply_symmetries(torch.from_numpy(voxels)[None], [plan.augmentation(index)])[0].numpy()
    grey = greys[sample.volume]
    return (2 * (voxels.astype(np.float32) - grey.low) / (grey.high - grey.low) - 1).astype(np.float32)


def write_montage(path: Path, generated: NDArray[np.float32], real: NDArray[np.float32], title: str) -> None:
    """Write a PNG: generated patches on the left, real ones on the right; a row each; slices across z, y and x."""
    scale = max(1, -(-_SMALLEST_SIDE // max(generated.shape[1:])))
    left, right = (np.vstack([_slices_row(patch, scale) for patch in patches]) for patches in (generated, real))
    gap = np.zeros((left.shape[0], 4 * _GAP), np.uint8)
    picture = np.hstack([left, gap, right])
    image = Image.new("L", (max(picture.shape[1], 8 * len(title)), picture.shape[0] + 2 * _HEADING))
    image.paste(Image.fromarray(picture), (0, 2 * _HEADING))
    draw = ImageDraw.Draw(image)
    draw.text((_GAP, 2), title, fill=255)
    draw.text((_GAP, _HEADING), "generated: z, y, x slices", fill=255)
    draw.text((left.shape[1] + 5 * _GAP, _HEADING), "real: z, y, x slices", fill=255)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    image.save(partial, format="PNG")
    partial.replace(path)


def _slices_row(patch: NDArray[np.float32], scale: int) -> NDArray[np.uint8]:
    """The middle slices across z, y and x, side by side, -1 black and +1 white, each pixel `scale` wide."""
    z, y, x = (size // 2 for size in patch.shape)
    slices = [patch[z], patch[:, y], patch[:, :, x]]
    height = max(s.shape[0] for s in slices) * scale + _GAP
    row = []
    for s in slices:
        grey = np.clip((s + 1) * 127.5, 0, 255).astype(np.uint8).repeat(scale, 0).repeat(scale, 1)
        row.append(np.pad(grey, ((0, height - grey.shape[0]), (0, _GAP))))
    return np.hstack(row)
