"""Starts the ranks of a run with Ray Train and waits for them, in the process of the command.

It prints the run's log, passes a stop on and ends with rank 0's exit code.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vesuvius.config import Config
from vesuvius.errors import ConfigError, VesuviusError, one_line
from vesuvius.launch.ray.worker import Job, Mailbox, run_rank
from vesuvius.monitor.run_files import Tail
from vesuvius.runlog.logfile import silence
from vesuvius.runlog.run_dir import refuse_existing, run_dir
from vesuvius.stream.options import StreamOptions, check_store, reads_here, store_bytes
from vesuvius.stream.ray.session import Session
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.threads import on_thread
from vesuvius.training.forecast.preflight import check_limits
from vesuvius.training.ranks.part import check_ranks
from vesuvius.training.request import Request
from vesuvius.training.stop import StopRequest

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

log = logging.getLogger(__name__)

_POLL_S = 0.5
_ANSWER_S = 10.0
_LOOK_EVERY_S = 60.0
_GROW_EVERY_S = 600.0
_PRINTED_CHARACTERS = 100_000  # of the log, in which an error is looked for
_LEAST_STORE_BYTES = 2**28  # for what Ray itself needs


def train_with_ray(request: Request) -> int:
    """Start `training.ranks` ranks and wait for them.  Returns the exit code of rank 0.

    Raises:
        ConfigError: the nodes have no room for the ranks, or the cluster does not answer.
        VesuviusError: a rank was lost more than `cluster.max_restarts` times, or the ranks did not come within
            `cluster.rank_timeout_minutes`.
    """
    config, ranks = request.config, int(request.config.training.ranks)
    check_ranks(config, config.cluster.min_ranks or ranks, ranks)
    if not request.resume:  # before a rank is lost, whose next start would resume what is there
        refuse_existing(run_dir(config))
    size = _store_bytes(config, ranks)
    with ExitStack() as opened:
        session = Session(config.cluster, config.training.workers * ranks, ranks, size)
        opened.callback(session.close)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        check_room(config, nodes)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        mailbox = cast(Any, ray.remote(Mailbox)).options(num_cpus=0, scheduling_strategy=here).remote()
        opened.callback(shutil.rmtree, _storage_of(config), ignore_errors=True)
        stop = opened.enter_context(StopRequest(config.training.max_hours))
        trainer = make_trainer(Job(request, os.getcwd(), time.time(), mailbox), ranks, _have_gpus(nodes))
        return _wait(config, on_thread(trainer.fit, name="ray-train"), mailbox, stop)


def make_trainer(job: Job, ranks: int, on_gpu: bool) -> TorchTrainer:
    """Ray Train's trainer for these ranks."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    config, cluster = job.request.config, job.request.config.cluster
    rank, scaling = cast(Any, run_rank), cast(Any, ScalingConfig)  # Ray's hints are of its version 1
    log.info("starting %d ranks with Ray Train, %s", ranks, "a GPU each" if on_gpu else "on processors")
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    return TorchTrainer(
        rank,
        train_loop_config={"job": job},
        torch_config=TorchConfig(
            backend="cuda:nccl,cpu:gloo" if on_gpu else "gloo", timeout_s=int(60 * cluster.rank_timeout_minutes)
        ),
        # Without their readers' processors Ray would put more ranks on a node than it can feed.
        scaling_config=scaling(
            num_workers=ranks if cluster.min_ranks in (None, ranks) else (cluster.min_ranks, ranks),
            use_gpu=on_gpu,
            resources_per_worker=_needs_of_rank(config, on_gpu),
            elastic_resize_monitor_interval_s=_GROW_EVERY_S,
        ),
        run_config=RunConfig(
            name=config.name,
            storage_path=str(_storage_of(config)),
            failure_config=FailureConfig(max_failures=cluster.max_restarts),
        ),
    )


def gpus_of_cluster(config: Config) -> int:
    """GPUs of the cluster that the config names.  Raises ConfigError: it does not answer."""
    session = Session(config.cluster, 0, 1, _LEAST_STORE_BYTES)
    try:
        return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    finally:
        session.close()


