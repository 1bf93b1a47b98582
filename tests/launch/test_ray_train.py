"""What ranks learn when they are started, again or for the first time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from vesuvius.config import ClusterConfig, Config, TrainingConfig
from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError, VesuviusError
from vesuvius.launch import rank
from vesuvius.launch.launch import with_number_of_ranks
from vesuvius.launch.ray import command, room, trainer, worker
from vesuvius.launch.ray.bulletin import Bulletin
from vesuvius.stream.options import StreamOptions, reads_here
from vesuvius.stream.ray.start import passed_on
from vesuvius.training.request import Request
from vesuvius.training.stop import StopRequest


def test_ranks_are_started_again_with_the_losses_that_they_have_not_heard_of() -> None:
    board = Bulletin()
    first = [board.start(rank) for rank in (0, 1)]
    assert [(start.restarts, start.lost, start.ended) for start in first] == [(0, {}, None)] * 2
    assert not first[0].again
    board.lose({1: "its process is gone"})
    assert [board.start(rank).lost for rank in (1, 0)] == [{1: "its process is gone"}] * 2
    assert not board.start(3).again  # more than there were
    resized = board.start(0)  # Ray Train has only changed their number
    assert (resized.again, resized.restarts, resized.lost) == (True, 1, {})
    board.lose({0: "a"})
    board.lose({1: "b"})
    assert board.start(1).lost == {1: "b"}
    assert board.start(2).restarts == 3


def test_no_rank_is_started_again_because_another_one_was_there_first() -> None:
    board = Bulletin()
    assert not board.start(1).again
    assert not board.start(0).again  # the first rank 0: the run may not exist yet
    assert board.start(1).again


def test_rank_0_does_not_begin_anew_on_a_node_without_the_run_that_has_made_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_config: Callable[..., Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    board = Bulletin()
    assert not board.start(0).begun
    assert not board.start(0).begun  # it was lost before its first step: there may be no directory
    board.reach(1)
    assert board.start(0).begun
    config = read_config(tiny_config())
    with pytest.raises(ConfigError, match=r"a path that all nodes share; got .*runs/tiny, which is not on"):
        worker._refuse_missing(config)
    (tmp_path / "runs/tiny/logs").mkdir(parents=True)
    worker._refuse_missing(config)


def test_the_command_starts_ray_without_waiting_for_torch(tmp_path: Path) -> None:
    code = "import sys, vesuvius.launch.launch, vesuvius.launch.ray.command; print(*{'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "\n"


def test_ray_train_is_asked_for_what_the_config_says(tmp_path: Path, tiny_config: Callable[..., Path]) -> None:
    """Of its own classes, whose arguments change between releases."""
    cluster = {"min_ranks": 2, "max_restarts": 7}
    path = tiny_config(training={"ranks": 4, "workers": 3}, cluster=cluster)
    job = worker.Job(Request(read_config(path), path, False), str(tmp_path), 0.0, Bulletin())
    asked: Any = trainer.make_trainer(job, 4, on_gpu=True)
    assert asked.scaling_config.num_workers == (2, 4)
    assert asked.scaling_config.use_gpu
    assert asked.scaling_config.resources_per_worker == {"CPU": 4, "GPU": 1}
    assert asked.run_config.failure_config.max_failures == 7
    assert ".ray_train/tiny-" in asked.run_config.storage_path
    (hook,) = [hook for hook in vars(trainer._Resizes) if not hook.startswith("__")]
    assert hook in dir(trainer.ControllerCallback), "a private interface, which Ray Train must still call"


def test_the_first_end_that_no_restart_helps_is_what_every_start_returns() -> None:
    board = Bulletin()
    board.end(6, "a chunk must be readable")
    board.end(1, "rank 1 failed")
    assert board.start(0).ended == board.start(1).ended == (6, "a chunk must be readable")


def test_a_stop_is_heard_once_rank_0_has_asked_after_it_came() -> None:
    board = Bulletin()
    assert board.stop() is None
    assert not board.heard()
    board.ask(75, "SIGTERM")
    assert not board.heard()
    assert board.stop() == (75, "SIGTERM")
    assert board.heard()


NODES = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 64.0}]


def test_a_rank_needs_all_of_its_processors_and_its_gpu_on_one_node() -> None:
    """A program that adds up the cluster finds room for twelve ranks of six processors."""
    assert room.room_for_ranks(NODES, {"CPU": 4, "GPU": 1}) == 2
    assert room.room_for_ranks(NODES, {"CPU": 6, "GPU": 1}) == 0
    assert room.room_for_ranks(NODES, {"CPU": 4}) == 18
    assert room.room_for_ranks([], {"CPU": 1}) == 0


def test_ranks_that_fit_only_in_sum_are_refused_before_ray_train_waits_for_them(
    tiny_config: Callable[..., Path],
) -> None:
    config = read_config(tiny_config(training={"ranks": 2, "workers": 5}))
    refused = r"6 processors of one node .*, and a GPU; got room for 0 of 2 ranks on 2 x \(4 CPU \+ 1 GPU\), 1 x \(64"
    with pytest.raises(ConfigError, match=refused):
        room.check_room(config, NODES)
    room.check_room(read_config(tiny_config(training={"ranks": 2, "workers": 3})), NODES)


def test_readers_that_may_run_anywhere_are_refused_where_the_nodes_have_no_processors_left_for_them(
    tiny_config: Callable[..., Path],
) -> None:
    """Ray Data would wait for these without a word.  As many ranks start as have a GPU, also where fewer would do."""

    def of(**cluster: Any) -> Config:
        return read_config(tiny_config(training={"ranks": 4, "workers": 3}, cluster={"reader_nodes": "any", **cluster}))

    two, four = [{"CPU": 2.5, "GPU": 2.0}], [{"CPU": 2.5, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}]
    for config, nodes, ranks, spare in [
        (of(), four, 4, 10),
        (of(min_ranks=2), two, 2, 6),
        (of(min_ranks=1), four, 4, 10),
    ]:
        room.check_room(config, [*nodes, {"CPU": float(spare)}])
        refused = (
            rf"need {4 * ranks} processors: .* {ranks} ranks .* {3 * ranks} readers; got {4 * ranks - 1} on .*; add"
        )
        with pytest.raises(ConfigError, match=refused):
            room.check_room(config, [*nodes, {"CPU": spare - 0.5}])


def test_readers_that_have_lost_their_processors_do_not_wait_without_a_word(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node of readers alone takes no rank with it when it dies: Ray Train does nothing."""
    config = read_config(tiny_config(training={"ranks": 2, "workers": 3}, cluster={"reader_nodes": "any"}))
    nodes = [{"CPU": 2.0, "GPU": 2.0}, {"CPU": 6.0}]
    monkeypatch.setattr(room, "living_nodes", lambda: nodes)
    room.look_for_ranks(config, True, 0.0)
    assert caplog.text == ""
    nodes.pop()
    room.look_for_ranks(config, True, 0.0)
    assert "readers may have to wait: with cluster.reader_nodes=any the nodes need 8 processors" in caplog.text


