"""A training run in chronological order, from its directory to its last checkpoint.  `loop.py` contains the loop."""

import contextlib
import errno
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from vesuvius.accelerator import choose_device
from vesuvius.config import Config
from vesuvius.config.experiment import quiet
from vesuvius.config.load import dump_config
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import EXIT_DATA, EXIT_OK, RunMovedError, StorageError, disk_remedy, one_line, system_error
from vesuvius.monitor.probes.vram import is_gpu_memory_error
from vesuvius.monitor.session import end_session
from vesuvius.monitor.watchdog import Watchdog
from vesuvius.runlog.held import where
from vesuvius.runlog.logfile import close_logs, close_terminal, open_log
from vesuvius.runlog.records import iter_records
from vesuvius.runlog.run_dir import RunDir, run_dir
from vesuvius.training.between_steps import GuardActions
from vesuvius.training.checkpoint.format import newest_checkpoint
from vesuvius.training.checkpoint.progress import Progress, without_cleared
from vesuvius.training.checkpoint.save import CheckpointWriter
from vesuvius.training.checkpoint.start import is_finished, restore, with_network_of
from vesuvius.training.checkpoint.trained import read_facts, write_facts
from vesuvius.training.forecast.plan import device_memory_bytes, gpu_memory_error, resolve_micro_batch
from vesuvius.training.forecast.preflight import Preflight, for_other_ranks, of_rank, preflight
from vesuvius.training.forecast.start_log import startup_lines
from vesuvius.training.loop import TrainingLoop
from vesuvius.training.ranks.failure import RankError, exit_code_of
from vesuvius.training.ranks.join import open_ranks
from vesuvius.training.ranks.ranks import SINGLE, Ranks
from vesuvius.training.ranks.share import launched_world_size, rank_share
from vesuvius.training.reporting.monitoring import (
    log_previous_death,
    open_metrics,
    open_monitor,
    open_session,
    run_died,
)
from vesuvius.training.request import MakeTuner, Request, RunContext
from vesuvius.training.step.self_test import check_kernels
from vesuvius.training.step.setup import build_network, configure_kernels, resolve_amp
from vesuvius.training.step.step import TrainStep
from vesuvius.training.stop import StoppedError, StopRequest, run_unless_stopped
from vesuvius.training.validation.validation import patches_of_rank
from vesuvius.volumes.store.cache import open_cache

log = logging.getLogger(__name__)

_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
# After a restart of ranks, the previous rank 0 may still be running, or its node may still hold the lock.
_LOCK_WAIT_S = 120.0


def train(request: Request, *, ranks: Ranks = SINGLE, stop: StopRequest | None = None) -> int:
    """Train, or continue training, until the last step or a request to stop.

    `stop` is by default a new request, for signals and `training.max_hours`.

    Returns EXIT_OK, or the exit code of a stop (75 for SIGTERM and time, 130 for Ctrl-C).  Raises VesuviusError: the
    last checkpoint is intact.
    """
    with stop or StopRequest(request.config.training.max_hours) as stop, contextlib.ExitStack() as held:
        if ranks.is_main:
            config, checked = _begin(request, stop, ranks, held)
            request = replace(request, config=config)
        else:
            ranks.reduce_min(device_memory_bytes(request.config, choose_device(ranks.local_rank)))
            config, checked = _begin_other_rank(ranks, held)
            request = replace(request, config=quiet(config), make_tuner=None)
        if isinstance(checked, int):  # an exit code: nothing to train
            return checked
        return _train_session(request, of_rank(checked, ranks.rank, ranks.world), stop, ranks)


def train_as_rank(request: Request, stop: StopRequest | None = None) -> int:
    """Train as the rank given by the environment, or as a single rank.  Otherwise like `train`."""
    # A single rank checks later, when Ctrl-C works even if the driver hangs.
    several = launched_world_size() not in (None, 1)
    device_type = choose_device().type if several else "cpu"
    with open_ranks(device_type, 60 * request.config.cluster.rank_timeout_minutes) as ranks:
        try:
            exit_code = train(request, ranks=ranks, stop=stop)
        except Exception as error:
            cause = ranks.root_cause(error)  # also for errors in the first and last collectives
            ranks.fail(cause)
            ranks.finish(exit_code_of(cause))
            if cause is error:
                raise
            raise cause from error
        ranks.finish(exit_code)
    return exit_code