def check_room(config: Config, nodes: list[dict[str, float]]) -> None:
    """Raises ConfigError where ranks and readers do not fit on nodes with these resources: Ray would wait for more."""
    least, workers = config.cluster.min_ranks or int(config.training.ranks), config.training.workers
    needs = _needs_of_rank(config, _have_gpus(nodes))
    room = sum(min(int(node.get(name, 0) // need) for name, need in needs.items()) for node in nodes)
    cpus = sum(node.get("CPU", 0) for node in nodes)
    if room < least or cpus < min(room, int(config.training.ranks)) * (1 + workers):
        text = " + ".join(f"{need:g} {name}" for name, need in needs.items())
        raise ConfigError(
            f"{least} ranks and their readers do not fit on the {len(nodes)} nodes with {cpus:g} processors: there is "
            f"room for {room} ranks, each of which needs {text} on one node, and {1 + workers} processors with its "
            "readers; lower training.ranks, cluster.min_ranks or training.workers, set cluster.reader_nodes=any, or "
            "add nodes"
        )


def _have_gpus(nodes: list[dict[str, float]]) -> bool:
    return any(node.get("GPU") for node in nodes)


def _needs_of_rank(config: Config, on_gpu: bool) -> dict[str, float]:
    """What a rank reserves on its node."""
    readers = config.training.workers if reads_here(config.cluster, world=2) else 0
    return {"CPU": 1.0 + readers} | ({"GPU": 1.0} if on_gpu else {})


def _wait(config: Config, result: Future[Any], mailbox: Any, stop: StopRequest) -> int:
    """Print the log of rank 0 and pass a stop on, until Ray Train ends; returns rank 0's exit code."""
    path, due, told = run_dir(config).log, time.monotonic() + _LOOK_EVERY_S, False
    log_file = Tail(path, first_bytes=0 if path.exists() else sys.maxsize)
    printed = _print_new(log_file)  # from here on
    while not result.done():
        with suppress(TimeoutError):
            result.exception(timeout=_POLL_S)
        printed = (printed + _print_new(log_file))[-_PRINTED_CHARACTERS:]
        if not told and (asked := stop.asked()):
            told = True
            mailbox.ask.remote(*asked)
        if time.monotonic() >= due:
            due += _LOOK_EVERY_S
            with suppress(ray.exceptions.RayError):
                _look_for_ranks(config, ray.get(mailbox.silent_s.remote(), timeout=_ANSWER_S), stop)
    printed += _print_new(log_file)
    try:
        exit_code, message = result.result().return_value
    except Exception as error:  # of the ranks, or of Ray Train itself
        raise VesuviusError(
            f"Ray Train has given up, after at most cluster.max_restarts={config.cluster.max_restarts} restarts: "
            f"{type(error).__name__}: {one_line(error)}; see the logs of the ranks below {run_dir(config).path} and "
            "Ray's in /tmp/ray/session_latest/logs; continue with --resume"
        ) from error
    if message and message not in printed:
        log.error("%s", message)  # of before there was a log
    return int(exit_code)


def _print_new(log_file: Tail) -> str:
    """Print what was appended since the last call, in whole lines, and return it."""
    printed = log_file.lines().decode("utf-8", errors="replace")
    try:
        print(printed, end="", flush=True)
    except OSError:  # its reader has left, or the terminal has closed
        silence(sys.stdout)
    return printed


def _look_for_ranks(config: Config, silent_s: float, stop: StopRequest) -> None:
    """Say that no rank is at work.  Raises VesuviusError where none has come for too long, or none to obey a stop."""
    minutes = config.cluster.rank_timeout_minutes
    if silent_s < _LOOK_EVERY_S:
        return
    if stop.wanted():
        raise stop.error("no rank is at work, so nothing is saved; the last checkpoint is whole")
    if silent_s > 60 * minutes:
        raise VesuviusError(
            f"no rank was at work for cluster.rank_timeout_minutes={minutes:g}; see `ray status` for what the cluster "
            "lacks, add nodes or lower cluster.min_ranks, and continue with --resume"
        )
    log.warning("no rank has been at work for %.0f s; `ray status` says what is in use", silent_s)


def _storage_of(config: Config) -> Path:
    """Where Ray Train keeps what it knows of its workers; our checkpoints are not in it.  It checks that the path is
    the same on all nodes."""
    return run_dir(config).path.absolute().parent / ".ray_train" / f"{config.name}-{os.getpid()}"


def _store_bytes(config: Config, ranks: int) -> int:
    """Size of a private Ray's object store, which serves all ranks; a cluster has its own."""
    if config.cluster.address is not None or config.training.workers == 0:
        return _LEAST_STORE_BYTES
    options = StreamOptions.from_config(config.training, config.cluster)
    data = prepare_data(config.seed, config.data.model_copy(update={"min_foreground": 0}))  # whose map would be read
    check_store(data.job, options, ranks)
    size = max(ranks * store_bytes(data.job, options), _LEAST_STORE_BYTES)
    check_limits(config, ranks, size)
    return size
