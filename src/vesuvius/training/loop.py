"""The training loop: from the first batch to the last step or a request to stop."""

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.accelerator import empty_cache, new_event
from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.errors import EXIT_DATA, NonFiniteError, one_line
from vesuvius.loader.device import DeviceFeed
from vesuvius.monitor.clock import StepClock, make_clock
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.probes.vram import is_gpu_memory_error
from vesuvius.runlog.held import problem
from vesuvius.stream.feeder import StreamInterrupted
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.stream import PatchStream
from vesuvius.training.between_steps import GuardActions, PeriodicTasks
from vesuvius.training.checkpoint.save import CheckpointWriter
from vesuvius.training.ranks.failure import RankError
from vesuvius.training.reporting.monitoring import worker_died
from vesuvius.training.reporting.report import LaunchedStep, MicroBatch, RankTelemetry, StepReporter, diagnose
from vesuvius.training.request import MakeTuner, RunContext
from vesuvius.training.step.feed import Conditioner, TrainingBatch, TrainingFeed
from vesuvius.training.step.step import TrainStep, learning_rate
from vesuvius.training.stop import StoppedError
from vesuvius.training.validation.validation import ValidationPatches

log = logging.getLogger(__name__)

_GRACE_S = 60.0
_LOOK_EVERY_S = 1.0  # for the run directory


