"""conv(SiLU(GroupNorm(x))) in two forms of the same numbers: plain, and lean in memory.

Plain, autograd keeps x, SiLU's result and, on a CPU, the norm's; on CUDA the kernels go from x to SiLU's result and
back without the norm's.  Lean, x alone is kept, with mean and inverse deviation of each group, and SiLU's result is
computed from them again in the backward pass: one more pass over memory on CUDA, two on a CPU.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vesuvius.diffusion import norm_silu

_ONE = [1, 1, 1]


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which dtypes stay as they are."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def norm_silu_conv(x: Tensor, weight: Tensor, bias: Tensor, groups: int, conv: nn.Conv3d, lean: bool) -> Tensor:
    """Return conv(SiLU(GroupNorm(x) weight + bias)), in the autocast dtype where autocast is on.

    `x` is [B, C, Z, Y, X], contiguous or channels last; `weight` and `bias` are [C], or [B, C] with a row for each
    sample; `conv` has stride 1 and a bias.  With `lean`, only `x` is kept for the backward pass.  The norm is computed
    on the autocast dtype, its sums, weights and statistics in float32: left to autocast, CUDA would keep float32 copies
    of its input and its output.
    """
    assert conv.bias is not None
    assert conv.stride == (1, 1, 1), conv.stride
    dtype = _compute_dtype(x)
    x, kernel, kernel_bias = (part.to(dtype) for part in (x, conv.weight, conv.bias))
    weight, bias = (part.to(norm_silu.statistics_dtype(x)) for part in (weight, bias))
    padding = [int(size) for size in conv.padding]
    with no_autocast(x.device):
        if not torch.is_grad_enabled():
            y: Tensor = norm_silu.forward(norm_silu.laid_out(x), weight, bias, groups)[0]
        elif lean:
            function: Any = _NormSiLUConv  # torch has no type for `apply`
            out: Tensor = function.apply(x, weight, bias, kernel, kernel_bias, groups, padding)
            return out
        elif torch.compiler.is_compiling():
            y = F.silu(_traceable_norm(x, weight, bias, groups))
        else:
            function = _NormSiLU
            y = function.apply(x, weight, bias, groups)
        return F.conv3d(y, kernel, kernel_bias, _ONE, padding)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would convolve `x`."""
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _traceable_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    """The norm in operations that a compiler can fuse with their neighbours."""
    x = norm_silu.laid_out(x)
    weight, bias = (part.to(x.dtype) for part in (weight, bias))
    samples = len(x) if weight.ndim == 2 else 1
    folded = x.reshape(1, -1, *x.shape[2:]) if samples > 1 else x
    n, c, *size_zyx = folded.shape
    z, _, _ = torch.native_group_norm(
        folded, weight.reshape(-1), bias.reshape(-1), n, c, math.prod(size_zyx), groups * samples, norm_silu.NORM_EPS
    )
    return z.view(x.shape)


class _NormSiLU(torch.autograd.Function):
    """SiLU(GroupNorm(x) weight + bias); the backward pass cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
        x = norm_silu.laid_out(x)
        y, z, mean, rstd = norm_silu.forward(x, weight, bias, groups, keep_z=True)
        ctx.save_for_backward(x, weight, bias, mean, rstd, z)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd, z = ctx.saved_tensors
        return *norm_silu.backward(grad_y, z, x, weight, bias, mean, rstd), None


class _NormSiLUConv(torch.autograd.Function):
    """The lean form; the backward pass cannot be differentiated again."""

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
        x = norm_silu.laid_out(x)
        if torch.compiler.is_compiling():
            y, mean, rstd = norm_silu.opaque_forward(x, weight, bias, groups)
        else:
            y, _, mean, rstd = norm_silu.forward(x, weight, bias, groups)
        ctx.save_for_backward(x, weight, bias, kernel, mean, rstd)
        ctx.padding = padding
        return F.conv3d(y, kernel, kernel_bias, _ONE, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, kernel, mean, rstd = ctx.saved_tensors
        z: Tensor | None = None
        if torch.compiler.is_compiling():
            y = norm_silu.opaque_again(x, weight, bias, mean, rstd)
        else:
            y, z = norm_silu.again(x, weight, bias, mean, rstd)
        wanted = [True, *ctx.needs_input_grad[3:5]]
        grad_y, grad_kernel, grad_kernel_bias = torch.ops.aten.convolution_backward(
            grad_out, y, kernel, [kernel.shape[0]], _ONE, ctx.padding, _ONE, False, [0, 0, 0], 1, wanted
        )
        del y
        if torch.compiler.is_compiling():
            found = norm_silu.opaque_backward(grad_y, x, weight, bias, mean, rstd)
        elif z is None:
            found = norm_silu.backward(grad_y, None, x, weight, bias, mean, rstd)
        else:
            grad_z = norm_silu.silu_backward(grad_y, z)
            del z, grad_y  # each as large as x, and the norm's backward pass makes one more
            found = norm_silu.norm_backward(grad_z, x, weight, mean, rstd)
        return *found, grad_kernel, grad_kernel_bias, None, None
