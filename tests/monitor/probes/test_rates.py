"""CPU use between two samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.system_trees import empty_roots, write_machine, write_process
from vesuvius.monitor.probes.system_sample import SystemSample, Watcher, rates_between
from vesuvius.runlog.units import GIB


@pytest.fixture
def samples(tmp_path: Path) -> tuple[SystemSample, SystemSample]:
    """Two samples four seconds apart: one core was busy for three seconds, the other for one."""
    roots = empty_roots(tmp_path)
    write_process(roots, 10, cpu_s=50.0)
    write_process(roots, 11, parent=10, cpu_s=7.0)
    write_machine(roots, total=GIB, available=GIB, cores=((10, 100), (10, 100)))
    watcher = Watcher(10)
    first = watcher.sample()
    write_process(roots, 10, cpu_s=56.0)
    write_process(roots, 11, parent=10, cpu_s=8.0)
    write_machine(roots, total=GIB, available=GIB, cores=((13, 104), (11, 104)))
    return replace(first, clock_s=1000.0), replace(watcher.sample(), clock_s=1004.0)


def test_counters_become_shares_and_rates(samples: tuple[SystemSample, SystemSample]) -> None:
    rates = rates_between(*samples)
    assert rates is not None
    assert rates.core_busy == pytest.approx((0.75, 0.25))
    assert rates.idle_cores({0, 1}) == pytest.approx(1.0)
    assert rates.idle_cores({1}) == pytest.approx(0.75), "of those that a cpuset allows"
    assert rates.idle_cores({7}) == pytest.approx(1.0), "numbers that mean nothing here"
    assert rates.process_cores == pytest.approx({10: 1.5, 11: 0.25})


def test_rates_ignore_the_wall_clock_and_are_none_if_a_counter_fell(
    samples: tuple[SystemSample, SystemSample],
) -> None:
    first, second = samples
    assert rates_between(first, replace(second, time=first.time - 3600)) == rates_between(first, second) is not None
    assert rates_between(first, replace(second, clock_s=first.clock_s)) is None
    assert rates_between(first, replace(second, clock_s=first.clock_s - 1)) is None
    higher = replace(first.machine, core_busy_s=(10**6, 10**6))
    assert rates_between(replace(first, machine=higher), second) is None


def test_new_ended_and_pid_reusing_processes_have_no_rate(
    samples: tuple[SystemSample, SystemSample],
) -> None:
    first, second = samples
    root, child = second.processes
    other = replace(child, started_s=child.started_s + 1)
    newcomer = replace(child, pid=12)
    rates = rates_between(first, replace(second, processes=(root, other, newcomer)))
    assert rates is not None
    assert set(rates.process_cores) == {10}
