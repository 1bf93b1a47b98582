"""The Triton kernels of norm and SiLU in Triton's interpreter, against float64.

Run by test_norm_kernels.py in a process of its own: the variable of the interpreter decides what Triton's own functions
are when they are imported, for the whole process.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from vesuvius.diffusion.network import norm_kernels as kernels
from vesuvius.diffusion.network import norm_silu
from vesuvius.diffusion.network.lean import norm_silu_conv

EPS = 1e-5
LAYOUTS = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=["czyx", "zyxc"])


def parts(
    rows: bool, layout: torch.memory_format, dtype: torch.dtype, channels: int = 12, size: tuple[int, ...] = (3, 4, 6)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x with a mean well away from 0, weight, bias and the result's gradient; 12 channels fill no tile."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, channels) if rows else (channels,)
    x = 1.5 + 0.7 * torch.randn(2, channels, *size, generator=generator)
    grad = torch.randn(x.shape, generator=generator)
    weight, bias = (0.3 * torch.randn(shape, generator=generator) + centre for centre in (1.0, 0.0))
    x, grad = (tensor.to(dtype).contiguous(memory_format=layout) for tensor in (x, grad))
    return x, weight, bias, grad


def exact(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, groups: int) -> list[Tensor]:
    """Result, mean, inverse deviation and the gradients of x, weight and bias, by autograd in float64."""
    x, weight, bias = (tensor.double().detach().requires_grad_() for tensor in (x, weight, bias))
    of_group = x.reshape(len(x), groups, -1)
    mean = of_group.mean(2)
    rstd = (of_group.var(2, correction=0) + EPS).rsqrt()
    u = ((of_group - mean[..., None]) * rstd[..., None]).view(x.shape)
    scale, shift = (tensor.view(-1, x.shape[1], 1, 1, 1) for tensor in (weight, bias))
    y = F.silu(u * scale + shift)
    y.backward(grad.double())
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return [y.detach(), mean.detach(), rstd.detach(), x.grad, weight.grad, bias.grad]


@pytest.mark.sample(5)
@LAYOUTS
@pytest.mark.parametrize(
    ("dtype", "rows", "tile"),
    [
        (torch.float32, False, 4096),
        (torch.float32, True, 64),
        (torch.bfloat16, True, 64),
        (torch.float16, False, 64),
    ],
)
def test_norm_silu_and_its_gradients_parity_with_fp64(
    tile: int, dtype: torch.dtype, rows: bool, layout: torch.memory_format
) -> None:
    x, weight, bias, grad = parts(rows, layout, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_TILE", tile)  # of 64: 72 voxels are several chunks, the last one shorter
        y, mean, rstd = kernels.norm_silu(x, weight, bias, 3, EPS)
        found = [y, mean, rstd, *kernels.backward(grad, x, weight, bias, mean, rstd)]
        rebuilt = kernels.again(x, weight, bias, mean, rstd)
    assert torch.equal(rebuilt, y)
    for large in (y, found[3], rebuilt):
        assert large.dtype == dtype
        assert large.stride() == x.stride(), "the memory order is that of x"
    for small in (mean, rstd, *found[4:]):
        assert small.dtype == torch.float32
    truth = exact(x, weight, bias, grad, 3)
    for number, (ours, right) in enumerate(zip(found, truth, strict=True)):
        assert ours.shape == right.shape
        # float32: some tens of roundings of 6e-8.  What is stored in 16 bits is rounded once more: by up to eps / 2 on
        # a GPU, by up to eps in the interpreter, which cuts bf16 off.
        stored = torch.finfo(dtype).eps if number in (0, 3) and dtype != torch.float32 else 0.0
        torch.testing.assert_close(ours.double(), right, rtol=stored + 2e-6, atol=4e-6 * float(right.abs().max()))


@LAYOUTS
def test_a_mean_far_beyond_the_deviation_costs_no_digits_of_it(layout: torch.memory_format) -> None:
    x, weight, bias, _ = parts(False, layout, torch.float32)
    far = x + 4096.0  # a square of 1.7e7 holds no variance of 0.5 in float32
    _, mean, rstd = kernels.norm_silu(far, weight, bias, 3, EPS)
    of_group = far.double().reshape(2, 3, -1)
    right = (of_group.var(2, correction=0) + EPS).rsqrt()
    # Deviations from a voxel of the same channel are exact.  1e-4: each channel's mean is kept to 2.4e-4, half of
    # float32's spacing there, and such means differ by a tenth of the deviation.
    torch.testing.assert_close(rstd.double(), right, rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), of_group.mean(2), rtol=1e-6, atol=0)


def test_a_sum_is_spread_over_many_blocks_at_full_resolution() -> None:
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        x = torch.empty(1, 64, 72, 136, 136, device="meta").contiguous(memory_format=layout)
        grid = kernels._plan(x)
        blocks = grid.chunks * -(-64 // grid.tile_c)
        # torch's GroupNorm has 16.  A GPU of 132 multiprocessors takes four blocks of 8 warps on each at once.
        assert blocks >= 4 * 132, layout
        assert (grid.chunks - 1) * grid.chunk < 72 * 136 * 136 <= grid.chunks * grid.chunk


def _conv() -> nn.Conv3d:
    conv = nn.Conv3d(12, 6, 3, padding=1)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(4))
    return conv


@pytest.mark.sample(3)
@LAYOUTS
@pytest.mark.parametrize(("lean", "kept"), [(False, 2), (True, 1)], ids=["plain", "lean"])
def test_autograd_around_the_kernels_gives_the_numbers_of_torchs_and_keeps_x_and_at_most_what_is_convolved(
    lean: bool, kept: int, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, sizes = [], {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for module in (None, kernels):
        monkeypatch.setattr(norm_silu, "kernels_for", lambda x, module=module: module)
        x, weight, bias, _ = (part.requires_grad_() for part in parts(True, layout, torch.float32))
        conv, made = _conv(), x * 1
        scale, shift = torch.cat([weight, bias], dim=1).chunk(2, dim=1)  # views of the rows of both, as AdaGN's
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = norm_silu_conv(made, scale, shift, 3, conv, lean)
        assert out.stride() == out.contiguous(memory_format=layout).stride()
        out.square().sum().backward()
        results.append([out, x.grad, weight.grad, bias.grad, conv.weight.grad, conv.bias.grad])
    assert sum(size == x.nbytes for size in sizes.values()) == kept
    for ours, theirs in zip(*results, strict=True):
        # float32 sums of some hundreds of numbers in another order.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max()))
