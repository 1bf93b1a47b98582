"""Progress of a run: steps and samples over sessions."""

from __future__ import annotations

import time
from typing import Any

import pytest

from vesuvius.config import Config, DataConfig, TrainingConfig, VolumeConfig
from vesuvius.training.checkpoint.progress import FIRST_PREVIEW_S, Best, Progress


def test_progress_is_restored_with_one_more_session() -> None:
    progress = Progress(quarantined=[{"region": 1}], best=Best(4, 0.5), validated_step=4, previewed_step=2)
    for _ in range(5):
        progress.advance(8)
    again = Progress.from_state(progress.state_dict())
    assert (again.step, again.sample_index, again.sessions) == (5, 40, 2)
    assert (again.validated_step, again.previewed_step, again.best) == (4, 2, Best(4, 0.5))
    assert again.quarantined == [{"region": 1}]
    assert Progress.from_state(Progress().state_dict()).best is None, "there was no validation"
    before = progress.state_dict() | {"best": {"step": 4, "relative_error": 0.1}}
    del before["best_judged"]
    assert Progress.from_state(before).best is None, "of earlier versions: the mean over other levels"
    state = Progress(trained_s=100.0).state_dict()
    assert 100.0 < state["trained_s"] == Progress.from_state(state).trained_s, "the pause in between does not count"


def run_of(**training: Any) -> Config:
    """100 steps."""
    keys = {"epochs": 1, "steps_per_epoch": 100, "warmup_steps": 1, "validate_every": 0, "preview_every": 0}
    data = DataConfig(volumes=(VolumeConfig(path="v.zarr"),))
    return Config(name="any", data=data, training=TrainingConfig(**(keys | {"save_every": 1000} | training)))


def test_the_time_left_follows_the_mean_pace_including_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    config, progress = run_of(), Progress(step=10)
    for step, seconds in enumerate([1.0, 1.0, 6.0, 1.0], start=11):  # a validation before the third
        assert progress.time_left(config) is None or step > 12
        now[0] += seconds
        progress.mark_reported(step)
    assert progress.time_left(config) == pytest.approx(86 * (1 + 6 + 1) / 3)
    assert progress.time_left(config, limit_s=100.0) == 100.0
    for step in range(15, 1100):
        now[0] += 2.0
        progress.mark_reported(step)
    assert progress.time_left(run_of(steps_per_epoch=1199)) == pytest.approx(100 * 2.0), "of the last thousand"
    assert Progress.from_state(progress.state_dict()).time_left(config) is None


@pytest.mark.parametrize(("index", "begins_at"), [(24, 24), (26, 26), (25, 36)])
def test_a_resume_begins_at_a_sample_the_ranks_can_share_or_at_the_next_full_batch(
    index: int, begins_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Progress(sample_index=index)
    progress.align_to_ranks(ranks=2, global_batch=12)
    assert progress.sample_index == begins_at
    assert ("skipping samples 25 to 36" in caplog.text) is (index != begins_at)


def test_the_first_preview_is_due_by_total_time_and_the_others_by_step() -> None:
    config, progress = run_of(preview_every=50), Progress(trained_s=FIRST_PREVIEW_S)
    assert not progress.preview_due(config), "before the first step there is nothing to show"
    progress.advance(8)
    assert progress.preview_due(config)
    assert not Progress(step=1, trained_s=FIRST_PREVIEW_S / 2).preview_due(config)
    assert not progress.preview_due(run_of())
    progress.previewed_step = 1
    due = []
    while progress.step < 100:
        progress.advance(8)
        if progress.preview_due(config):
            due.append(progress.step)
    assert due == [50, 100]
