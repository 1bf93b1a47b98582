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
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vesuvius.config import Config
from vesuvius.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError, VesuviusError, one_line
from vesuvius.launch.log_lines import LogLines
from vesuvius.launch.rank import Request, train_as_rank
from vesuvius.runlog.logfile import close_logs
from vesuvius.runlog.run_dir import run_dir
from vesuvius.stream.options import StreamOptions, reads_here, store_bytes
from vesuvius.stream.ray.session import Session
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.ranks.ranks import RankLostError, Restart
from vesuvius.training.stop import StopRequest

log = logging.getLogger(__name__)

_POLL_S = 0.5
_HEARD_WITHIN_S = 60.0
_LONGEST_CAUSE = 300
_LEAST_STORE_BYTES = 2**28  # for what Ray itself needs


@dataclass(frozen=True)
class Start:
    """What a rank learns when it is started.

    Attributes:
        again: there was a start before.
        restarts: after losses, so far.
        lost: ranks that were lost since the start before, and why; empty where Ray Train only changed their number.
        begun: rank 0 has made a step before.
        ended: how a rank has ended that no restart can help: exit code and message.
    """

    again: bool
    begun: bool
    restarts: int
    lost: dict[int, str]
    ended: tuple[int, str] | None


@ray.remote(num_cpus=0)
class Bulletin:
    """What the ranks ask the process that started them: whether to stop, and which of them were lost."""

    def __init__(self) -> None:
        self._losses: list[dict[int, str]] = []
        self._seen: dict[int, int] = {}  # losses that a rank has heard of, by rank
        self._started = self._begun = False
        self._stop: tuple[int, str] | None = None
        self._heard = False
        self._ended: tuple[int, str] | None = None

    def start(self, rank: int) -> Start:
        """Note a start of this rank."""
        new = self._losses[self._seen.get(rank, 0) :]
        again, self._started = self._started, self._started or rank == 0
        self._seen[rank] = len(self._losses)
        return Start(again, self._begun, len(self._losses), new[-1] if new else {}, self._ended)

    def begin(self) -> None:
        """Note that rank 0 has made a step."""
        self._begun = True

    def lose(self, ranks: dict[int, str]) -> None:
        """Note that these ranks ended all, and why."""
        self._losses.append(ranks)

    def end(self, exit_code: int, message: str) -> None:
        """Note how a rank has ended that no restart can help; the first one counts."""
        self._ended = self._ended or (exit_code, message)

    def ask(self, exit_code: int, reason: str) -> None:
        """Ask rank 0 for a stop."""
        self._stop = (exit_code, reason)

    def stop(self) -> tuple[int, str] | None:
        """The stop that is asked for; rank 0 hears of it."""
        self._heard = self._stop is not None
        return self._stop

    def heard(self) -> bool:
        """Whether rank 0 has heard of the stop."""
        return self._heard


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


def train_with_ray(request: Request) -> int:
    """Start `training.ranks` ranks and wait for them.

    Returns:
        The exit code of rank 0.

    Raises:
        ConfigError: there are fewer GPUs or processors than ranks, or the cluster does not answer.
        VesuviusError: a rank was lost more than `cluster.max_restarts` times.
    """
    config = request.config
    ranks = int(config.training.ranks)
    with ExitStack() as opened:
        session = Session(config.cluster, config.training.workers * ranks, ranks, _store_bytes(config, ranks))
        opened.callback(session.close)
        on_gpu = _resource("GPU") > 0
        _check_room(config, ranks, on_gpu)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        bulletin = Bulletin.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
        opened.callback(shutil.rmtree, _storage(config), ignore_errors=True)
        signals = opened.enter_context(_Signals(bulletin))
        lines = LogLines(run_dir(config).log)
        log.info("starting %d ranks with Ray Train, %s", ranks, "a GPU each" if on_gpu else "on processors")
        result = _fit(_trainer(_Job(request, os.getcwd(), time.time(), bulletin), ranks, on_gpu))
        while not result.done() and not signals.abandoned():
            with suppress(TimeoutError):
                result.exception(timeout=_POLL_S)
            lines.print_new()
        lines.print_new()
        if not result.done():
            log.error("the ranks are ended at once: %s; the last checkpoint is whole", signals.why)
            return signals.exit_code
        try:
            exit_code, message = result.result().return_value
        except TrainingFailedError as error:
            raise VesuviusError(
                f"a lost rank may be replaced cluster.max_restarts={config.cluster.max_restarts} times; got "
                f"{one_line(error)}; see the logs of the ranks below {run_dir(config).path}, and go on with --resume"
            ) from error
        if message and message not in lines.last:
            log.error("%s", message)  # of before there was a log
        return int(exit_code)