def _begin(
    request: Request, stop: StopRequest, ranks: Ranks, held: contextlib.ExitStack
) -> tuple[Config, Preflight | int]:
    """Check everything, lock and initialize the run directory, and send the results to the other ranks.

    Returns the config with `auto` replaced by numbers, and an exit code if the run is finished or was stopped early.
    """
    config, resume, chosen = request.config, request.resume, list[str]()
    can_halve = config.training.train_batch_size == "auto"
    directory = RunDir(request.directory) if request.directory else run_dir(config)
    # The only rank left of several also waits for the previous session's lock.
    lock_wait_s = _LOCK_WAIT_S if ranks.world > 1 or config.training.ranks != 1 else 0.0
    existed = directory.exists()
    if resume and existed:  # first: another process may still be writing the checkpoint
        held.enter_context(directory.locked(new=False, wait_s=lock_wait_s))
    try:
        config, chosen = run_unless_stopped(lambda: _with_micro_batch(request.config, ranks), stop.is_requested)
        request = replace(request, config=config)
        checked = run_unless_stopped(lambda: _check(request, directory, ranks.local_world), stop.is_requested)
        if not isinstance(checked, int):
            if checked.resumed:
                config = with_network_of(checked.resumed.config, config)
            config = _check_kernels(config, ranks, can_halve, stop.raise_if_requested)
            checked = replace(checked, can_halve=can_halve)
    except StoppedError:
        log.info("stopped before the run began")
        assert stop.exit_code is not None
        checked = stop.exit_code
    if isinstance(checked, int):
        if checked == EXIT_OK:
            log_previous_death(directory)
        ranks.send((config, checked, ""))
        return config, checked
    is_new = not directory.path.exists()
    if not (resume and existed):
        held.enter_context(directory.locked(new=not resume))
    if is_new:
        held.enter_context(_removed_if_start_fails(directory))
    directory.begin(config, request.source, checked.data.describe(checked.facts.intensities))
    _open_log(directory)
    source = None if request.make_tuner else request.source  # profiles and trials train otherwise
    for level, line in startup_lines(config, source, checked, ranks.world, resume, existed):
        log.log(level, "%s", line)
    for line in chosen:
        log.info("%s", line)
    log_previous_death(directory)
    ranks.send((config, for_other_ranks(checked), directory.lock_owner()))
    for rank in range(1, ranks.world):
        ranks.send(patches_of_rank(config, checked.fixed, rank, ranks.world), rank)
    return config, checked


def _begin_other_rank(ranks: Ranks, held: contextlib.ExitStack) -> tuple[Config, Preflight | int]:
    """Like `_begin` on the other ranks, which receive config and results from rank 0."""
    config, checked, mark = ranks.receive()
    if isinstance(checked, int):
        return config, checked
    held.enter_context(checked.directory.held_by_rank_0(mark))
    _check_kernels(config, ranks)
    directory = checked.directory.of_rank(ranks.rank)
    _open_log(directory)
    close_terminal()  # only rank 0 prints
    log_previous_death(directory)
    if ranks.local_rank == 0 and (cache := open_cache(config.data.store)):
        cache.check()
    return config, replace(checked, fixed=ranks.receive(mine=True))


def _with_micro_batch(config: Config, ranks: Ranks) -> tuple[Config, list[str]]:
    """On rank 0, `resolve_micro_batch` for the device of every rank."""
    own_bytes = device_memory_bytes(config, choose_device(ranks.local_rank))  # waits for the driver
    return resolve_micro_batch(config, ranks.reduce_min(own_bytes))


