"""A training run from its directory to its last checkpoint.  `Run.train` reads in the order of time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vesuvius.config import Config
from vesuvius.data.prepare import GreyRange, PreparedData, prepare_data
from vesuvius.data.stream import PatchStream
from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.unet import build_unet
from vesuvius.engine.checkpoint import newest_checkpoint, save_checkpoint
from vesuvius.engine.device import DeviceFeed
from vesuvius.engine.preview import generate_patches, real_patches, write_montage
from vesuvius.engine.report import StepReporter
from vesuvius.engine.resume import Progress, read_state, restore, run_state
from vesuvius.engine.run_dir import RunDir, refuse_existing, run_dir
from vesuvius.engine.step import StepResult, TrainStep, choose_device, learning_rate, parameter_count
from vesuvius.engine.stop import StopRequest
from vesuvius.errors import EXIT_ERROR, EXIT_OK, GpuMemoryError, VesuviusError
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
    directory = run_dir(config)
    if not resume:
        refuse_existing(directory)
    data = prepare_data(config.seed, config.data)
    checkpoint = newest_checkpoint(directory.checkpoints) if resume else None
    state, drift = read_state(checkpoint, config, data.plan) if checkpoint else (None, [])
    if state is not None and state["step"] >= config.stop_step:
        log.info("%s is finished: step %d of %d", directory.path, state["step"], config.stop_step)
        return EXIT_OK
    greys = [GreyRange(*grey) for grey in state["greys"]] if state else data.grey_ranges(config.data)
    directory.begin(config, source, data.describe(config.data, greys))
    open_log(directory.log)
    _log_start(config, data, directory, checkpoint, resume, drift)
    metrics = JsonLines(directory.metrics)
    exit_code = EXIT_ERROR
    try:
        metrics.write("run_start", name=config.name, step=state["step"] if state else 0, drift=drift)
        exit_code = Run(config, directory, data, greys, metrics, on_step).train(state)
    except torch.OutOfMemoryError as error:
        exit_code = GpuMemoryError.exit_code
        raise GpuMemoryError(
            f"a step must fit the GPU's memory; got train_batch_size {config.training.train_batch_size}: out of memory "
            f"({error}); halve training.train_batch_size and double training.accumulate_steps"
        ) from error
    except VesuviusError as error:
        exit_code = error.exit_code
        raise
    finally:
        metrics.write("run_end", exit_code=exit_code)
        metrics.close()
    return exit_code


class Run:
    """The parts of one session of a run, wired together."""

    def __init__(
        self,
        config: Config,
        directory: RunDir,
        data: PreparedData,
        greys: list[GreyRange],
        metrics: JsonLines,
        on_step: Callable[[int], None],
    ) -> None:
        self._config = config
        self._directory = directory
        self._data = data
        self._greys = greys
        self._metrics = metrics
        self._on_step = on_step
        self._device = choose_device()
        if self._device.type == "cuda":
            torch.backends.cudnn.benchmark = config.training.cudnn_benchmark
        self._schedule = Schedule.from_config(config.diffusion).to(self._device)
        network = build_unet(config.model, config.seed, device=self._device)
        self._step = TrainStep(config, network, self._schedule, self._device)
        log.info(
            "model %.1f M parameters, device %s, amp %s, global batch %d",
            parameter_count(network) / 1e6,
            self._device,
            self._step.amp,
            config.global_batch,
        )

    def train(self, state: dict[str, Any] | None) -> int:
        """Run steps until the last one or a wish to stop, save, and return the exit code."""
        config = self._config
        progress = restore(state, self._step, self._device) if state else Progress()
        saved_step = progress.step if state else None
        batch_size = config.training.train_batch_size
        feed = DeviceFeed(
            self._device, batch_size, config.data.patch_size, self._data.job.dtype, self._data.plan, self._greys
        )
        with (
            StopRequest(config.training.max_hours) as stop,
            PatchStream(
                self._data.job,
                batch_size,
                config.training,
                config.cluster,
                first=progress.sample_index,
                stop=progress.sample_index + (config.stop_step - progress.step) * config.global_batch,
                buffers=feed.buffers,
            ) as stream,
            Monitor(
                config.monitor, self._directory.system, self._directory.monitor_log, stream.reader_memory
            ) as monitor,
        ):
            stop.listen()
            clock = make_clock(self._device)
            reporter = StepReporter(
                config, self._device, clock, self._metrics, lambda: monitor.latest, stream.readers, self._on_step
            )
            try:
                while progress.step < config.stop_step and not stop.wanted():
                    lr = learning_rate(progress.step, config.training)
                    result = self._one_step(progress.step, lr, feed, stream, clock)
                    reporter.launched(progress.step + 1, progress.sample_index, lr, result)
                    progress.step += 1
                    progress.sample_index += config.global_batch
                    reporter.report()
                    if progress.step % config.training.save_every == 0:
                        saved_step = self._save(progress, reporter)
                    if self._wants_preview(progress.step):
                        self._preview(progress.step)
                reporter.report(wait=True)
            finally:
                # Also when a step was not finite: it was not applied, and a resume goes on behind it.
                if progress.step > 0 and saved_step != progress.step:
                    self._save(progress, reporter=None)
        if stop.exit_code is None:
            log.info("done: step %d", progress.step)
            return EXIT_OK
        log.info("stopped at step %d of %d; go on with --resume", progress.step, config.stop_step)
        return stop.exit_code

    def _one_step(self, step: int, lr: float, feed: DeviceFeed, stream: PatchStream, clock: StepClock) -> StepResult:
        """One optimizer step over all micro-batches of its global batch."""
        config = self._config
        timesteps = stratified_timesteps(config.seed, step, config.global_batch, config.diffusion.timesteps)
        for t in np.split(timesteps, config.training.accumulate_steps):
            batch, x_0 = feed.next(stream, clock)
            with clock.computing():
                self._step.accumulate(x_0, batch.indices, t)
        with clock.computing():
            result = self._step.apply(lr)
        clock.step_done()
        return result

    def _save(self, progress: Progress, reporter: StepReporter | None) -> int:
        if reporter is not None:
            reporter.report(wait=True)
        state = run_state(self._config, self._data.plan, self._greys, self._step, progress, torch.get_num_threads())
        path = save_checkpoint(
            self._directory.checkpoints, progress.step, state, self._step.ema.weights, self._config.training.keep_last
        )
        log.info("saved %s", path)
        return progress.step

    def _wants_preview(self, step: int) -> bool:
        every = self._config.training.preview_every
        return every > 0 and (step % every == 0 or step == self._config.horizon_steps)

    def _preview(self, step: int) -> None:
        path = self._directory.samples / f"step_{step:08d}.png"
        generated = generate_patches(self._config, self._step.denoise, self._schedule)
        real = real_patches(self._config, self._data, self._greys)
        write_montage(path, generated, real, f"{self._config.name} step {step}")
        log.info("wrote %s", path)


def _log_start(
    config: Config, data: PreparedData, directory: RunDir, checkpoint: Path | None, resume: bool, drift: list[str]
) -> None:
    if checkpoint is not None:
        log.info("going on from %s", checkpoint)
    elif resume:
        log.warning("no whole checkpoint in %s: starting at step 0", directory.checkpoints)
    for line in drift:
        log.warning("changed since the checkpoint: %s", line)
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