def test_a_ray_that_does_not_answer_is_asked_only_where_something_may_wait_and_ends_no_run(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def does_not_answer() -> list[dict[str, float]]:
        asked.append(True)
        raise ray.exceptions.RaySystemError("the head is gone")

    asked: list[bool] = []
    monkeypatch.setattr(room, "living_nodes", does_not_answer)
    for reader_nodes, times in (("same", 0), ("any", 1)):
        config = read_config(tiny_config(training={"ranks": 2}, cluster={"reader_nodes": reader_nodes}))
        room.look_for_ranks(config, True, 0.0)
        assert len(asked) == times
    room.look_for_ranks(config, True, 61.0)
    assert caplog.text.count("Ray does not say which nodes live") == 2


def test_a_wait_for_ranks_is_said_each_minute_and_ends(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(room, "living_nodes", lambda: NODES[:1])
    config = read_config(tiny_config(training={"ranks": 2}, cluster={"rank_timeout_minutes": 2}))
    board = Bulletin()
    for step, awaited in [(59, 0), (1, 1), (60, 2)]:
        now[0] += step
        room.look_for_ranks(config, True, board.waited_s())
        assert caplog.text.count("waiting for 2 ranks for") == awaited
    assert "the nodes have room for 1 (1 x (4 CPU + 1 GPU))" in caplog.text
    board.start(0)
    assert board.waited_s() == 0.0
    board.lose({1: "gone"})
    now[0] += 121
    with pytest.raises(VesuviusError, match=r"2 ranks must start within cluster.rank_timeout_minutes=2; got none"):
        room.look_for_ranks(config, True, board.waited_s())


def test_ranks_that_are_at_work_save_before_their_number_changes_and_nobody_waits_for_others() -> None:
    board = Bulletin()
    assert not board.resize("3 ranks")  # the first start
    board.start(0)
    assert board.resize("3 ranks")
    assert (board.stop(), board.heard(), board.resizing()) == ((75, "3 ranks"), False, True)
    board.leave()
    assert (board.stop(), board.resizing()) == (None, False)
    board.start(0)
    board.resize("4 ranks")
    board.lose({1: "gone"})  # it cannot save any more
    assert not board.resizing()
    board.ask(130, "SIGINT")
    assert board.stop() == (130, "SIGINT")
    board.start(0)
    board.resize("3 ranks")
    board.end(6, "the disk is full")  # nor does anybody start again
    assert not board.resizing()


class _Called:
    """An actor whose methods answer at once, here."""

    def __init__(self, board: Bulletin) -> None:
        self._board = board

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._board, name))