def _check(request: Request, directory: RunDir, ranks_here: int) -> Preflight | int:
    """Checkpoint and requirements of the run, or EXIT_OK if it is finished.  Raises like `train`."""
    config, facts = request.config, request.facts
    checkpoint = newest_checkpoint(directory.checkpoints) if request.resume else None
    if checkpoint is not None and is_finished(checkpoint, config):
        text = "%s is already finished: %s reaches the requested step %d"
        log.info(text, directory.path, checkpoint.name, config.stop_step)
        return EXIT_OK
    known = None if facts is None else read_facts(facts, config.data)
    checked = preflight(
        config, request.resume, checkpoint, request.allow_drift, ranks_here=ranks_here, known=known, directory=directory
    )
    if facts is not None and (known is None or known.volumes != checked.facts.volumes):
        with contextlib.suppress(OSError):  # only an optimization
            write_facts(facts, config.data, checked.facts)
    if cache := open_cache(config.data.store):
        cache.check()
    return checked


def _check_kernels(
    config: Config, ranks: Ranks, can_halve: bool = False, poll: Callable[[], None] = lambda: None
) -> Config:
    """Choose and test this device's kernels before anything is written.

    Returns the config, with a smaller micro-batch if memory ran out and `can_halve`.  Raises ConfigError, and
    GpuMemoryError if memory ran out.
    """
    device = choose_device(ranks.local_rank)
    configure_kernels(device, config.training)
    micro_batch = rank_share(config, ranks.rank, ranks.world).micro_batch
    try:
        check_kernels(config, micro_batch, device, resolve_amp(config.training.amp, device), poll=poll)
        return config
    except Exception as error:
        if not is_gpu_memory_error(error):
            raise
        if not (can_halve and micro_batch > 1):
            raise gpu_memory_error(config, device, error, None) from error
    smaller = next(size for size in range(micro_batch - 1, 0, -1) if micro_batch % size == 0)
    log.warning("out of memory when testing kernels with micro-batch %d; trying %d", micro_batch, smaller)
    return _check_kernels(config.with_micro_batch(smaller), ranks, can_halve, poll)


@contextlib.contextmanager
def _removed_if_start_fails(directory: RunDir) -> Iterator[None]:
    """Remove a new run directory, which is locked, if its first session fails before it has begun."""
    try:
        yield
    except Exception:
        with contextlib.suppress(RunMovedError):
            path = where(directory.metrics)
            if not (path.exists() and any(record.get("kind") == "run_start" for record in iter_records(path))):
                close_logs()
                shutil.rmtree(path.parent, ignore_errors=True)
        raise


def _open_log(directory: RunDir) -> None:
    with directory.writing():
        directory.make_folders()
        open_log(directory.log)


def _train_session(request: Request, checked: Preflight, stop: StopRequest, ranks: Ranks) -> int:
    """Run one session, and record its start and its end in any case."""
    config, directory, device = request.config, checked.directory, choose_device(ranks.local_rank)
    share = rank_share(config, ranks.rank, ranks.world)
    with open_session(config, directory, ranks.local_world) as session, open_metrics(config, directory) as metrics:
        progress = Progress()

        def record_end(exit_code: int, cause: str) -> None:
            metrics.write("run_end", exit_code=exit_code, cause=cause, step=progress.step, total_s=progress.total_s)

        def record_kill(failure: RankError) -> None:
            record_end(failure.exit_code, one_line(failure))
            end_session(directory.session, session.record, failure.exit_code)

        ranks.abort.on_kill = record_kill
        try:
            schedule = Schedule.from_config(config.diffusion, checked.facts.spectrum)
            network = build_network(config, device)
            if checked.initial:  # on rank 0, which sends its weights to the others
                network.load_state_dict(checked.initial[0])
                checked.initial[0].clear()
            train_step = TrainStep(config, network, schedule, device, ranks)
            if checked.resumed:
                progress = restore(checked.resumed, train_step, device)
                progress.quarantined = without_cleared(progress.quarantined, directory.quarantine)
            progress.align_to_ranks(ranks.world, config.global_batch)
            watchdog = Watchdog(
                60 * (config.monitor.stall_minutes or 0.0),
                directory.stacks,
                metrics.write,
                lambda: (progress.step, config.stop_step),
            )
            run = RunContext(config, checked, device, session.record, metrics, progress, stop, watchdog, share, ranks)
            _record_start(run)
            session.exit_code = _train(run, train_step, request.make_tuner)
        except Exception as error:
            reported = _reported_error(error, directory)
            if is_gpu_memory_error(error):  # while building the network
                reported = gpu_memory_error(config, device, error, None)
            session.exit_code = exit_code_of(reported)
            if reported is error:
                raise
            raise reported from error
        finally:
            raised = sys.exception()
            cause = one_line(raised) if raised else "done" if session.exit_code == EXIT_OK else stop.reason or ""
            ranks.abort.on_kill = None
            record_end(session.exit_code, cause)
    return session.exit_code


