"""SiLU(GroupNorm(x)) on each device: forward, recomputation from stored statistics, backward.  No autograd here.

Triton kernels run on CUDA (`norm_kernels.py`), torch's kernels elsewhere.  Results have the memory order of x,
contiguous or channels last; statistics are float32 for 16-bit x.  `lean.py` decides what autograd keeps.
"""

from __future__ import annotations

import functools
import logging
import math
from types import ModuleType

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, library

NORM_EPS = 1e-5

log = logging.getLogger(__name__)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of mean, inverse deviation, weight and bias: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


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


# ---- any device


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, keep_z: bool = False
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return y = SiLU(z), z = GroupNorm(x) weight + bias, mean and inverse deviation [N, groups].

    Args:
        x: [N, C, Z, Y, X], from `laid_out`.
        weight, bias: [C], or [N, C] with one row per sample, in `statistics_dtype`.
        groups: a divisor of C.
        keep_z: return z; else, and always with the Triton kernels, z is None.
    """
    kernels = kernels_for(x)
    if kernels is not None:
        y, mean, rstd = kernels.norm_silu(x, weight, bias, groups, NORM_EPS)
        return y, None, mean, rstd
    z, mean, rstd = _group_norm(x, weight, bias, groups)
    return (F.silu(z), z, mean, rstd) if keep_z else (F.silu(z, inplace=True), None, mean, rstd)


def again(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor | None]:
    """Recompute y and z of `forward`, bit-identical, from its inputs and statistics; z is None with Triton."""
    kernels = kernels_for(x)
    if kernels is not None:
        return kernels.again(x, weight, bias, mean, rstd), None
    z, _, _ = _group_norm(x, weight, bias, mean.shape[1])
    return F.silu(z), z


def backward(
    grad: Tensor, z: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias from that of y, in any memory order.

    z is from `forward` or `again`, None = recompute it if needed; the others are inputs and statistics of `forward`.
    """
    kernels = kernels_for(x)
    if kernels is not None:
        in_order = laid_out(grad.contiguous(memory_format=layout_of(x)))
        found: tuple[Tensor, Tensor, Tensor] = kernels.backward(in_order, x, weight, bias, mean, rstd)
        return found
    if z is None:
        z, _, _ = _group_norm(x, weight, bias, mean.shape[1])
    return norm_backward(silu_backward(grad, z), x, weight, mean, rstd)


def silu_backward(grad: Tensor, z: Tensor) -> Tensor:
    """Return the gradient of z from that of y, in the memory order of z: first half of `backward` with torch."""
    found: Tensor = torch.ops.aten.silu_backward(laid_out(grad.contiguous(memory_format=layout_of(z))), z)
    return found


def kernels_for(x: Tensor) -> ModuleType | None:
    """Return the module of Triton kernels if they handle `x`; None if torch's kernels do."""
    if x.device.type != "cuda" or x.dtype == torch.float64:
        return None
    return _triton_kernels()


@functools.cache
def _triton_kernels() -> ModuleType | None:
    """Return the module after a test run; None, with a warning, if Triton does not work (e.g. no C compiler)."""
    try:
        from vesuvius.diffusion.network import norm_kernels

        x = torch.zeros(1, 4, 1, 1, 8, device="cuda")
        norm_kernels.norm_silu(x, x.new_ones(4), x.new_zeros(4), 1, NORM_EPS)
    except Exception as error:  # whatever Triton lacks
        log.warning(
            "Triton kernels do not run here: %s; norms use torch's kernels, which are slow on a GPU and copy "
            "channels-last tensors; install the triton version of torch %s, and a C compiler",
            error,
            torch.__version__,
        )
        return None
    return norm_kernels


# ---- torch's kernels


def _folds(x: Tensor, weight: Tensor) -> bool:
    """Whether the batch is folded into the channels, which gives each sample its own weight without another tensor."""
    return weight.ndim == 2 and (len(x) == 1 or x.is_cuda or layout_of(x) == torch.contiguous_format)


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    if weight.ndim == 2 and not _folds(x, weight):
        # Folding channels-last tensors would copy x, so samples are processed one at a time.
        rows = [_group_norm(x[i : i + 1], weight[i], bias[i], groups) for i in range(len(x))]
        z, mean, rstd = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return z, mean, rstd
    folded = _folded(x, weight)
    n, c, *size_zyx = folded.shape
    z, mean, rstd = torch.native_group_norm(
        folded, weight.reshape(-1), bias.reshape(-1), n, c, math.prod(size_zyx), groups * len(x) // n, NORM_EPS
    )
    # Kernels give float32 here; torch's fake ones, on which memory is planned, give the dtype of x.
    mean, rstd = (part.view(len(x), groups).to(weight.dtype) for part in (mean, rstd))
    return _like(x, z), mean, rstd


def norm_backward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias from that of z: second half of `backward` with torch."""
    if weight.ndim == 2 and not _folds(x, weight):
        samples = (torch.split(part, 1) for part in (grad, x, mean, rstd))
        rows = [norm_backward(g, one, w, m, r) for g, one, m, r, w in zip(*samples, weight, strict=True)]
        grads_x, grads_weight, grads_bias = zip(*rows, strict=True)
        return torch.cat(grads_x), torch.stack(grads_weight), torch.stack(grads_bias)
    folded = _folded(x, weight)
    n, c, *size_zyx = folded.shape
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_group_norm_backward(
        *(_folded(grad, weight), folded, mean.view(n, -1), rstd.view(n, -1), weight.reshape(-1)),
        *(n, c, math.prod(size_zyx), mean.numel() // n, [True, True, True]),
    )
    return _like(x, grad_x), grad_weight.view(weight.shape), grad_bias.view(weight.shape)


def _folded(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x` with the batch folded into the channels if each sample has its own weights, else `x` itself.

    On CUDA contiguous and in the dtype of the weights, as torch's kernels require: they keep statistics in that of x.
    """
    folded = x.reshape(1, -1, *x.shape[2:]) if weight.ndim == 2 and len(x) > 1 else x
    return folded.to(weight.dtype).contiguous() if x.is_cuda else folded


def _like(x: Tensor, found: Tensor) -> Tensor:
    """Return `found` in the shape, dtype and memory order of `x`."""
    found = found.to(x.dtype) if x.is_cuda else found  # on a CPU it has it, but for fake tensors: no copy is planned
    return laid_out(found.view(x.shape).contiguous(memory_format=layout_of(x)))


# ---- custom ops for torch.compile: opaque, or it would merge the recomputation with the forward pass and keep y


@library.custom_op("vesuvius::norm_silu", mutates_args=())
def opaque_forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, mean and inverse deviation of `forward`."""
    y, _, mean, rstd = forward(x, weight, bias, groups)
    return y, mean, rstd


@opaque_forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), weight.new_empty(len(x), groups), weight.new_empty(len(x), groups)


@library.custom_op("vesuvius::norm_silu_again", mutates_args=())
def opaque_again(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return y of `again`."""
    return again(x, weight, bias, mean, rstd)[0]


@opaque_again.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return torch.empty_like(x)


@library.custom_op("vesuvius::norm_silu_backward", mutates_args=())
def opaque_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `backward`."""
    return backward(grad, None, x, weight, bias, mean, rstd)


@opaque_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
