"""SIGKILL at any time: every checkpoint is intact, and the final weights equal those of an undisturbed run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.kill_harness import (
    KillStats,
    Session,
    final_difference,
    kill_inside_save,
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
# States of 12 MB, so that a kill can fall into each part of a save.
_WIDER = {"channels": [32, 64]}


def training(kills: int, save_every: int) -> dict[str, Any]:
    """Long enough for sessions of at most 5 + 2 steps, and a few more after the last kill."""
    return _TRAINING | {"epochs": 1, "steps_per_epoch": 7 * kills + 5, "save_every": save_every}


def undisturbed(config: Path, cwd: Path) -> Path:
    with Session(config, cwd) as session:
        assert session.end() == 0, session.text()
    return run_directory(config, cwd)


def kill_and_compare(config: WriteConfig, cwd: Path, kills: int, seed: int, save_every: int) -> KillStats:
    straight = undisturbed(config("straight", training=training(kills, save_every)), cwd)
    killed = config("killed", training=training(kills, save_every))
    figures = run_with_kills(killed, cwd, kills, seed)
    print(f"\nat random moments: {figures}", flush=True)
    assert final_difference(run_directory(killed, cwd), straight) is None
    return figures


@pytest.mark.long
def test_fifty_random_kills_change_no_bit_and_leave_no_unreadable_checkpoint(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    figures = kill_and_compare(tiny_config, tmp_path, kills=50, seed=1, save_every=2)
    assert figures.before_first_step > 0
    assert figures.steps_redone > 0


@pytest.mark.long
def test_a_run_killed_during_a_save_continues_from_the_previous_checkpoint(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    saving = _TRAINING | {"save_every": 1, "epochs": 1000, "validate_every": 0}
    figures = kill_inside_save(tiny_config("saving", training=saving, model=_WIDER), tmp_path, kills=5, seed=2)
    print(f"\ninside the save: {figures}", flush=True)
    assert figures.inside_save == 5


@pytest.mark.long
def test_kills_with_changing_numbers_of_ray_readers_change_no_bit_and_leave_no_process(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    kills, marker = 5, f"marker-{os.getpid()}-{time.time_ns()}"
    straight = undisturbed(tiny_config("straight", training=training(kills, save_every=2)), tmp_path)
    killed = tiny_config("killed", training=training(kills, save_every=2))
    figures = run_with_kills(
        killed,
        tmp_path,
        kills,
        seed=3,
        arguments=lambda session: [f"training.workers={(2, 1, 2, 0, 2, 1)[session]}"],
        environment={"TEST_OF_VESUVIUS": marker},
    )
    print(f"\nwith Ray: {figures}", flush=True)
    assert final_difference(run_directory(killed, tmp_path), straight) is None
    assert left_after(marker, at_most_s=120) == [], "that is the claim: gone within 2 minutes"
