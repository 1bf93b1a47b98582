"""The ranks of a run as workers of Ray Train, which starts them, notices their deaths and starts them again.

The command prints the run's log, passes a stop on and ends with rank 0's exit code.  It and rank 0 leave each other
notes in a folder that all nodes share, beside what Ray Train keeps there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vesuvius.config import Config
from vesuvius.errors import EXIT_ERROR, ConfigError, VesuviusError, one_line, storage_errors
from vesuvius.runlog.files import write_atomically
from vesuvius.runlog.logfile import close_logs, silence
from vesuvius.runlog.records import Tail
from vesuvius.runlog.run_dir import refuse_existing, run_dir
from vesuvius.stream.options import StreamOptions, check_store, readers_are_local, store_bytes
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
_LOOK_EVERY_S = 60.0
_GROW_EVERY_S = 600.0
_LEAST_STORE_BYTES = 2**28  # for what Ray itself needs
# The notes: exit code and reason with which rank 0 is to stop; that it is at work, and that it has started before.
_STOP, _ALIVE, _STARTED = "stop.json", "alive", "started"


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
    # By the time, as the number of a process may be that of one that was killed, and has left its notes.
    place = run_dir(config).path.absolute().parent / ".ray_train" / f"{config.name}-{time.time_ns()}"
    with ExitStack() as opened:
        session = Session(config.cluster, config.training.workers * ranks, ranks, size)
        opened.callback(session.close)
        import ray  # after `stream.ray`, which sets its environment

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        needs = check_room(config, nodes)
        with storage_errors(f"the runs folder {place}", "set VESUVIUS_RUNS to a writable folder"):
            place.mkdir(parents=True, exist_ok=True)
        opened.callback(shutil.rmtree, place, ignore_errors=True)
        stop = opened.enter_context(StopRequest(config.training.max_hours))
        trainer = make_trainer(request, ranks, needs, place)
        return _wait(config, on_thread(trainer.fit, name="ray-train"), place, stop)


def make_trainer(request: Request, ranks: int, needs: dict[str, float], place: Path) -> TorchTrainer:
    """Ray Train's trainer for these ranks, each of which reserves what it needs."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    config, cluster, on_gpu = request.config, request.config.cluster, "GPU" in needs
    rank, scaling = cast(Any, run_rank), cast(Any, ScalingConfig)  # Ray's hints are of its version 1
    log.info("starting %d ranks with Ray Train, %s", ranks, "a GPU each" if on_gpu else "on CPUs")
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    return TorchTrainer(
        rank,
        train_loop_config={"request": request, "place": place, "directory": os.getcwd(), "began": time.time()},
        torch_config=TorchConfig(
            backend="cuda:nccl,cpu:gloo" if on_gpu else "gloo", timeout_s=int(60 * cluster.rank_timeout_minutes)
        ),
        scaling_config=scaling(
            num_workers=ranks if cluster.min_ranks in (None, ranks) else (cluster.min_ranks, ranks),
            use_gpu=on_gpu,
            resources_per_worker=needs,
            elastic_resize_monitor_interval_s=_GROW_EVERY_S,
        ),
        run_config=RunConfig(
            name=config.name,
            storage_path=str(place),  # Ray Train checks that it is the same on all nodes
            failure_config=FailureConfig(max_failures=cluster.max_restarts),
        ),
    )


