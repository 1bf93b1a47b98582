"""How far a run is: counted in steps and samples, over sessions."""

from __future__ import annotations

from vesuvius.engine.progress import Best, Progress


def test_progress_comes_back_from_its_state_with_one_session_more() -> None:
    progress = Progress(quarantined=[{"region": 1}], best=Best(4, 0.5), validated_step=4, previewed_step=2)
    for _ in range(5):
        progress.advance(8)
    progress.pace.extend([1.0, 2.0, 3.0])
    again = Progress.from_state(progress.state_dict())
    assert (again.step, again.sample_index, again.sessions) == (5, 40, 2)
    assert (again.validated_step, again.previewed_step, again.best) == (4, 2, Best(4, 0.5))
    assert again.quarantined == [{"region": 1}]
    assert list(again.pace) == [1.0, 2.0, 3.0]


def test_a_run_without_a_validation_comes_back_without_a_best() -> None:
    assert Progress.from_state(Progress().state_dict()).best is None


def test_training_time_adds_up_over_sessions_and_the_pause_between_them_does_not_count() -> None:
    state = Progress(trained_s=100.0).state_dict()
    assert state["trained_s"] > 100.0
    second = Progress.from_state(state)
    assert second.trained_s == state["trained_s"] < second.total_s


def test_the_time_left_is_known_right_after_a_resume() -> None:
    progress = Progress(step=10)
    assert progress.remaining_s(110) is None
    progress.pace.extend([100.0, 2.0, 2.0])  # the first step of a session holds the start of the readers
    assert Progress.from_state(progress.state_dict()).remaining_s(110) == 200.0
    assert progress.remaining_s(110, behind=60) == 100.0


def test_steps_behind_one_that_stopped_the_run_do_not_count() -> None:
    progress = Progress(step=10, sample_index=80)
    progress.go_back_to(7, 8)
    assert (progress.step, progress.sample_index) == (7, 56)
