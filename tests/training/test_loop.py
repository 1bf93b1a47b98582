"""When the loop gives up waiting for data."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from vesuvius.training.loop import TrainingLoop
from vesuvius.training.stop import StopRequest


@pytest.mark.parametrize(("world", "gives_up"), [(1, [False, True, True]), (2, [False, False, True])])
def test_a_stop_gives_data_a_minute_where_other_ranks_are_in_the_same_step(
    monkeypatch: pytest.MonkeyPatch, world: int, gives_up: list[bool]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stop = StopRequest(None)
    loop: Any = SimpleNamespace(run=SimpleNamespace(stop=stop, ranks=SimpleNamespace(world=world)))
    seen = [TrainingLoop._gives_up(loop)]
    stop.adopt(75, "SIGTERM")
    seen.append(TrainingLoop._gives_up(loop))
    now[0] += 59
    assert TrainingLoop._gives_up(loop) is (world == 1)
    now[0] += 2
    seen.append(TrainingLoop._gives_up(loop))
    assert seen == gives_up
