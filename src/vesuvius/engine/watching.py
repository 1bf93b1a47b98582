"""Everything that looks at a run while it goes on, opened and closed together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from vesuvius.config import Config
from vesuvius.engine.run_dir import RunDir
from vesuvius.errors import EXIT_ERROR
from vesuvius.observe.metrics import Metrics
from vesuvius.observe.monitor import Monitor, MonitorPaths
from vesuvius.observe.prometheus import Exporter
from vesuvius.observe.risk.guard import Order
from vesuvius.observe.risk.killers import Limits, ray_share_from_environment
from vesuvius.observe.session import SessionRecord, begin_session, end_session
from vesuvius.observe.system.gpus import Gpus
from vesuvius.observe.system.look import Watcher
from vesuvius.observe.system.machine import read_machine
from vesuvius.observe.tensorboard import TensorBoard
from vesuvius.observe.units import GIB
from vesuvius.observe.vram import Vram

log = logging.getLogger(__name__)


def memory_limits(config: Config) -> Limits:
    """What the memory of a run is held against."""
    monitor = config.monitor
    return Limits(
        ray_share=ray_share_from_environment(os.environ, read_machine().total_bytes)
        if config.training.workers
        else None,
        configured_bytes=None if monitor.ram_limit_gib is None else int(monitor.ram_limit_gib * GIB),
        warn_at=monitor.warn_at,
        prefetch_at=monitor.prefetch_at,
        worker_at=monitor.worker_at,
        exit_at=monitor.exit_at,
    )


@dataclass
class OpenSession:
    """A session in progress.

    Attributes:
        record: what `session.json` says of it.
        exit_code: that it will have ended with.
    """

    record: SessionRecord
    exit_code: int = EXIT_ERROR


@contextmanager
def open_session(config: Config, directory: RunDir) -> Iterator[OpenSession]:
    """`session.json`: that this process is at work here, and at the end that it was no more."""
    limits = memory_limits(config)
    session = OpenSession(begin_session(directory.session, config.name, config.training.workers, limits))
    try:
        yield session
    finally:
        try:
            end_session(directory.session, session.record, session.exit_code)
        except OSError as error:
            log.warning(
                "%s must be writable; got %s; the next start takes this session for killed", directory.session, error
            )


@contextmanager
def open_metrics(config: Config, directory: RunDir) -> Iterator[Metrics]:
    """`metrics.jsonl`, and whoever else wants its records: TensorBoard, Prometheus."""
    listeners: list[Callable[[dict[str, object]], None]] = []
    with ExitStack() as opened:
        if config.monitor.tensorboard:
            tensorboard = TensorBoard(directory.tensorboard, directory.path)
            opened.callback(tensorboard.close)
            listeners.append(tensorboard.write)
        if config.monitor.prometheus_port is not None:
            exporter = opened.enter_context(Exporter(config.monitor.prometheus_port, config.name))
            listeners.append(exporter.take)
        metrics = Metrics(directory.metrics, listeners)
        opened.callback(metrics.close)
        yield metrics


@contextmanager
def open_monitor(
    config: Config,
    directory: RunDir,
    device: torch.device,
    metrics: Metrics,
    limits: Limits,
    on_exit: Callable[[Order], None],
) -> Iterator[Monitor]:
    """The monitor of this process, its readers and its GPUs."""
    monitor = config.monitor
    with (
        Gpus() as gpus,
        Monitor(
            MonitorPaths(directory.system, directory.monitor_log, directory.recent),
            limits,
            Watcher(os.getpid(), gpus=gpus),
            Vram(device) if device.type == "cuda" else None,
            sample_every_s=monitor.sample_every_s,
            write_every_s=monitor.write_every_s,
            guard=monitor.guard,
            on_exit=on_exit,
            on_record=metrics.share,
        ) as opened,
    ):
        yield opened
