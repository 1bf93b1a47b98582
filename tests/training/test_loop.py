"""Conditions for giving up the wait for data, and for queueing micro-batches."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.gpu import GPU, needs_gpu, sleep
from vesuvius.training.loop import TrainingLoop
from vesuvius.training.ranks.ranks import Ranks
from vesuvius.training.stop import StopRequest


@pytest.mark.parametrize(("world", "gives_up"), [(1, [False, True, True]), (2, [False, False, True])])
def test_a_stop_waits_a_minute_for_data_if_other_ranks_are_in_the_same_step(
    monkeypatch: pytest.MonkeyPatch, world: int, gives_up: list[bool]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stop, ranks = StopRequest(None), Ranks(world=world)
    loop: Any = SimpleNamespace(run=SimpleNamespace(stop=stop, ranks=ranks), _in_step=True)
    seen = [TrainingLoop._stops_waiting(loop)]
    stop.request(75, "SIGTERM")
    seen.append(TrainingLoop._stops_waiting(loop))
    now[0] += 59
    assert TrainingLoop._stops_waiting(loop) is (world == 1)
    now[0] += 2
    seen.append(TrainingLoop._stops_waiting(loop))
    assert seen == gives_up


def test_another_ranks_stop_ends_the_wait_for_data_before_a_step() -> None:
    ranks = Ranks(world=2)
    loop: Any = SimpleNamespace(run=SimpleNamespace(stop=StopRequest(None), ranks=ranks), _in_step=False)
    assert not TrainingLoop._stops_waiting(loop)
    ranks.stopping = (75, "SIGTERM")
    assert TrainingLoop._stops_waiting(loop)
    assert loop.run.stop.pending() == (75, "SIGTERM"), "and all agree on it"


@needs_gpu
def test_the_host_queues_at_most_two_micro_batches_on_a_gpu() -> None:
    loop, ends = SimpleNamespace(_queued=deque(), run=SimpleNamespace(device=GPU)), []
    for _ in range(6):
        sleep(0.1)
        ends.append(torch.Event(GPU))
        ends[-1].record()
        TrainingLoop._limit_queue(loop)  # type: ignore[arg-type]
        assert sum(not end.query() for end in ends) <= 2