def _store_bytes(config: Config, ranks: int) -> int:
    """Size of a private Ray's object store: all ranks are on this machine."""
    options = StreamOptions.from_config(config.training, config.cluster)
    data = prepare_data(config.seed, config.data, foreground=lambda volume, spec, section: None)
    return max(ranks * store_bytes(data.job, options), _LEAST_STORE_BYTES)


def _check_room(config: Config, ranks: int, on_gpu: bool) -> None:
    least, each = config.cluster.min_ranks or ranks, _processors(config)
    if on_gpu and (have := _resource("GPU")) < least:
        raise ConfigError(
            f"each rank needs a GPU of its own; got {have} for {least} ranks; lower training.ranks or "
            "cluster.min_ranks, or set training.ranks=auto"
        )
    if (have := _resource("CPU")) < least * each:
        raise ConfigError(
            f"each rank needs {each} processors of the cluster, with its readers; got {have} for {least} ranks; lower "
            "training.ranks, cluster.min_ranks or training.workers, or set cluster.reader_nodes=any"
        )


def _processors(config: Config) -> int:
    """What a rank reserves on its node."""
    return 1 + (config.training.workers if reads_here(config.cluster, world=2) else 0)


def _resource(name: str) -> int:
    """How many of them the cluster has."""
    return int(ray.cluster_resources().get(name, 0))  # type: ignore[no-untyped-call]


def _trainer(job: _Job, ranks: int, on_gpu: bool) -> TorchTrainer:
    cluster = job.request.config.cluster
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    rank: Any = _rank  # Ray's hints know no function that returns something
    scaling: Any = ScalingConfig  # nor those of version 2
    losses: Any = _Losses(job.bulletin)
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
            resources_per_worker={"CPU": _processors(job.request.config)} | ({"GPU": 1} if on_gpu else {}),
            elastic_resize_monitor_interval_s=600.0,
        ),
        run_config=RunConfig(
            name=job.request.config.name,
            storage_path=str(_storage(job.request.config)),
            failure_config=FailureConfig(max_failures=cluster.max_restarts),
            callbacks=[losses],
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
        ray.get(self._bulletin.lose.remote(lost), timeout=30)


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
    os.chdir(job.directory)
    logging.getLogger("vesuvius").setLevel(logging.INFO)
    rank, request, restart = int(os.environ["RANK"]), job.request, None
    start: Start = ray.get(job.bulletin.start.remote(rank))
    if start.ended is not None:
        return start.ended
    if start.again:
        request = replace(request, resume=True)
    if start.lost:
        restart = Restart(start.restarts, request.config.cluster.max_restarts, start.lost)
    stop = StopRequest(None) if rank else job.stop_request()
    if rank == 0:
        threading.Thread(target=_follow, args=(job.bulletin, stop), name="bulletin", daemon=True).start()
    try:
        if rank == 0 and start.begun:
            _refuse_missing(request.config)
        told_of_first_step = start.begun

        def on_step(step: int) -> None:
            nonlocal told_of_first_step
            if not told_of_first_step:
                told_of_first_step = True
                job.bulletin.begin.remote()

        return train_as_rank(request, on_step, stop, restart), ""
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
            stop.ask(*asked)
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
            self._heard = ray.get(self._bulletin.heard.remote(), timeout=30)
            if not self._heard:
                self.why = f"no rank heard of {signal.Signals(self._came[0]).name} within {_HEARD_WITHIN_S:.0f} s"
        return bool(self.why)

    def _on_signal(self, number: int, frame: object) -> None:
        self._came.append(number)
        if len(self._came) == 1:
            self._since_s = time.monotonic()
            self._bulletin.ask.remote(self.exit_code, signal.Signals(number).name)
