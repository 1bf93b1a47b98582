"""The count of what a step costs a GPU, on steps small enough to count by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from vesuvius.diffusion.network.layers import ResidualBlock
from vesuvius.diffusion.network.regions import CompiledRegions

REPOSITORY = Path(__file__).parents[2]
_HOW = ("pessimistic", "optimistic")


@pytest.fixture
def step_cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(REPOSITORY / "tools" / "bench"), *sys.path])
    import step_cost

    return step_cost


@pytest.mark.long
def test_kernels_and_bytes_are_those_counted_by_hand(step_cost: Any) -> None:
    x, weight = torch.zeros(1, 4, 8, 8, 8), torch.zeros(4, 4, 3, 3, 3)
    with step_cost.Costs() as costs:
        y = functional.conv3d(x, weight, padding=1)
        y.view(4, -1).t().add_(1.0)
        x.permute(0, 4, 1, 2, 3).reshape(-1)
        y.to(torch.bfloat16)
        torch._foreach_add_([y, x], 1.0)
    size, kinds, bias = x.nbytes, costs.kinds, torch.zeros(4)
    with step_cost.Costs() as with_bias:
        functional.conv3d(x, weight, bias, padding=1)
    assert (with_bias.kinds["bias"].kernels, with_bias.kinds["bias"].moved_bytes) == (1, 2 * size)
    assert (kinds["convolution"].flops, kinds["convolution"].moved_bytes) == (
        2 * 4 * 4 * 27 * 512,
        2 * size + weight.nbytes,
    )
    assert (kinds["add"].kernels, kinds["add"].moved_bytes) == (1, 2 * size), "views are no kernels"
    assert (kinds["copy"].kernels, kinds["copy"].moved_bytes) == (1, 2 * size), "the view of a copy is no kernel"
    assert (kinds["cast"].kernels, kinds["cast"].moved_bytes) == (1, size + size // 2)
    assert (kinds["pointwise"].kernels, kinds["pointwise"].moved_bytes) == (1, 4 * size), "one for both tensors"
    assert costs.kernels == 5
    assert costs.syncs == 0
    peak, bandwidth = step_cost.GPUS["H100"]
    assert costs.seconds("H100") == pytest.approx(
        sum(max(k.flops / peak, k.moved_bytes / bandwidth) for k in kinds.values())
    )


def test_a_convolution_keeps_the_order_of_a_gpu_and_its_gradients_are_timed_by_their_class(step_cost: Any) -> None:
    # torch without CUDA gives contiguous results: every gradient would be copied, every block made for another order
    last = torch.channels_last_3d
    with FakeTensorMode(), step_cost._on_gpu(), step_cost.Costs() as costs:
        x, weight = (torch.empty(size, dtype=torch.bfloat16) for size in ((2, 64, 8, 8, 8), (64, 64, 3, 3, 3)))
        x, weight = (each.contiguous(memory_format=last).requires_grad_() for each in (x, weight))
        y = functional.conv3d(x, weight, padding=1)
        y.backward(torch.empty_like(y))
    assert all(each is not None and each.is_contiguous(memory_format=last) for each in (y, x.grad, weight.grad))
    of = "3x3x3, 64 channels"
    work = [(flops, kernel) for flops, _, kernel in costs._work if kernel]
    assert work == [(work[0][0], each) for each in (of, of, f"{of}, weight gradient")]
    least, *estimates = (costs.seconds("H100"), *(costs.estimated_seconds("H100", how) for how in _HOW))
    assert least < estimates[1] < estimates[0]


def test_a_value_that_the_host_waits_for_is_counted(step_cost: Any) -> None:
    with step_cost.Costs() as costs:
        assert float(torch.zeros(3).sum()) == 0
    assert costs.syncs == 1


@pytest.mark.long
def test_a_step_of_the_demo_waits_for_nothing(step_cost: Any) -> None:
    micro_batch, update, batch, pieces = step_cost.count(REPOSITORY / "configs/demo.yaml", [], None)
    assert (batch, pieces) == (8, 1)
    assert micro_batch.syncs == update.syncs == 0
    assert micro_batch.flops > 0 < update.kernels


@pytest.mark.long
def test_a_compiled_block_is_counted_by_its_fused_kernels_forward_and_backward(step_cost: Any) -> None:
    # A count without the backward pass, or of operations one by one, gives other figures.
    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return 2 * functional.silu(functional.conv3d(x, weight, padding=1)) + 1

    costs, x = step_cost.Costs(), torch.randn(1, 16, 8, 8, 8, requires_grad=True)
    weight, size = torch.randn(16, 16, 3, 3, 3, requires_grad=True), x.nbytes
    torch.compiler.reset()
    compiled = torch.compile(block, backend=step_cost.backend(costs.launch), fullgraph=True)
    out = compiled(x, weight)
    forward = {kind: (cost.kernels, cost.moved_bytes) for kind, cost in costs.kinds.items()}
    assert forward == {"fused pointwise": (1, 2 * size), "convolution": (1, 2 * size + weight.nbytes)}
    out.sum().backward()
    torch.compiler.reset()
    # the gradient and the result of the convolution are read, the latter's gradient is written
    fused = costs.kinds["fused pointwise"]
    assert (fused.kernels, fused.moved_bytes) == (2, 5 * size)
    torch.testing.assert_close(out, block(x, weight))


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 2])
def test_a_compiled_block_passes_over_its_activations_as_often_as_counted_by_hand(step_cost: Any, batch: int) -> None:
    # A copy in another order of memory, a float32 activation, or statistics computed again are passes more.
    size, last = (batch, 16, 16, 16, 16), torch.channels_last_3d
    one_pass, launches, passes = 2 * math.prod(size), [], []

    def launch(graph: Any, arguments: Any, kernels: Any) -> Any:
        launches.append(len(kernels))
        moved = [kernel.moved_bytes for kernel in kernels if kernel.moved_bytes > 0.9 * one_pass]  # not the weights
        passes.append(sum(moved) / one_pass)
        return graph(*arguments)

    x = torch.randn(size, dtype=torch.bfloat16).contiguous(memory_format=last).requires_grad_()
    rows, block = torch.randn(batch, 32, requires_grad=True), ResidualBlock(16, 16, 64)
    torch.compiler.reset()
    regions = CompiledRegions(step_cost.backend(launch))
    with torch.autocast("cpu", torch.bfloat16):
        out = regions(block.to(memory_format=last), x, rows, True)  # type: ignore[call-overload]
    out.backward(torch.ones_like(out))
    torch.compiler.reset()
    assert not regions.failure
    # forward: for each norm 1 for statistics and 2 to apply it, 3 for the sum with x; backward: for each norm 2 to
    # compute its result again, 2 for sums and 3 for x's gradient, 1 to add the sum's, 1 for the last bias's
    assert passes == pytest.approx([9, 16], abs=0.5)
    assert launches[0] <= 16
    assert launches[1] <= 28


@pytest.mark.long
def test_the_full_experiment_compiled_costs_what_its_page_says(step_cost: Any) -> None:
    compiled, *_ = step_cost.count(REPOSITORY / "configs/exp001_full.yaml", [], 8, compiled=True)
    # docs/performance.md
    assert compiled.kernels == pytest.approx(1085, rel=0.03)
    assert compiled.other_bytes / 8 == pytest.approx(23.4e9, rel=0.03)


@pytest.mark.long
def test_a_compiled_prediction_moves_less_and_does_the_same_work(step_cost: Any) -> None:
    demo = REPOSITORY / "configs/demo.yaml"
    eager, compiled = (step_cost.count_evaluation(demo, [], 2, compiled=how) for how in (False, True))
    assert compiled.flops == eager.flops > 0
    assert compiled.other_bytes < 0.9 * eager.other_bytes


@pytest.mark.long
def test_a_compiled_step_does_the_same_work_in_fewer_kernels(step_cost: Any) -> None:
    small = ["model.channels=[16]", "model.blocks_per_level=1", "model.full_res_channels=0"]
    eager, update, *_ = step_cost.count(REPOSITORY / "configs/demo.yaml", small, 2)
    compiled, same_update, *_ = step_cost.count(REPOSITORY / "configs/demo.yaml", small, 2, compiled=True)
    assert compiled.flops == eager.flops, "a pass, or a block, was not counted"
    assert compiled.kernels < eager.kernels
    assert compiled.syncs == 0
    assert same_update.kernels == update.kernels