def test_a_signal_during_the_save_of_another_stop_is_heard_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the command would end rank 0 a minute later, in the middle of a long save."""
    board, asked = Bulletin(), iter([None, (75, "SIGTERM")])

    class Board(Bulletin):
        def stop(self) -> tuple[int, str] | None:
            try:
                came = next(asked)
            except StopIteration:
                raise ray.exceptions.RayActorError from None  # the command has ended, and with it the bulletin
            if came is not None:
                board.ask(*came)
            return board.stop()

    monkeypatch.setattr(worker, "ray", SimpleNamespace(get=lambda said, timeout: said, exceptions=ray.exceptions))
    monkeypatch.setattr(worker, "_POLL_S", 0.0)
    stop = StopRequest(None)
    stop.ask(4, "memory guard")
    worker._follow(_Called(Board()), stop)
    assert board.heard()
    assert stop.asked() == (4, "memory guard")


@pytest.mark.parametrize(
    ("rank_0_hears", "second", "why"),
    [(True, False, ""), (False, False, "no rank heard of SIGTERM within 60 s"), (True, True, "a second signal")],
)
def test_the_command_waits_for_a_rank_0_that_has_heard_of_its_signal_and_for_no_other(
    monkeypatch: pytest.MonkeyPatch, rank_0_hears: bool, second: bool, why: str
) -> None:
    now, board = [1000.0], Bulletin()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(command, "answer", lambda said: said)
    board.start(0)
    signals = command._Signals(_Called(board))
    assert not signals.abandoned()
    signals._on_signal(signal.SIGTERM, None)
    if rank_0_hears:
        assert board.stop() == (75, "SIGTERM")
    now[0] += 59
    assert not signals.abandoned()
    if second:
        signals._on_signal(signal.SIGINT, None)
    for passed in (2, 3600):
        now[0] += passed
        assert signals.abandoned() == bool(why)
    assert (signals.why, signals.exit_code) == (why, 75)


def test_the_end_of_ray_train_itself_is_no_defect_and_names_the_remedy(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its controller is a process that the system may kill, as any other."""
    monkeypatch.chdir(tmp_path)

    def fit() -> None:
        raise ray.exceptions.RayActorError

    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: _Called(Bulletin())))
    place = SimpleNamespace(get_node_id=lambda: "a" * 56)
    up = SimpleNamespace(get_runtime_context=lambda: place, remote=lambda _: actor, exceptions=ray.exceptions)
    monkeypatch.setattr(command, "ray", up)
    monkeypatch.setattr(command, "Session", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(command, "living_nodes", lambda: [{"CPU": 2.0}])
    monkeypatch.setattr(command, "start_autoscaling_coordinator", lambda: None)
    monkeypatch.setattr(command, "answer", lambda said: said)
    monkeypatch.setattr(trainer, "make_trainer", lambda *_: SimpleNamespace(fit=fit))
    path = tiny_config(training={"ranks": 2})
    with pytest.raises(VesuviusError, match=r"must live as long as the run; got RayActorError.* with --resume"):
        command.train_with_ray(Request(read_config(path), path, False))


def test_an_error_of_a_gpu_is_not_called_a_defect_and_is_left_to_ray_train(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> int:
        raise error

    monkeypatch.chdir(tmp_path)  # and back: a rank goes where the command was started
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(worker, "ray", SimpleNamespace(get=lambda said: said, exceptions=ray.exceptions))
    monkeypatch.setattr(rank, "train_as_rank", fails)
    path, board = tiny_config(training={"ranks": 2}), Bulletin()
    job = worker.Job(Request(read_config(path), path, False), str(tmp_path), 0.0, _Called(board))
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    with pytest.raises(RuntimeError, match="ECC"):
        worker.run_rank({"job": job})
    assert "a defect" not in caplog.text
    assert board.ended() is None
    error = RuntimeError("an index is out of range")
    assert worker.run_rank({"job": job})[0] == board.ended()[0] == 1  # type: ignore[index]
    assert "a defect" in caplog.text


CUDA_ERRORS = ["an illegal memory access was encountered", "misaligned address", "unspecified launch failure"]


@pytest.mark.parametrize(
    ("errors", "steps", "starts"),
    [
        (["device-side assert triggered"], [40], 1),  # an index out of range: ours
        *(([cuda], [40], 2) for cuda in CUDA_ERRORS),  # again at the same step: it will be so the third time
        (["an illegal memory access was encountered"], [40, 42], 2),  # as late as steps are logged
        (["an illegal memory access was encountered"], [0], 2),  # before there was a step
        (["an illegal memory access was encountered"], [40, 47, 3, 900], 10),  # at another step each time: a GPU
        (["uncorrectable ECC error encountered", "NCCL error: unhandled system error"], [40], 10),  # in turn
    ],
)
def test_the_same_error_of_a_gpu_at_the_same_step_is_not_met_a_third_time(
    errors: list[str],
    steps: list[int],
    starts: int,
    tiny_config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Ray Train starts ranks again, ten times."""

    def fails(request: Request, on_step: Callable[[int], None], *_: Any) -> int:
        on_step(steps[started % len(steps)])
        raise RuntimeError(f"CUDA error: {errors[started % len(errors)]}\nCUDA kernel errors might be asynchronous")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(worker, "ray", SimpleNamespace(get=lambda said: said, exceptions=ray.exceptions))
    monkeypatch.setattr(rank, "train_as_rank", fails)
    path, board = tiny_config(training={"ranks": 2}), Bulletin()
    job = worker.Job(Request(read_config(path), path, False), str(tmp_path), 0.0, _Called(board))
    for started in range(10):  # noqa: B007 - read by `fails`
        with suppress(RuntimeError):
            exit_code, message = worker.run_rank({"job": job})
            assert exit_code == 1
            assert errors[0] in message
            break
        assert board.ended() is None
    assert started + 1 == starts
    assert (board.ended() is None) == (starts == 10)


def test_a_rank_on_a_node_without_the_folder_of_the_command_says_so_once_and_for_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be there on all nodes; got .*gone"):
        worker._enter(str(tmp_path / "gone"))


def test_run_directory_and_credentials_reach_other_nodes_unless_a_job_has_set_them() -> None:
    environment = {"VESUVIUS_RUNS": "/runs", "AWS_ACCESS_KEY_ID": "key", "GOOGLE_SERVICE_ACCOUNT": "x", "HOME": "/root"}
    assert set(passed_on(environment)) == {"VESUVIUS_RUNS", "AWS_ACCESS_KEY_ID", "GOOGLE_SERVICE_ACCOUNT"}
    job = {"runtime_env": {"env_vars": {"VESUVIUS_RUNS": "/runs"}}, "metadata": {}}
    assert "VESUVIUS_RUNS" not in passed_on(environment | {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)})


def test_auto_counts_the_gpus_of_the_cluster_that_is_named_and_not_those_of_the_machine_of_the_command(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "Session", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(room, "living_nodes", lambda: [*NODES, {"CPU": 16.0, "GPU": 8.0}])
    training = {"ranks": "auto", "workers": 1}
    for address, count in (("head:6379", 10), ("local", 1)):
        path = tiny_config(training=training, cluster={"address": address})
        request = with_number_of_ranks(Request(read_config(path), path, False), None)
        assert request.config.training.ranks == count, address
    assert request.config.cluster.address is None, "local is the default: a private Ray with settings of its own"


def test_a_rank_that_is_left_alone_of_several_reads_where_it_has_reserved_processors() -> None:
    """On a node without others free, readers that ask for processors of their own would be waited for without end."""
    cluster = ClusterConfig(address="10.0.0.1:6379", min_ranks=1)
    left = StreamOptions.from_config(TrainingConfig(ranks=2), cluster)
    assert reads_here(left.cluster, world=1)
    alone = StreamOptions.from_config(TrainingConfig(), cluster)
    assert not reads_here(alone.cluster, world=1), "a run of one rank uses the whole cluster"
    anywhere = StreamOptions.from_config(TrainingConfig(ranks=2), cluster.model_copy(update={"reader_nodes": "any"}))
    assert not reads_here(anywhere.cluster, world=2)


@pytest.mark.parametrize("before", ["", "of an earlier session\n"])
def test_the_command_prints_what_rank_0_appends_to_its_log_a_whole_line_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str
) -> None:
    log = tmp_path / "train_full.log"
    if before:
        log.write_text(before)
    lines = command._LogLines(log)
    for appended, shown in (("", ""), ("step 1\nst", "step 1\n"), ("ep 2\n", "step 2\n")):
        with log.open("a") as file:
            file.write(appended)
        lines.print_new()
        assert capsys.readouterr().out == shown
    assert lines.last == "step 1\nstep 2\n"
