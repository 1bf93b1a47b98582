"""conv(SiLU(GroupNorm(x))), with norm and SiLU recomputed in the backward pass, and the memory order of tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NORM_EPS = 1e-5


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def norm_silu_conv(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, conv: Callable[[Tensor], Tensor], recompute: bool
) -> Tensor:
    """Return conv(SiLU(GroupNorm(x) weight + bias)).

    Args:
        x: [B, C, Z, Y, X], contiguous or channels last, as the result is.
        weight, bias: [C], or [B, C] with one row per sample.
        groups: a divisor of C.
        recompute: keep only x for the backward pass, which computes norm and SiLU again.  It stops in front of the
            convolution, whose result it does not need.
    """

    def applied(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = group_norm(laid_out(x), weight, bias, groups)
        y = F.silu(z, inplace=not torch.is_grad_enabled())
        return conv(y.contiguous(memory_format=layout_of(x)))  # on CUDA the norm comes out contiguous

    if recompute and torch.is_grad_enabled():
        # Nothing in it is random, so no generator state has to be restored.
        out: Tensor = checkpoint(applied, x, weight, bias, use_reentrant=False, preserve_rng_state=False)
        return out
    return applied(x, weight, bias)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    """Return GroupNorm(x) weight + bias, with statistics, weight and bias in float32 also where x has 16 bits.

    `x` is from `laid_out`, the others as in `norm_silu_conv`.
    """
    weight, bias = (part.to(torch.promote_types(x.dtype, torch.float32)) for part in (weight, bias))
    if weight.ndim == 1:
        return F.group_norm(x, groups, weight, bias, NORM_EPS)
    if len(x) == 1 or x.is_contiguous():  # the batch as channels: each sample has its own weights without another pass
        folded = x.reshape(1, -1, *x.shape[2:])
        return F.group_norm(folded, len(x) * groups, weight.reshape(-1), bias.reshape(-1), NORM_EPS).view(x.shape)
    one, zero = torch.ones_like(weight[0]), torch.zeros_like(bias[0])
    scale, shift = (part.to(x.dtype).view(*part.shape, 1, 1, 1) for part in (weight, bias))
    return torch.addcmul(shift, F.group_norm(x, groups, one, zero, NORM_EPS), scale)


def laid_out(x: Tensor) -> Tensor:
    """Return `x` [N, C, Z, Y, X] contiguous or channels last with canonical strides; a view if it already is either.

    The stride of an axis of size 1 is arbitrary (oneDNN sets its own).  torch then still reports channels last, but the
    kernel of its GroupNorm rejects the strides.
    """
    if x.is_contiguous():
        return x
    if not x.is_contiguous(memory_format=torch.channels_last_3d):
        return x.contiguous()
    return with_channels_last_strides(x)


def with_channels_last_strides(x: Tensor) -> Tensor:
    """Return a view of a channels-last `x` [N, C, Z, Y, X] with the canonical strides of that order."""
    _, c, z, y, x_size = x.shape
    return x.as_strided(x.shape, (c * z * y * x_size, 1, y * x_size * c, x_size * c, c))


def layout_of(x: Tensor) -> torch.memory_format:
    """Return the memory order of `laid_out(x)`: contiguous or channels last."""
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)
    return torch.channels_last_3d if last else torch.contiguous_format
