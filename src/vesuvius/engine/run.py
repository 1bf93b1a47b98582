"""A training run from its directory to its last checkpoint.  `Run.train` reads in the order of time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from vesuvius.config import Config
from vesuvius.data.stream import PatchStream
from vesuvius.data.stream_options import StreamOptions
from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.engine.checkpoint import save_checkpoint
from vesuvius.engine.conditioning import Conditioner
from vesuvius.engine.device import DeviceFeed
from vesuvius.engine.network import build_network
from vesuvius.engine.preflight import Preflight, doubts, preflight
from vesuvius.engine.preview import generate_patches, real_patches, write_montage
from vesuvius.engine.report import StepReporter
from vesuvius.engine.resume import Progress, restore, run_state
from vesuvius.engine.run_dir import RunDir
from vesuvius.engine.self_test import check_convolution
from vesuvius.engine.step import StepResult, TrainStep, choose_device, learning_rate, parameter_count
from vesuvius.engine.stop import StopRequest
from vesuvius.errors import EXIT_ERROR, EXIT_OK, GpuMemoryError, StorageError, VesuviusError
from vesuvius.observe.clock import StepClock, make_clock
from vesuvius.observe.logfile import open_log
from vesuvius.observe.monitor import Monitor
from vesuvius.observe.records import JsonLines

log = logging.getLogger(__name__)


def train(config: Config, source: Path, resume: bool, on_step: Callable[[int], None] = lambda step: None) -> int:
    """Train, or go on training, until the last step or a wish to stop.

    Args:
        config: the experiment.
        source: the YAML file it came from, kept with the run.
        resume: go on from the newest whole checkpoint of `runs/<name>`, if there is one.
        on_step: called with the number of each step once it is logged.

    Returns:
        EXIT_OK, or the exit code of what stopped it (75 for SIGTERM and time, 130 for Ctrl-C).

    Raises:
        ConfigError: the run exists and `resume` is false, or it was another experiment.
        DataError: a volume cannot be read.
        NonFiniteError, GpuMemoryError, StorageError: as they say.  The last checkpoint is whole.
    """
    with StopRequest(config.training.max_hours) as stop:
        found = preflight(config, resume)
        if found.state is not None and found.state["step"] >= config.stop_step:
            log.info(
                "%s is finished: step %d, asked for %d", found.directory.path, found.state["step"], config.stop_step
            )
            return EXIT_OK
        with found.directory.locked(new=not resume), _storage_errors(found.directory):
            found.directory.begin(config, source, found.data.describe(config.data, found.greys))
            open_log(found.directory.log)
            _log_start(config, found, resume)
            return _train_and_record(config, found, stop, on_step)


def _train_and_record(config: Config, found: Preflight, stop: StopRequest, on_step: Callable[[int], None]) -> int:
    """Run, and write into the metrics how it began and how it ended, however it ends."""
    exit_code = EXIT_ERROR
    metrics = JsonLines(found.directory.metrics)
    try:
        metrics.write("run_start", name=config.name, step=found.state["step"] if found.state else 0, drift=found.drift)
        exit_code = Run(config, found, stop, metrics, on_step).train()
    except torch.OutOfMemoryError as error:
        exit_code = GpuMemoryError.exit_code
        raise GpuMemoryError(
            f"a step must fit the GPU's memory; got train_batch_size {config.training.train_batch_size}: out of memory "
            f"({error}); halve training.train_batch_size and double training.accumulate_steps"
        ) from error
    except OSError:
        exit_code = StorageError.exit_code
        raise
    except VesuviusError as error:
        exit_code = error.exit_code
        raise
    finally:
        with contextlib.suppress(OSError):  # on a full disk the error above is the one to report
            metrics.write("run_end", exit_code=exit_code)
            metrics.close()
    return exit_code


@contextlib.contextmanager
def _storage_errors(directory: RunDir) -> Iterator[None]:
    """What the system says of a log, a record or a picture that cannot be written, as an error with a remedy."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the run directory must be writable; got {error} in {directory.path}; free some space and go on "
            "with --resume"
        ) from error


