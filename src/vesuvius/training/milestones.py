"""What happens between two steps: validation, preview and checkpoint, each at the steps where it is due.

What a stop cuts short is due again on resume, so an interrupted run leaves the same records as one that was not.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.errors import StorageError
from vesuvius.training.checkpoint.progress import Best
from vesuvius.training.checkpoint.writer import CheckpointWriter
from vesuvius.training.context import RunContext
from vesuvius.training.step.step import TrainStep
from vesuvius.training.validation.preview import make_preview
from vesuvius.training.validation.reference import Reference
from vesuvius.training.validation.validation import Validation

log = logging.getLogger(__name__)


class Milestones:
    """Validates, draws previews and saves checkpoints after the steps where they are due: on rank 0, nothing on others.

    Args:
        reference: fixed patches; None where the config asks for neither validation nor previews.
        spectrum: of the data.
        state: returns all that a checkpoint holds.
    """

    def __init__(
        self,
        run: RunContext,
        train_step: TrainStep,
        reference: Reference | None,
        spectrum: Spectrum,
        writer: CheckpointWriter,
        state: Callable[[], dict[str, Any]],
    ) -> None:
        self._run = run
        self._config = run.config
        self._progress = run.progress
        self._metrics = run.metrics
        self._train_step = train_step
        self._reference = reference
        self._writer = writer
        self._state = state
        self._handed = self._done()  # to the writer, in this session or the one before
        self._validation: Validation | None = None
        if reference is not None and reference.held_out:
            self._validation = Validation(run.config, reference, train_step.schedule, spectrum, run.device)

    def due(self) -> bool:
        """Whether `do_what_is_due` has something to do."""
        progress, config = self._progress, self._config
        due = progress.validation_due(config) or progress.preview_due(config) or self._save_due()
        return due and self._run.ranks.is_main

    def do_what_is_due(self) -> None:
        """Validate, draw and save after the present step, whose figures must have been reported."""
        progress, improved = self._progress, False
        if not self.due():
            return
        if progress.validation_due(self._config) and not self._run.stop.wanted():
            with self._timed("validation"):
                improved = self._validate()
        if progress.preview_due(self._config) and not self._run.stop.wanted():
            with self._timed("preview"):
                self._preview()
        if improved or self._save_due():
            with self._timed("save"):
                self.save()

    def rehearse(self) -> None:
        """Validate and save, due or not, so that memory peaks as it will.

        Raises StorageError: the checkpoint cannot be written.
        """
        if not self._run.ranks.is_main:
            return
        if self._validation is not None:
            self._validate()
        if (failure := self.save_last()) is not None:
            raise failure

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Note for the time left what one takes, unless it is cut short."""
        started = time.monotonic()
        yield
        if not self._run.stop.wanted():
            self._progress.note_pause(what, time.monotonic() - started)

    def save_last(self) -> StorageError | None:
        """Save the present step, unless that has been done, and wait for the disk; returns why the last save failed."""
        self.save()
        if self._run.ranks.is_main:
            self._run.watchdog.expects("checkpoint", "the disk")
        failure = self._writer.wait()
        self.record_saves()
        return failure

    def save_after_error(self) -> int | None:
        """Save what there is, and return its step; the error on its way out is the one to report."""
        if not self._run.ranks.is_main:
            return None
        try:
            return None if self.save_last() else self._progress.step
        except Exception:
            log.exception("no checkpoint could be saved after step %d", self._progress.step)
            return None

    def record_saves(self) -> None:
        """Record which checkpoints were saved, and which could not be; the writer has logged them."""
        while self._writer.saved:
            saved = self._writer.saved.popleft()
            self._progress.note_pause("write", saved["seconds"])
            self._metrics.write("checkpoint", **saved)
        while self._writer.failures:
            step, text = self._writer.failures.popleft()
            self._metrics.write("event", event="save_failed", step=step, text=text)

    def save(self) -> None:
        """Hand a checkpoint to the writer, unless it has this one.  Does not wait for the disk."""
        best = self._progress.best
        if self._handed != self._done() and self._run.ranks.is_main:
            self._handed = self._done()
            self._run.watchdog.expects("checkpoint", "the disk")
            self._writer.save(self._progress.step, self._state(), best.step if best else None)

    def _alive_and_stopping(self, what: str) -> bool:
        """Whether to stop, which is asked before each `what`."""
        self._run.watchdog.expects(what, "the network")
        ranks = self._run.ranks
        return self._run.stop.wanted() or ranks.stopping is not None or ranks.failure is not None

    def _save_due(self) -> bool:
        """At multiples of `save_every`, and where this step's checkpoint lacks a validation or preview made since."""
        step = self._progress.step
        at_its_time = step % self._config.training.save_every == 0
        return self._handed != self._done() and (at_its_time or self._handed[0] == step)

    def _done(self) -> tuple[int, int, int]:
        """What tells one checkpoint from another."""
        return self._progress.step, self._progress.validated_step, self._progress.previewed_step

    def _validate(self) -> bool:
        """Validate all sets of weights; returns whether the EMA weights have a new best error."""
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
                self._run.directory.path,
                step,
                self._train_step.denoiser("ema"),
                self._train_step.schedule,
                self._reference,
                lambda: self._alive_and_stopping("sampling step of a preview"),
            )
        except OSError as error:  # a full disk: no reason to end a run
            log.error(
                "a preview must be writable; got %s; free some space: the run continues without that of step %d",
                error,
                step,
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
        log.info("wrote %s", self._run.directory.path / record["picture"])
