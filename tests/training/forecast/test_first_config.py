"""The readers of a first config are as many as memory holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.training.forecast.test_suggest import BOX, step_bytes, volume
from vesuvius.runlog.units import GIB
from vesuvius.stream.start.prepare import PreparedData
from vesuvius.training.forecast import first_config
from vesuvius.training.forecast.suggest import suggest


@pytest.mark.parametrize(
    ("ram_bytes", "shm_bytes", "free_shm_bytes", "workers"),
    [
        (lambda n: 2 * GIB, lambda n: 2 * GIB, 3 * GIB, 6),
        (lambda n: n * 2 * GIB, lambda n: GIB, 3 * GIB, 4),
        (lambda n: GIB, lambda n: n * GIB, 3 * GIB, 3),
        (lambda n: GIB, lambda n: 4 * GIB, 3 * GIB, 0),
        (lambda n: GIB, lambda n: 4 * GIB, None, 6),
    ],
)
def test_readers_are_as_many_as_memory_and_shared_memory_hold(
    ram_bytes: Callable[[int], int],
    shm_bytes: Callable[[int], int],
    free_shm_bytes: int | None,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan(config: Any, *_: object) -> SimpleNamespace:
        return SimpleNamespace(total_bytes=ram_bytes(config.training.workers))

    monkeypatch.setattr(first_config, "plan_ram", plan)
    monkeypatch.setattr(first_config, "store_bytes", lambda job, options: shm_bytes(options.workers))
    machine = replace(BOX, ram_bytes=10 * GIB, shm_bytes=free_shm_bytes)
    chosen = suggest("a", volume(), False, BOX, step_bytes)
    data = cast(PreparedData, SimpleNamespace(job=None))
    assert chosen.config.training.workers == 6
    assert first_config._fitting_workers(chosen, data, machine) == workers
