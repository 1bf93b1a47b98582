"""What ranks learn when they are started, again or for the first time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError
from vesuvius.launch import ray_train
from vesuvius.launch.rank import Request


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


def test_rank_0_does_not_begin_anew_on_a_node_without_the_run_that_has_made_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config: Callable[..., Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    board = bulletin()
    assert not board.start(0).begun
    assert not board.start(0).begun  # it was lost before its first step: there may be no directory
    board.begin()
    assert board.start(0).begun
    config = read_config(tiny_config())
    with pytest.raises(ConfigError, match=r"a path that all nodes share; got .*runs/tiny, which is not on"):
        ray_train._refuse_missing(config)
    (tmp_path / "runs/tiny/logs").mkdir(parents=True)
    ray_train._refuse_missing(config)
    stored = read_config(tiny_config("other", cluster={"storage_path": "s3://bucket/runs"}))
    ray_train._refuse_missing(stored)  # it comes from there


def test_ray_train_is_asked_for_what_the_config_says(tmp_path: Path, tiny_config: Callable[..., Path]) -> None:
    """Of its own classes, whose arguments change between releases."""
    cluster = {"min_ranks": 2, "max_restarts": 7}
    path = tiny_config(training={"ranks": 4, "workers": 3}, cluster=cluster)
    job = ray_train._Job(Request(read_config(path), path, False), str(tmp_path), 0.0, bulletin())
    trainer: Any = ray_train._trainer(job, 4, on_gpu=True)
    assert trainer.scaling_config.num_workers == (2, 4)
    assert trainer.scaling_config.use_gpu
    assert trainer.scaling_config.resources_per_worker == {"CPU": 4, "GPU": 1}
    assert trainer.run_config.failure_config.max_failures == 7
    assert ".ray_train/tiny-" in trainer.run_config.storage_path


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
