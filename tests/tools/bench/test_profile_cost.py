"""What a profile costs is found beside a drift of the machine, and not where there is nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tools.bench.profile_cost import is_profiled, ratios

from tests.conftest import REPOSITORY
from tests.support.runs import WriteConfig
from vesuvius.experiments.paired import compare_one_of


@pytest.mark.parametrize("cost", [1.0, 1.1])
def test_the_cost_is_found_under_a_drift_of_half_the_speed(cost: float) -> None:
    pairs, turn_steps = 20, 10
    drift = np.linspace(1.0, 1.5, 2 * pairs * turn_steps)
    noise = np.random.default_rng(0).normal(1.0, 0.02, drift.shape)
    profiled = np.repeat([cost if is_profiled(turn) else 1.0 for turn in range(2 * pairs)], turn_steps)
    found = ratios(drift * noise * profiled, turn_steps, pairs)
    interval = compare_one_of([(each, 1.0) for each in found.tolist()], cells=1)
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low < cost - 1 < interval.high
    assert interval.high - interval.low < 0.03


@pytest.mark.long
def test_a_real_run_in_turns_prints_both_costs(tiny_config: WriteConfig, tmp_path: Path) -> None:
    config = tiny_config("any", training={"workers": 0})
    command = [sys.executable, str(REPOSITORY / "tools" / "bench" / "profile_cost.py"), "--config", str(config)]
    done = subprocess.run(
        [*command, "--pairs=2", "--turn-steps=4"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "2 pairs of turns of 4 steps" in done.stdout
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[-2:]] == ["wall time", "processor time"]
