"""Volumes, patches and chunks as they occur, and what tests of the plan share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from vesuvius.config import AugmentConfig, DataConfig, Triple, ValidationConfig, VolumeConfig
from vesuvius.plan.foreground import patch_sum
from vesuvius.plan.make_plan import make_plan, plan_volume, split_volume
from vesuvius.plan.plan import Plan, PlanVolume
from vesuvius.volumes.occupancy import ForegroundMap


class Layout(NamedTuple):
    """A volume and how it is read."""

    shape: Triple
    patch: Triple
    chunk: Triple
    dtype: str = "uint8"
    options: dict[str, Any] = {}  # noqa: RUF012 - read only


BIG = (512, 1024, 1024)
LAYOUTS = {
    "u8": Layout(BIG, (72, 136, 136), (128, 128, 128)),
    "u8 with a split": Layout(BIG, (72, 136, 136), (128, 128, 128), options={"validation": ValidationConfig()}),
    "u8 160^3": Layout(BIG, (160, 160, 160), (128, 128, 128)),
    "u16, little memory": Layout(BIG, (128, 128, 128), (128, 128, 128), "uint16", {"stream_gib": 0.3}),
    "f32 144^3": Layout(BIG, (144, 144, 144), (128, 128, 128), "float32"),
    "4096^3, 64^3": Layout((4096, 4096, 4096), (64, 64, 64), (128, 128, 128)),
    "the largest scroll": Layout((75784, 32693, 32693), (72, 136, 136), (128, 128, 128)),
    "shards of 32^3": Layout((700, 900, 900), (72, 136, 136), (32, 32, 32)),
    "chunks of 64^3": Layout((700, 900, 900), (72, 136, 136), (64, 64, 64)),
    "chunks of 512^3": Layout((1500, 1500, 1500), (72, 136, 136), (512, 512, 512)),
    "slices": Layout((300, 800, 900), (72, 136, 136), (1, 800, 900)),
    "chunks of a prime length": Layout(BIG, (72, 136, 136), (127, 127, 127)),
    "ragged": Layout((333, 517, 401), (72, 100, 136), (100, 120, 96)),
    "hardly larger than a patch": Layout((80, 140, 139), (72, 136, 136), (128, 128, 128)),
}


def data_config(patch: Triple = (8, 16, 16), **options: Any) -> DataConfig:
    defaults: dict[str, Any] = {
        "augment": AugmentConfig(rot90=patch[1] == patch[2]),
        "validation": ValidationConfig(fraction=0),
    }
    return DataConfig(volumes=(VolumeConfig(path="v"),), patch_size=patch, **(defaults | options))


def planned(layout: Layout, name: str = "v", weight: float = 1.0, **more: Any) -> PlanVolume:
    config = data_config(layout.patch, **layout.options)
    split = split_volume(name, layout.shape, config.patch_size, config.validation)
    more.setdefault("min_foreground", config.min_foreground)
    return plan_volume(name, split, layout.shape, layout.chunk, layout.dtype, weight, config, **more)


def plan_of(layout: Layout, seed: int = 0, **more: Any) -> Plan:
    return make_plan(seed, data_config(layout.patch, **layout.options), [planned(layout, **more)])


def patch_fraction(foreground: ForegroundMap, start_zyx: Triple, patch_zyx: Triple) -> float:
    """Foreground share, 0..1, of a patch: the mean over its voxels of their cell's fraction."""
    return patch_sum(foreground, start_zyx, patch_zyx) / (255 * math.prod(patch_zyx))


def chi_square_p(counts: Any, expected: Any) -> float:
    """P(a deviation at least as large) if the counts were drawn with these expectations, which add up alike."""
    counts, expected = torch.as_tensor(counts, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((expected.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
