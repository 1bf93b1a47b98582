"""What Ray Train is asked for, and what its ranks and the command that started them tell each other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from vesuvius.config import ClusterConfig, TrainingConfig, load
from vesuvius.config.load import read_config, read_source
from vesuvius.errors import EXIT_STOPPED, ConfigError, DataError, VesuviusError
from vesuvius.launch import ray_train
from vesuvius.launch.launch import resolve_ranks
from vesuvius.runlog.run_dir import run_dir
from vesuvius.stream.options import StreamOptions, readers_are_local
from vesuvius.stream.ray.session import passed_on
from vesuvius.training.ranks.failure import RankLostError
from vesuvius.training.request import Request
from vesuvius.training.stop import StopRequest

WriteConfig = Callable[..., Path]


@pytest.fixture
def job(tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of the rank 0 that this process then is."""
    monkeypatch.chdir(tmp_path)  # and back: a rank goes where the command was started
    monkeypatch.setenv("RANK", "0")
    path = tiny_config(training={"ranks": 4, "workers": 3}, cluster={"min_ranks": 2, "max_restarts": 7})
    (place := tmp_path / "notes").mkdir()
    request = Request(read_config(path), path, False)
    return {"request": request, "folder": place, "directory": tmp_path, "began": 0.0, "text": path.read_bytes()}


def test_the_trainer_has_the_resources_and_options_of_the_config(job: dict[str, Any]) -> None:
    """Of its own classes, whose arguments change between releases."""
    needs = {"CPU": 4.0, "GPU": 1.0}
    asked: Any = ray_train.make_trainer(job["request"], 4, needs, Path("runs/.ray_train/tiny-1"), {})
    assert asked.scaling_config.num_workers == (2, 4)
    assert asked.scaling_config.use_gpu
    assert asked.scaling_config.resources_per_worker == needs
    assert asked.run_config.failure_config.max_failures == 7
    assert ".ray_train/tiny-" in asked.run_config.storage_path


def test_ranks_keep_the_text_of_the_config_that_the_command_read(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a pipe of the command, edited while Ray starts, or not be on the machine of rank 0."""
    source, text = job["request"].source, job["text"]
    source.unlink()
    asked: Any = ray_train.make_trainer(job["request"], 4, {"CPU": 4.0}, Path("runs/.ray_train/tiny-1"), {})
    assert asked.train_loop_config["text"] == text
    monkeypatch.setattr(load, "_read", {})  # as in another process
    monkeypatch.setattr(ray_train, "train_as_rank", lambda request, **_: int(read_source(request.source) != text))
    assert ray_train.run_rank(job) == (0, "")


def test_a_restarted_rank_0_resumes_and_only_restartable_errors_reach_ray_train(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[tuple[Any, Any]] = [
        (RankLostError("gone"), None),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), None),
        (RuntimeError("NCCL error: unhandled system error"), None),
        (dist.DistBackendError("[3] remote process exited or there was a network error"), None),
        (DataError("no volume"), (6, "no volume")),
        (RuntimeError("CUDA error: device-side assert triggered"), 1),  # an index out of range
        (RuntimeError("CUDA error: an illegal memory access was encountered"), 1),
        (dist.DistBackendError("NCCL watchdog: CUDA error: device-side assert triggered"), 1),
        (dist.DistBackendError("NCCL error: invalid usage: Duplicate GPU detected"), 1),
        (AssertionError("Torch not compiled with CUDA enabled"), 1),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), 1),
        (RuntimeError("Distributed package doesn't have NCCL built in"), 1),
        (TypeError("a defect"), (1, "TypeError: a defect")),
        (75, (75, "")),
    ]
    seen = []

    def train(request: Request, stop: StopRequest) -> int:
        seen.append((request.resume, stop.is_requested()))
        end = ends[len(seen) - 1][0]
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(ray_train, "train_as_rank", train)
    for end, ended in ends:
        if ended is None:
            with pytest.raises(type(end)):
                ray_train.run_rank(job)
        else:
            assert ended in (found := ray_train.run_rank(job), found[0])
    assert seen == [(number > 0, False) for number in range(len(ends))]


def test_a_stop_request_reaches_rank_0_which_sends_heartbeats(job: dict[str, Any]) -> None:
    stop, times = StopRequest(None), iter([False, False, True])
    (job["folder"] / "stop.json").write_text('[75, "SIGTERM"]')
    ray_train._follow(job["folder"], stop, SimpleNamespace(wait=lambda _: next(times)))  # type: ignore[arg-type]
    assert stop.pending() == (75, "SIGTERM")
    assert ray_train._modified_ns(job["folder"] / "alive")


NODES = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 64.0}]


@pytest.mark.parametrize(
    ("training", "cluster", "refused"),
    [
        ({"ranks": 2, "workers": 3}, {}, None),
        ({"ranks": 2, "workers": 5}, {}, r"room for 0 ranks: each needs 6 CPU \+ 1 GPU on one node"),
        ({"ranks": 3, "workers": 3}, {}, "3 ranks and .* room for 2 ranks"),
        ({"ranks": 4, "workers": 3}, {"min_ranks": 2}, None),
        ({"ranks": 2, "workers": 35}, {"worker_nodes": "any"}, None),
        (
            {"ranks": 2, "workers": 36},
            {"worker_nodes": "any"},
            "2 ranks and .* 72 cores.* 37 cores with its workers",
        ),
    ],
)
def test_ranks_and_readers_that_do_not_fit_are_refused_at_once(
    tiny_config: WriteConfig, training: dict[str, Any], cluster: dict[str, Any], refused: str | None
) -> None:
    """A program that adds up the cluster finds room for twelve ranks of six cores."""
    config = read_config(tiny_config(training=training, cluster=cluster))
    if refused is None:
        ray_train.check_room(config, NODES)
    else:
        with pytest.raises(ConfigError, match=refused):
            ray_train.check_room(config, NODES)


class Waiting(Future[Any]):
    """A result that comes after these seconds of waiting, at each of which `act` is called with the seconds so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[float], None] = lambda _: None) -> None:
        super().__init__()
        self._now, self._act = 1000.0, act
        monkeypatch.setattr("time.monotonic", lambda: self._now)

    def exception(self, timeout: float | None = None) -> None:
        self._now += 20
        self._act(self._now - 1000)


