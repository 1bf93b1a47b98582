"""What happens between two steps: validation, preview and checkpoint, each at the steps where it is due.

Whatever a stop has cut short is due again when the run is resumed, so that the records of a run that was interrupted
are those of one that was not.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from vesuvius.config import Config
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.engine.checkpoint_writer import CheckpointWriter
from vesuvius.engine.preview import make_preview
from vesuvius.engine.progress import Best, Progress
from vesuvius.engine.reference import Reference
from vesuvius.engine.run_dir import RunDir
from vesuvius.engine.step import TrainStep
from vesuvius.engine.validation import Validation
from vesuvius.errors import StorageError
from vesuvius.observe.metrics import Metrics
from vesuvius.observe.watchdog import Watchdog

log = logging.getLogger(__name__)


class Milestones:
    """Validates, draws previews and saves behind the steps where that is due.

    Args:
        reference: fixed patches; None where the config wants neither validation nor previews.
        progress: of the run; what is done is noted there.
        writer: of the checkpoints.
        state: returns all that a checkpoint holds.
        stopping: whether the run should save and end; looked at often.
        watchdog: learns what the loop waits for.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDir,
        train_step: TrainStep,
        schedule: Schedule,
        spectrum: Spectrum,
        reference: Reference | None,
        progress: Progress,
        metrics: Metrics,
        writer: CheckpointWriter,
        state: Callable[[], dict[str, Any]],
        stopping: Callable[[], bool],
        watchdog: Watchdog,
    ) -> None:
        self._config = config
        self._directory = directory
        self._train_step = train_step
        self._schedule = schedule
        self._reference = reference
        self._progress = progress
        self._metrics = metrics
        self._writer = writer
        self._state = state
        self._stopping = stopping
        self._watchdog = watchdog
        self._prepared = False
        self._handed = self._done()  # to the writer, in this session or the one before
        self._validation: Validation | None = None
        if reference is not None and reference.held_out:
            self._validation = Validation(config, reference, schedule, spectrum, schedule.device)

    def due(self) -> bool:
        """Whether `do_what_is_due` has something to do."""
        progress, config = self._progress, self._config
        return progress.validation_due(config) or progress.preview_due(config) or self._save_due()

    def do_what_is_due(self) -> None:
        """Validate, draw and save behind the present step, whose figures must have been reported."""
        progress, improved = self._progress, False
        if progress.validation_due(self._config) and not self._stopping():
            improved = self._validate()
        if progress.preview_due(self._config) and not self._stopping():
            self._preview()
        if improved or self._save_due():
            self.save()

    def prepare(self) -> None:
        """Behind the first step of a session, when the optimizer has its state: make room for copies of it."""
        if not self._prepared:
            self._prepared = True
            self._writer.prepare(self._state())

    def save_last(self) -> StorageError | None:
        """Save the present step, unless that has been done, and wait for the disk; returns why the last save failed."""
        self.save()
        self._watchdog.expects("checkpoint", "the disk")
        failure = self._writer.wait()
        self.record_failures()
        return failure

    def save_after_error(self) -> int | None:
        """Save what there is, and return its step; the error on its way out is the one to report."""
        try:
            return None if self.save_last() else self._progress.step
        except Exception:
            log.exception("no checkpoint could be saved behind step %d", self._progress.step)
            return None

    def record_failures(self) -> None:
        """Write down which saves have failed; the writer has logged them."""
        while self._writer.failures:
            step, text = self._writer.failures.popleft()
            self._metrics.write("event", event="save_failed", step=step, text=text)

    def save(self) -> None:
        """Hand a checkpoint to the writer, unless it has this one.  Does not wait for the disk."""
        best = self._progress.best
        if self._handed != self._done():
            self._handed = self._done()
            self._watchdog.expects("checkpoint", "the disk")
            self._writer.save(self._progress.step, self._state(), best.step if best else None)

    def _alive_and_stopping(self, what: str) -> bool:
        """Whether to stop, which is asked before each `what`."""
        self._watchdog.expects(what, "the network")
        return self._stopping()

    def _save_due(self) -> bool:
        """At every multiple, and where the checkpoint of this step does not know of what was made up for."""
        step = self._progress.step
        at_its_time = step % self._config.training.save_every == 0
        return self._handed != self._done() and (at_its_time or self._handed[0] == step)

    def _done(self) -> tuple[int, int, int]:
        """What tells one checkpoint from another."""
        return self._progress.step, self._progress.validated_step, self._progress.previewed_step

    def _validate(self) -> bool:
        """Validate all sets of weights; returns whether the averaged ones have never been better."""
        assert self._validation is not None
        started, progress = time.monotonic(), self._progress
        denoisers = {name: self._train_step.denoiser(name) for name in self._train_step.weight_names}
        result = self._validation.run(denoisers, lambda: self._alive_and_stopping("batch of a validation"))
        if result is None:
            return False
        error = result.relative_error
        improved = math.isfinite(error) and (progress.best is None or error < progress.best.relative_error)
        if improved:
            progress.best = Best(progress.step, error)
        progress.validated_step = progress.step
        self._metrics.write(
            "validation",
            step=progress.step,
            samples_total=progress.sample_index,
            seconds=time.monotonic() - started,
            best_step=progress.best.step if progress.best else None,
            **result.record(),
        )
        best = "none finite yet"
        if progress.best:
            best = f"best so far {progress.best.relative_error:.4f} at step {progress.best.step}"
        log.info("%s, %s", result.line(progress.step, self._config.stop_step), best)
        return improved

    def _preview(self) -> None:
        assert self._reference is not None
        started, step = time.monotonic(), self._progress.step
        try:
            record = make_preview(
                self._config,
                self._directory.path,
                step,
                self._train_step.denoiser("ema"),
                self._schedule,
                self._reference,
                lambda: self._alive_and_stopping("sampling step of a preview"),
            )
        except OSError as error:  # a full disk: no reason to end a run
            log.error(
                "a preview must be writable; got %s; free some space: the run goes on without that of %d", error, step
            )
            self._metrics.write("event", event="preview_failed", step=step, text=str(error))
            self._progress.previewed_step = step
            return
        if record is None:
            return
        self._progress.previewed_step = step
        self._metrics.write(
            "preview",
            step=step,
            samples_total=self._progress.sample_index,
            seconds=time.monotonic() - started,
            **record,
        )
        log.info("wrote %s", self._directory.path / record["picture"])
