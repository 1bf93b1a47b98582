"""What ranks learn when they are started, again or for the first time."""

from __future__ import annotations

from typing import Any

from vesuvius.launch import ray_train


def bulletin() -> Any:
    """The class behind the actor, without Ray."""
    return ray_train.Bulletin.__ray_metadata__.modified_class()  # type: ignore[attr-defined]


def test_ranks_are_started_again_with_the_losses_that_they_have_not_heard_of() -> None:
    board = bulletin()
    first = [board.start(rank) for rank in (0, 1)]
    assert [(start.restarts, start.lost, start.ended) for start in first] == [(0, {}, None)] * 2
    assert not first[0].again
    board.lose({1: "its process is gone"})
    assert [board.start(rank).lost for rank in (1, 0)] == [{1: "its process is gone"}] * 2
    resized = board.start(0)  # Ray Train has only changed their number
    assert (resized.again, resized.restarts, resized.lost) == (True, 1, {})
    board.lose({0: "a"})
    board.lose({1: "b"})
    assert board.start(1).lost == {1: "b"}
    assert board.start(2).restarts == 3


def test_a_rank_that_was_there_first_does_not_make_rank_0_resume() -> None:
    board = bulletin()
    assert not board.start(1).again
    assert not board.start(0).again  # the first rank 0: the run may not exist yet
    assert board.start(1).again


def test_the_first_end_that_no_restart_helps_is_what_every_start_returns() -> None:
    board = bulletin()
    board.end(6, "a chunk must be readable")
    board.end(1, "rank 1 failed")
    assert board.start(0).ended == board.start(1).ended == (6, "a chunk must be readable")


def test_a_stop_is_heard_once_rank_0_has_asked_after_it_came() -> None:
    board = bulletin()
    assert board.stop() is None
    assert not board.heard()
    board.ask(75, "SIGTERM")
    assert not board.heard()
    assert board.stop() == (75, "SIGTERM")
    assert board.heard()