def test_a_wait_for_ranks_is_logged_and_ends_by_timeout_or_stop(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, place = job["request"].config, job["folder"]

    def at_work(seconds: float) -> None:
        if seconds <= 1000:
            (place / "alive").touch()
            os.utime(place / "alive", (seconds, seconds))

    with pytest.raises(VesuviusError, match=r"No rank has run for cluster.rank_timeout_minutes=30"):
        ray_train._wait(config, Waiting(monkeypatch, at_work), place, StopRequest(None))
    waits = [record.getMessage() for record in caplog.records]
    assert waits[0].startswith("No rank has run for 60 s")
    assert len(waits) == 30, "each minute"
    stop = StopRequest(None)
    stop.request(EXIT_STOPPED, "SIGTERM")
    with pytest.raises(VesuviusError, match="SIGTERM: no rank is running, so nothing is saved") as ended:
        ray_train._wait(config, Waiting(monkeypatch), place, stop)
    assert ended.value.exit_code == EXIT_STOPPED
    assert json.loads((place / "stop.json").read_bytes()) == [EXIT_STOPPED, "SIGTERM"]


def test_a_command_suspended_along_with_its_ranks_does_not_give_up(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by `docker pause`: rank 0 says a moment later that it is at work."""

    def go_on(seconds: float) -> None:
        if seconds == 40:
            result._now += 7200
        if seconds > 7250:
            (job["folder"] / "alive").touch()
            result.set_result(SimpleNamespace(return_value=(0, "")))

    result = Waiting(monkeypatch, go_on)
    assert ray_train._wait(job["request"].config, result, job["folder"], StopRequest(None)) == 0
    assert "No rank has run for 7240 s" in caplog.text


def test_a_failure_of_ray_train_itself_is_an_error_with_a_remedy(job: dict[str, Any]) -> None:
    """Its controller is a process that the system may kill, as any other."""
    result: Future[Any] = Future()
    result.set_exception(ray.exceptions.RayActorError())
    with pytest.raises(VesuviusError, match=r"gave up \(.*=7\): RayActorError.* with --resume"):
        ray_train._wait(job["request"].config, result, job["folder"], StopRequest(None))


def test_early_errors_are_logged_and_rank_0s_log_is_printed_by_complete_lines(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    log = run_dir(job["request"].config).log
    log.parent.mkdir(parents=True)
    log.write_text("of an earlier session\n")
    appended = iter(["step 1\nst", "ep 2\n"])

    def work(_: float) -> None:
        with log.open("a") as file:
            file.write(said := next(appended))
        if said == "ep 2\n":
            result.set_result(SimpleNamespace(return_value=(1, "no space")))

    result = Waiting(monkeypatch, work)
    assert ray_train._wait(job["request"].config, result, job["folder"], StopRequest(None)) == 1
    assert capsys.readouterr().out == "step 1\nstep 2\n"
    assert caplog.text.count("no space") == 1


def test_run_directory_and_credentials_reach_other_nodes_unless_a_job_has_set_them() -> None:
    environment = {"VESUVIUS_RUNS": "/runs", "AWS_ACCESS_KEY_ID": "key", "GOOGLE_SERVICE_ACCOUNT": "x"}
    environment |= {"AZURE_STORAGE_KEY": "x", "HF_TOKEN": "x"}
    assert passed_on(environment | {"HOME": "/root"}) == environment
    job = {"runtime_env": {"env_vars": {"VESUVIUS_RUNS": "/runs"}}, "metadata": {}}
    assert "VESUVIUS_RUNS" not in passed_on(environment | {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)})


def test_auto_counts_local_gpus_and_refuses_clusters(tiny_config: WriteConfig) -> None:
    for address in ("head:6379", "local"):
        path = tiny_config(training={"ranks": "auto", "workers": 1}, cluster={"address": address})
        request = Request(read_config(path), path, False)
        if address == "local":
            request = resolve_ranks(request, None)
            assert request.config.cluster.address is None, "local is the default: a private Ray"
            assert request.config.training.ranks == max(torch.cuda.device_count(), 1)
        else:
            with pytest.raises(ConfigError, match=r"not work with cluster.address=head:6379; set training.ranks to"):
                resolve_ranks(request, None)


def test_the_last_of_several_ranks_keeps_its_readers_on_its_reserved_cores() -> None:
    """On a node without others free, readers that ask for cores of their own would be waited for without end."""
    cluster = ClusterConfig(address="10.0.0.1:6379", min_ranks=1)
    left = StreamOptions.from_config(TrainingConfig(ranks=2), cluster)
    assert readers_are_local(left.cluster, world=1)
    alone = StreamOptions.from_config(TrainingConfig(), cluster)
    assert not readers_are_local(alone.cluster, world=1), "a run of one rank uses the whole cluster"
    anywhere = StreamOptions.from_config(TrainingConfig(ranks=2), cluster.model_copy(update={"worker_nodes": "any"}))
    assert not readers_are_local(anywhere.cluster, world=2)
