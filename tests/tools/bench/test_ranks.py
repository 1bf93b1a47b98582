"""The prediction of step times, and the measurement of what Ray Train costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tools.bench.ranks import Link, Workload, all_reduce_s, predicted_s, step_s

from tests.conftest import REPOSITORY

WORK = Workload(compute_s=3.0, last_backward_s=2.0, gradient_bytes=1e9, samples=8)


def test_a_ring_moves_twice_the_gradient_over_each_link_however_many_ranks_there_are() -> None:
    link = Link(bytes_s=1e9, latency_s=0.0)
    assert all_reduce_s(2, 1e9, link) == pytest.approx(1.0)
    assert all_reduce_s(10**6, 1e9, link) == pytest.approx(2.0, rel=1e-5)
    assert all_reduce_s(3, 0.0, Link(1e9, 0.5)) == pytest.approx(2.0)


def test_a_step_waits_for_what_the_backward_pass_does_not_hide_and_for_data() -> None:
    hidden, slow = Link(1e9, 0.0), Link(1e8, 0.0)
    assert step_s(WORK, 1, slow) == 3.0
    assert step_s(WORK, 2, hidden, agreement_s=0.1) == pytest.approx(3.1)
    assert step_s(WORK, 2, slow) == pytest.approx(3.0 + 10.0 - 0.8 * 2.0)
    starved = Workload(3.0, 2.0, 1e9, 8, readers_samples_s=1.0)
    assert step_s(starved, 1, hidden) == 8.0
    assert step_s(Workload(3.0, 2.0, 1e9, 8, store_samples_s=8.0), 16, hidden) == 16.0


def test_ranks_that_crowd_each_other_compute_longer_and_nothing_hides_their_exchange() -> None:
    alone = {"all_reduce_s": 0.0, "barrier_s": 0.0}
    assert predicted_s(1.0, 0.9, 1.0, alone) == pytest.approx(1.0)
    assert predicted_s(1.0, 0.9, 2.0, alone) == pytest.approx(1.9), "what is not computed stays"
    slow = {"all_reduce_s": 1.0, "barrier_s": 0.1}
    assert predicted_s(1.0, 0.9, 2.0, slow) == pytest.approx(1.9 + 1.0 + 0.1)


@pytest.mark.long
def test_the_cost_of_ray_train_is_that_of_runs_in_turn(tiny_config: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "tools/bench/ranks.py"), "--through-ray", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--config", str(tiny_config())], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "| in the process |" in done.stdout
    assert "| through Ray Train |" in done.stdout
    assert "a step takes" in done.stdout
