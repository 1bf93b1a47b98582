"""Context managers that record and monitor a run, and its post-mortems."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from vesuvius.config import Config
from vesuvius.config.describe import flatten
from vesuvius.errors import EXIT_ERROR, one_line
from vesuvius.monitor.memory.guard import Order
from vesuvius.monitor.memory.limits import MemoryPolicy, ray_memory, ray_share_from_environment
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.post_mortem import (
    Death,
    append_death,
    death_lines,
    death_of_this_run,
    examine_reader,
    examine_run,
)
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.probes.system_sample import Watcher, sample_system
from vesuvius.monitor.probes.vram import gpu_uuid, read_vram
from vesuvius.monitor.session import SessionRecord, begin_session, end_session
from vesuvius.runlog.prometheus import Exporter
from vesuvius.runlog.records import JsonLines
from vesuvius.runlog.redact import redacted
from vesuvius.runlog.run_dir import RunDir
from vesuvius.runlog.trackers import TRACKERS, TensorBoard, Tracker
from vesuvius.runlog.units import GIB
from vesuvius.stream.events import StreamEvent
from vesuvius.stream.stream import PatchStream
from vesuvius.training.request import RunContext

log = logging.getLogger(__name__)


def memory_policy(config: Config, ranks_here: int = 1) -> MemoryPolicy:
    """Memory limits of a run; `ranks_here`: its ranks on this machine."""
    monitor, ray_share = config.monitor, None
    if config.training.workers:
        ray_share = ray_share_from_environment(os.environ, ray_memory(sample_system(os.getpid()))[1])
    return MemoryPolicy(
        ray_share=ray_share,
        configured_bytes=None if monitor.ram_limit_gib is None else int(monitor.ram_limit_gib * GIB),
        ranks_here=ranks_here,
    )


@dataclass
class OpenSession:
    record: SessionRecord  # contents of `session.json`
    exit_code: int = EXIT_ERROR  # when it ends


@contextmanager
def open_session(config: Config, directory: RunDir, ranks_here: int = 1) -> Iterator[OpenSession]:
    """Mark the session as running in `session.json`, and as ended at the end."""
    limits = memory_policy(config, ranks_here)
    with directory.writing():
        session = OpenSession(begin_session(directory.session, config.name, config.training.workers, limits))
    try:
        yield session
    finally:
        try:
            end_session(directory.session, session.record, session.exit_code)
        except OSError as error:
            text = "cannot write %s: %s; the next start will report that this session died"
            log.warning(text, directory.session, error)


@contextmanager
def open_metrics(config: Config, directory: RunDir) -> Iterator[JsonLines]:
    """`metrics.jsonl`, and other consumers of its records: TensorBoard, Prometheus, trackers."""
    monitor = config.monitor
    listeners: list[Callable[[dict[str, object]], None]] = []
    settings = flatten(redacted(config.model_dump(mode="json")))
    with ExitStack() as opened:
        if monitor.tensorboard:
            board = partial(TensorBoard, directory.tensorboard, directory.path)
            listeners.append(opened.enter_context(Tracker("TensorBoard", board)).take)
        if monitor.prometheus_port is not None:
            listeners.append(opened.enter_context(Exporter(monitor.prometheus_port, config.name)).take)
        for name in dict.fromkeys(monitor.trackers):
            begin = partial(TRACKERS[name], config.name, directory.path, settings)
            listeners.append(opened.enter_context(Tracker(f"monitor.trackers {name}", begin)).take)
        with directory.writing():
            metrics = JsonLines(directory.metrics, listeners)
        opened.callback(metrics.close)
        yield metrics


@contextmanager
def open_monitor(run: RunContext, on_exit: Callable[[Order], None]) -> Iterator[Monitor]:
    """Monitor this process, its readers and its GPUs; `on_exit` is called when the memory guard ends the run."""
    monitor, directory, device = run.config.monitor, run.directory, run.device
    with (
        Gpus() as gpus,
        Monitor(
            directory,
            run.session.limits,
            Watcher(os.getpid(), gpus=gpus),
            partial(read_vram, device) if device.type != "cpu" else None,
            gpu_uuid=gpu_uuid(device),
            sample_every_s=monitor.sample_every_s,
            guard=monitor.guard,
            on_exit=on_exit,
            on_record=run.metrics.share,
            silence=run.watchdog.silence,
        ) as opened,
    ):
        yield opened


def worker_died(run: RunContext, monitor: Monitor, stream: PatchStream, event: StreamEvent) -> None:
    """Write the post-mortem of a reader that was replaced."""
    session = replace(run.session, workers=stream.options.num_processes)  # the guard may have reduced them
    death = examine_reader(event.fields, run.progress.step, session, monitor.recent_samples(), stream.local_readers())
    _record_death(run.directory, death)


def run_died(run: RunContext, monitor: Monitor, cause: Literal["gpu", "guard"], reason: str, remedy: str) -> None:
    """Write the post-mortem of this run, which ran out of GPU memory or was ended by the memory guard."""
    _record_death(run.directory, death_of_this_run(cause, run.progress.step, reason, monitor.recent_samples(), remedy))


def log_previous_death(directory: RunDir) -> None:
    """Write a post-mortem if the previous session died.  Needs the run's lock."""
    try:
        if (death := examine_run(directory.path, locked=True)) is not None:
            _record_death(directory, death)
    except Exception as error:  # of records that a crash or an editor damaged: no reason not to start
        log.warning("cannot explain how the last session ended: %s: %s", type(error).__name__, one_line(error))


def _record_death(directory: RunDir, death: Death) -> None:
    """Log a post-mortem and record it."""
    try:
        append_death(directory.post_mortem, death)
    except OSError as error:
        log.warning("cannot write the post-mortem, which is in the log only: %s", error)
    for line in death_lines(death):
        log.error("%s", line)
