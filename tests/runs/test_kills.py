"""SIGKILL at any time: every checkpoint is intact, and the final weights equal those of an undisturbed run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.kill_harness import (
    Session,
    final_difference,
    left_after,
    run_directory,
    run_with_kills,
)
from tests.support.runs import WriteConfig

# All that a resume has to restore: accumulation, averages, a schedule, validation.
_TRAINING: dict[str, Any] = {
    "accumulate_steps": 2,
    "extra_ema_decays": [0.5],
    "lr_schedule": "cosine",
    "validate_every": 3,
    "validate_patches": 2,
}


def training(kills: int, save_every: int) -> dict[str, Any]:
    """Long enough for sessions of at most 5 + 2 steps, and a few more after the last kill."""
    return _TRAINING | {"epochs": 1, "steps_per_epoch": 7 * kills + 5, "save_every": save_every}


def undisturbed(config: Path, cwd: Path) -> Path:
    with Session(config, cwd) as session:
        assert session.end() == 0, session.text()
    return run_directory(config, cwd)


@pytest.mark.long
def test_fifty_random_kills_change_no_bit_and_leave_no_unreadable_checkpoint(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    straight = undisturbed(tiny_config("straight", training=training(50, save_every=2)), tmp_path)
    killed = tiny_config("killed", training=training(50, save_every=2))
    before_first_step, steps_redone = run_with_kills(killed, tmp_path, kills=50, seed=1)
    assert final_difference(run_directory(killed, tmp_path), straight) is None
    assert before_first_step > 0
    assert steps_redone > 0


@pytest.mark.long
def test_kills_with_changing_numbers_of_ray_readers_change_no_bit_and_leave_no_process(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    kills, marker = 5, f"marker-{os.getpid()}-{time.time_ns()}"
    straight = undisturbed(tiny_config("straight", training=training(kills, save_every=2)), tmp_path)
    killed = tiny_config("killed", training=training(kills, save_every=2))
    run_with_kills(
        killed,
        tmp_path,
        kills,
        seed=3,
        arguments=lambda session: [f"training.workers={(2, 1, 2, 0, 2, 1)[session]}"],
        environment={"TEST_OF_VESUVIUS": marker},
    )
    assert final_difference(run_directory(killed, tmp_path), straight) is None
    assert left_after(marker, at_most_s=120) == [], "that is the claim: gone within 2 minutes"
