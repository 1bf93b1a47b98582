"""A snapshot is what the state was at that moment, and costs no new memory from the second on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.training.checkpoint.test_format import assert_same
from vesuvius.errors import StorageError
from vesuvius.training.checkpoint.files import tensors_in
from vesuvius.training.checkpoint.snapshot import Snapshot


def nested_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"a": torch.full((3, 4), value), "b": torch.full((), value, dtype=torch.float64)},
        "optimizer": {"state": {0: {"step": torch.tensor(value)}}, "param_groups": [{"betas": (0.9, 0.99), "p": [0]}]},
        "channels_last": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "empty": torch.empty(0),
        "half": torch.full((7,), value, dtype=torch.bfloat16),
        "plain": [1, "two", None, {"three": 3.0}],
    }


def test_changes_after_it_was_taken_do_not_reach_it() -> None:
    state, expected = nested_state(), nested_state()
    expected["channels_last"] = state["channels_last"].clone()
    snapshot = Snapshot()
    snapshot.take(state)
    for tensor in tensors_in(state):
        tensor.add_(1)
    state["plain"].append("more")
    state["plain"][3]["three"] = 4.0
    assert_same(snapshot.state(), expected)


def test_the_memory_order_is_kept() -> None:
    state, snapshot = nested_state(), Snapshot()
    snapshot.take(state)
    assert snapshot.state()["channels_last"].stride() == state["channels_last"].stride()


def test_buffers_are_used_again_unless_shape_dtype_or_order_change() -> None:
    state, snapshot = nested_state(), Snapshot()
    snapshot.take(state)
    first = snapshot.state()
    addresses = {name: first[name].data_ptr() for name in ("channels_last", "half")}
    state["channels_last"].mul_(2)
    snapshot.take(state)
    assert {name: snapshot.state()[name].data_ptr() for name in addresses} == addresses
    assert torch.equal(snapshot.state()["channels_last"], state["channels_last"])
    state["channels_last"] = state["channels_last"].contiguous()
    state["half"] = torch.ones(9)
    state["new"] = torch.ones(2)
    del state["empty"]
    snapshot.take(state)
    assert_same(snapshot.state(), state)
    assert snapshot.state()["channels_last"].is_contiguous()


def test_a_copy_that_does_not_fit_the_memory_is_an_error_with_a_remedy() -> None:
    state, snapshot = {"a": torch.ones(1), "large": torch.ones(1).expand(2**45)}, Snapshot()
    with pytest.raises(StorageError, match=r"must fit the host's memory; got .*allocate.*; give the run more"):
        snapshot.take(state)
    state["large"] = torch.ones(3)
    snapshot.take(state)
    assert_same(snapshot.state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_updates_queued_behind_it_do_not_reach_it() -> None:
    state, snapshot = {"w": torch.zeros(2**26, device="cuda"), "host": torch.zeros(3)}, Snapshot()
    for round_ in range(3):
        snapshot.take(state)
        for tensor in state.values():
            tensor.add_(1)
        taken = snapshot.state()
        assert taken["w"].is_pinned()
        assert taken["w"].unique().tolist() == [round_]
        assert taken["host"].unique().tolist() == [round_]
