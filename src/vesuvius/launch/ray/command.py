"""Starts the ranks of a run with Ray Train and waits for them, in the process of the command.

It prints the run's log, passes signals on and ends with rank 0's exit code.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import sys
import time
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import ray
from ray.train import TrainingFailedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vesuvius.config import Config
from vesuvius.errors import EXIT_INTERRUPTED, EXIT_STOPPED, VesuviusError, one_line
from vesuvius.launch.ray.bulletin import Bulletin, answer
from vesuvius.launch.ray.room import LEAST_STORE_BYTES, SAY_EVERY_S, check_room, have_gpus, living_nodes, look_for_ranks
from vesuvius.launch.ray.worker import Job
from vesuvius.monitor.run_files import Tail
from vesuvius.runlog.logfile import silence, silence_lost_terminal
from vesuvius.runlog.run_dir import refuse_existing, run_dir
from vesuvius.stream.options import StreamOptions, check_store, store_bytes
from vesuvius.stream.ray.private import start_autoscaling_coordinator
from vesuvius.stream.ray.session import Session
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.threads import on_thread
from vesuvius.training.forecast.limits import check_limits
from vesuvius.training.request import Request
from vesuvius.training.stop import restore_handlers, stop_signals

log = logging.getLogger(__name__)

_POLL_S = 0.5
_HEARD_WITHIN_S = 60.0


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
    if not request.resume:  # before a rank is lost, whose next start would resume what is there
        refuse_existing(run_dir(config))
    size = _store_bytes(config, ranks)
    with ExitStack() as opened:
        # torch takes seconds to import, Ray's processes take seconds to start.
        importing = on_thread(importlib.import_module, "torch.distributed", name="torch")  # an error comes again below
        opened.callback(wait, [importing])  # a process that ends while its C++ code starts may crash
        session = Session(config.cluster, config.training.workers * ranks, ranks, size)
        opened.callback(session.close)
        start_autoscaling_coordinator()
        from vesuvius.launch.ray.trainer import make_trainer, storage_of  # imports torch

        nodes = living_nodes()
        on_gpu = have_gpus(nodes)
        check_room(config, nodes)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board: Any = ray.remote(Bulletin)  # Ray's hints know no options of a class
        bulletin = board.options(num_cpus=0, scheduling_strategy=here).remote()
        opened.callback(shutil.rmtree, storage_of(config), ignore_errors=True)
        signals = opened.enter_context(_Signals(bulletin))
        lines = _LogLines(run_dir(config).log)
        log.info("starting %d ranks with Ray Train, %s", ranks, "a GPU each" if on_gpu else "on processors")
        trainer = make_trainer(Job(request, os.getcwd(), time.time(), bulletin), ranks, on_gpu)
        result: Future[Any] = on_thread(trainer.fit, name="ray-train")  # this thread handles signals and prints
        due = time.monotonic() + SAY_EVERY_S
        while not result.done() and not signals.abandoned():
            with suppress(TimeoutError):
                result.exception(timeout=_POLL_S)
            lines.print_new()
            if time.monotonic() >= due:
                due += SAY_EVERY_S
                look_for_ranks(config, on_gpu, answer(bulletin.waited_s.remote()) or 0.0)
        lines.print_new()
        if not result.done():
            log.error("the ranks are ended at once: %s; the last checkpoint is whole", signals.why)
            return signals.exit_code
        try:
            exit_code, message = result.result().return_value
        except (TrainingFailedError, ray.exceptions.RayActorError) as error:
            # The rank that knows the cause may have told it when another one, which hung in a collective, was lost.
            if (ended := answer(bulletin.ended.remote())) is None:
                raise _end_of_ray_train(config, error) from error
            exit_code, message = ended
        if message and message not in lines.last:
            log.error("%s", message)  # of before there was a log
        return int(exit_code)


def _end_of_ray_train(config: Config, error: Exception) -> VesuviusError:
    """For an end of which no rank has told the cause."""
    if isinstance(error, TrainingFailedError):
        return VesuviusError(
            f"a lost rank may be replaced cluster.max_restarts={config.cluster.max_restarts} times; got "
            f"{one_line(error)}; see the logs of the ranks below {run_dir(config).path}, and continue with --resume"
        )
    return VesuviusError(
        f"Ray Train's own process must live as long as the run; got {type(error).__name__}: {one_line(error)}; look "
        "for its end in Ray's logs (/tmp/ray/session_latest/logs) and the system's, and continue with --resume"
    )


def _store_bytes(config: Config, ranks: int) -> int:
    """Size of a private Ray's object store, which serves all ranks; a cluster has its own."""
    if config.cluster.address is not None or config.training.workers == 0:
        return LEAST_STORE_BYTES
    options = StreamOptions.from_config(config.training, config.cluster)
    data = prepare_data(config.seed, config.data.model_copy(update={"min_foreground": 0}))  # whose map would be read
    check_store(data.job, options, ranks)
    size = max(ranks * store_bytes(data.job, options), LEAST_STORE_BYTES)
    check_limits(config, ranks, size)
    return size


class _LogLines:
    """Prints what is appended to the log of rank 0.

    Attributes:
        last: the end of what was printed.
    """

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path, first_bytes=0 if path.exists() else sys.maxsize)
        self._tail.lines()  # from here on
        self.last = ""

    def print_new(self) -> None:
        printed = self._tail.lines().decode("utf-8", errors="replace")
        self.last = (self.last + printed)[-100_000:]
        try:
            print(printed, end="", flush=True)
        except OSError:  # its reader has left, or the terminal has closed
            silence(sys.stdout)


class _Signals:
    """Puts SIGTERM, SIGHUP and Ctrl-C on the bulletin; a second one, or none to hear the first, ends all at once.

    Attributes:
        why: they are to be ended at once.
    """

    def __init__(self, bulletin: Any) -> None:
        self._bulletin = bulletin
        self._came: list[int] = []
        self._since_s = 0.0
        self._heard = False
        self.why = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Signals:
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._before, heard=signal.SIGHUP in self._came)

    @property
    def exit_code(self) -> int:
        return EXIT_INTERRUPTED if self._came and self._came[0] == signal.SIGINT else EXIT_STOPPED

    def abandoned(self) -> bool:
        """Whether to wait no longer: a second signal has come, or no rank 0 is there to hear the first."""
        if sum(number != signal.SIGHUP for number in self._came) > 1:
            self.why = "a second signal"
        elif self._came and not self._heard and time.monotonic() - self._since_s > _HEARD_WITHIN_S:
            self._heard = bool(answer(self._bulletin.heard.remote()))
            if not self._heard:
                self.why = f"no rank heard of {signal.Signals(self._came[0]).name} within {_HEARD_WITHIN_S:.0f} s"
        return bool(self.why)

    def _on_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:  # a terminal that closes sends several, and SIGTERM with them
            silence_lost_terminal()
            if self._came:
                return
        self._came.append(number)
        if len(self._came) == 1:
            self._since_s = time.monotonic()
            self._bulletin.ask.remote(self.exit_code, signal.Signals(number).name)