def _record_start(run: RunContext) -> None:
    """Record the step at which this session begins; later records of earlier sessions become void."""
    progress, resumed = run.progress, run.checked.resumed
    done = {name: getattr(progress, name) for name in ("step", "validated_step", "previewed_step")}
    changes = {"drift": resumed.drift if resumed else [], "accepted": resumed.accepted if resumed else []}
    run.metrics.write("run_start", name=run.config.name, session=progress.sessions, **done, **changes)


def _train(run: RunContext, train_step: TrainStep, make_tuner: MakeTuner | None) -> int:
    """Run steps until the last one or a request to stop, save, and return the exit code."""
    config, progress, stop = run.config, run.progress, run.stop
    guard = GuardActions(run)
    with (
        run.watchdog,
        open_monitor(run, guard.exit) as monitor,
        CheckpointWriter(run.directory.checkpoints, config.training, dump_config(config)) as writer,
    ):
        loop = TrainingLoop(run, train_step, writer, monitor, guard)
        periodic = loop.periodic
        try:
            if not stop.is_requested() or run.ranks.world > 1:  # several ranks stop together in the loop
                loop.run_steps(make_tuner)
        except Exception as error:
            out_of_memory = is_gpu_memory_error(error)
            cause = _reported_error(run.ranks.root_cause(error), run.directory)
            # Also saves after non-finite steps, which were not applied: a resume continues after them.
            # Not on a GPU if another rank failed: a step may be queued behind an incomplete sum.
            behind_sum = isinstance(cause, RankError) and run.device.type != "cpu"
            config = config.with_micro_batch(loop.micro_batch) if loop.micro_batch < run.share.micro_batch else config
            reported = gpu_memory_error(config, run.device, error, None) if out_of_memory else cause
            run.ranks.fail(reported, saves=not behind_sum)
            saved = None if train_step.updating or behind_sum else periodic.save_after_error()
            if out_of_memory:
                short = gpu_memory_error(config, run.device, error, saved)
                run_died(run, monitor, "gpu", str(short).splitlines()[0], short.remedy)
                raise short from error
            if cause is error:
                raise
            raise cause from error
        failure = periodic.save_last()
        # A stop during the last step or its save has no effect.
        finished = progress.step >= config.stop_step and not periodic.is_scheduled()
        if guard.reason is not None and not finished:
            run_died(run, monitor, "guard", *guard.record_exit(monitor.risk.limits[0].name))
    if failure is not None:
        raise failure
    if stop.exit_code is None or finished:
        log.info("done: step %d", progress.step)
        if count := len(progress.quarantined):
            text = "damaged regions in quarantine: %d; list them with `vesuvius quarantine %s`"
            log.warning(text, count, config.name)
        return EXIT_OK
    if stop.exit_code in (EXIT_OK, EXIT_DATA):  # a completed profile; the reason says how to continue
        log.info("ended after step %d: %s", progress.step, stop.reason)
    else:
        log.info("stopped at step %d of %d; continue with --resume", progress.step, config.stop_step)
    return stop.exit_code


def _reported_error(error: Exception, directory: RunDir) -> Exception:
    """The error to report: for a file of the run with its remedy, for another OSError with its code location."""
    # not network errors
    if not isinstance(error, OSError) or isinstance(error, StorageError | ConnectionError | TimeoutError):
        return error
    named = error.filename if isinstance(error.filename, str) else ""
    # A failed write names no file: with a disk error it is assumed to be one of the run's.
    in_run = Path(named).absolute().is_relative_to(directory.path.absolute())
    if in_run if named else error.errno in _DISK_ERRNOS:
        remedy = f"{disk_remedy(error)} and continue with --resume"
        return StorageError(f"Cannot write to {directory.path}: {error}; {remedy}")
    return system_error(error) or error
