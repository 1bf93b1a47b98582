"""A training run from its directory to its last checkpoint, in the order of time.  `loop.py` holds the loop."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from vesuvius.config import Config
from vesuvius.config.trial import without_listeners
from vesuvius.errors import EXIT_ERROR, EXIT_OK, GpuMemoryError, StorageError, VesuviusError, one_line
from vesuvius.runlog.logfile import close_terminal, open_log
from vesuvius.runlog.run_dir import RunDir, run_dir
from vesuvius.training.build import build_loop, build_step, load_weights, open_watchdog, open_writer
from vesuvius.training.checkpoint.data_facts import read_facts, write_facts
from vesuvius.training.checkpoint.format import list_with_replaced
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.checkpoint.resume import ResumePoint, check_same_config, checkpoint_to_resume, is_finished
from vesuvius.training.checkpoint.save import set_aside
from vesuvius.training.context import RunContext
from vesuvius.training.forecast.gpu_memory import gpu_memory_error, is_gpu_memory_error
from vesuvius.training.forecast.preflight import Preflight, for_other_ranks, of_rank, preflight
from vesuvius.training.forecast.start_log import log_progress, log_ranks, log_start
from vesuvius.training.guard_actions import GuardActions
from vesuvius.training.loop import MakeTuner, make_autotuner
from vesuvius.training.quarantine import log_replaced
from vesuvius.training.ranks.errors import RankError
from vesuvius.training.ranks.part import part_of
from vesuvius.training.ranks.ranks import SINGLE, Ranks
from vesuvius.training.reporting.deaths import log_killed_session
from vesuvius.training.reporting.monitoring import open_metrics, open_monitor, open_session
from vesuvius.training.request import Request
from vesuvius.training.step.step import TrainStep, choose_device
from vesuvius.training.stop import StoppedError, StopRequest, unless_stopped
from vesuvius.volumes.store.object_store import open_cache

log = logging.getLogger(__name__)

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
# Where ranks are started again, the rank 0 of before may not have ended, or its node's lock not yet.
_LOCK_WAIT_S = 120.0


def train(
    request: Request,
    on_step: Callable[[int], None] = lambda step: None,
    *,
    ranks: Ranks = SINGLE,
    stop: StopRequest | None = None,
) -> int:
    """Train, or continue training, until the last step or a request to stop.

    Args:
        on_step: called with the number of each step once it is logged.
        ranks: the trainer processes of the run, of which this is one.
        stop: a request that the caller may make; by default one that listens to signals and `training.max_hours`.

    Returns:
        EXIT_OK, or the exit code of what stopped it (75 for SIGTERM and time, 130 for Ctrl-C).

    Raises:
        ConfigError: the run exists and `resume` is false, or it was another experiment.
        DataError: a volume cannot be read.
        NonFiniteError, GpuMemoryError, StorageError: as they say.  The last checkpoint is whole.
    """
    config, resume = request.config, request.resume
    if ranks.rank:
        return _train_other_rank(config, ranks, stop or StopRequest(config.training.max_hours))
    directory, shared = run_dir(config), config.model_dump(mode="json")
    # A rank that is left alone of several waits, too, for what holds the lock of the start before.
    lock_wait_s = _LOCK_WAIT_S if ranks.world > 1 or config.training.ranks != 1 else 0.0
    existed = directory.exists()
    with stop or StopRequest(config.training.max_hours) as stop, contextlib.ExitStack() as held:
        if resume and existed:  # first of all: another process may be writing the checkpoint to continue from
            held.enter_context(directory.locked(new=False, wait_s=lock_wait_s))
        try:
            checked = unless_stopped(lambda: _before_the_run(request, directory, ranks.local_world), stop.wanted)
        except StoppedError:
            log.info("stopped before the run began")
            ranks.publish((shared, stop.asked()[0], ""))
            return stop.asked()[0]
        if checked is None:
            log_killed_session(directory)
            ranks.publish((shared, EXIT_OK, ""))
            return EXIT_OK
        if not (resume and existed):
            held.enter_context(directory.locked(new=not resume))
        held.enter_context(_storage_errors(directory))
        directory.begin(config, request.source, checked.data.describe(config.data, checked.facts.greys))
        open_log(directory.log)
        if checked.resumed is None and list_with_replaced(directory.checkpoints):
            log.warning("the damaged checkpoints are kept in %s", set_aside(directory.checkpoints))
        log_start(config, checked, ranks.world, lost=resume and existed)
        log_killed_session(directory)
        ranks.publish((shared, for_other_ranks(checked), directory.mark()))
        checked = of_rank(checked, 0, ranks.world)
        return _train_and_record(config, checked, stop, on_step, request.make_tuner, ranks)


def _train_other_rank(config: Config, ranks: Ranks, stop: StopRequest) -> int:
    """The same as rank 0 does, but for what that does for all: checks, checkpoints, validations and pictures."""
    with stop, contextlib.ExitStack() as held:
        shared, checked, mark = ranks.await_main()
        check_same_config(config, shared, ranks.rank)
        if isinstance(checked, int):  # an exit code: there is nothing to train
            return checked
        checked.directory.refuse_other_path(mark)
        checked = of_rank(checked, ranks.rank, ranks.world)
        held.enter_context(_storage_errors(checked.directory))
        checked.directory.make_folders()
        open_log(checked.directory.log)
        close_terminal()  # rank 0 says what there is to say
        log_killed_session(checked.directory)
        if ranks.local_rank == 0 and (cache := open_cache(config.data.store)):
            cache.prepare()
        return _train_and_record(without_listeners(config), checked, stop, lambda step: None, None, ranks)


def _before_the_run(request: Request, directory: RunDir, ranks_here: int) -> Preflight | None:
    """What the run continues from and needs; None where it is finished.  Raises as `train`."""
    config, facts = request.config, request.facts
    checkpoint = checkpoint_to_resume(directory.checkpoints, request.restart_damaged) if request.resume else None
    if checkpoint is not None and is_finished(checkpoint, config):
        log.info("%s is finished: %s, asked for step %d", directory.path, checkpoint.name, config.stop_step)
        return None
    known = None if facts is None else read_facts(facts, config.data)
    checked = preflight(config, request.resume, checkpoint, request.allow_drift, ranks_here=ranks_here, known=known)
    if facts is not None and (known is None or known.volumes != checked.facts.volumes):
        with contextlib.suppress(OSError):  # they save time, no more
            write_facts(facts, config.data, checked.facts)
    if cache := open_cache(config.data.store):
        cache.prepare()
    return checked


def _train_and_record(
    config: Config,
    preflight: Preflight,
    stop: StopRequest,
    on_step: Callable[[int], None],
    make_tuner: MakeTuner | None,
    ranks: Ranks,
) -> int:
    """Run one session, and record how it began and how it ended, however it ends."""
    directory, device = preflight.directory, choose_device(ranks.local_rank)
    part = part_of(config, ranks.rank, ranks.world)
    log_ranks(config, part)
    with open_session(config, directory, ranks.local_world) as session, open_metrics(config, directory) as metrics:
        progress: Progress | None = None
        try:
            train_step = build_step(config, preflight, device, part, ranks)
            progress = load_weights(config, preflight, train_step, device)
            progress.begin_at_multiple(ranks.world, config.global_batch)
            watchdog = open_watchdog(config, directory, metrics, progress)
            run = RunContext(
                config, directory, device, session.record, metrics, progress, stop, watchdog, part, ranks, on_step
            )
            _record_start(run, preflight.resumed)
            session.exit_code = _train(run, preflight, train_step, make_tuner)
        except (ConnectionError, TimeoutError):  # of the network, not of a file
            raise
        except OSError as error:
            told = _told(error, directory)
            session.exit_code = told.exit_code if isinstance(told, VesuviusError) else EXIT_ERROR
            raise
        except VesuviusError as error:
            session.exit_code = error.exit_code
            raise
        except RuntimeError as error:
            if not is_gpu_memory_error(error):  # while the network was built
                raise
            session.exit_code = GpuMemoryError.exit_code
            raise gpu_memory_error(config, device, error, None) from error
        finally:
            reached = {"step": progress.step, "total_s": progress.total_s} if progress else {}
            cause = _cause(sys.exception(), stop, session.exit_code)
            metrics.write("run_end", exit_code=session.exit_code, cause=cause, **reached)
    return session.exit_code


def _cause(error: BaseException | None, stop: StopRequest, exit_code: int) -> str:
    """Why a session ends, in one line."""
    if error is not None:
        return one_line(error)
    return "done" if exit_code == EXIT_OK else stop.reason or ""


@contextlib.contextmanager
def _storage_errors(directory: RunDir) -> Iterator[None]:
    """What the system says of a file of the run that cannot be written, as an error with a remedy."""
    try:
        yield
    except OSError as error:
        told = _told(error, directory)
        if told is error:
            raise
        raise told from error


def _told(error: Exception, directory: RunDir) -> Exception:
    """The error that a user is told of: that of a file of the run names its remedy, that of another one its place."""
    if not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError):  # of the network
        return error
    # A write names no file: it is taken for one of the run's if it fails for the disk.
    of_run = error.errno in _OF_DISKS
    if error.filename is not None:
        named = Path(os.fsdecode(error.filename)).absolute() if isinstance(error.filename, str | bytes) else None
        of_run = named is not None and named.is_relative_to(directory.path.absolute())
    if of_run:
        return StorageError(
            f"the run directory must be writable; got {error} in {directory.path}; free some space and continue with "
            "--resume"
        )
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in place)
    return VesuviusError(f"The system refused what the run needs: {error}{where}")


def _record_start(run: RunContext, resumed: ResumePoint | None) -> None:
    """Log and record where this session begins: what was recorded beyond that is void."""
    progress = run.progress
    log_progress(run.config, progress, run.stop.left_s())
    run.metrics.write(
        "run_start",
        name=run.config.name,
        session=progress.sessions,
        step=progress.step,
        validated_step=progress.validated_step,
        previewed_step=progress.previewed_step,
        drift=resumed.drift if resumed else [],
        accepted=resumed.accepted if resumed else [],
    )


def _train(run: RunContext, preflight: Preflight, train_step: TrainStep, make_tuner: MakeTuner | None) -> int:
    """Run steps until the last one or a request to stop, save, and return the exit code."""
    config, progress, stop = run.config, run.progress, run.stop
    guard_actions = GuardActions(run, preflight.data.job.patch_bytes)
    with run.watchdog, open_monitor(run, guard_actions.exit) as monitor, open_writer(run) as writer:
        loop = build_loop(run, preflight, train_step, writer, monitor, guard_actions, make_tuner or make_autotuner)
        milestones, deaths = loop.milestones, loop.deaths
        try:
            if not stop.wanted() or run.ranks.world > 1:  # several stop together, which they do in the loop
                loop.run_steps()
        except Exception as error:
            cause = run.ranks.explain(error)
            run.ranks.fail(
                gpu_memory_error(config, run.device, error, None)
                if is_gpu_memory_error(error)
                else _told(cause, run.directory)
            )
            # Also after non-finite steps: they were not applied, and a resume continues after them.
            # On a GPU not where another rank failed: a step may be queued after a sum that is not complete.
            behind_sum = isinstance(cause, RankError) and run.device.type == "cuda"
            intact = not (train_step.updating or behind_sum)
            saved = milestones.save_after_error() if intact else None
            if is_gpu_memory_error(error):
                short = gpu_memory_error(config, run.device, error, saved)
                deaths.of_run("gpu", str(short).splitlines()[0], short.remedy)
                raise short from error
            if cause is not error:
                raise cause from error
            raise
        failure = milestones.save_last()
        # A stop requested in the last step, or while the last checkpoint is written, has nothing left to stop.
        finished = progress.step >= config.stop_step and not milestones.due()
        if guard_actions.reason is not None and not finished:
            guard_actions.record_exit()
            deaths.of_run("guard", guard_actions.reason, guard_actions.remedy(monitor.risk.killers[0].name))
    if failure is not None:
        raise failure
    if stop.exit_code is None or finished:
        log.info("done: step %d", progress.step)
        log_replaced(preflight.data.job.plan, progress.quarantined, progress.sample_index, config.name)
        return EXIT_OK
    if stop.exit_code == EXIT_OK:  # a profile, which is over
        log.info("ended after step %d: %s", progress.step, stop.reason)
    else:
        log.info("stopped at step %d of %d; continue with --resume", progress.step, config.stop_step)
    return stop.exit_code
