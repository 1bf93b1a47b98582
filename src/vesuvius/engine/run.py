"""A training run from its directory to its last checkpoint.  `Run.train` reads in the order of time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vesuvius.config import Config
from vesuvius.config_file import dump_config
from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.engine.autotune import Autotuner
from vesuvius.engine.checkpoint import list_with_replaced
from vesuvius.engine.checkpoint_save import set_aside
from vesuvius.engine.checkpoint_writer import CheckpointWriter
from vesuvius.engine.conditioning import Conditioner
from vesuvius.engine.deaths import Deaths, log_killed_session
from vesuvius.engine.device import DeviceFeed
from vesuvius.engine.gpu_memory import gpu_memory_error, is_gpu_memory_error
from vesuvius.engine.memory_acts import MemoryActs
from vesuvius.engine.milestones import Milestones
from vesuvius.engine.network import build_network
from vesuvius.engine.preflight import Preflight, preflight
from vesuvius.engine.progress import Progress
from vesuvius.engine.quarantine import still_quarantined
from vesuvius.engine.reference import Reference
from vesuvius.engine.replay_file import ReplayWriter
from vesuvius.engine.report import StepReporter
from vesuvius.engine.resume import checkpoint_to_resume, is_finished, restore, run_state
from vesuvius.engine.run_dir import RunDir, run_dir
from vesuvius.engine.self_test import check_convolution, check_cudnn, check_norm
from vesuvius.engine.start_log import log_network, log_progress, log_start
from vesuvius.engine.step import TrainStep, choose_device, choose_kernels, learning_rate
from vesuvius.engine.stop import StoppedError, StopRequest, unless_stopped
from vesuvius.engine.watching import open_metrics, open_monitor, open_session
from vesuvius.errors import EXIT_GUARD, EXIT_OK, GpuMemoryError, NonFiniteError, StorageError, VesuviusError
from vesuvius.observe.clock import StepClock, make_clock
from vesuvius.observe.logfile import open_log
from vesuvius.observe.metrics import Metrics
from vesuvius.observe.monitor import Monitor
from vesuvius.observe.records import JsonLines
from vesuvius.observe.session import SessionRecord
from vesuvius.observe.watchdog import Watchdog
from vesuvius.stream.feeder import StreamInterrupted
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.stream import PatchStream
from vesuvius.volumes.object_store import prepare_cache

log = logging.getLogger(__name__)


def train(
    config: Config,
    source: Path,
    resume: bool,
    allow_drift: bool = False,
    on_step: Callable[[int], None] = lambda step: None,
    *,
    restart_damaged: bool = False,
) -> int:
    """Train, or go on training, until the last step or a wish to stop.

    Args:
        config: the experiment.
        source: the YAML file it came from, kept with the run.
        resume: go on from the newest whole checkpoint of `runs/<name>`, if there is one.
        allow_drift: go on though the data or what the weights mean have changed.
        on_step: called with the number of each step once it is logged.
        restart_damaged: where `resume` finds checkpoints and none is whole, move them aside and start at step 0.

    Returns:
        EXIT_OK, or the exit code of what stopped it (75 for SIGTERM and time, 130 for Ctrl-C).

    Raises:
        ConfigError: the run exists and `resume` is false, or it was another experiment.
        DataError: a volume cannot be read.
        NonFiniteError, GpuMemoryError, StorageError: as they say.  The last checkpoint is whole.
    """
    directory = run_dir(config)
    existed = directory.exists()
    with StopRequest(config.training.max_hours) as stop, contextlib.ExitStack() as held:
        if resume and existed:  # first of all: another process may be writing the checkpoint to go on from
            held.enter_context(directory.locked(new=False))
        try:
            found = unless_stopped(
                lambda: _before_the_run(config, directory, resume, allow_drift, restart_damaged), stop.wanted
            )
        except StoppedError:
            assert stop.exit_code is not None
            log.info("stopped before the run began")
            return stop.exit_code
        if found is None:
            log_killed_session(directory)
            return EXIT_OK
        if not (resume and existed):
            held.enter_context(directory.locked(new=not resume))
        held.enter_context(_storage_errors(directory))
        directory.begin(config, source, found.data.describe(config.data, found.greys))
        open_log(directory.log)
        if found.resumed is None and list_with_replaced(directory.checkpoints):
            log.warning("the damaged checkpoints are kept in %s", set_aside(directory.checkpoints))
        log_start(config, found, lost=resume and existed)
        log_killed_session(directory)
        return _train_and_record(config, found, stop, on_step)


def _before_the_run(
    config: Config, directory: RunDir, resume: bool, allow_drift: bool, restart_damaged: bool
) -> Preflight | None:
    """What the run goes on from and needs; None where it is finished.  Raises as `train`."""
    checkpoint = checkpoint_to_resume(directory.checkpoints, restart_damaged) if resume else None
    if checkpoint is not None and is_finished(checkpoint, config):
        log.info("%s is finished: %s, asked for step %d", directory.path, checkpoint.name, config.stop_step)
        return None
    found = preflight(config, resume, checkpoint, allow_drift)
    prepare_cache(config.data.store)
    return found


def _train_and_record(config: Config, found: Preflight, stop: StopRequest, on_step: Callable[[int], None]) -> int:
    """Run, and write down how it began and how it ended, however it ends."""
    directory = found.directory
    with open_session(config, directory) as session, open_metrics(config, directory) as metrics:
        run: Run | None = None
        try:
            run = Run(config, found, stop, metrics, session.record, on_step)
            session.exit_code = run.train()
        except (ConnectionError, TimeoutError):  # of the network, not of a file
            raise
        except OSError:
            session.exit_code = StorageError.exit_code
            raise
        except VesuviusError as error:
            session.exit_code = error.exit_code
            raise
        except RuntimeError as error:
            if not is_gpu_memory_error(error):  # while the network was built
                raise
            session.exit_code = GpuMemoryError.exit_code
            raise gpu_memory_error(config, choose_device(), error, None) from error
        finally:
            progress = {"step": run.progress.step, "total_s": run.progress.total_s} if run else {}
            metrics.write("run_end", exit_code=session.exit_code, **progress)
    return session.exit_code


@contextlib.contextmanager
def _storage_errors(directory: RunDir) -> Iterator[None]:
    """What the system says of a file of the run that cannot be written, as an error with a remedy."""
    try:
        yield
    except (ConnectionError, TimeoutError):  # of the network, not of a file
        raise
    except OSError as error:
        raise StorageError(
            f"the run directory must be writable; got {error} in {directory.path}; free some space and go on "
            "with --resume"
        ) from error


class Run:
    """The parts of one session of a run, wired together.

    Attributes:
        progress: how far it is.
    """

    def __init__(
        self,
        config: Config,
        found: Preflight,
        stop: StopRequest,
        metrics: Metrics,
        session: SessionRecord,
        on_step: Callable[[int], None],
    ) -> None:
        self._config = config
        self._found = found
        self._directory = found.directory
        self._stop = stop
        self._metrics = metrics
        self._session = session
        self._on_step = on_step
        self._device = choose_device()
        choose_kernels(self._device, config.training)
        self._conditioner = Conditioner(
            config.data.condition_classes, found.greys.conditions, found.scalars, self._device
        )
        self._schedule = Schedule.from_config(config.diffusion, found.spectrum).to(self._device)
        network = build_network(config, self._device)
        self._step = TrainStep(config, network, self._schedule, self._device)
        check_cudnn(self._device, self._step.amp, config.training.channels_last)
        check_convolution(self._device, self._step.amp)
        check_norm(self._device, self._step.amp, config.training.channels_last)
        log_network(config, network, self._device, self._step.amp)
        self.progress = self._begin_or_go_on()
        self._acts = MemoryActs(
            config, stop, metrics, self.progress, found.data.job.patch_bytes, pinned=self._device.type == "cuda"
        )
        self._watchdog = Watchdog(
            60 * (config.monitor.stall_minutes or 0.0),
            self._directory.stacks,
            metrics.write,
            lambda: (self.progress.step, config.stop_step),
        )
        self._record_start()

    def _begin_or_go_on(self) -> Progress:
        """Give the step its weights: of a checkpoint, of another run, or those it was made with."""
        if self._found.resumed:
            progress = restore(self._found.resumed, self._step, self._device)
            progress.quarantined = still_quarantined(progress.quarantined, self._directory.quarantine)
            return progress
        if self._found.initial:
            self._step.set_weights(self._found.initial.weights)
        return Progress()

    def _record_start(self) -> None:
        """Say and write down where this session begins: what was recorded beyond that is void."""
        progress, resumed = self.progress, self._found.resumed
        log_progress(self._config, progress)
        self._metrics.write(
            "run_start",
            name=self._config.name,
            session=progress.sessions,
            step=progress.step,
            validated_step=progress.validated_step,
            previewed_step=progress.previewed_step,
            drift=resumed.drift if resumed else [],
            accepted=resumed.accepted if resumed else [],
        )

    def train(self) -> int:
        """Run steps until the last one or a wish to stop, save, and return the exit code."""
        training, directory = self._config.training, self._directory
        with (
            self._watchdog,
            open_monitor(
                self._config, directory, self._device, self._metrics, self._session.limits, self._acts.exit
            ) as monitor,
            CheckpointWriter(
                directory.checkpoints,
                training.keep_last,
                training.keep_every,
                dump_config(self._config),
                on_progress=lambda: self._watchdog.alive("checkpoint"),
            ) as writer,
        ):
            deaths = Deaths(directory, self._session, self.progress, monitor, self._acts)
            milestones = self._milestones(writer)
            try:
                if not self._stop.wanted():
                    self._run_steps(milestones, monitor, deaths)
            except Exception as error:
                # Also behind steps that were not finite: they were not applied, and a resume goes on behind them.
                saved = None if self._step.updating else milestones.save_after_error()
                if is_gpu_memory_error(error):
                    short = gpu_memory_error(self._config, self._device, error, saved)
                    deaths.of_gpu(short)
                    raise short from error
                raise
            failure = milestones.save_last()
            # Asked for in the last step, or while the last checkpoint is written, a stop finds nothing left to stop.
            finished = self.progress.step >= self._config.stop_step and not milestones.due()
            if self._stop.exit_code == EXIT_GUARD and not finished:
                self._acts.record_exit()
                deaths.of_guard()
        if failure is not None:
            raise failure
        if self._stop.exit_code is None or finished:
            log.info("done: step %d", self.progress.step)
            return EXIT_OK
        log.info("stopped at step %d of %d; go on with --resume", self.progress.step, self._config.stop_step)
        return self._stop.exit_code

    def _milestones(self, writer: CheckpointWriter) -> Milestones:
        fixed = self._found.fixed
        reference = None if fixed is None else Reference(fixed, self._found.greys, self._conditioner, self._device)
        return Milestones(
            self._config,
            self._directory,
            self._step,
            self._schedule,
            self._found.spectrum,
            reference,
            self.progress,
            self._metrics,
            writer,
            self._state,
            self._stop.wanted,
            self._watchdog,
        )

    def _run_steps(self, milestones: Milestones, monitor: Monitor, deaths: Deaths) -> None:
        """The loop, from the first batch to the last step or a wish to stop."""
        config, progress, found = self._config, self.progress, self._found
        options = StreamOptions.from_config(config.training, config.cluster)
        job = replace(found.data.job, notes_dir=str(self._directory.reading))
        feed = DeviceFeed(self._device, options, job, found.greys.volumes, self._conditioner)
        stop_sample = progress.sample_index + (config.stop_step - progress.step) * config.global_batch
        milestones.do_what_is_due()  # what the stop of the session before has cut short
        if progress.step >= config.stop_step:
            return
        self._watchdog.expects("batch", "the readers to start")
        with (
            PatchStream(
                job,
                options,
                first=progress.sample_index,
                stop=stop_sample,
                buffers=feed.buffers,
                condition_buffers=feed.condition_buffers,
                quarantined=progress.quarantined,
                interrupted=self._stop.wanted,
            ) as stream,
            self._watchdog.with_readers(stream.dump_reader_stacks),
        ):
            clock = make_clock(self._device)
            tuner = Autotuner(config, job, self._session.limits, self._metrics, progress)
            reporter = StepReporter(
                config,
                self._device,
                clock,
                self._metrics,
                progress,
                stream,
                monitor,
                self._on_step,
                ReplayWriter(
                    self._directory.nonfinite,
                    config,
                    found.data,
                    found.greys,
                    found.spectrum,
                    found.scalars,
                    self._step,
                ),
                tuner.take,
            )
            try:
                while progress.step < config.stop_step and not self._stop.wanted():
                    try:
                        self._one_step(feed, stream, clock, reporter)
                    except StreamInterrupted:
                        log.info("step %d was waiting for data and is given up; --resume does it", progress.step + 1)
                        break
                    self._record_events(stream, deaths)
                    with clock.pausing():
                        if not self._stop.wanted():
                            self._acts.obey(stream, monitor, reporter.longest_step_s)
                            tuner.act(stream, feed, monitor)
                    milestones.record_failures()
                    milestones.prepare()
                    if milestones.due():
                        reporter.report(wait=True)
                        with clock.pausing():
                            milestones.do_what_is_due()
                reporter.finish()
                milestones.save()  # written while the readers end: a scheduler may not give the seconds for both
            except Exception as error:
                self._settle(reporter, error)
                raise
            finally:
                self._record_events(stream, deaths)
                self._watchdog.expects("end of the readers", "them to end")

    def _one_step(self, feed: DeviceFeed, stream: PatchStream, clock: StepClock, reporter: StepReporter) -> None:
        """One optimizer step over all micro-batches of its global batch, and the report of those that are finished.

        Raises:
            StreamInterrupted: a stop is wanted and a micro-batch is not there; the step counts as not begun.
        """
        config, progress = self._config, self.progress
        lr = learning_rate(progress.step, config.training)
        timesteps = stratified_timesteps(config.seed, progress.step, config.global_batch, config.diffusion.timesteps)
        batches = []
        for t in np.split(timesteps, config.training.accumulate_steps):
            self._watchdog.expects("batch", stream.waiting_for)
            batch = feed.next(stream, clock)
            self._watchdog.expects("step", "the network to compute it")
            self._step.accumulate(batch.x_0, batch.indices, t, batch.condition, clock.computing)
            batches.append((batch.stored, t))
        result = self._step.apply(lr, clock.computing)
        clock.step_done()
        reporter.launched(progress.step + 1, progress.sample_index, lr, result, batches)
        progress.advance(config.global_batch)
        self._watchdog.expects("step", "what is done between two steps")
        reporter.report()

    def _settle(self, reporter: StepReporter, error: Exception) -> None:
        """Behind an error: log the steps that a GPU has in hand, and take back what was not applied.

        Raises:
            NonFiniteError: one of those steps was not finite, which is then what ends the run.
        """
        nonfinite = error if isinstance(error, NonFiniteError) else None
        if nonfinite is None:
            try:
                reporter.report(wait=True)
            except NonFiniteError as late:
                nonfinite = late
        if nonfinite is not None:
            # Steps that were launched before this one was noticed have not been applied.
            self.progress.go_back_to(nonfinite.step, self._config.global_batch)
            raise nonfinite

    def _record_events(self, stream: PatchStream, deaths: Deaths) -> None:
        """Write down what the stream had to deal with; it has logged it."""
        while stream.events:
            event = stream.events.popleft()
            step = self.progress.step  # whose checkpoint knows of it
            self._metrics.write("event", event=event.kind, step=step, text=event.text, **event.fields)
            if event.kind == "quarantine":
                with contextlib.closing(JsonLines(self._directory.quarantine)) as quarantine:
                    quarantine.write("region", step=step, **event.fields)
                self.progress.quarantined = list(stream.quarantined)
            elif event.kind == "reader_died":
                deaths.of_reader(event)

    def _state(self) -> dict[str, Any]:
        """All that a checkpoint holds."""
        found = self._found
        return run_state(
            self._config, found.data, found.greys, found.spectrum, found.scalars, self._step, self.progress
        )
