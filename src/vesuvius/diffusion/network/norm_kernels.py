"""Triton kernels for SiLU(GroupNorm(x)) on CUDA: forward and backward in either memory order, without a copy.

torch's GroupNorm runs one block per sample and group (16 for a patch at full resolution, on 132 multiprocessors),
copies channels-last tensors, and stores the statistics of 16-bit tensors in 16 bits.  Here about a thousand blocks sum
over chunks of voxels; sums, statistics and scales are float32.  Without atomic additions, equal inputs give equal bits.

`norm_silu.py` imports this module on CUDA only.  The tests run it in Triton's interpreter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements per block
_WARPS = 8
_BLOCKS = 1024  # blocks per sum: several per multiprocessor
_WIDEST = 128  # most channels of a tile


class _Grid(NamedTuple):
    """Tiling of [N, C, V] into tiles of voxels x channels."""

    # stride_c, stride_v: elements from one channel, or voxel, to the next
    stride_c: int
    stride_v: int
    # tile_v, tile_c: sizes of a tile, powers of 2
    tile_v: int
    tile_c: int
    chunk: int  # voxels that one block sums
    chunks: int  # number of chunks; the last may be shorter


def _plan(x: Tensor) -> _Grid:
    """Plan the tiling of x [N, C, Z, Y, X], contiguous or channels last; tiles are wide along the fast axis.  Pure."""
    n, c = x.shape[:2]
    voxels = x[0, 0].numel()
    last = not x.is_contiguous()
    tile_c = min(triton.next_power_of_2(c), _WIDEST) if last else 1
    tile_v = min(_TILE // tile_c, triton.next_power_of_2(voxels))
    wanted = max(1, _BLOCKS // (n * triton.cdiv(c, tile_c)))
    chunk = triton.cdiv(triton.cdiv(voxels, wanted), tile_v) * tile_v
    stride_c, stride_v = (1, c) if last else (voxels, 1)
    return _Grid(stride_c, stride_v, tile_v, tile_c, chunk, triton.cdiv(voxels, chunk))


def norm_silu(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return SiLU(GroupNorm(x) weight + bias), and the mean and inverse deviation of each group, float32 [N, groups].

    Args:
        x: [N, C, Z, Y, X] in float32, bf16 or fp16, contiguous or channels last, which the result keeps.
        weight, bias: float32 [C], or contiguous [N, C] with one row per sample.
    """
    n, c = x.shape[:2]
    voxels, grid = x[0, 0].numel(), _plan(x)
    parts = torch.empty(2, n, grid.chunks, c, dtype=torch.float32, device=x.device)
    _moments[(grid.chunks, triton.cdiv(c, grid.tile_c), n)](
        x, parts[0], parts[1], c, voxels, grid.chunk, *grid[:4], num_warps=_WARPS
    )
    mean = torch.empty(n, groups, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    width = triton.next_power_of_2(c // groups)
    _combined[(groups, n)](
        parts[0], parts[1], mean, rstd, c, voxels, c // groups, grid.chunk, eps, max(1, 1024 // width), width
    )
    return again(x, weight, bias, mean, rstd), mean, rstd


def again(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Recompute the first result of `norm_silu` from the statistics, in one pass over x."""
    n, c = x.shape[:2]
    voxels, grid, y = x[0, 0].numel(), _plan(x), torch.empty_like(x)
    _applied[(triton.cdiv(voxels, grid.tile_v), triton.cdiv(c, grid.tile_c), n)](
        x,
        y,
        *(weight, bias, mean, rstd),
        *(c, voxels, c // mean.shape[1], _row(weight)),
        *grid[:4],
        num_warps=_WARPS,
    )
    return y


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias in their shapes and dtypes, the first in the memory order of x.

    With u = (x - mean) rstd, z = weight u + bias and h = grad SiLU'(z): the weight's gradient is sum(h u), the bias's
    sum(h), and x's is rstd (weight h - a - b u), where a and b are the means of weight h and weight h u over the group.
    `grad` is the gradient of the result of `norm_silu`, in its shape, dtype and memory order.
    """
    n, c = x.shape[:2]
    voxels, groups, grid = x[0, 0].numel(), mean.shape[1], _plan(x)
    numbers = (c, voxels, c // groups, _row(weight))
    blocks_c = triton.cdiv(c, grid.tile_c)
    parts = torch.empty(2, n, grid.chunks, c, dtype=torch.float32, device=x.device)
    _summed[(grid.chunks, blocks_c, n)](
        *(grad, x, parts[0], parts[1], weight, bias, mean, rstd),
        *numbers,
        grid.chunk,
        *grid[:4],
        num_warps=_WARPS,
    )
    sums = parts.sum(2)  # h u and h, [2, N, C]
    of_group = (sums * weight).view(2, n, groups, -1).sum(3) / (voxels * (c // groups))
    grad_x = torch.empty_like(x)
    _pulled_back[(triton.cdiv(voxels, grid.tile_v), blocks_c, n)](
        *(grad, x, grad_x, weight, bias, mean, rstd, of_group[0], of_group[1]),
        *numbers,
        *grid[:4],
        num_warps=_WARPS,
    )
    if weight.ndim == 1:
        sums = sums.sum(1)
    return grad_x, sums[0], sums[1]


def _row(weight: Tensor) -> int:
    """Return the elements from the weights of one sample to those of the next."""
    return weight.shape[1] if weight.ndim == 2 else 0


# ---- kernels; program ids are (chunk or tile of voxels, tile of channels, sample).  Offsets stay below 2^31, because
# `UNet` refuses larger tensors.  There are no type annotations, because Triton would interpret them.


@triton.jit
def _moments(
    x, means, squares, channels, voxels, chunk, stride_c, stride_v, tile_v: tl.constexpr, tile_c: tl.constexpr
):
    """Mean and sum of squared deviations of each channel of a chunk.

    Sums differences from the first voxel of the chunk; otherwise a large mean would cost precision in the squares.
    """
    part, sample = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * tile_c + tl.arange(0, tile_c)
    first = part * chunk
    stop = tl.minimum(first + chunk, voxels)
    base = x + sample * channels * voxels + c * stride_c
    shift = tl.load(base + first * stride_v, mask=c < channels, other=0.0).to(tl.float32)
    total = tl.zeros((tile_v, tile_c), tl.float32)
    square = tl.zeros((tile_v, tile_c), tl.float32)
    for start in range(first, stop, tile_v):
        v = start + tl.arange(0, tile_v)
        inside = (v < stop)[:, None] & (c < channels)[None, :]
        values = tl.load(base[None, :] + v[:, None] * stride_v, mask=inside, other=0.0).to(tl.float32)
        deviation = tl.where(inside, values - shift[None, :], 0.0)
        total += deviation
        square += deviation * deviation
    count = (stop - first).to(tl.float32)
    moved = tl.sum(total, 0) / count
    out = (sample * tl.num_programs(0) + part) * channels + c
    tl.store(means + out, shift + moved, mask=c < channels)
    tl.store(squares + out, tl.sum(square, 0) - count * moved * moved, mask=c < channels)


@triton.jit
def _combined(
    means, squares, mean, rstd, channels, voxels, width, chunk, eps, tile_k: tl.constexpr, tile_c: tl.constexpr
):
    """Combine the moments of the channels and chunks of a group (Chan et al. 1983)."""
    group, sample = tl.program_id(0), tl.program_id(1)
    chunks = tl.cdiv(voxels, chunk)
    inner = tl.arange(0, tile_c)
    base = sample * chunks * channels + group * width + inner
    total = tl.zeros((tile_k, tile_c), tl.float32)
    for start in range(0, chunks, tile_k):
        k = start + tl.arange(0, tile_k)
        inside = (k < chunks)[:, None] & (inner < width)[None, :]
        count = tl.minimum(voxels - k * chunk, chunk).to(tl.float32)
        total += count[:, None] * tl.load(means + base[None, :] + k[:, None] * channels, mask=inside, other=0.0)
    elements = 1.0 * voxels * width  # no `.to`: Triton makes a constant of an argument of 1
    centre = tl.sum(tl.sum(total, 1), 0) / elements
    square = tl.zeros((tile_k, tile_c), tl.float32)
    for start in range(0, chunks, tile_k):
        k = start + tl.arange(0, tile_k)
        inside = (k < chunks)[:, None] & (inner < width)[None, :]
        count = tl.minimum(voxels - k * chunk, chunk).to(tl.float32)
        at = base[None, :] + k[:, None] * channels
        off = tl.load(means + at, mask=inside, other=0.0) - centre
        within = tl.load(squares + at, mask=inside, other=0.0)
        square += tl.where(inside, within + count[:, None] * off * off, 0.0)
    variance = tl.sum(tl.sum(square, 1), 0) / elements
    out = sample * tl.num_programs(0) + group
    tl.store(mean + out, centre)
    tl.store(rstd + out, 1.0 / tl.sqrt(variance + eps))


@triton.jit
def _coefficients(weight, bias, mean, rstd, c, channels, width, row, sample):
    """Load weight, bias, mean and inverse deviation of some channels of a sample."""
    inside = c < channels
    of_group = sample * (channels // width) + c // width
    return (
        tl.load(weight + sample * row + c, mask=inside, other=0.0),
        tl.load(bias + sample * row + c, mask=inside, other=0.0),
        tl.load(mean + of_group, mask=inside, other=0.0),
        tl.load(rstd + of_group, mask=inside, other=0.0),
    )


@triton.jit
def _applied(
    x,
    y,
    weight,
    bias,
    mean,
    rstd,
    channels,
    voxels,
    width,
    row,
    stride_c,
    stride_v,
    tile_v: tl.constexpr,
    tile_c: tl.constexpr,
):
    sample = tl.program_id(2)
    v = tl.program_id(0) * tile_v + tl.arange(0, tile_v)
    c = tl.program_id(1) * tile_c + tl.arange(0, tile_c)
    w, b, m, r = _coefficients(weight, bias, mean, rstd, c, channels, width, row, sample)
    inside = (v < voxels)[:, None] & (c < channels)[None, :]
    at = sample * channels * voxels + v[:, None] * stride_v + c[None, :] * stride_c
    z = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - m[None, :]) * (w * r)[None, :] + b[None, :]
    tl.store(y + at, (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _through_silu(grad, x, at, inside, w, b, m, r):
    """Return u and h of `backward`."""
    u = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - m[None, :]) * r[None, :]
    z = u * w[None, :] + b[None, :]
    s = tl.sigmoid(z)
    h = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * s * (1.0 + z * (1.0 - s))
    return u, h


@triton.jit
def _summed(
    grad,
    x,
    sums_hu,
    sums_h,
    weight,
    bias,
    mean,
    rstd,
    channels,
    voxels,
    width,
    row,
    chunk,
    stride_c,
    stride_v,
    tile_v: tl.constexpr,
    tile_c: tl.constexpr,
):
    part, sample = tl.program_id(0), tl.program_id(2)
    c = tl.program_id(1) * tile_c + tl.arange(0, tile_c)
    w, b, m, r = _coefficients(weight, bias, mean, rstd, c, channels, width, row, sample)
    first = part * chunk
    stop = tl.minimum(first + chunk, voxels)
    total_hu = tl.zeros((tile_v, tile_c), tl.float32)
    total_h = tl.zeros((tile_v, tile_c), tl.float32)
    for start in range(first, stop, tile_v):
        v = start + tl.arange(0, tile_v)
        inside = (v < stop)[:, None] & (c < channels)[None, :]
        at = sample * channels * voxels + v[:, None] * stride_v + c[None, :] * stride_c
        u, h = _through_silu(grad, x, at, inside, w, b, m, r)
        total_hu += h * u
        total_h += h
    out = (sample * tl.num_programs(0) + part) * channels + c
    tl.store(sums_hu + out, tl.sum(total_hu, 0), mask=c < channels)
    tl.store(sums_h + out, tl.sum(total_h, 0), mask=c < channels)


@triton.jit
def _pulled_back(
    grad,
    x,
    grad_x,
    weight,
    bias,
    mean,
    rstd,
    means_hu,
    means_h,
    channels,
    voxels,
    width,
    row,
    stride_c,
    stride_v,
    tile_v: tl.constexpr,
    tile_c: tl.constexpr,
):
    sample = tl.program_id(2)
    v = tl.program_id(0) * tile_v + tl.arange(0, tile_v)
    c = tl.program_id(1) * tile_c + tl.arange(0, tile_c)
    w, b, m, r = _coefficients(weight, bias, mean, rstd, c, channels, width, row, sample)
    of_group = sample * (channels // width) + c // width
    mean_hu = tl.load(means_hu + of_group, mask=c < channels, other=0.0)
    mean_h = tl.load(means_h + of_group, mask=c < channels, other=0.0)
    inside = (v < voxels)[:, None] & (c < channels)[None, :]
    at = sample * channels * voxels + v[:, None] * stride_v + c[None, :] * stride_c
    u, h = _through_silu(grad, x, at, inside, w, b, m, r)
    pulled = r[None, :] * (w[None, :] * h - mean_h[None, :] - u * mean_hu[None, :])
    tl.store(grad_x + at, pulled.to(grad_x.dtype.element_ty), mask=inside)
