"""Layers of the U-Net, independent of the network's config.

Branches end in a zero-initialized convolution, so a block starts as the identity (or its skip).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vesuvius.config import Triple

NORM_EPS = 1e-5

Conv = Callable[[Tensor], Tensor]


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast."""
    # torch.compile cannot trace `is_autocast_available` before torch 2.13.
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def norm_silu_conv(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, conv: Conv, recompute: bool, conv_bias: Tensor | None = None
) -> Tensor:
    """Return conv(SiLU(GroupNorm(x + conv_bias) weight + bias)), in the memory order of x, [B, C, Z, Y, X].

    `weight` and `bias` are [C], or [B, C] with one row per sample.  With `recompute` only x is kept for the backward
    pass, which computes norm and SiLU again, but not the convolution.  `conv_bias`, [C], is for compiled code only,
    where it takes no extra pass.
    """

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = group_norm(canonical_strides(x), weight, bias, groups)
        y = F.silu(z, inplace=not torch.is_grad_enabled())
        return conv(y.contiguous(memory_format=memory_format_of(x)))  # on CUDA the norm returns a contiguous tensor

    def fused(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y: Tensor = AffineSiLU.apply(x, scale, shift)  # type: ignore[no-untyped-call]
        return conv(y)

    function: Callable[..., Tensor] = eager
    arguments: tuple[Tensor, ...] = x, weight, bias
    if torch.compiler.is_compiling():
        rows = (part.expand(len(x), -1) for part in (weight, bias))
        arguments = x, *GroupNormAffine.apply(x, *rows, conv_bias, groups)  # type: ignore[no-untyped-call]
        function = fused
    return recomputed(function, *arguments) if recompute else function(*arguments)


def recomputed(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Return function(*arguments), of which only the arguments are kept: the backward pass calls it again."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    # No layer is random, so no generator state has to be restored.
    out: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out


class GroupNormAffine(torch.autograd.Function):
    """Scale and shift, float32 [B, C, 1, 1, 1], such that GroupNorm(x + conv_bias) weight + bias = x scale + shift.

    With `AffineSiLU` this is the norm in compiled code, written to minimize memory traffic: forward and backward read x
    twice, and no tensor as large as x is float32.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, conv_bias: Tensor | None, groups: int
    ) -> tuple[Tensor, Tensor]:
        def by_group(x: Tensor) -> Tensor:
            return x.view(*x.shape[:-1], groups, -1)

        full = x.to(torch.promote_types(x.dtype, torch.float32))
        variances, means = (by_group(part) for part in torch.var_mean(full, (2, 3, 4), correction=0))
        shifted = means if conv_bias is None else means + by_group(conv_bias)
        mean = shifted.mean(2, keepdim=True)
        var = (variances + (shifted - mean).square()).mean(2, keepdim=True)
        rstd = torch.rsqrt(var + NORM_EPS)
        mean = mean.expand_as(means) if conv_bias is None else mean - by_group(conv_bias)
        scale = rstd * by_group(weight)
        ctx.save_for_backward(x, by_group(weight), means, mean, rstd, scale)
        ctx.has_conv_bias = conv_bias is not None
        return _by_channel(scale), _by_channel(by_group(bias) - mean * scale)

    @staticmethod
    def backward(ctx: Any, *grad_affine: Tensor) -> Any:
        x, weight, means, mean, rstd, scale = ctx.saved_tensors
        grad_scale, grad_shift = (part.view(weight.shape) for part in grad_affine)
        voxels = x[0, 0].numel()
        elements = voxels * weight.shape[2]
        grad_weight = (grad_scale - grad_shift * mean) * rstd
        slope = -rstd.square() * (grad_weight * weight).sum(2, keepdim=True) / elements
        offset = -rstd * (grad_shift * weight).sum(2, keepdim=True) / elements - slope * mean
        grad_x = x * _by_channel(slope.expand_as(weight)) + _by_channel(offset)
        grad_conv_bias = None
        if ctx.has_conv_bias:
            grad_conv_bias = (grad_shift * scale + voxels * (slope * means + offset)).sum(0).flatten()
        return grad_x.to(x.dtype), grad_weight.flatten(1), grad_shift.flatten(1), grad_conv_bias, None


class AffineSiLU(torch.autograd.Function):
    """SiLU(x scale + shift), in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale, shift)
        return F.silu(x * scale + shift).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale, shift = ctx.saved_tensors
        z = x * scale + shift
        sigmoid = torch.sigmoid(z)
        grad_z = grad * (sigmoid * (1 + z * (1 - sigmoid)))
        grad_scale, grad_shift = (part.sum((2, 3, 4), keepdim=True) for part in (grad_z * x, grad_z))
        return (grad_z * scale).to(x.dtype), grad_scale, grad_shift


def _by_channel(x: Tensor) -> Tensor:
    """Reshape [B, groups, channels of a group] to [B, channels, 1, 1, 1].

    Explicit strides make inductor compute the values once instead of for each voxel.
    """
    channels = x.shape[1] * x.shape[2]
    return x.contiguous().as_strided((len(x), channels, 1, 1, 1), (channels, 1, 1, 1, 1))


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    """Return GroupNorm(x) weight + bias, with statistics, weight and bias in float32 even if x has 16 bits.

    Exception: weights per sample in channels-last order have the dtype of x.  `x` comes from `canonical_strides`; the
    other arguments are as in `norm_silu_conv`.
    """
    weight, bias = (part.to(torch.promote_types(x.dtype, torch.float32)) for part in (weight, bias))
    if weight.ndim == 1:
        return F.group_norm(x, groups, weight, bias, NORM_EPS)
    if len(x) == 1 or x.is_contiguous():  # fold the batch into the channels: weights per sample without another pass
        folded = x.reshape(1, -1, *x.shape[2:])
        return F.group_norm(folded, len(x) * groups, weight.reshape(-1), bias.reshape(-1), NORM_EPS).view(x.shape)
    one, zero = torch.ones_like(weight[0]), torch.zeros_like(bias[0])
    scale, shift = (part.to(x.dtype).view(*part.shape, 1, 1, 1) for part in (weight, bias))
    return torch.addcmul(shift, F.group_norm(x, groups, one, zero, NORM_EPS), scale)


def canonical_strides(x: Tensor) -> Tensor:
    """Return `x` [N, C, Z, Y, X], contiguous or channels last, with canonical strides; without a copy if possible.

    The stride of an axis of size 1 is arbitrary (oneDNN sets its own), and torch's GroupNorm kernel rejects it.
    """
    if x.is_contiguous():
        return x
    if not x.is_contiguous(memory_format=torch.channels_last_3d):
        return x.contiguous()
    return with_channels_last_strides(x)


def with_channels_last_strides(x: Tensor) -> Tensor:
    """Return a channels-last `x` [N, C, Z, Y, X] with the canonical strides of that order: itself or, if needed, a
    view.

    The backward pass of `as_strided` fills a tensor with zeros and copies.
    """
    _, c, z, y, x_size = x.shape
    strides = c * z * y * x_size, 1, y * x_size * c, x_size * c, c
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return the memory format of `canonical_strides(x)`: contiguous or channels last."""
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)
    return torch.channels_last_3d if last else torch.contiguous_format


FREQUENCIES = 64
LONGEST_PERIOD = 10_000.0
NORM_GROUPS = 32
MIN_CHANNELS_PER_GROUP = 4


def group_count(channels: int) -> int:
    """Return the largest divisor of `channels` that is at most 32 and gives at least 4 channels per group.

    A group of one channel would be instance normalization, which removes the brightness of the patch.
    """
    most = max(1, min(NORM_GROUPS, channels // MIN_CHANNELS_PER_GROUP))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


class ZeroConv3d(nn.Conv3d):
    """A zero-initialized convolution; a branch that ends in it initially adds nothing."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class NormSiLU(nn.Module):
    """GroupNorm with learned weight and bias, then SiLU, then the convolution passed to `forward`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.groups = group_count(channels)
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, conv: Conv, recompute: bool, conv_bias: Tensor | None = None) -> Tensor:
        return norm_silu_conv(x, self.weight, self.bias, self.groups, conv, recompute, conv_bias)


class AdaptiveNormSiLU(nn.Module):
    """GroupNorm with scale and shift from the timestep (AdaGN, Dhariwal & Nichol 2021), then SiLU, then a given
    convolution.
    """

    def __init__(self, channels: int, embedding: int) -> None:
        super().__init__()
        self.groups = group_count(channels)
        self.project = nn.Linear(embedding, 2 * channels)

    def forward(self, x: Tensor, rows: Tensor, conv: Conv, recompute: bool, x_bias: Tensor | None = None) -> Tensor:
        """[B, C, Z, Y, X] and `project_timestep`'s rows -> conv(SiLU(norm(x) (1 + scale) + shift))."""
        scale, shift = rows.chunk(2, dim=1)
        return norm_silu_conv(x, 1 + scale, shift, self.groups, conv, recompute, x_bias)


class ResidualBlock(nn.Module):
    """x + conv(SiLU(AdaGN(conv(SiLU(norm(x))), t))), with a zero-initialized second convolution."""

    def __init__(self, channels_in: int, channels_out: int, embedding: int) -> None:
        super().__init__()
        self.norm_1 = NormSiLU(channels_in)
        self.conv_1 = nn.Conv3d(channels_in, channels_out, 3, padding=1)
        self.norm_2 = AdaptiveNormSiLU(channels_out, embedding)
        self.conv_2 = ZeroConv3d(channels_out, channels_out, 3, padding=1)
        self.skip = nn.Identity() if channels_in == channels_out else nn.Conv3d(channels_in, channels_out, 1)

    def forward(self, x: Tensor, rows: Tensor, recompute: bool, x_bias: Tensor | None = None) -> Tensor:
        """[B, channels_in, Z, Y, X] and `project_timestep`'s rows -> [B, channels_out, Z, Y, X].

        Compiled code may pass the bias of the convolution that x is from, [channels_in], which takes no extra pass.
        """
        conv_1: Conv = self.conv_1
        conv_bias: Tensor | None = None
        if torch.compiler.is_compiling():  # the bias is added by the norm
            conv_1, conv_bias = partial(F.conv3d, weight=self.conv_1.weight, padding=1), self.conv_1.bias
        h = self.norm_1(x, conv_1, recompute, x_bias)
        if x_bias is not None:
            x = (x + x_bias.view(-1, 1, 1, 1)).to(x.dtype)
        out: Tensor = self.skip(x) + self.norm_2(h, rows, self.conv_2, recompute, conv_bias)
        return out


def project_timestep(blocks: Sequence[ResidualBlock], embedding: Tensor, as_one: bool) -> dict[nn.Module, Tensor]:
    """Return scale and shift of the second norm of each block, float32 [B, 2 channels_out], from [B, embedding].

    `as_one` makes a single product of them, for fewer launches; it rounds differently.
    """
    maps = [block.norm_2.project for block in blocks]
    with no_autocast(embedding.device):  # 1 + scale in bf16 would lose most of a small scale
        if as_one:
            weight, bias = torch.cat([each.weight for each in maps]), torch.cat([each.bias for each in maps])
            rows = torch.split(F.linear(embedding, weight, bias), [each.out_features for each in maps], dim=1)
        else:
            rows = tuple(each(embedding) for each in maps)
    return dict(zip(blocks, rows, strict=True))


class Attention(nn.Module):
    """x + self-attention over all voxels, with a zero-initialized output projection."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(group_count(channels), channels, NORM_EPS)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = ZeroConv3d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, *size_zyx = x.shape
        qkv: Tensor = self.qkv(self.norm(canonical_strides(x)).flatten(2).transpose(1, 2))
        q, k, v = qkv.reshape(b, -1, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v)
        if memory_format_of(x) == torch.channels_last_3d:
            joined = attended.transpose(1, 2).reshape(b, *size_zyx, c).permute(0, 4, 1, 2, 3)
        else:
            joined = attended.transpose(2, 3).reshape(b, c, *size_zyx)
        out: Tensor = self.out(joined)
        return x + out


class TimestepEmbedding(nn.Module):
    """Sines and cosines of t (Vaswani et al. 2017) and a two-layer perceptron, always in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(2 * FREQUENCIES, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        """t, int64 or float32 [B] -> float32 [B, width]."""
        with no_autocast(t.device):
            exponents = torch.arange(FREQUENCIES, dtype=torch.float32, device=t.device) / FREQUENCIES
            angles = t.float()[:, None] * torch.exp(-math.log(LONGEST_PERIOD) * exponents)
            waves = torch.cat([angles.cos(), angles.sin()], dim=1)
            return F.silu(self.linear_2(F.silu(self.linear_1(waves))))


def space_to_depth(x: Tensor, stride_zyx: Triple) -> Tensor:
    """Move each stride-sized box of voxels into channels: [B, C, Z, Y, X] -> [B, sz sy sx C, Z/sz, Y/sy, X/sx].

    Takes one copy, in channels-last order of runs of sx C numbers; the result and the gradient have the order of x.
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