class Run:
    """The parts of one session of a run, wired together."""

    def __init__(
        self,
        config: Config,
        found: Preflight,
        stop: StopRequest,
        metrics: JsonLines,
        on_step: Callable[[int], None],
    ) -> None:
        self._config = config
        self._directory = found.directory
        self._data = found.data
        self._greys = found.greys
        self._scalars = found.scalars
        self._stop = stop
        self._metrics = metrics
        self._on_step = on_step
        self._device = choose_device()
        if self._device.type == "cuda":
            torch.backends.cudnn.benchmark = config.training.cudnn_benchmark
        self._conditioner = Conditioner(
            config.data.condition_classes, self._greys.conditions, found.scalars, self._device
        )
        self._schedule = Schedule.from_config(config.diffusion).to(self._device)
        network = build_network(config, self._device)
        self._step = TrainStep(config, network, self._schedule, self._device)
        check_convolution(self._device, self._step.amp)
        log.info(
            "model %.1f M parameters, device %s, amp %s, global batch %d",
            parameter_count(network) / 1e6,
            self._device,
            self._step.amp,
            config.global_batch,
        )

        self._progress = restore(found.state, self._step, self._device) if found.state else Progress()
        self._saved_step = self._progress.step

    def train(self) -> int:
        """Run steps until the last one or a wish to stop, save, and return the exit code."""
        try:
            if not self._stop.wanted():
                self._run_steps()
        except StorageError:
            raise  # a second try to save would fail alike
        except Exception:
            # Also behind steps that were not finite: they were not applied, and a resume goes on behind them.
            self._save_after_error()
            raise
        self._save()
        if self._stop.exit_code is None:
            log.info("done: step %d", self._progress.step)
            return EXIT_OK
        log.info("stopped at step %d of %d; go on with --resume", self._progress.step, self._config.stop_step)
        return self._stop.exit_code

    def _run_steps(self) -> None:
        """The loop, from the first batch to the last step or a wish to stop."""
        config, progress = self._config, self._progress
        options, job = StreamOptions.from_config(config.training, config.cluster), self._data.job
        feed = DeviceFeed(self._device, options, job, self._greys.volumes, self._conditioner)
        stop_sample = progress.sample_index + (config.stop_step - progress.step) * config.global_batch
        with (
            PatchStream(
                job,
                options,
                first=progress.sample_index,
                stop=stop_sample,
                buffers=feed.buffers,
                condition_buffers=feed.condition_buffers,
                quarantined=progress.quarantined,
            ) as stream,
            Monitor(
                config.monitor, self._directory.system, self._directory.monitor_log, stream.reader_memory
            ) as monitor,
        ):
            clock = make_clock(self._device)
            reporter = StepReporter(
                config, self._device, clock, self._metrics, lambda: monitor.latest, stream.readers, self._on_step
            )
            while progress.step < config.stop_step and not self._stop.wanted():
                lr = learning_rate(progress.step, config.training)
                try:
                    result = self._one_step(progress.step, lr, feed, stream, clock)
                finally:
                    self._record_events(stream)
                reporter.launched(progress.step + 1, progress.sample_index, lr, result)
                progress.step += 1
                progress.sample_index += config.global_batch
                reporter.report()
                if self._wants_preview(progress.step):
                    reporter.report(wait=True)
                    self._preview(progress.step)
                if progress.step % config.training.save_every == 0:
                    reporter.report(wait=True)
                    self._save()
            reporter.report(wait=True)
            self._record_events(stream)

    def _one_step(self, step: int, lr: float, feed: DeviceFeed, stream: PatchStream, clock: StepClock) -> StepResult:
        """One optimizer step over all micro-batches of its global batch."""
        config = self._config
        timesteps = stratified_timesteps(config.seed, step, config.global_batch, config.diffusion.timesteps)
        for t in np.split(timesteps, config.training.accumulate_steps):
            batch = feed.next(stream, clock)
            with clock.computing():
                self._step.accumulate(batch.x_0, batch.indices, t, batch.condition)
        with clock.computing():
            result = self._step.apply(lr)
        clock.step_done()
        return result

    def _record_events(self, stream: PatchStream) -> None:
        """Write down what the stream had to deal with; it has logged it."""
        while stream.events:
            event = stream.events.popleft()
            step = self._progress.step + 1
            self._metrics.write("event", event=event.kind, step=step, text=event.text, **event.fields)
            if event.kind == "quarantine":
                with contextlib.closing(JsonLines(self._directory.quarantine)) as quarantine:
                    quarantine.write("region", step=step, **event.fields)
                self._progress.quarantined = list(stream.quarantined)

    def _save(self) -> None:
        """Write a checkpoint, unless this step has one."""
        step = self._progress.step
        if step == self._saved_step:
            return
        threads = torch.get_num_threads()
        state = run_state(self._config, self._data, self._greys, self._scalars, self._step, self._progress, threads)
        keep_last = self._config.training.keep_last
        path = save_checkpoint(self._directory.checkpoints, step, state, self._step.ema.weights, keep_last)
        self._saved_step = step
        log.info("saved %s", path)

    def _save_after_error(self) -> None:
        """Save what there is; the error on its way out is the one to report."""
        try:
            self._save()
        except StorageError as error:
            log.error("%s", error)

    def _wants_preview(self, step: int) -> bool:
        every = self._config.training.preview_every
        return every > 0 and (step % every == 0 or step == self._config.horizon_steps)

    def _preview(self, step: int) -> None:
        path = self._directory.samples / f"step_{step:08d}.png"
        real, conditions = real_patches(self._config, self._data, self._greys, self._conditioner)
        generated = generate_patches(self._config, self._step.denoise, self._schedule, conditions)
        write_montage(path, generated, real, f"{self._config.name} step {step}")
        log.info("wrote %s", path)


def _log_start(config: Config, found: Preflight, resume: bool) -> None:
    if found.checkpoint is not None:
        log.info("going on from %s", found.checkpoint)
    elif resume:
        log.warning("no checkpoint in %s: starting at step 0", found.directory.checkpoints)
    for doubt in doubts(config):
        log.warning("%s", doubt)
    for line in found.drift:
        level = logging.WARNING if line.startswith("data.") else logging.INFO
        log.log(level, "changed since the checkpoint: %s", line)
    data = found.data
    for volume, planned in zip(data.volumes, data.plan.volumes, strict=True):
        log.info(
            "volume %s: %s %s, %d regions, decoded by %s",
            volume.name,
            "x".join(map(str, volume.shape_zyx)),
            volume.dtype,
            planned.region_count,
            volume.codec_pipeline,
        )
    if data.plan.repeats_within_a_run:
        log.warning(
            "the volumes hold fewer regions than data.regions_per_task=%d: batches repeat regions; use larger volumes, "
            "a smaller data.patch_size or a smaller data.validation.guard",
            config.data.regions_per_task,
        )
