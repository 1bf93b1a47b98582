"""Space-to-depth and back: a box of voxels becomes channels ordered [sz sy sx, C].

In channels-last order this copies runs of sx C numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vesuvius.config import Triple
from vesuvius.diffusion.network.layers import memory_format_of

_SEEDING_NAMES = {"patch_embed.": "stem_in.", "upsample.": "stem_out."}


def space_to_depth(x: Tensor, stride_zyx: Triple) -> Tensor:
    """Move each stride-sized box of voxels into channels: [B, C, Z, Y, X] -> [B, sz sy sx C, Z/sz, Y/sy, X/sx].

    Takes one copy; the result and the gradient have the memory order of x.
    """
    b, c, z, y, x_size = x.shape
    sz, sy, sx = stride_zyx
    if memory_format_of(x) == torch.channels_last_3d:
        boxes = x.permute(0, 2, 3, 4, 1).reshape(b, z // sz, sz, y // sy, sy, x_size // sx, sx, c)
        moved = boxes.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(b, z // sz, y // sy, x_size // sx, sz * sy * sx * c)
        return moved.permute(0, 4, 1, 2, 3)
    boxes = x.reshape(b, c, z // sz, sz, y // sy, sy, x_size // sx, sx)
    return boxes.permute(0, 3, 5, 7, 1, 2, 4, 6).reshape(b, sz * sy * sx * c, z // sz, y // sy, x_size // sx)


def depth_to_space(x: Tensor, stride_zyx: Triple) -> Tensor:
    """Undo `space_to_depth`: [B, sz sy sx C, Z, Y, X] -> [B, C, Z sz, Y sy, X sx]; the memory order is kept."""
    b, channels, z, y, x_size = x.shape
    sz, sy, sx = stride_zyx
    c = channels // (sz * sy * sx)
    if memory_format_of(x) == torch.channels_last_3d:
        boxes = x.permute(0, 2, 3, 4, 1).reshape(b, z, y, x_size, sz, sy, sx, c)
        return boxes.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(b, z * sz, y * sy, x_size * sx, c).permute(0, 4, 1, 2, 3)
    boxes = x.reshape(b, sz, sy, sx, c, z, y, x_size)
    return boxes.permute(0, 4, 5, 1, 6, 2, 7, 3).reshape(b, c, z * sz, y * sy, x_size * sx)


class Upsample(nn.Conv3d):
    """1x1x1 convolution, then depth-to-space: [B, C, Z, Y, X] -> [B, channels, Z sz, Y sy, X sx]."""

    def __init__(self, channels_in: int, channels: int, stride_zyx: Triple) -> None:
        super().__init__(channels_in, math.prod(stride_zyx) * channels, 1)
        self.box_zyx = stride_zyx

    def forward(self, x: Tensor) -> Tensor:
        return depth_to_space(super().forward(x), self.box_zyx)


class BoxChannels(NamedTuple):
    """Axis of a weight whose channels are boxes, and the number of channels per voxel."""

    axis: int
    channels: int

    def offsets_first(self, weight: Tensor) -> Tensor:
        """Reorder channels from [C, sz sy sx] to [sz sy sx, C] along the axis of the weight."""
        shape, axis = weight.shape, self.axis
        pairs = weight.reshape(*shape[:axis], self.channels, -1, *shape[axis + 1 :])
        return pairs.transpose(axis, axis + 1).reshape(shape)


def boxed_weights(weights: Mapping[str, Tensor]) -> dict[str, BoxChannels]:
    """Return the weights of a U-Net whose channels are boxes, by name.  Pure."""
    shape = {name: weight.shape for name, weight in weights.items()}
    boxed = {}
    if "full_in.weight" in shape:
        full = shape["full_in.weight"][0]
        boxed = {"patch_embed.weight": BoxChannels(1, full), **_both("upsample", full)}
    elif {"conv_out.weight", "patch_embed.weight"} <= shape.keys():
        boxed = {"patch_embed.weight": BoxChannels(1, shape["patch_embed.weight"][1] // shape["conv_out.weight"][0])}
    levels = sum(name.startswith("trunk.downsamples.") and name.endswith(".weight") for name in shape)
    for level in range(levels):
        boxed |= _both(f"trunk.upsamples.{levels - 1 - level}", shape[f"trunk.downsamples.{level}.weight"][0])
    return {name: channels for name, channels in boxed.items() if name in shape}


def _both(convolution: str, channels: int) -> dict[str, BoxChannels]:
    return {f"{convolution}.{part}": BoxChannels(0, channels) for part in ("weight", "bias")}


def seeding_name(name: str) -> str:
    """Return the name that seeds a weight: an earlier one, so that a seed keeps its initial weights.  Pure."""
    return next((old + name.removeprefix(new) for new, old in _SEEDING_NAMES.items() if name.startswith(new)), name)
