"""conv(SiLU(GroupNorm(x))) in two forms of the same numbers: plain, and lean in memory.

Plain, torch keeps three tensors of the size of x until the backward pass: x, the norm's result and SiLU's.  Lean, x
alone is kept, and the other two are computed from it again in the backward pass by the same kernels: two more passes
over memory for a third of the bytes.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

NORM_EPS = 1e-5
_ONE = [1, 1, 1]


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which dtypes stay as they are."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def norm_silu_conv(x: Tensor, weight: Tensor, bias: Tensor, groups: int, conv: nn.Conv3d, lean: bool) -> Tensor:
    """Return conv(SiLU(GroupNorm(x) weight + bias)), in the autocast dtype where autocast is on.

    `x` is [B, C, Z, Y, X]; `weight` and `bias` are [C], or [B, C] with a row for each sample; `conv` has stride 1 and a
    bias.  With `lean`, only `x` is kept for the backward pass.  The norm is computed in the dtype of `x`: left to
    autocast, CUDA would keep float32 copies of its input and its output.
    """
    assert conv.bias is not None
    assert conv.stride == (1, 1, 1), conv.stride
    dtype = _compute_dtype(x)
    x, weight, bias, kernel, kernel_bias = (part.to(dtype) for part in (x, weight, bias, conv.weight, conv.bias))
    padding = [int(size) for size in conv.padding]
    with no_autocast(x.device):
        if lean and torch.is_grad_enabled():
            function: Any = _NormSiLUConv  # torch has no type for `apply`
            out: Tensor = function.apply(x, weight, bias, kernel, kernel_bias, groups, padding)
            return out
        z, _, _ = _group_norm(x, weight, bias, groups)
        return F.conv3d(F.silu(z, inplace=not torch.is_grad_enabled()), kernel, kernel_bias, _ONE, padding)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would convolve `x`."""
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _layout(x: Tensor) -> torch.memory_format:
    """The memory order in which the kernel of GroupNorm takes `x`: channels last is for CPUs alone.

    And there for the strides of the textbook alone: with an axis of size 1, whose stride is arbitrary, torch calls `x`
    channels last and its kernel refuses it.
    """
    _, c, z, y, x_size = x.shape
    textbook = (c * z * y * x_size, 1, y * x_size * c, x_size * c, c)
    last = x.device.type == "cpu" and x.stride() == textbook and not x.is_contiguous()
    return torch.channels_last_3d if last else torch.contiguous_format


def _folded(x: Tensor, weight: Tensor) -> Tensor:
    """`x` as the kernel of GroupNorm takes it: with a weight for each sample, the batch is folded into the channels.

    Written as norm(x) * (1 + scale) + shift, one more tensor of the size of x would be kept or computed.
    """
    if weight.ndim == 2:
        x = x.reshape(1, -1, *x.shape[2:])
    return x.contiguous(memory_format=_layout(x))


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of `x`, of its shape, and the mean and inverse deviation of each group."""
    folded = _folded(x, weight)
    n, c, *size_zyx = folded.shape
    samples = weight.shape[0] if weight.ndim == 2 else 1
    z, mean, rstd = torch.native_group_norm(
        folded, weight.reshape(-1), bias.reshape(-1), n, c, math.prod(size_zyx), groups * samples, NORM_EPS
    )
    return z.view(x.shape), mean, rstd


class _NormSiLUConv(torch.autograd.Function):
    """The lean form.  All tensors have one dtype; the backward pass cannot be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        kernel: Tensor,
        kernel_bias: Tensor,
        groups: int,
        padding: list[int],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, kernel)
        ctx.groups, ctx.padding = groups, padding
        z, _, _ = _group_norm(x, weight, bias, groups)
        return F.conv3d(F.silu(z, inplace=True), kernel, kernel_bias, _ONE, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, kernel = ctx.saved_tensors
        z, mean, rstd = _group_norm(x, weight, bias, ctx.groups)
        wanted = [True, *ctx.needs_input_grad[3:5]]
        grad_y, grad_kernel, grad_kernel_bias = torch.ops.aten.convolution_backward(
            grad_out, F.silu(z), kernel, [kernel.shape[0]], _ONE, ctx.padding, _ONE, False, [0, 0, 0], 1, wanted
        )
        grad_z = torch.ops.aten.silu_backward(grad_y, z)
        del z, grad_y  # each as large as x, and the norm's backward pass makes one more
        folded = _folded(x, weight)
        n, c, *size_zyx = folded.shape
        grad_folded, grad_weight, grad_bias = torch.ops.aten.native_group_norm_backward(
            grad_z.reshape(folded.shape).contiguous(memory_format=_layout(folded)),
            folded,
            mean,
            rstd,
            weight.reshape(-1),
            n,
            c,
            math.prod(size_zyx),
            mean.shape[1],
            ctx.needs_input_grad[:3],
        )
        return (
            None if grad_folded is None else grad_folded.view(x.shape),
            None if grad_weight is None else grad_weight.view(weight.shape),
            None if grad_bias is None else grad_bias.view(bias.shape),
            grad_kernel,
            grad_kernel_bias,
            None,
            None,
        )
