"""The ranks of a run as workers of Ray Train, which starts them, notices their deaths and starts them again.

Each worker runs `training.run.train` as torchrun would run it; this process prints the run's log, passes signals on
and ends with rank 0's exit code.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.execution.callback import ControllerCallback  # private: tests/launch/test_ray_train.py
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vesuvius.config import Config
from vesuvius.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError, VesuviusError, one_line
from vesuvius.launch.bulletin import Bulletin, Start
from vesuvius.launch.rank import Request, train_as_rank
from vesuvius.runlog.logfile import close_logs
from vesuvius.runlog.run_dir import run_dir
from vesuvius.stream.options import StreamOptions, check_store, reads_here, store_bytes
from vesuvius.stream.ray.session import Session
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.ranks.ranks import RankLostError, Restart
from vesuvius.training.stop import StopRequest

log = logging.getLogger(__name__)

_POLL_S = 0.5
_SAY_EVERY_S = 60.0
_GROW_EVERY_S = 600.0
_SAVE_S = 300.0
_ANSWER_S = 10.0
_HEARD_WITHIN_S = 60.0
_LONGEST_CAUSE = 300
_LEAST_STORE_BYTES = 2**28  # for what Ray itself needs


@dataclass(frozen=True)
class _Job:
    """What a worker gets: the request, where relative paths begin, when all began, and the bulletin."""

    request: Request
    directory: str
    began: float
    bulletin: Any

    def stop_request(self) -> StopRequest:
        """For rank 0: `max_hours` count from the start of this command, over all restarts."""
        hours = self.request.config.training.max_hours
        return StopRequest(None if hours is None else max(hours - (time.time() - self.began) / 3600, 1e-3))


class _LogLines:
    """Prints what is appended to the log of rank 0.

    Attributes:
        last: the end of what was printed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = path.stat().st_size if path.exists() else 0
        self.last = ""

    def print_new(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                text = file.read()
        except OSError:  # not there yet
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        printed = whole.decode("utf-8", errors="replace")
        self.last = (self.last + printed)[-100_000:]
        print(printed, end="", flush=True)


def train_with_ray(request: Request) -> int:
    """Start `training.ranks` ranks and wait for them.

    Returns:
        The exit code of rank 0.

    Raises:
        ConfigError: the nodes have no room for the ranks, or the cluster does not answer.
        VesuviusError: a rank was lost more than `cluster.max_restarts` times, or the ranks did not come within
            `cluster.rank_timeout_minutes`.
    """
    config = request.config
    ranks = int(config.training.ranks)
    with ExitStack() as opened:
        session = Session(config.cluster, config.training.workers * ranks, ranks, _store_bytes(config, ranks))
        opened.callback(session.close)
        nodes = _nodes()
        on_gpu = _have_gpus(nodes)
        _check_room(config, nodes)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board: Any = ray.remote(Bulletin)  # Ray's hints know no options of a class
        bulletin = board.options(num_cpus=0, scheduling_strategy=here).remote()
        opened.callback(shutil.rmtree, _storage(config), ignore_errors=True)
        signals = opened.enter_context(_Signals(bulletin))
        lines = _LogLines(run_dir(config).log)
        log.info("starting %d ranks with Ray Train, %s", ranks, "a GPU each" if on_gpu else "on processors")
        result = _fit(_trainer(_Job(request, os.getcwd(), time.time(), bulletin), ranks, on_gpu))
        due = time.monotonic() + _SAY_EVERY_S
        while not result.done() and not signals.abandoned():
            with suppress(TimeoutError):
                result.exception(timeout=_POLL_S)
            lines.print_new()
            if time.monotonic() >= due:
                due += _SAY_EVERY_S
                _look_for_ranks(config, on_gpu, _answer(bulletin.waited_s.remote()) or 0.0)
        lines.print_new()
        if not result.done():
            log.error("the ranks are ended at once: %s; the last checkpoint is whole", signals.why)
            return signals.exit_code
        try:
            exit_code, message = result.result().return_value
        except TrainingFailedError as error:
            # The rank that knows the cause may have told it when another one, which hung in a collective, was lost.
            if (ended := _answer(bulletin.ended.remote())) is None:
                raise VesuviusError(
                    f"a lost rank may be replaced cluster.max_restarts={config.cluster.max_restarts} times; got "
                    f"{one_line(error)}; see the logs of the ranks below {run_dir(config).path}, and go on with "
                    "--resume"
                ) from error
            exit_code, message = ended
        if message and message not in lines.last:
            log.error("%s", message)  # of before there was a log
        return int(exit_code)


def _answer(reference: Any) -> Any:
    """What an actor answers; None where it does not in time."""
    try:
        return ray.get(reference, timeout=_ANSWER_S)
    except ray.exceptions.RayError:
        return None


def _store_bytes(config: Config, ranks: int) -> int:
    """Size of a private Ray's object store, which serves all ranks; a cluster has its own."""
    if config.cluster.address is not None or config.training.workers == 0:
        return _LEAST_STORE_BYTES
    options = StreamOptions.from_config(config.training, config.cluster)
    data = prepare_data(config.seed, config.data, foreground=lambda volume, spec, section: None)
    check_store(data.job, options, ranks)
    return max(ranks * store_bytes(data.job, options), _LEAST_STORE_BYTES)


def ranks_of_cluster(config: Config) -> int:
    """How many ranks the cluster that the config names has GPUs for; 1 where it has none.

    Raises:
        ConfigError: the cluster does not answer.
    """
    session = Session(config.cluster, 0, 1, _LEAST_STORE_BYTES)
    try:
        nodes = _nodes()
    finally:
        session.close()
    return max(room_for_ranks(nodes, _needs(config, on_gpu=True)), 1)


def room_for_ranks(nodes: Sequence[Mapping[str, float]], each: Mapping[str, float]) -> int:
    """How many ranks fit on these nodes, each with what it needs on a single one.  Pure."""
    return sum(min(int(node.get(name, 0) // need) for name, need in each.items()) for node in nodes)


def _nodes() -> list[dict[str, float]]:
    """The resources of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _have_gpus(nodes: Sequence[Mapping[str, float]]) -> bool:
    return any(node.get("GPU", 0) for node in nodes)


def _needs(config: Config, on_gpu: bool) -> dict[str, float]:
    """What a rank reserves on its node."""
    readers = config.training.workers if reads_here(config.cluster, world=2) else 0
    return {"CPU": 1.0 + readers} | ({"GPU": 1.0} if on_gpu else {})


def _check_room(config: Config, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raises ConfigError where the ranks do not fit: Ray would wait for ever, also where they only fit in sum."""
    least = config.cluster.min_ranks or int(config.training.ranks)
    on_gpu = _have_gpus(nodes)
    if (have := room_for_ranks(nodes, needs := _needs(config, on_gpu))) < least:
        raise ConfigError(
            f"each rank needs {needs['CPU']:g} processors of one node for itself and its readers"
            f"{', and a GPU' if on_gpu else ''}; got room for {have} of {least} ranks on {_text(nodes)}; lower "
            "training.ranks, cluster.min_ranks or training.workers, or set cluster.reader_nodes=any"
        )


def _text(nodes: Sequence[Mapping[str, float]]) -> str:
    """The nodes for people, equal ones counted."""
    kinds = Counter(f"{node.get('CPU', 0):g} CPU + {node.get('GPU', 0):g} GPU" for node in nodes)
    return ", ".join(f"{count} x ({kind})" for kind, count in kinds.items()) or "no node"


def _look_for_ranks(config: Config, on_gpu: bool, waited_s: float) -> None:
    """Say that ranks are awaited, as Ray Train does not.  Raises VesuviusError where that has taken too long."""
    if waited_s < _SAY_EVERY_S:
        return
    least, limit_minutes = config.cluster.min_ranks or int(config.training.ranks), config.cluster.rank_timeout_minutes
    nodes = _nodes()
    offer = f"the nodes have room for {room_for_ranks(nodes, _needs(config, on_gpu))} ({_text(nodes)})"
    if waited_s > 60 * limit_minutes:
        raise VesuviusError(
            f"{least} ranks must start within cluster.rank_timeout_minutes={limit_minutes:g}; got none, and {offer}; "
            "add nodes, see `ray status` for what others use, or lower cluster.min_ranks; go on with --resume"
        )
    log.warning(
        "waiting for %d ranks for %.0f s; %s; it is tried for %g minutes; `ray status` says what is in use",
        least,
        waited_s,
        offer,
        limit_minutes,
    )


def _trainer(job: _Job, ranks: int, on_gpu: bool) -> TorchTrainer:
    cluster = job.request.config.cluster
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    rank: Any = _rank  # Ray's hints know no function that returns something
    scaling: Any = ScalingConfig  # nor those of version 2
    callbacks: list[Any] = [_Losses(job.bulletin), _Resizes(job.bulletin)]
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
            resources_per_worker=_needs(job.request.config, on_gpu),
            elastic_resize_monitor_interval_s=_GROW_EVERY_S,
        ),
        run_config=RunConfig(
            name=job.request.config.name,
            storage_path=str(_storage(job.request.config)),
            failure_config=FailureConfig(max_failures=cluster.max_restarts),
            callbacks=callbacks,
        ),
    )


def _storage(config: Config) -> Path:
    """Where Ray Train keeps what it knows of its workers; our checkpoints are not in it."""
    return run_dir(config).path.absolute().parent / ".ray_train" / f"{config.name}-{os.getpid()}"


def _fit(trainer: TorchTrainer) -> Future[Any]:
    """Run it on a thread: this one handles signals and prints."""
    result: Future[Any] = Future()

    def fit() -> None:
        try:
            result.set_result(trainer.fit())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=fit, name="ray-train", daemon=True).start()
    return result


class _Losses(UserCallback):
    """Tells the bulletin which ranks failed; in the process of Ray Train's controller."""

    def __init__(self, bulletin: Any) -> None:
        self._bulletin = bulletin

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        said = {rank: f"{type(error).__name__} {one_line(error)}" for rank, error in worker_exceptions.items()}
        first = {rank: text for rank, text in said.items() if "RankLostError" not in text}
        lost = {rank: _cause(text) for rank, text in (first or said).items()}
        _answer(self._bulletin.lose.remote(lost))


class _Resizes(ControllerCallback):
    """Lets the ranks save before Ray Train ends them to start another number; in the process of its controller."""

    def __init__(self, bulletin: Any) -> None:
        self._bulletin = bulletin

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        if not _answer(self._bulletin.resize.remote(f"Ray Train goes on with {resize_decision.num_workers} ranks")):
            return  # none are at work
        deadline = time.monotonic() + _SAVE_S
        while _answer(self._bulletin.resizing.remote()) is not False and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _cause(text: str) -> str:
    """Why a rank was lost, from Ray Train's error."""
    if "HealthCheckFailed" in text or "health check failed" in text:
        return "its process or its node is gone, or does not answer"
    return text if len(text) < _LONGEST_CAUSE else f"{text[:_LONGEST_CAUSE]}..."


def _rank(arguments: dict[str, Any]) -> tuple[int, str]:
    """What each worker runs.  Returns the exit code, and the error that it stands for.

    Raises:
        RankLostError: another rank is gone; Ray Train then starts all of them anew.
        RuntimeError: of a GPU or its network, which another start may not meet.
    """
    job: _Job = arguments["job"]
    logging.getLogger("vesuvius").setLevel(logging.INFO)
    rank, request = int(os.environ["RANK"]), job.request
    start: Start = ray.get(job.bulletin.start.remote(rank))
    if start.ended is not None:
        return start.ended
    restart = None
    if start.again:
        request = replace(request, resume=True)
        restart = Restart(start.restarts, request.config.cluster.max_restarts, start.lost)
    stop = StopRequest(None) if rank else job.stop_request()
    if rank == 0:
        threading.Thread(target=_follow, args=(job.bulletin, stop), name="bulletin", daemon=True).start()
    told_of_first_step = start.begun

    def on_step(step: int) -> None:
        nonlocal told_of_first_step
        if not told_of_first_step:
            told_of_first_step = True
            job.bulletin.begin.remote()

    try:
        _enter(job.directory)
        if rank == 0 and start.begun:
            _refuse_missing(request.config)
        exit_code = train_as_rank(request, on_step, stop, restart)
        if rank == 0:
            ray.get(job.bulletin.leave.remote())
        return exit_code, ""
    except RankLostError as error:
        log.error("%s", error)
        raise
    except VesuviusError as error:
        log.error("%s", error)
        ended = error.exit_code, str(error)
    except Exception as error:
        log.exception("a defect of vesuvius, please report it")
        if "CUDA" in str(error) or "NCCL" in str(error):
            raise
        ended = EXIT_ERROR, f"a defect of vesuvius, please report it: {type(error).__name__}: {one_line(error)}"
    finally:
        close_logs()
    ray.get(job.bulletin.end.remote(*ended))
    return ended


def _enter(directory: str) -> None:
    """Go where the command was started, where relative paths begin.  Raises ConfigError."""
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(
            f"the folder in which the command is started must be there on all nodes; got {error} on "
            f"{platform.node()}; start it in one on a shared file system"
        ) from error


def _refuse_missing(config: Config) -> None:
    """Raises ConfigError where rank 0 would begin a run anew that has made steps: it came to another node."""
    directory = run_dir(config)
    if config.cluster.storage_path is None and not directory.exists():
        raise ConfigError(
            f"the run directory must be on a path that all nodes share; got {directory.path.absolute()}, which is not "
            f"on {platform.node()}, where rank 0 was started again; put runs/ on a shared file system, or let "
            "VESUVIUS_RUNS name one"
        )


def _follow(bulletin: Any, stop: StopRequest) -> None:
    """Ask the bulletin for a stop, until there is one or the process that keeps it is gone."""
    while stop.exit_code is None:
        try:
            asked = ray.get(bulletin.stop.remote(), timeout=30)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayError:
            return
        if asked is not None:
            stop.adopt(*asked)
            return
        threading.Event().wait(_POLL_S)


class _Signals:
    """Puts SIGTERM and Ctrl-C on the bulletin; a second one, or none to hear the first, ends everything at once.

    Attributes:
        why: they are to be ended at once.
    """

    def __init__(self, bulletin: Any) -> None:
        self._bulletin = bulletin
        self._came: list[int] = []
        self._since_s = 0.0
        self._heard = False
        self.why = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        return EXIT_INTERRUPTED if self._came and self._came[0] == signal.SIGINT else EXIT_STOPPED

    def abandoned(self) -> bool:
        """Whether to wait no longer: a second signal has come, or no rank 0 is there to hear the first."""
        if len(self._came) > 1:
            self.why = "a second signal"
        elif self._came and not self._heard and time.monotonic() - self._since_s > _HEARD_WITHIN_S:
            self._heard = bool(_answer(self._bulletin.heard.remote()))
            if not self._heard:
                self.why = f"no rank heard of {signal.Signals(self._came[0]).name} within {_HEARD_WITHIN_S:.0f} s"
        return bool(self.why)

    def _on_signal(self, number: int, frame: object) -> None:
        self._came.append(number)
        if len(self._came) == 1:
            self._since_s = time.monotonic()
            self._bulletin.ask.remote(self.exit_code, signal.Signals(number).name)
