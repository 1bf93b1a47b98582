"""Runs the ranks as workers of Ray Train, which starts them, detects their deaths and restarts them.

The command prints the run's log, forwards a stop request and ends with rank 0's exit code.  It communicates with rank 0
through files in a folder that all nodes share, which Ray Train also uses as its storage path.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vesuvius.config import Config
from vesuvius.config.load import keep_source, read_source
from vesuvius.errors import EXIT_ERROR, ConfigError, VesuviusError, one_line, storage_errors
from vesuvius.runlog.files import write_atomically
from vesuvius.runlog.logfile import close_logs, silence
from vesuvius.runlog.records import Tail
from vesuvius.runlog.run_dir import refuse_existing, run_dir
from vesuvius.stream.options import StreamOptions, check_store, readers_are_local, store_bytes
from vesuvius.stream.ray.nodes import HeadCheck, Nodes, local_paths
from vesuvius.stream.ray.session import Session
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.threads import on_thread
from vesuvius.training.forecast.preflight import check_limits
from vesuvius.training.ranks.failure import is_restartable
from vesuvius.training.ranks.share import check_ranks
from vesuvius.training.request import Request
from vesuvius.training.run import train_as_rank
from vesuvius.training.stop import StopRequest

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

log = logging.getLogger(__name__)

_POLL_S = 0.5
_LIVENESS_CHECK_S = 60.0
_GROW_EVERY_S = 600.0
_MIN_STORE_BYTES = 2**28  # for Ray itself
# The files: exit code and reason of a stop request; heartbeat of rank 0; whether rank 0 has started before.
_STOP, _ALIVE, _STARTED = "stop.json", "alive", "started"


def train_with_ray(request: Request) -> int:
    """Start `training.ranks` ranks and wait for them.  Returns the exit code of rank 0.

    Raises ConfigError: no room for the ranks, or no answer; VesuviusError: ranks were lost too often or did not start.
    """
    config, ranks = request.config, int(request.config.training.ranks)
    check_ranks(config, config.cluster.min_ranks or ranks, ranks)
    if not request.resume:  # checked here because a restarted rank resumes the run that it finds
        refuse_existing(run_dir(config))
    size = _store_bytes(config, ranks)
    # The time is unique, unlike a pid: a killed process with the same pid may have left its files.
    folder = run_dir(config).path.absolute().parent / ".ray_train" / f"{config.name}-{time.time_ns()}"
    with ExitStack() as opened:
        session = Session(config.cluster, config.training.workers * ranks, ranks, size)
        opened.callback(session.close)
        import ray  # after `stream.ray`, which sets Ray's environment

        nodes = Nodes(local_paths(config.data))
        if config.cluster.address is not None:
            nodes.check()
        alive = [node for node in ray.nodes() if node["Alive"] and nodes.can_work(node["NodeID"])]  # type: ignore[no-untyped-call]
        needs = check_room(config, [node["Resources"] for node in alive])
        with storage_errors(f"the runs folder {folder}", "set VESUVIUS_RUNS to a writable folder"):
            folder.mkdir(parents=True, exist_ok=True)
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        stop = opened.enter_context(StopRequest(config.training.max_hours))
        trainer = make_trainer(request, ranks, needs, folder, nodes.placement())
        return _wait(config, on_thread(trainer.fit, name="ray-train"), folder, stop, HeadCheck())


def make_trainer(
    request: Request, ranks: int, needs: dict[str, float], folder: Path, placement: dict[str, Any]
) -> TorchTrainer:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    config, cluster, on_gpu = request.config, request.config.cluster, "GPU" in needs
    rank, scaling = cast(Any, run_rank), cast(Any, ScalingConfig)  # Ray's type hints are those of Ray Train v1
    log.info("Starting %d ranks with Ray Train, %s", ranks, "one GPU each" if on_gpu else "on CPUs")
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    return TorchTrainer(
        rank,
        train_loop_config={"request": request, "folder": folder, "directory": os.getcwd(), "began": time.time()}
        | {"text": read_source(request.source)},
        torch_config=TorchConfig(
            backend="cuda:nccl,cpu:gloo" if on_gpu else "gloo", timeout_s=int(60 * cluster.rank_timeout_minutes)
        ),
        scaling_config=scaling(
            num_workers=ranks if cluster.min_ranks in (None, ranks) else (cluster.min_ranks, ranks),
            use_gpu=on_gpu,
            resources_per_worker=needs,
            elastic_resize_monitor_interval_s=_GROW_EVERY_S,
            **placement,
        ),
        run_config=RunConfig(
            name=config.name,
            storage_path=str(folder),  # Ray Train checks that all nodes share it
            failure_config=FailureConfig(max_failures=cluster.max_restarts),
        ),
    )


def check_room(config: Config, nodes: list[dict[str, float]]) -> dict[str, float]:
    """The resources that a rank reserves on a node, with its readers' cores.  Raises ConfigError: no room."""
    least, workers = config.cluster.min_ranks or int(config.training.ranks), config.training.workers
    needs = {"CPU": 1.0 + (workers if readers_are_local(config.cluster, world=2) else 0)}
    needs |= {"GPU": 1.0} if any(node.get("GPU") for node in nodes) else {}
    room = sum(min(int(node.get(name, 0) // need) for name, need in needs.items()) for node in nodes)
    cpus = sum(node.get("CPU", 0) for node in nodes)
    if room < least or cpus < min(room, int(config.training.ranks)) * (1 + workers):
        text = " + ".join(f"{need:g} {name}" for name, need in needs.items())
        raise ConfigError(
            f"{least} ranks and their workers do not fit on the {len(nodes)} nodes with {cpus:g} cores, which have "
            f"room for {room} ranks: each needs {text} on one node, and {1 + workers} cores with its workers; lower "
            "training.ranks, cluster.min_ranks or training.workers, set cluster.worker_nodes=any, or add nodes"
        )
    return needs


def run_rank(job: dict[str, Any]) -> tuple[int, str]:
    """Train as a rank in a worker of Ray Train; returns the exit code, and the error if it is not in the run's log.

    `job`: `request`, `folder` of the shared files, working `directory`, `began` (start of the command), `text` of the
    config.  Raises what a restart of all ranks by Ray Train may fix: RankLostError, and errors of a GPU or the network.
    """
    logger, ended, folder = logging.getLogger("vesuvius"), threading.Event(), job["folder"]
    logger.setLevel(logging.INFO)
    request, hours = job["request"], job["request"].config.training.max_hours
    # `max_hours` counts from the start of the command, across restarts.
    stop = StopRequest(None if hours is None else max(hours - (time.time() - job["began"]) / 3600, 1e-3))
    try:
        if os.environ["RANK"] == "0":
            request = replace(request, resume=request.resume or (folder / _STARTED).exists())
            (folder / _STARTED).touch()
            threading.Thread(target=_follow, args=(folder, stop, ended), name="command", daemon=True).start()
        os.chdir(job["directory"])
        keep_source(request.source, job["text"])
        return train_as_rank(request, stop=stop), ""
    except Exception as error:
        known, restarts = isinstance(error, VesuviusError), is_restartable(error)
        text = str(error) if known else f"{type(error).__name__}: {one_line(error)}"
        outlook = "; Ray Train restarts all ranks from the last checkpoint" if restarts else ""
        log.error("%s%s", text, outlook, exc_info=None if known else error)
        if restarts:
            raise
        return getattr(error, "exit_code", EXIT_ERROR), "" if logger.handlers else text
    finally:
        ended.set()
        close_logs()


def _follow(folder: Path, stop: StopRequest, ended: threading.Event) -> None:
    """Send heartbeats and take stop requests from the command until rank 0 ends."""
    while not ended.wait(2 * _POLL_S):
        with suppress(OSError):  # the command has ended
            (folder / _ALIVE).touch()  # works on a full disk, too
        with suppress(OSError):
            stop.request(*json.loads((folder / _STOP).read_bytes()))


def _modified_ns(path: Path) -> int | None:
    """Modification time of a file that another process touches; opened because NFS caches the state of closed files."""
    with suppress(OSError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def _wait(
    config: Config, result: Future[Any], folder: Path, stop: StopRequest, check_head: Callable[[], None] = lambda: None
) -> int:
    """Print the log of rank 0, forward a stop request, return its exit code.  Raises VesuviusError: no rank runs."""
    path, minutes, is_forwarded, alive = run_dir(config).log, config.cluster.rank_timeout_minutes, False, None
    heard_s = checked_s = time.monotonic()
    log_file = Tail(path, first_bytes=0 if path.exists() else sys.maxsize)
    _print_new(log_file)  # skips the log of earlier sessions
    while not result.done():
        with suppress(TimeoutError):
            result.exception(timeout=_POLL_S)
        _print_new(log_file)
        check_head()
        if not is_forwarded and (asked := stop.pending()):
            with suppress(OSError):  # a full disk: retried in the next round
                write_atomically(folder / _STOP, json.dumps(asked).encode())
                is_forwarded = True
        now, before, alive = time.monotonic(), alive, _modified_ns(folder / _ALIVE)
        if alive != before:
            heard_s = checked_s = now
        elif now - checked_s >= _LIVENESS_CHECK_S:
            # Until the last check: since then this process may have been suspended along with the ranks.
            late_s, checked_s = checked_s - heard_s, now
            if stop.is_requested():
                raise stop.as_error("no rank is running, so nothing is saved; the last checkpoint is intact")
            if late_s >= 60 * minutes:
                raise VesuviusError(
                    f"No rank has run for cluster.rank_timeout_minutes={minutes:g}; check `ray status` for missing "
                    "resources, add nodes or lower cluster.min_ranks, and continue with --resume"
                )
            log.warning("No rank has run for %.0f s; `ray status` shows the resources in use", now - heard_s)
    _print_new(log_file)
    try:
        exit_code, message = result.result().return_value
    except Exception as error:  # of the ranks, or of Ray Train itself
        raise VesuviusError(
            f"Ray Train gave up (cluster.max_restarts={config.cluster.max_restarts}): "
            f"{type(error).__name__}: {one_line(error)}; see the logs of the ranks in {run_dir(config).path} and "
            "Ray's in /tmp/ray/session_latest/logs, then continue with --resume"
        ) from error
    if message:
        log.error("%s", message)
    return int(exit_code)


def _print_new(log_file: Tail) -> None:
    try:
        print(log_file.lines().decode("utf-8", errors="replace"), end="", flush=True)
    except OSError:  # a broken pipe or a closed terminal
        silence(sys.stdout)


def _store_bytes(config: Config, ranks: int) -> int:
    """Size of a private Ray's object store, which all ranks share; a cluster has its own."""
    if config.cluster.address is not None or config.training.workers == 0:
        return _MIN_STORE_BYTES
    options = StreamOptions.from_config(config.training, config.cluster)
    data = prepare_data(config.seed, config.data.with_patches_from_everywhere(), world_size=ranks)
    check_store(data.job, options, ranks)
    size = max(ranks * store_bytes(data.job, options), _MIN_STORE_BYTES)
    check_limits(config, ranks, size)
    return size