class TrainingLoop:
    """Runs optimizer steps; between steps it executes memory-guard orders and runs periodic tasks."""

    def __init__(
        self,
        run: RunContext,
        train_step: TrainStep,
        writer: CheckpointWriter,
        monitor: Monitor,
        guard_actions: GuardActions,
    ) -> None:
        config, checked, facts = run.config, run.checked, run.checked.facts
        self.run, self.train_step, self.monitor, self.guard_actions = run, train_step, monitor, guard_actions
        self.job = replace(checked.data.job, reading_log_dir=str(run.directory.reading.absolute()))
        options = replace(StreamOptions.from_config(config.training, config.cluster), batch_size=run.share.micro_batch)
        conditioner = Conditioner(config.data.class_values, facts.intensities.conditions, run.device)
        self.feed = DeviceFeed(run.device, options, self.job, facts.intensities.volumes)  # delivers patches
        self.batches = TrainingFeed(self.feed, conditioner, config.diffusion.condition_noise)  # with noise, conditions
        fixed = checked.fixed
        arguments = facts.intensities, conditioner, run.device, config.diffusion.sampled_condition_noise
        reference = None if fixed is None else ValidationPatches(fixed, *arguments)
        self.periodic = PeriodicTasks(run, train_step, reference, writer)
        self._in_step, self._looks_s = False, 0.0
        self._nonfinite: NonFiniteError | None = None  # with several ranks, raised before the next step
        self.micro_batch = run.share.micro_batch  # patches computed at a time
        self._queued = deque[torch.Event]()  # ends of micro-batches that the GPU may have yet to compute

    def run_steps(self, make_tuner: MakeTuner | None = None) -> None:
        """Train until the last step or a request to stop.

        Raises NonFiniteError: too many steps in a row were not finite; DataError, ConfigError: as from `PatchStream`.
        """
        config, progress, stop, watchdog = self.run.config, self.run.progress, self.run.stop, self.run.watchdog
        self.periodic.run_scheduled()  # tasks interrupted by the previous session's stop
        if progress.step >= config.stop_step:
            return
        watchdog.expects("batch", "the workers to start")
        with self.batches.open(
            first=progress.sample_index,
            stop=progress.sample_index + (config.stop_step - progress.step) * config.global_batch,
            quarantined=progress.quarantined,
            interrupted=self._stops_waiting,
            resident=self._open_resident(),
        ) as stream:
            clock, again = make_clock(self.run.device), partial(diagnose, self.train_step, self.batches)
            self.train_step.timed = clock.computing
            reporter = StepReporter(self.run, clock, stream, self.monitor, again)
            tune = make_tuner(self, reporter) if make_tuner else None
            try:
                while progress.step < config.stop_step and self._next_step(clock, reporter):
                    self._stop_if_moved()
                    self._record_events(stream)
                    with clock.pausing():
                        if not stop.is_requested():
                            self.guard_actions.execute(self.feed, self.monitor, reporter.longest_step_s)
                            if tune:
                                tune()
                    self.periodic.record_saves()
                    if self.periodic.is_scheduled():
                        self._report(reporter, wait=True)
                        if self._nonfinite is None:  # else no rank runs them
                            with clock.pausing():
                                self.periodic.run_scheduled()
                if self._nonfinite is not None:
                    raise self._nonfinite
                reporter.finish()
                self.periodic.save()  # overlaps with ending the readers: a scheduler may not allow time for both
            except Exception as error:
                self._flush_after_error(reporter, error)
                raise
            finally:
                self._record_events(stream)
                watchdog.expects("end of the workers", "the workers to end")

    def _stop_if_moved(self) -> None:
        """Once a second, request a stop if the run directory is no longer in its place."""
        if self.run.ranks.is_main and (now := time.monotonic()) >= self._looks_s:
            self._looks_s = now + _LOOK_EVERY_S
            if moved := problem(self.run.directory.path):
                self.run.stop.request(EXIT_DATA, moved, logging.ERROR)

    def _open_resident(self) -> Resident | None:
        """Copy of the volumes in memory, shared by the ranks of this machine; None if none is kept."""
        ranks = self.run.ranks
        if not self.run.checked.resident[0]:
            return None
        try:
            if ranks.local_rank > 0:
                return Resident(self.job, ranks.receive_local(), ranks.local_world)
            resident = Resident(self.job, sharers=ranks.local_world)
            ranks.send_local(resident.address)
        except OSError as error:
            log.warning("cannot keep the volumes in memory, reading them instead: %s", one_line(error))
            ranks.send_local("")
            return None
        return resident

    def _next_step(self, clock: StepClock, reporter: StepReporter) -> bool:
        """Run one step, unless the run ends before it; returns whether it was run.  Raises RankError."""
        ranks, stop, progress = self.run.ranks, self.run.stop, self.run.progress
        dropped = f"step {progress.step + 1} was dropped; --resume repeats it"
        first = None
        try:
            # Before the ranks synchronize: without data, all can still stop together.
            if not stop.is_requested():
                first = self._next_batch(clock)
        except StreamInterrupted:
            log.info("%s", dropped)
        if self._stops(clock, reporter.telemetry):
            return False
        if first is None:
            assert ranks.failure is not None, "only a stop or a failure ends the wait"
            raise ranks.failure
        try:
            self._one_step(clock, reporter, first)
        except (StreamInterrupted, StoppedError):
            if ranks.world > 1:  # the other ranks are in the middle of the step
                raise ranks.failure or stop.as_error(dropped) from None
            log.info("%s", dropped)
            return False
        return True

    def _next_batch(self, clock: StepClock) -> TrainingBatch:
        self.run.watchdog.expects("batch", self.feed.stream.waiting_for)
        batch = self.batches.next(clock)
        self.run.watchdog.expects("step", "the network to compute it")
        return batch

    def _one_step(self, clock: StepClock, reporter: StepReporter, batch: TrainingBatch) -> None:
        """Run one optimizer step over all micro-batches of its global batch, and report finished steps.

        Raises StreamInterrupted, StoppedError: a stop came during the step, which counts as not begun.
        """
        config, progress, share = self.run.config, self.run.progress, self.run.share
        lr = learning_rate(progress.step, config.training)
        timesteps = stratified_timesteps(config.seed, progress.step, config.global_batch, config.diffusion.timesteps)
        delivered: list[MicroBatch] = []
        for t in np.split(timesteps[share.positions], share.accumulate_steps):
            if delivered:
                self._in_step = True
                batch = self._next_batch(clock)
                self._in_step = False
            delivered.append((batch.stored, t))
            pending: Iterable[tuple[TrainingBatch, NDArray[np.int64]]] = [(batch, t)]
            while not self._accumulate(pending, last=len(delivered) == share.accumulate_steps):
                pending = ((self.batches.to_device(stored), t) for stored, t in delivered)
        batches = [(stored.rows(micro), t[micro]) for stored, t in delivered for micro in self._pieces(t)]
        result = self.train_step.apply(lr)
        clock.step_done()
        reporter.launched.append(LaunchedStep(progress.step + 1, progress.sample_index, lr, result, batches))
        progress.advance(config.global_batch)
        self.run.watchdog.expects("step", "the tasks between two steps")
        self._report(reporter)

    def _report(self, reporter: StepReporter, wait: bool = False) -> None:
        """Log finished steps.  Raises NonFiniteError if this is the only rank.

        Several ranks get it at different times: the first stops all before the next step, as rank 0 cannot save behind
        an incomplete sum.
        """
        try:
            reporter.report(wait)
        except NonFiniteError as error:
            if self.run.ranks.world == 1:
                raise
            self._nonfinite = self._nonfinite or error
            self.run.stop.request(error.exit_code, f"step {error.step} was not finite", logging.ERROR)

    def _accumulate(self, batches: Iterable[tuple[TrainingBatch, NDArray[np.int64]]], last: bool) -> bool:
        """Add the gradients of batches and their timesteps; returns False if memory ran out: then the step must be
        repeated with the smaller `micro_batch`.  Several ranks cannot: some gradients are exchanged by then.
        """
        run, alone = self.run, self.run.ranks.world == 1
        try:
            for batch, t in batches:
                for micro in self._pieces(t):
                    if alone and run.stop.is_overdue():
                        raise StoppedError
                    piece, exchanges = batch.rows(micro), last and micro.stop >= len(t)
                    self.train_step.accumulate(
                        piece.x_0, piece.indices, t[micro], piece.condition, exchanges, piece.eps
                    )
                    if alone and run.device.type != "cpu":
                        self._limit_queue()
            return True
        except Exception as error:
            if not (run.checked.can_halve and alone and self.micro_batch > 1 and is_gpu_memory_error(error)):
                raise
            why = one_line(error, 100)
        self._halve(why)  # outside the handler, which keeps the activations alive
        return False

    def _limit_queue(self) -> None:
        """Wait until the GPU has at most two micro-batches left, as queued ones cannot be dropped after a stop."""
        self._queued.append(new_event(self.run.device))
        self._queued[-1].record()
        if len(self._queued) > 2:
            self._queued.popleft().synchronize()

    def _pieces(self, t: NDArray[np.int64]) -> list[slice]:
        """Slices of a delivered batch."""
        return [slice(first, first + self.micro_batch) for first in range(0, len(t), self.micro_batch)]

    def _halve(self, why: str) -> None:
        """Reduce the micro-batch to its next smaller divisor."""
        run, before = self.run, self.micro_batch
        self.micro_batch = now = next(size for size in range(before - 1, 0, -1) if before % size == 0)
        self.train_step.drop()
        empty_cache()
        step = run.progress.step
        text = (
            f"out of memory in step {step + 1} with micro-batch {before} ({why}); repeating the step and continuing "
            f"with micro-batch {now}: the effective batch and its samples stay the same"
        )
        log.warning("%s", text)
        run.metrics.write("event", event="micro_batch", step=step, text=text, before=before, now=now)

    def _stops_waiting(self) -> bool:
        """Whether to stop waiting for data.  In the middle of a step of several ranks, data get some more time."""
        ranks, stop = self.run.ranks, self.run.stop
        if ranks.stopping is not None:
            stop.request(*ranks.stopping)
        if ranks.failure is not None:
            return True
        return stop.is_requested() and not (self._in_step and ranks.world > 1 and stop.requested_for_s() <= _GRACE_S)

    def _stops(self, clock: StepClock, telemetry: RankTelemetry) -> bool:
        """Whether the run ends before the next step: the same answer on all ranks.  Raises RankError."""
        ranks, stop = self.run.ranks, self.run.stop
        if ranks.world == 1:
            return stop.is_requested()
        self.run.watchdog.expects("ranks", "another rank to begin the step")
        with clock.computing("comm"):
            agreed, messages = ranks.sync_step(stop.pending, telemetry.collect())
        telemetry.record(messages)
        if agreed:
            stop.request(*agreed)
        return agreed is not None

    def _flush_after_error(self, reporter: StepReporter, error: Exception) -> None:
        """After an error, log steps that a GPU has yet to finish, and roll back those that were not applied.

        Raises NonFiniteError: one of them was not finite, which then ends the run.
        """
        nonfinite = error if isinstance(error, NonFiniteError) else None
        hangs = isinstance(error, RankError) and self.run.device.type != "cpu"  # a sum may never complete
        if nonfinite is None and not hangs:
            try:
                reporter.report(wait=True)
            except NonFiniteError as late:
                nonfinite = late
        if nonfinite is not None:
            # Steps launched before this one was noticed were not applied.
            self.run.progress.rewind_to(nonfinite.step, self.run.config.global_batch)
            raise nonfinite

    def _record_events(self, stream: PatchStream) -> None:
        """Record events of the stream, which has logged them."""
        while stream.events:
            event = stream.events.popleft()
            step = self.run.progress.step  # its checkpoint includes the event
            self.run.metrics.write("event", event=event.kind, step=step, text=event.text, **event.fields)
            if event.kind == "quarantine":
                self.run.progress.quarantine(self.run.directory.quarantine, [event.fields])
            elif event.kind == "worker_died":
                worker_died(self.run, self.monitor, stream, event)
