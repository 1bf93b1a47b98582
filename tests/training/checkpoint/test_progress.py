"""How far a run is: counted in steps and samples, over sessions."""

from __future__ import annotations

from typing import Any

import pytest

from vesuvius.config import Config, DataConfig, TrainingConfig, VolumeConfig
from vesuvius.training.checkpoint.progress import Best, Progress


def test_progress_comes_back_from_its_state_with_one_session_more() -> None:
    progress = Progress(quarantined=[{"region": 1}], best=Best(4, 0.5), validated_step=4, previewed_step=2)
    for _ in range(5):
        progress.advance(8)
    progress.pace.extend([1.0, 2.0, 3.0])
    again = Progress.from_state(progress.state_dict())
    assert (again.step, again.sample_index, again.sessions) == (5, 40, 2)
    assert (again.validated_step, again.previewed_step, again.best) == (4, 2, Best(4, 0.5))
    assert again.quarantined == [{"region": 1}]
    assert again.state_dict()["pace_s"] == [1.0, 2.0, 3.0]


def test_a_run_without_a_validation_comes_back_without_a_best() -> None:
    assert Progress.from_state(Progress().state_dict()).best is None


def test_training_time_adds_up_over_sessions_and_the_pause_between_them_does_not_count() -> None:
    state = Progress(trained_s=100.0).state_dict()
    assert state["trained_s"] > 100.0
    second = Progress.from_state(state)
    assert second.trained_s == state["trained_s"] < second.total_s


def run_of(**training: Any) -> Config:
    """100 steps."""
    keys = {"epochs": 1, "steps_per_epoch": 100, "warmup_steps": 1, "validate_every": 0, "preview_every": 0}
    data = DataConfig(volumes=(VolumeConfig(path="v.zarr"),))
    return Config(name="any", data=data, training=TrainingConfig(**(keys | {"save_every": 1000} | training)))


def test_the_time_left_is_that_of_steps_and_of_all_that_is_known_to_come_between_them() -> None:
    config = run_of(validate_every=20, preview_every=30, save_every=50)
    progress = Progress(step=10)
    assert progress.time_left(config) is None
    for seconds in (1.0, 1.0, 1.0, 5.0):  # each fourth waits for data
        progress.note_step(seconds)
    assert progress.time_left(config) == 90 * 2.0
    for what, seen in {"validation": [40.0, 80.0], "preview": [10.0], "save": [1.0], "write": [7.0, 9.0]}.items():
        for each in seen:
            progress.note_pause(what, each)
    # Only the last checkpoint is waited for until it is written.
    # Validations behind 20, 40, 60, 80 and 100, previews behind 30, 60, 90 and the last step, saves behind 50 and 100.
    whole = 90 * 2.0 + 5 * 60.0 + 4 * 10.0 + 2 * 1.0 + 8.0
    assert progress.time_left(config) == progress.time_left(config, limit_s=7200.0) == whole
    assert progress.time_left(config, limit_s=100.0) == 100.0
    again = Progress.from_state(progress.state_dict())
    assert again.time_left(config) == whole, "right after a resume"
    # The line of step 40 comes before the validation behind it, that of 41 behind it; likewise the save of 50.
    assert progress.time_left(config, 40) == 60 * 2.0 + 4 * 60.0 + 3 * 10.0 + 2 * 1.0 + 8.0
    progress.validated_step = 40
    assert progress.time_left(config, 41) == 59 * 2.0 + 3 * 60.0 + 3 * 10.0 + 2 * 1.0 + 8.0
    assert progress.time_left(config, 50) == 50 * 2.0 + 3 * 60.0 + 3 * 10.0 + 2 * 1.0 + 8.0
    assert progress.time_left(config, 51) == 49 * 2.0 + 3 * 60.0 + 3 * 10.0 + 1 * 1.0 + 8.0


def test_a_resumed_run_counts_with_the_pace_of_its_own_settings_and_with_recent_pauses() -> None:
    before = Progress(step=10)
    before.pace.extend([18.0] * 200)
    for seconds in [100.0] * 50 + [10.0] * 10:
        before.note_pause("validation", seconds)
    progress, config = Progress.from_state(before.state_dict()), run_of(validate_every=20)
    assert progress.time_left(config) == 90 * 18.0 + 5 * 10.0
    progress.note_step(1.0)
    assert progress.time_left(config) == 90 * 1.0 + 5 * 10.0


def test_steps_behind_one_that_stopped_the_run_do_not_count() -> None:
    progress = Progress(step=10, sample_index=80)
    progress.go_back_to(7, 8)
    assert (progress.step, progress.sample_index) == (7, 56)


@pytest.mark.parametrize(("index", "begins_at"), [(24, 24), (26, 26), (25, 36)])
def test_a_resume_begins_at_a_sample_that_the_ranks_share_or_at_the_next_whole_batch(
    index: int, begins_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Progress(sample_index=index)
    progress.begin_at_multiple(ranks=2, global_batch=12)
    assert progress.sample_index == begins_at
    assert ("samples 25 to 36 are skipped" in caplog.text) is (index != begins_at)
