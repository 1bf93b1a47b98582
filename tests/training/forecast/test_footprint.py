"""What is alive, what is kept for backward and what is computed, counted by hand on steps small enough for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vesuvius.training.forecast.memory_plan import Footprint

KIB = 1024


def kib(count: int) -> Tensor:
    """float32 that takes `count` KiB."""
    return torch.empty(count * KIB // 4)


@pytest.fixture(params=["real", "fake"])
def footprint(request: pytest.FixtureRequest) -> Iterator[Footprint]:
    """One that is entered, over real tensors and over fake ones."""
    mode = FakeTensorMode(allow_non_fake_inputs=True) if request.param == "fake" else nullcontext()
    with mode, Footprint() as entered:
        yield entered


def test_memory_lives_until_its_last_view_is_gone(footprint: Footprint) -> None:
    x = kib(4)
    view = x.view(-1, 2)[:3].detach()
    assert footprint.live_bytes == 4 * KIB, "three tensors, one storage"
    del x
    assert footprint.live_bytes == 4 * KIB
    del view
    assert footprint.live_bytes == 0


def test_memory_held_by_the_graph_alone_counts_until_backward_lets_go(footprint: Footprint) -> None:
    x = torch.empty(256, requires_grad=True)
    y = x.sin().sin().sum()
    assert footprint.live_bytes == 2 * KIB + 4, "x, sin(x) for the outer cosine, and y"
    y.backward()
    del y
    assert footprint.live_bytes == 2 * KIB, "x and its gradient"


def test_kept_for_backward_counts_each_storage_once_and_no_parameter(footprint: Footprint) -> None:
    layer = nn.Linear(64, 64)
    with footprint.saving(layer.parameters()):
        x = torch.empty(16, 64)
        y = layer(x)
        (y.sin() * y.cos() * layer.weight.sum()).sum().backward()
    # By the calculus, of 4 KiB each: x, y (for both derivatives), the two factors, their product; and the 4 bytes of
    # the sum of weights.
    assert footprint.saved_bytes == 5 * 4 * KIB + 4
    assert footprint.saved_cast_bytes == 0


def test_a_checkpointed_block_keeps_its_input_and_its_second_pass_counts_as_work(footprint: Footprint) -> None:
    def block(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, weight), weight)

    weight = torch.empty(64, 64, requires_grad=True)
    with footprint.saving([weight]):
        out = checkpoint(block, torch.empty(16, 64, requires_grad=True), use_reentrant=False)
        out.sum().backward()
    assert footprint.saved_bytes == 16 * 64 * 4, "the block's input"
    product = 2 * 16 * 64 * 64
    # Each layer forward, and the gradients of its input and weight; of the second pass only the first layer: what the
    # second one gives is needed by nothing.
    assert footprint.flops == (2 + 4 + 1) * product


def test_operations_are_those_that_torch_counts(footprint: Footprint) -> None:
    conv, linear = nn.Conv3d(2, 3, 3, padding=1), nn.Linear(5, 7)
    x, rows = torch.empty(2, 2, 4, 5, 6, requires_grad=True), torch.empty(4, 5, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        footprint.restart()
        conv(x).sum().backward()
        linear(rows).sum().backward()
    # Forward, and as much again for the gradients of the input and of the weight.
    closed_form = 3 * (2 * (2 * 4 * 5 * 6) * 27 * 2 * 3 + 2 * 4 * 5 * 7)
    assert footprint.flops == counter.get_total_flops() == closed_form
    assert footprint.convolution_bytes == [(2 + 3) * 2 * 120 * 4]


def test_attention_is_counted_without_a_matrix_of_scores(footprint: Footprint) -> None:
    n, width = 1024, 16
    q, k, v = (torch.empty(1, 1, n, width, requires_grad=True) for _ in range(3))
    with footprint.saving([]):
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    product = 2 * n * n * width
    # Forward QK' and PV; backward forms the scores again and four gradients.
    assert footprint.flops == (2 + 5) * product
    # q, k, v, the result, and a float32 number for each query
    assert footprint.saved_bytes == 4 * n * width * 4 + n * 4
    assert max(footprint.history) < n * n * 4, "the scores of all pairs would take 4 MiB"
