"""What Ray Train is asked for, and what its ranks and the command that started them tell each other."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from vesuvius.config import ClusterConfig, TrainingConfig
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_STOPPED, ConfigError, DataError, VesuviusError
from vesuvius.launch.launch import with_number_of_ranks
from vesuvius.launch.ray import command, worker
from vesuvius.stream.options import StreamOptions, reads_here
from vesuvius.stream.ray.session import passed_on
from vesuvius.training.ranks.ranks import RankLostError
from vesuvius.training.request import Request
from vesuvius.training.stop import StopRequest

WriteConfig = Callable[..., Path]


class Called:
    """An actor whose methods answer at once, here."""

    def __init__(self, mailbox: worker.Mailbox) -> None:
        self._mailbox = mailbox

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._mailbox, name))


@pytest.fixture
def job(tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> worker.Job:
    """Of the rank 0 that this process then is."""
    monkeypatch.chdir(tmp_path)  # and back: a rank goes where the command was started
    monkeypatch.setenv("RANK", "0")
    answers = SimpleNamespace(get=lambda said, timeout=None: said, exceptions=ray.exceptions)
    for module in (worker, command):
        monkeypatch.setattr(module, "ray", answers)
    monkeypatch.setattr(worker, "_follow", lambda *_: None)
    path = tiny_config(training={"ranks": 4, "workers": 3}, cluster={"min_ranks": 2, "max_restarts": 7})
    return worker.Job(Request(read_config(path), path, False), str(tmp_path), 0.0, Called(worker.Mailbox()))


def test_ray_train_is_asked_for_what_the_config_says(job: worker.Job) -> None:
    """Of its own classes, whose arguments change between releases."""
    asked: Any = command.make_trainer(replace(job, mailbox=worker.Mailbox()), 4, on_gpu=True)
    assert asked.scaling_config.num_workers == (2, 4)
    assert asked.scaling_config.use_gpu
    assert asked.scaling_config.resources_per_worker == {"CPU": 4, "GPU": 1}
    assert asked.run_config.failure_config.max_failures == 7
    assert ".ray_train/tiny-" in asked.run_config.storage_path


def test_a_rank_0_that_is_started_again_resumes_and_errors_without_a_message_are_left_to_ray_train(
    job: worker.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Exception | int] = [RankLostError("gone"), RuntimeError("CUDA error"), DataError("no volume"), 75]
    seen = []

    def train(request: Request, stop: StopRequest) -> int:
        seen.append((request.resume, stop.wanted()))
        if isinstance(end := ends[len(seen) - 1], Exception):
            raise end
        return end

    monkeypatch.setattr(worker, "train_as_rank", train)
    for kind in (RankLostError, RuntimeError):
        with pytest.raises(kind):
            worker.run_rank({"job": job})
    assert worker.run_rank({"job": job}) == (6, "no volume")
    assert worker.run_rank({"job": job}) == (75, "")
    assert seen == [(False, False), (True, False), (True, False), (True, False)]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("NCCL error: unhandled system error"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),  # an index out of range
        (TypeError("a defect"), False),
    ],
)
def test_an_error_that_would_come_again_ends_all_ranks_that_are_started_after_it(
    job: worker.Job, monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    starts = []

    def train(request: Request, stop: StopRequest) -> int:
        starts.append(request)
        if len(starts) == 1:
            raise error
        return 0

    monkeypatch.setattr(worker, "train_as_rank", train)
    with pytest.raises(type(error)):
        worker.run_rank({"job": job})
    ended = worker.run_rank({"job": job})
    assert ended == ((0, "") if again else (1, f"{type(error).__name__}: {error}"))
    assert len(starts) == 1 + again


def test_a_stop_reaches_rank_0_once_and_the_end_of_the_command_ends_the_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "_POLL_S", 0.0)
    monkeypatch.setattr(worker, "ray", SimpleNamespace(get=lambda said, timeout: said, exceptions=ray.exceptions))
    mailbox, stop, answers = worker.Mailbox(), StopRequest(None), iter([False, True, True])

    def said() -> Any:
        try:
            if next(answers):
                mailbox.ask(75, "SIGTERM")
        except StopIteration:
            raise ray.exceptions.RayActorError from None  # the command has ended, and with it the mailbox
        return mailbox.stop()

    worker._follow(SimpleNamespace(stop=SimpleNamespace(remote=said)), stop, threading.Event())
    assert stop.asked() == (75, "SIGTERM")
    assert mailbox.silent_s() < 10


NODES = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 64.0}]


@pytest.mark.parametrize(
    ("training", "cluster", "refused"),
    [
        ({"ranks": 2, "workers": 3}, {}, None),
        ({"ranks": 2, "workers": 5}, {}, r"room for 0 ranks, each of which needs 6 CPU \+ 1 GPU on one node"),
        ({"ranks": 3, "workers": 3}, {}, "3 ranks and .* room for 2 ranks"),
        ({"ranks": 4, "workers": 3}, {"min_ranks": 2}, None),
        ({"ranks": 2, "workers": 35}, {"reader_nodes": "any"}, None),
        (
            {"ranks": 2, "workers": 36},
            {"reader_nodes": "any"},
            "2 ranks and .* 72 processors.* 37 processors with its readers",
        ),
    ],
)
def test_ranks_and_readers_that_never_fit_are_refused_before_ray_train_waits_for_them(
    tiny_config: WriteConfig, training: dict[str, Any], cluster: dict[str, Any], refused: str | None
) -> None:
    """A program that adds up the cluster finds room for twelve ranks of six processors."""
    config = read_config(tiny_config(training=training, cluster=cluster))
    if refused is None:
        command.check_room(config, NODES)
    else:
        with pytest.raises(ConfigError, match=refused):
            command.check_room(config, NODES)


def test_a_wait_for_ranks_is_said_and_ends_by_the_timeout_or_by_a_stop(
    job: worker.Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, config, stop = [1000.0], job.request.config, StopRequest(None)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(command, "_POLL_S", 0.0)
    mailbox = worker.Mailbox()
    now[0] += 59
    command._look_for_ranks(config, mailbox.silent_s(), stop)
    assert caplog.text == ""
    now[0] += 61
    command._look_for_ranks(config, mailbox.silent_s(), stop)
    assert "no rank has been at work for 120 s" in caplog.text
    mailbox.stop()  # rank 0 asks
    assert mailbox.silent_s() == 0
    now[0] += 1801
    with pytest.raises(VesuviusError, match=r"no rank was at work for cluster.rank_timeout_minutes=30"):
        command._look_for_ranks(config, mailbox.silent_s(), stop)
    stop.ask(EXIT_STOPPED, "SIGTERM")
    waiting: Future[Any] = Future()

    def later(timeout: float) -> None:
        now[0] += 61
        raise TimeoutError

    monkeypatch.setattr(waiting, "exception", later)
    with pytest.raises(VesuviusError, match="SIGTERM: no rank is at work, so nothing is saved") as ended:
        command._wait(config, waiting, Called(mailbox), stop)
    assert ended.value.exit_code == EXIT_STOPPED
    assert mailbox._stop == (EXIT_STOPPED, "SIGTERM")


def test_the_end_of_ray_train_itself_is_no_defect_and_names_the_remedy(job: worker.Job) -> None:
    """Its controller is a process that the system may kill, as any other."""
    result: Future[Any] = Future()
    result.set_exception(ray.exceptions.RayActorError())
    with pytest.raises(VesuviusError, match=r"given up, after at most .*=7 restarts: RayActorError.* with --resume"):
        command._wait(job.request.config, result, None, StopRequest(None))


@pytest.mark.parametrize(("now", "logged"), [("step 8\n", 1), ("step 8\nERROR no space\n", 0)])
def test_an_error_of_before_the_log_is_said_though_an_earlier_session_has_logged_it(
    job: worker.Job, now: str, logged: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, result = command.run_dir(job.request.config).log, Future[Any]()
    log.parent.mkdir(parents=True)
    log.write_text("ERROR no space\n")

    def ended(timeout: float) -> None:
        with log.open("a") as file:
            file.write(now)
        result.set_result(SimpleNamespace(return_value=(1, "no space")))

    monkeypatch.setattr(result, "exception", ended)
    assert command._wait(job.request.config, result, None, StopRequest(None)) == 1
    assert caplog.text.count("no space") == logged


def test_run_directory_and_credentials_reach_other_nodes_unless_a_job_has_set_them() -> None:
    environment = {"VESUVIUS_RUNS": "/runs", "AWS_ACCESS_KEY_ID": "key", "GOOGLE_SERVICE_ACCOUNT": "x", "HOME": "/root"}
    assert set(passed_on(environment)) == {"VESUVIUS_RUNS", "AWS_ACCESS_KEY_ID", "GOOGLE_SERVICE_ACCOUNT"}
    job = {"runtime_env": {"env_vars": {"VESUVIUS_RUNS": "/runs"}}, "metadata": {}}
    assert "VESUVIUS_RUNS" not in passed_on(environment | {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)})


def test_auto_counts_the_gpus_of_the_cluster_that_is_named_and_not_those_of_the_machine_of_the_command(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "Session", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(command, "ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 99.0, "GPU": 10.0}))
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
    lines = command.Tail(log, first_bytes=0 if log.exists() else sys.maxsize)
    for appended, shown in (("", ""), ("step 1\nst", "step 1\n"), ("ep 2\n", "step 2\n")):
        with log.open("a") as file:
            file.write(appended)
        command._print_new(lines)
        assert capsys.readouterr().out == shown
