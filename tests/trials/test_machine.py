"""The machine that trials run on, and the memory that it has left for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vesuvius.config.load import read_config
from vesuvius.runlog.units import GIB
from vesuvius.trials.machine import describe_machine, ram_left

WriteConfig = Callable[..., Path]


def test_a_configured_limit_leaves_less_than_the_guards_first_rung(tiny_config: WriteConfig) -> None:
    config = read_config(tiny_config(monitor={"ram_limit_gib": 2.0}))
    assert 0 < ram_left(config) <= 0.84 * 2 * GIB
    assert ram_left(read_config(tiny_config())) > ram_left(config)


def test_a_machine_is_described_alike_each_time() -> None:
    assert describe_machine() == describe_machine()
