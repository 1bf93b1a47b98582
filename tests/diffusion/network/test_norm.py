"""conv(SiLU(GroupNorm(x))), recomputed or kept: against float64, what each keeps, and what is run again."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vesuvius.diffusion.network.layers import norm_silu_conv

GROUPS = 4
LAYOUTS = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=["czyx", "zyxc"])
ROWS = pytest.mark.parametrize("rows", [None, 2], ids=["shared", "per_sample"])


def _parts(rows: int | None) -> tuple[Tensor, Tensor, Tensor, nn.Conv3d]:
    """x with a mean well away from 0, scales, shifts, a convolution; all require gradients."""
    generator = torch.Generator().manual_seed(8)
    shape = (8,) if rows is None else (rows, 8)
    x = 1.5 + 0.7 * torch.randn(2, 8, 5, 6, 7, generator=generator)
    weight = 1 + 0.3 * torch.randn(shape, generator=generator)
    bias = 0.2 * torch.randn(shape, generator=generator)
    conv = nn.Conv3d(8, 6, 3, padding=1)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_(std=0.1, generator=generator)
    x, weight, bias = (part.requires_grad_() for part in (x, weight, bias))
    return x, weight, bias, conv


def _forward_and_gradients(
    form: str, rows: int | None, layout: torch.memory_format, dtype: torch.dtype
) -> list[Tensor]:
    """The output and the gradients of x, weight, bias, kernel and kernel bias."""
    x, weight, bias, conv = _parts(rows)
    x, weight, bias = (part.detach().to(dtype).requires_grad_() for part in (x, weight, bias))
    conv = conv.to(dtype)
    canonical_strides = x.contiguous(memory_format=layout)
    if form == "formula":
        scale, shift = (part.view(-1, 8, 1, 1, 1) for part in (weight, bias))
        out = conv(F.silu(F.group_norm(canonical_strides, GROUPS) * scale + shift))
    else:
        out = norm_silu_conv(canonical_strides, weight, bias, GROUPS, conv, recompute=form == "recomputed")
    # A gradient that differs from voxel to voxel and does not depend on the output's rounding.
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    out.backward(grad)
    found = [out.detach(), *(part.grad for part in (x, weight, bias, conv.weight, conv.bias))]
    return [part for part in found if part is not None]


@LAYOUTS
@ROWS
def test_parity_with_the_formula_in_float64_with_and_without_recomputation(
    rows: int | None, layout: torch.memory_format
) -> None:
    exact = _forward_and_gradients("formula", rows, layout, torch.float64)
    eager = _forward_and_gradients("formula", rows, layout, torch.float32)
    recomputed = _forward_and_gradients("recomputed", rows, layout, torch.float32)
    kept = _forward_and_gradients("kept", rows, layout, torch.float32)
    assert len(exact) == len(recomputed) == 6
    for ours, plain, theirs, truth in zip(recomputed, kept, eager, exact, strict=True):
        assert ours.dtype == torch.float32
        # Twice the error of torch's own float32, and the rounding of one number where that error happens to be 0.
        allowed = 2 * (theirs - truth).abs().max() + 1e-7 * truth.abs().max()
        assert (ours - truth).abs().max() <= allowed
        assert torch.equal(ours, plain), "the same kernels on the same numbers"


@pytest.mark.sample(7)
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
def test_compiled_norms_add_the_bias_before_them_equally_accurately(
    batch: int, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    # A bias whose way through the statistics, or past them, is forgotten has another gradient.
    def results(norm: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        x, weight, bias, conv = _parts(2)
        x, weight, bias = (part.detach()[:batch].requires_grad_() for part in (x, weight, bias))
        before = torch.linspace(-1, 1, 8).requires_grad_()
        out = norm(x.to(dtype).contiguous(memory_format=layout), weight, bias, GROUPS, conv.to(dtype), True, before)
        assert out.dtype == dtype
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(dtype))
        found = [out.detach(), *(part.grad for part in (x, weight, bias, before, conv.weight, conv.bias))]
        return [part.double() for part in found if part is not None]

    def formula(
        x: Tensor, weight: Tensor, bias: Tensor, groups: int, conv: nn.Conv3d, recompute: bool, before: Tensor
    ) -> Tensor:
        scale, shift = (part.to(x.dtype).view(-1, 8, 1, 1, 1) for part in (weight, bias))
        return conv(F.silu(F.group_norm(x + before.to(x.dtype).view(-1, 1, 1, 1), groups) * scale + shift))

    torch.compiler.reset()
    ours = results(torch.compile(norm_silu_conv, backend="aot_eager", fullgraph=True), dtype)
    plain, exact = results(formula, dtype), results(formula, torch.float64)
    assert len(ours) == 7
    for one, other, truth in zip(ours, plain, exact, strict=True):
        allowed = 2 * (other - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
        assert (one - truth).abs().max() <= allowed


class _Counted(TorchDispatchMode):
    """How often each operation is run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@ROWS
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
def test_norm_and_silu_are_recomputed_but_no_convolution(rows: int | None, autocast: bool) -> None:
    x, weight, bias, conv = _parts(rows)
    with _Counted() as counted:
        h = x
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                h = F.pad(norm_silu_conv(h, weight, bias, GROUPS, conv, recompute=True), (0, 0) * 3 + (0, 2))
        h.float().sum().backward()
    names = ("native_group_norm", "silu", "convolution", "convolution_backward", "silu_backward")
    assert [counted.calls[name] for name in names] == [8, 8, 4, 4, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_convolves_in_its_dtype_with_float32_gradients(dtype: torch.dtype) -> None:
    results = []
    for recompute in (False, True):
        x, weight, bias, conv = _parts(2)
        with torch.autocast("cpu", dtype=dtype):
            out = norm_silu_conv(x.to(dtype), weight, bias, GROUPS, conv, recompute)
        assert out.dtype == dtype
        out.float().square().mean().backward()
        gradients = [x.grad, weight.grad, bias.grad, conv.weight.grad]
        assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)
        results.append([out, *gradients])
    for kept, recomputed in zip(*results, strict=True):
        # The same kernels in the same dtype; one rounding of bf16 (2^-8) where a sum takes another order.
        torch.testing.assert_close(kept, recomputed, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_channels_last_convolution_may_precede_the_norm(batch: int, dtype: torch.dtype) -> None:
    # oneDNN gives an axis of size 1 a stride of its own, which torch's GroupNorm refuses.
    x, weight, bias, conv = _parts(None)
    before = nn.Conv3d(8, 8, 3, padding=1)
    last = copy.deepcopy(before).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    results = []
    for first, layout in [(before, torch.contiguous_format), (last, torch.channels_last_3d)]:
        h = first.to(dtype)(x[:batch].detach().to(dtype).contiguous(memory_format=layout))
        rows = (weight.expand(batch, -1), bias.expand(batch, -1))
        results.append(norm_silu_conv(h, *rows, GROUPS, conv.to(dtype), recompute=True).float())
    # bf16 sums in another order: some roundings, 2^-8, of values near 1.
    tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
