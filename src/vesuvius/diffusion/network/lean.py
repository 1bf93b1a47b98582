"""conv(SiLU(GroupNorm(x))) in two forms with equal results: plain, and lean in memory.

Plain: autograd keeps x, the SiLU output and, on a CPU, the norm output.  Lean: autograd keeps x and the mean and
inverse deviation of each group, and the SiLU output is recomputed in the backward pass.  That costs one more pass over
memory on CUDA and two on a CPU.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vesuvius.diffusion.network import norm_silu

_ONE = [1, 1, 1]


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def norm_silu_conv(x: Tensor, weight: Tensor, bias: Tensor, groups: int, conv: nn.Conv3d, lean: bool) -> Tensor:
    """Return conv(SiLU(GroupNorm(x) weight + bias)), in the autocast dtype if autocast is on, else in that of x.

    The norm reads and writes the autocast dtype, with sums, weights and statistics in float32.  Under plain autocast,
    CUDA would keep float32 copies of its input and output.

    Args:
        x: [B, C, Z, Y, X], contiguous or channels last.
        weight, bias: [C], or [B, C] with one row per sample.
        groups: a divisor of C.
        conv: stride 1, with a bias.
        lean: keep only x and the statistics for the backward pass.
    """
    assert conv.bias is not None
    assert conv.stride == (1, 1, 1), conv.stride
    dtype = _compute_dtype(x)
    x = x.to(dtype)
    # Contiguous: the Triton kernels count rows by channels, and AdaGN's shift is a view of the rows of both.
    weight, bias = (part.to(norm_silu.statistics_dtype(x)).contiguous() for part in (weight, bias))
    padding = [int(size) for size in conv.padding]
    with no_autocast(x.device):
        if not torch.is_grad_enabled():
            y: Tensor = norm_silu.forward(norm_silu.laid_out(x), weight, bias, groups)[0]
        elif lean:
            function: Any = _NormSiLUConv  # torch has no type for `apply`
            out: Tensor = function.apply(x, weight, bias, conv.weight, conv.bias, groups, padding)
            return out
        elif torch.compiler.is_compiling():
            y = F.silu(_traceable_norm(x, weight, bias, groups))
        else:
            function = _NormSiLU
            y = function.apply(x, weight, bias, groups)
        return F.conv3d(y, conv.weight.to(dtype), conv.bias.to(dtype), _ONE, padding)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a convolution of `x` would run."""
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _traceable_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    """Return GroupNorm(x) weight + bias, in operations that torch.compile can fuse with others."""
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
    """SiLU(GroupNorm(x) weight + bias), without double backward."""

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
    """The lean form of norm, SiLU and convolution, without double backward.

    Of the kernel autograd keeps what it is given, the weight itself, and not its copy in the autocast dtype: of a
    sharded weight (FSDP2) nothing then stays gathered between the two passes.
    """

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
        return F.conv3d(y, kernel.to(x.dtype), kernel_bias.to(x.dtype), _ONE, padding)

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
            grad_out, y, kernel.to(x.dtype), [kernel.shape[0]], _ONE, ctx.padding, _ONE, False, [0, 0, 0], 1, wanted
        )
        del y
        if torch.compiler.is_compiling():
            found = norm_silu.opaque_backward(grad_y, x, weight, bias, mean, rstd)
        elif z is None:
            found = norm_silu.backward(grad_y, None, x, weight, bias, mean, rstd)
        else:
            grad_z = norm_silu.silu_backward(grad_y, z)
            del z, grad_y  # each as large as x; the backward pass of the norm allocates one more
            found = norm_silu.norm_backward(grad_z, x, weight, mean, rstd)
        grads = (None if grad is None else grad.to(kernel.dtype) for grad in (grad_kernel, grad_kernel_bias))
        return *found, *grads, None, None
