"""The training loop: from the first batch to the last step or a request to stop."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.errors import NonFiniteError, one_line
from vesuvius.loader.device import DeviceBatch, DeviceFeed
from vesuvius.monitor.clock import StepClock, make_clock
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.verdict import Verdict
from vesuvius.stream.feeder import StreamInterrupted
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.stream import PatchStream
from vesuvius.training.actions import Autotuner, GuardActions
from vesuvius.training.checkpoint.save import CheckpointWriter
from vesuvius.training.milestones import Milestones
from vesuvius.training.ranks.failure import RankError
from vesuvius.training.replay import MicroBatch, diagnose
from vesuvius.training.reporting.monitoring import reader_died
from vesuvius.training.reporting.report import Launched, RankNews, StepReporter
from vesuvius.training.request import RunContext
from vesuvius.training.step.conditioner import Conditioner
from vesuvius.training.step.step import TrainStep, learning_rate
from vesuvius.training.validation.validation import Reference

log = logging.getLogger(__name__)

_GRACE_S = 60.0


class Tuner(Protocol):
    """Changes the readers between two steps."""

    def take(self, verdict: Verdict) -> None:
        """Take note of a verdict."""

    def act(self, stream: PatchStream, feed: DeviceFeed, monitor: Monitor, /) -> None:
        """Change what is to be changed now."""


class TrainingLoop:
    """Runs optimizer steps; between two of them it obeys the memory guard, tunes the readers and does what is due.

    `feed` delivers the batches of `job` to the device.
    """

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
        self.job = replace(checked.data.job, notes_dir=str(run.directory.reading.absolute()))
        options = replace(StreamOptions.from_config(config.training, config.cluster), batch_size=run.part.micro_batch)
        conditioner = Conditioner(config.data.labels, facts.greys.conditions, run.device)
        self.feed = DeviceFeed(run.device, options, self.job, facts.greys.volumes, conditioner)
        fixed = checked.fixed
        reference = None if fixed is None else Reference(fixed, facts.greys, conditioner, run.device)
        self.milestones = Milestones(run, train_step, reference, writer)
        train_step.before_update = writer.hold_updates
        self._in_step = False

    def run_steps(self) -> None:
        """Train until the last step or a request to stop.

        Raises:
            NonFiniteError: too many steps in a row were not finite.
            DataError, ConfigError: as `PatchStream`.
        """
        config, progress, stop, watchdog = self.run.config, self.run.progress, self.run.stop, self.run.watchdog
        self.milestones.do_what_is_due()  # what the stop of the previous session cut short
        if progress.step >= config.stop_step:
            return
        watchdog.expects("batch", "the readers to start")
        with self.feed.open(
            first=progress.sample_index,
            stop=progress.sample_index + (config.stop_step - progress.step) * config.global_batch,
            quarantined=progress.quarantined,
            interrupted=self._gives_up,
            resident=self._open_resident(),
        ) as stream:
            clock, news = make_clock(self.run.device), RankNews(self.run)
            self.train_step.timed, again = clock.computing, partial(diagnose, self.train_step, self.feed)
            reporter = StepReporter(self.run, clock, stream, self.monitor, again, news)
            make = self.run.request.make_tuner
            tuner: Tuner = make(self, reporter) if make else Autotuner(self.run, self.job)
            reporter.verdicts.tell(tuner.take)
            try:
                while progress.step < config.stop_step and self._next_step(clock, news, reporter):
                    self._record_events(stream)
                    saves = False
                    with clock.pausing():
                        if not stop.wanted():
                            saves = self.guard_actions.obey(self.feed, self.monitor, reporter.longest_step_s)
                            tuner.act(stream, self.feed, self.monitor)
                    self.milestones.record_saves()
                    if saves or self.milestones.due():
                        reporter.report(wait=True)
                        with clock.pausing():
                            self.milestones.do_what_is_due()
                            if saves:
                                self.milestones.save()
                reporter.finish()
                self.milestones.save()  # written while the readers end: a scheduler may not allow time for both in turn
            except Exception as error:
                self._settle(reporter, error)
                raise
            finally:
                self._record_events(stream)
                watchdog.expects("end of the readers", "them to end")

    def _open_resident(self) -> Resident | None:
        """The copy of the volumes that the ranks of this machine share; None where none is kept."""
        if not self.run.checked.resident_bytes:
            return None
        ranks = self.run.ranks
        try:
            if ranks.local_rank > 0:
                return Resident(self.job, ranks.of_first_here(), ranks.local_world)
            resident = Resident(self.job, sharers=ranks.local_world)
            ranks.tell_here(resident.address)
        except OSError as error:
            log.warning("the volumes are not kept in memory: %s", one_line(error))
            ranks.tell_here("")
            return None
        return resident

    def _next_step(self, clock: StepClock, news: RankNews, reporter: StepReporter) -> bool:
        """Make one step, unless the run is to end before it; returns whether it was made.  Raises RankError."""
        ranks, stop, progress = self.run.ranks, self.run.stop, self.run.progress
        given_up = f"step {progress.step + 1} was waiting for data and is abandoned; --resume does it"
        first = None
        try:
            # Awaited before the ranks agree on the step: where data do not come, all can still stop together.
            if not stop.wanted():
                first = self._next_batch(clock)
        except StreamInterrupted:
            log.info("%s", given_up)
        if self._stops(clock, news):
            return False
        if first is None:
            assert ranks.failure is not None, "only a stop or a failure ends the wait"
            raise ranks.failure
        try:
            self._one_step(clock, reporter, first)
        except StreamInterrupted:
            if ranks.world > 1:  # the others are in the middle of the step
                raise ranks.failure or stop.error(given_up) from None
            log.info("%s", given_up)
            return False
        return True

    def _next_batch(self, clock: StepClock) -> DeviceBatch:
        self.run.watchdog.expects("batch", self.feed.stream.waiting_for)
        batch = self.feed.next(clock)
        self.run.watchdog.expects("step", "the network to compute it")
        return batch

    def _one_step(self, clock: StepClock, reporter: StepReporter, batch: DeviceBatch) -> None:
        """Run one optimizer step over all micro-batches of its global batch, and report the steps that are finished.

        Raises StreamInterrupted: a stop came while a further micro-batch was awaited; the step counts as not begun.
        """
        config, progress = self.run.config, self.run.progress
        lr = learning_rate(progress.step, config.training)
        part = self.run.part
        timesteps = stratified_timesteps(config.seed, progress.step, config.global_batch, config.diffusion.timesteps)
        batches: list[MicroBatch] = []
        for t in np.split(timesteps[part.places], part.accumulate_steps):
            if batches:
                self._in_step = True
                batch = self._next_batch(clock)
                self._in_step = False
            last = len(batches) == part.accumulate_steps - 1
            self.train_step.accumulate(batch.x_0, batch.indices, t, batch.condition, last, batch.eps)
            batches.append((batch.stored, t))
        result = self.train_step.apply(lr)
        clock.step_done()
        reporter.launched(Launched(progress.step + 1, progress.sample_index, lr, result, batches))
        progress.advance(config.global_batch)
        self.run.watchdog.expects("step", "what is done between two steps")
        reporter.report()

    def _gives_up(self) -> bool:
        """Whether to wait no longer for data.  In the middle of a step, where other ranks count on this one, data get
        some time to come."""
        ranks, stop = self.run.ranks, self.run.stop
        if ranks.stopping is not None:
            stop.ask(*ranks.stopping)
        if ranks.failure is not None:
            return True
        return stop.wanted() and not (self._in_step and ranks.world > 1 and stop.wanted_for_s() <= _GRACE_S)

    def _stops(self, clock: StepClock, news: RankNews) -> bool:
        """Whether the run is to end before the next step: all ranks come to the same answer.  Raises RankError."""
        ranks, stop = self.run.ranks, self.run.stop
        if ranks.world == 1:
            return stop.wanted()
        self.run.watchdog.expects("ranks", "another rank to begin the step")
        with clock.computing("comm"):
            agreed, told = ranks.agree(stop.asked, news.tell())
        news.take(told)
        if agreed:
            stop.ask(*agreed)
        return agreed is not None

    def _settle(self, reporter: StepReporter, error: Exception) -> None:
        """After an error, log the steps that a GPU still has in hand, and take back those that were not applied.

        Raises NonFiniteError: one of those steps was not finite; that is then what ends the run.
        """
        nonfinite = error if isinstance(error, NonFiniteError) else None
        hangs = isinstance(error, RankError) and self.run.device.type == "cuda"  # after a sum that never completes
        if nonfinite is None and not hangs:
            try:
                reporter.report(wait=True)
            except NonFiniteError as late:
                nonfinite = late
        if nonfinite is not None:
            # Steps launched before this one was noticed have not been applied.
            self.run.progress.go_back_to(nonfinite.step, self.run.config.global_batch)
            raise nonfinite

    def _record_events(self, stream: PatchStream) -> None:
        """Write down the events of the stream, which has logged them."""
        while stream.events:
            event = stream.events.popleft()
            step = self.run.progress.step  # whose checkpoint knows of it
            self.run.metrics.write("event", event=event.kind, step=step, text=event.text, **event.fields)
            if event.kind == "quarantine":
                self.run.progress.quarantine(self.run.directory.quarantine, [event.fields])
            elif event.kind == "reader_died":
                reader_died(self.run, self.monitor, stream, event)
