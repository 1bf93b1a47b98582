"""The count of what a step costs a GPU, on steps small enough to count by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def step_cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(REPOSITORY / "tools" / "bench"), *sys.path])
    import step_cost

    return step_cost


def test_kernels_and_bytes_are_those_counted_by_hand(step_cost: Any) -> None:
    x, weight = torch.zeros(1, 4, 8, 8, 8), torch.zeros(4, 4, 3, 3, 3)
    with step_cost.Costs() as costs:
        y = functional.conv3d(x, weight, padding=1)
        y.view(4, -1).t().add_(1.0)
        y.to(torch.bfloat16)
        torch._foreach_add_([y, x], 1.0)
    size, kinds = x.nbytes, costs.kinds
    assert (kinds["convolution"].flops, kinds["convolution"].moved_bytes) == (
        2 * 4 * 4 * 27 * 512,
        2 * size + weight.nbytes,
    )
    assert (kinds["add"].kernels, kinds["add"].moved_bytes) == (1, 2 * size), "views are no kernels"
    assert (kinds["cast"].kernels, kinds["cast"].moved_bytes) == (1, size + size // 2)
    assert (kinds["pointwise"].kernels, kinds["pointwise"].moved_bytes) == (1, 4 * size), "one for both tensors"
    assert costs.kernels == 4
    assert costs.syncs == 0
    peak, bandwidth = step_cost.GPUS["H100"]
    assert costs.seconds("H100") == pytest.approx(
        sum(max(k.flops / peak, k.moved_bytes / bandwidth) for k in kinds.values())
    )


def test_a_value_that_the_host_waits_for_is_counted(step_cost: Any) -> None:
    with step_cost.Costs() as costs:
        assert float(torch.zeros(3).sum()) == 0
    assert costs.syncs == 1


def test_a_step_of_the_demo_waits_for_nothing(step_cost: Any) -> None:
    micro_batch, update, batch, pieces = step_cost.count(REPOSITORY / "configs/demo.yaml", [], None, "bf16")
    assert (batch, pieces) == (8, 1)
    assert micro_batch.syncs == update.syncs == 0
    assert micro_batch.flops > 0 < update.kernels
