"""Space-to-depth and back: a box of voxels becomes channels ordered [sz sy sx, C].

In channels-last order this copies runs of sx C numbers.
"""

import math

import torch
from torch import Tensor, nn

from vesuvius.config import Triple
from vesuvius.diffusion.network.layers import memory_format_of


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


def box_first(weight: Tensor, axis: int, voxels: int) -> Tensor:
    """Reorder channels from [C, sz sy sx] to [sz sy sx, C] along an axis.  Pure."""
    pairs = weight.reshape(*weight.shape[:axis], -1, voxels, *weight.shape[axis + 1 :])
    return pairs.transpose(axis, axis + 1).reshape(weight.shape)