def check_room(config: Config, nodes: list[dict[str, float]]) -> dict[str, float]:
    """What a rank reserves on one of these nodes: also its readers' cores, or Ray would put more ranks on a node
    than it can feed.

    Raises:
        ConfigError: ranks and readers do not fit: Ray would wait for more nodes.
    """
    least, workers = config.cluster.min_ranks or int(config.training.ranks), config.training.workers
    needs = {"CPU": 1.0 + (workers if readers_are_local(config.cluster, world=2) else 0)}
    needs |= {"GPU": 1.0} if any(node.get("GPU") for node in nodes) else {}
    room = sum(min(int(node.get(name, 0) // need) for name, need in needs.items()) for node in nodes)
    cpus = sum(node.get("CPU", 0) for node in nodes)
    if room < least or cpus < min(room, int(config.training.ranks)) * (1 + workers):
        text = " + ".join(f"{need:g} {name}" for name, need in needs.items())
        raise ConfigError(
            f"{least} ranks and their readers do not fit on the {len(nodes)} nodes with {cpus:g} cores: there is "
            f"room for {room} ranks, each of which needs {text} on one node, and {1 + workers} cores with its "
            "readers; lower training.ranks, cluster.min_ranks or training.workers, set cluster.reader_nodes=any, or "
            "add nodes"
        )
    return needs


def run_rank(job: dict[str, Any]) -> tuple[int, str]:
    """What each worker runs: `training.run.train`, as torchrun would run it, with an ear for the command.

    Args:
        job: `request`; `place` of the notes; `directory` where relative paths begin; `began`, when the command did.

    Returns:
        The exit code, and the error that it stands for where no log has it.

    Raises:
        RankLostError: another rank is gone; Ray Train then starts all of them again.
        Exception: the same, of a failing GPU or the network.
    """
    logger, ended, place = logging.getLogger("vesuvius"), threading.Event(), job["place"]
    logger.setLevel(logging.INFO)
    request, hours = job["request"], job["request"].config.training.max_hours
    # `max_hours` count from the start of the command, over all restarts.
    stop = StopRequest(None if hours is None else max(hours - (time.time() - job["began"]) / 3600, 1e-3))
    try:
        if os.environ["RANK"] == "0":
            request = replace(request, resume=request.resume or (place / _STARTED).exists())
            (place / _STARTED).touch()
            threading.Thread(target=_follow, args=(place, stop, ended), name="command", daemon=True).start()
        os.chdir(job["directory"])
        return train_as_rank(request, stop=stop), ""
    except Exception as error:
        known, again = isinstance(error, VesuviusError), is_restartable(error)
        text = str(error) if known else f"{type(error).__name__}: {one_line(error)}"
        told = "; Ray Train starts all ranks again, from the last checkpoint" if again else ""
        log.error("%s%s", text, told, exc_info=None if known else error)
        if again:
            raise
        return getattr(error, "exit_code", EXIT_ERROR), "" if logger.handlers else text
    finally:
        ended.set()
        close_logs()


def _follow(place: Path, stop: StopRequest, ended: threading.Event) -> None:
    """Until rank 0 has ended, say that it is at work, and obey the command."""
    while not ended.wait(2 * _POLL_S):
        with suppress(OSError):  # the command has ended
            (place / _ALIVE).touch()  # takes no room: the disk may be full
        with suppress(OSError):
            stop.request(*json.loads((place / _STOP).read_bytes()))


def _touched(note: Path) -> int | None:
    """When another process has; opened, as NFS may remember how a closed file was."""
    with suppress(OSError), note.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return None


def _wait(config: Config, result: Future[Any], place: Path, stop: StopRequest) -> int:
    """Print the log of rank 0 and pass a stop on, until Ray Train ends; returns rank 0's exit code.

    Raises VesuviusError: Ray Train has given up, no rank has come for too long, or none is there to obey a stop.
    """
    path, minutes, told, alive = run_dir(config).log, config.cluster.rank_timeout_minutes, False, None
    heard_s = said_s = time.monotonic()
    log_file = Tail(path, first_bytes=0 if path.exists() else sys.maxsize)
    _print_new(log_file)  # from here on
    while not result.done():
        with suppress(TimeoutError):
            result.exception(timeout=_POLL_S)
        _print_new(log_file)
        if not told and (asked := stop.pending()):
            with suppress(OSError):  # a full disk: the next round tries again
                write_atomically(place / _STOP, json.dumps(asked).encode())
                told = True
        now, before, alive = time.monotonic(), alive, _touched(place / _ALIVE)
        if alive != before:
            heard_s = said_s = now
        elif now - said_s >= _LOOK_EVERY_S:
            late_s, said_s = said_s - heard_s, now  # when it was last said: all may have been stopped together since
            if stop.is_requested():
                raise stop.as_error("no rank is at work, so nothing is saved; the last checkpoint is whole")
            if late_s >= 60 * minutes:
                raise VesuviusError(
                    f"no rank was at work for cluster.rank_timeout_minutes={minutes:g}; see `ray status` for what the "
                    "cluster lacks, add nodes or lower cluster.min_ranks, and continue with --resume"
                )
            log.warning("no rank has been at work for %.0f s; `ray status` says what is in use", now - heard_s)
    _print_new(log_file)
    try:
        exit_code, message = result.result().return_value
    except Exception as error:  # of the ranks, or of Ray Train itself
        raise VesuviusError(
            f"Ray Train has given up, after at most cluster.max_restarts={config.cluster.max_restarts} restarts: "
            f"{type(error).__name__}: {one_line(error)}; see the logs of the ranks below {run_dir(config).path} and "
            "Ray's in /tmp/ray/session_latest/logs; continue with --resume"
        ) from error
    if message:
        log.error("%s", message)
    return int(exit_code)


def _print_new(log_file: Tail) -> None:
    """Print what was appended since the last call, in whole lines."""
    try:
        print(log_file.lines().decode("utf-8", errors="replace"), end="", flush=True)
    except OSError:  # its reader has left, or the terminal has closed
        silence(sys.stdout)


def _store_bytes(config: Config, ranks: int) -> int:
    """Size of a private Ray's object store, which serves all ranks; a cluster has its own."""
    if config.cluster.address is not None or config.training.workers == 0:
        return _LEAST_STORE_BYTES
    options = StreamOptions.from_config(config.training, config.cluster)
    data = prepare_data(config.seed, config.data.with_patches_from_everywhere())
    check_store(data.job, options, ranks)
    size = max(ranks * store_bytes(data.job, options), _LEAST_STORE_BYTES)
    check_limits(config, ranks, size)
    return size
