"""The sample picture: three orthogonal slices of generated patches beside the same of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from vesuvius.config import Config
from vesuvius.data.plan import Plan
from vesuvius.data.prepare import GreyRanges, PreparedData
from vesuvius.data.volume import Volume
from vesuvius.diffusion.condition import Condition
from vesuvius.diffusion.estimate import Denoise
from vesuvius.diffusion.generate import generate
from vesuvius.diffusion.randomness import Purpose
from vesuvius.diffusion.schedule import Schedule
from vesuvius.engine.conditioning import Conditioner, scale_and_offset
from vesuvius.engine.device import apply_symmetries
from vesuvius.engine.montage import GAP, HEADING, magnification, slices_row


def generate_patches(
    config: Config, denoise: Denoise, schedule: Schedule, conditions: Sequence[Condition]
) -> NDArray[np.float32]:
    """Patches drawn with the network `denoise`, one for each condition: float32 [preview_count, Z, Y, X], model values.

    Each condition is a batch of 1 on the schedule's device, `NO_CONDITION` where the network is shown none.  Patch n
    follows from (seed, n) and its condition: the pictures of one run show the same patches growing.
    """
    assert len(conditions) == config.training.preview_count, (len(conditions), config.training.preview_count)
    patches = []
    for number, condition in enumerate(conditions):
        generated = generate(
            denoise,
            schedule,
            config.diffusion,
            config.seed,
            [number],
            (1, *config.data.patch_size),
            schedule.device,
            condition=condition,
            purpose=Purpose.PREVIEW,
        )
        patches.append(generated.x_0[0, 0].cpu().numpy())
    return np.stack(patches)


def real_patches(
    config: Config, data: PreparedData, greys: GreyRanges, conditioner: Conditioner
) -> tuple[NDArray[np.float32], list[Condition]]:
    """The plan's first training patches, mirrored as in training, and their conditions.

    Returns:
        float32 [preview_count, Z, Y, X], model values; a condition with a batch of 1 for each.
    """
    patches, conditions = [], []
    for index in range(config.training.preview_count):
        number = data.plan.sample(index).volume
        scale, offset = scale_and_offset(greys.volumes[number])
        patches.append(_read_patch(data.plan, data.volumes, index)[0, 0].float().numpy() * scale + offset)
        raw = _read_patch(data.plan, data.conditions, index) if data.conditions else None
        conditions.append(conditioner(raw, [number]))
    return np.stack(patches).astype(np.float32), conditions


def _read_patch(plan: Plan, volumes: Sequence[Volume], index: int) -> Tensor:
    """Sample `index` of the plan, mirrored as in training: [1, 1, Z, Y, X] in its stored dtype."""
    sample = plan.sample(index)
    z, y, x = (start + size for start, size in zip(sample.start_zyx, plan.patch_zyx, strict=True))
    voxels = torch.from_numpy(volumes[sample.volume].read((sample.start_zyx, (z, y, x))))
    return apply_symmetries(voxels[None], [plan.augmentation(index)])[:, None]


def write_montage(path: Path, generated: NDArray[np.float32], real: NDArray[np.float32], title: str) -> None:
    """Write a PNG: generated patches on the left, real ones on the right; a row each; slices across z, y and x."""
    scale = magnification(generated.shape[1:])
    left, right = (np.vstack([slices_row(patch, scale) for patch in patches]) for patches in (generated, real))
    gap = np.zeros((left.shape[0], 4 * GAP), np.uint8)
    picture = np.hstack([left, gap, right])
    image = Image.new("L", (max(picture.shape[1], 8 * len(title)), picture.shape[0] + 2 * HEADING))
    image.paste(Image.fromarray(picture), (0, 2 * HEADING))
    draw = ImageDraw.Draw(image)
    draw.text((GAP, 2), title, fill=255)
    draw.text((GAP, HEADING), "generated: z, y, x slices", fill=255)
    draw.text((left.shape[1] + 5 * GAP, HEADING), "real: z, y, x slices", fill=255)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    image.save(partial, format="PNG")
    partial.replace(path)
