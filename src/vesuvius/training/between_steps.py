"""Tasks between two steps: orders of the memory guard (docs/monitoring.md), validation, preview and checkpoint.

A task interrupted by a stop is repeated on resume, so an interrupted run leaves the same records as an undisturbed one.
"""

import logging
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

from vesuvius.errors import EXIT_GUARD, StorageError, disk_remedy, one_line
from vesuvius.loader.device import DeviceFeed
from vesuvius.monitor.memory.guard import Action, LoopStatus, Order
from vesuvius.monitor.memory.limits import CONFIGURED_NAME
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.probes.vram import is_gpu_memory_error
from vesuvius.stream.options import StreamChanges, StreamOptions
from vesuvius.training.checkpoint.progress import Best
from vesuvius.training.checkpoint.save import CheckpointWriter
from vesuvius.training.checkpoint.start import run_state
from vesuvius.training.request import RunContext
from vesuvius.training.step.step import TrainStep
from vesuvius.training.validation.pictures import make_preview
from vesuvius.training.validation.validation import ValidationPatches, validate

log = logging.getLogger(__name__)


class PeriodicTasks:
    """Validates on all ranks together, and on rank 0 makes previews and saves.  `reference` is for the first two."""

    def __init__(
        self, run: RunContext, train_step: TrainStep, reference: ValidationPatches | None, writer: CheckpointWriter
    ) -> None:
        self._run, self._progress, self._train_step = run, run.progress, train_step
        self._reference, self._writer = reference, writer
        self._saved = self._done()  # last state passed to the writer, also in an earlier session

    def is_scheduled(self) -> bool:
        progress, config = self._progress, self._run.config
        alone = self._run.ranks.is_main and (progress.preview_due(config) or self._save_due())
        return alone or progress.validation_due(config)

    def run_scheduled(self) -> None:
        """Validate, preview and save as scheduled after the current step, which must have been reported."""
        progress, config, stop, improved = self._progress, self._run.config, self._run.stop, False
        if not self.is_scheduled():
            return
        ranks = self._run.ranks
        # With several ranks, a rank that is to stop still takes part and announces the stop.
        if progress.validation_due(config) and (ranks.world > 1 or not stop.is_requested()):
            improved = self._validate()
        if not ranks.is_main:
            return
        if progress.preview_due(config) and not stop.is_requested():
            self._preview()
        if improved or self._save_due():
            self.save()

    def run_all_now(self) -> None:
        """Validate and save now, so that memory reaches its peak.  Raises StorageError."""
        if self._reference is not None and self._reference.held_out and self._run.ranks.is_main:
            self._validate()
        if (failure := self.save_last()) is not None:
            raise failure

    def save(self) -> None:
        """Pass a checkpoint to the writer unless it already has this one.  Does not wait for the disk."""
        run, progress = self._run, self._progress
        if self._saved != self._done() and run.ranks.is_main:
            self._saved = self._done()
            run.watchdog.expects("checkpoint", "the disk")
            state = run_state(run.config, run.checked.data, run.checked.facts, self._train_step, progress)
            self._writer.save(progress.step, state)

    def save_last(self) -> StorageError | None:
        """Save the current step unless already saved, and wait for the disk; returns why the last save failed."""
        self.save()
        if self._run.ranks.is_main:
            self._run.watchdog.expects("checkpoint", "the disk")
        failure = self._writer.wait()
        self.record_saves()
        return failure

    def save_after_error(self) -> int | None:
        """Save after an error, which stays the one to report; returns the saved step."""
        if not self._run.ranks.is_main:
            return None
        try:
            return None if self.save_last() else self._progress.step
        except Exception:
            log.exception("could not save a checkpoint after step %d", self._progress.step)
            return None

    def record_saves(self) -> None:
        while self._writer.ended:
            ended = self._writer.ended.popleft()
            failed = {"event": "save_failed"} if "text" in ended else {}
            self._run.metrics.write("event" if failed else "checkpoint", **failed, **ended)

    def _save_due(self) -> bool:
        """Whether to save: at multiples of `save_every`, or if validation or preview came after its checkpoint."""
        step = self._progress.step
        is_multiple = step % self._run.config.training.save_every == 0
        return self._saved != self._done() and (is_multiple or self._saved[0] == step)

    def _done(self) -> tuple[int, int, int]:
        return self._progress.step, self._progress.validated_step, self._progress.previewed_step

    def _stops(self, awaited: str) -> bool:
        """Whether to interrupt a validation or preview; polled before each part of it."""
        run = self._run
        run.watchdog.expects(awaited, "the network")
        if (stop := run.stop.pending()) is not None:
            run.ranks.announce_stop(stop)
        return run.stop.is_requested() or run.ranks.stopping is not None or run.ranks.failure is not None

    def _validate(self) -> bool:
        """Validate all sets of weights; returns whether the EMA weights have a new best error."""
        assert self._reference is not None
        assert self._reference.held_out
        started, progress, step, ranks = time.monotonic(), self._progress, self._train_step, self._run.ranks
        denoisers = {name: step.denoiser(name) for name in step.weight_names}
        spectrum, stop = self._run.checked.facts.spectrum, partial(self._stops, "batch of a validation")
        result = validate(self._run.config, self._reference, step.schedule, spectrum, denoisers, stop, ranks)
        if result is None:
            return False
        error, before = result.relative_error, progress.best
        improved = math.isfinite(error) and (before is None or error < before.relative_error)
        best = progress.best = Best(progress.step, error) if improved else before
        progress.validated_step = progress.step
        if not ranks.is_main:
            return improved
        self._run.metrics.write(
            "validation",
            step=progress.step,
            samples_total=progress.sample_index,
            seconds=time.monotonic() - started,
            best_step=best.step if best else None,
            **result.record(),
        )
        so_far = f"best so far {best.relative_error:.4f} at step {best.step}" if best else "none finite yet"
        log.info("%s, %s", result.line(progress.step, self._run.config.stop_step), so_far)
        return improved

    def _preview(self) -> None:
        assert self._reference is not None
        run, started, progress = self._run, time.monotonic(), self._progress
        try:
            record = make_preview(
                run.config,
                run.directory.path,
                progress.step,
                self._train_step.denoiser("ema"),
                self._train_step.schedule,
                self._reference,
                run.checked.facts.voxel_size_um,
                partial(self._stops, "sampling step of a preview"),
            )
        except Exception as error:
            if not (isinstance(error, OSError) or is_gpu_memory_error(error)):  # such as a full disk
                raise
            remedy = disk_remedy(error) if isinstance(error, OSError) else "training.preview_every=0 skips previews"
            text = "no preview of step %d: %s; %s; training continues"
            log.error(text, progress.step, why := one_line(error), remedy)
            run.metrics.write("event", event="preview_failed", step=progress.step, text=why)
            progress.previewed_step = progress.step
            return
        if record is None:
            return
        progress.previewed_step = progress.step
        seconds = time.monotonic() - started
        run.metrics.write("preview", step=progress.step, samples_total=progress.sample_index, seconds=seconds, **record)
        log.info("wrote %s", run.directory.path / record["picture"])


class GuardActions:
    """Executes the orders of the memory guard; `reason` says why it ended the run, or is None."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._options = StreamOptions.from_config(run.config.training, run.config.cluster)  # as last seen
        self._kept = False  # whether volumes were
        self._readers_again = self._options.num_processes  # readers without them
        self.reason: str | None = None

    def exit(self, order: Order) -> None:
        """Request a stop; called in the monitor's thread, so that it also interrupts a validation."""
        self.reason = order.reason
        self._run.stop.request(EXIT_GUARD, f"memory guard: {order.reason}", logging.ERROR)

    def execute(self, feed: DeviceFeed, monitor: Monitor, longest_step_s: float) -> None:
        """Execute the guard's pending order, and report the loop's status to the monitor."""
        order, self._options = monitor.order, feed.stream.options
        self._kept = self._kept or feed.stream.has_resident
        self._readers_again = feed.stream.num_readers_without_resident
        if order is not None and order.action != "exit":
            self._reopen(order, feed)
            monitor.carried_out()
        stream, workers, smaller = feed.stream, self._options.num_processes, self._smaller()
        monitor.loop_status = LoopStatus(
            step=self._run.progress.step,
            step_s=longest_step_s,
            readers=stream.reader_memory() if workers else {},
            local_readers=stream.local_readers(),
            workers=workers,
            can_drop=stream.resident_frees_memory,
            can_shrink=(smaller.num_processes, smaller.prefetch_factor) != (workers, self._options.prefetch_factor),
        )

    def record_exit(self, limit_name: str) -> tuple[str, str]:
        """Record that the guard ended the run; returns why, and how to continue with less memory or a higher limit."""
        assert self.reason is not None
        self._record("exit", self.reason)
        again = self._readers_again
        self._options = replace(self._options, num_workers=again, processes=again > 0)
        workers, kept = self._smaller().num_workers, "data.resident=0 " if self._kept else ""
        remedy = f"continue with --resume {kept}training.workers={workers} training.prefetch_factor=1"
        if not kept and workers == self._options.num_workers and self._options.prefetch_factor == 1:
            remedy = (
                "continue with --resume once more memory is free, or with a smaller data.regions_in_flight; "
                f"training.workers={workers} and training.prefetch_factor=1 are already minimal"
            )
        raised = ", or raise monitor.ram_limit_gib if the machine has more" if limit_name == CONFIGURED_NAME else ""
        return self.reason, remedy + raised

    def _smaller(self) -> StreamOptions:
        """Return half the prefetch and one reader less, but at least one: its memory would move to the trainer."""
        workers = max(self._options.num_workers - 1, min(self._options.num_workers, 1))
        return replace(self._options, num_workers=workers, prefetch_factor=max(self._options.prefetch_factor // 2, 1))

    def _reopen(self, order: Order, feed: DeviceFeed) -> None:
        """Reopen the stream with less memory at the next sample; no batch changes."""
        options, again = self._smaller() if order.action == "shrink" else self._options, self._readers_again
        changes: StreamChanges = {"num_workers": options.num_workers, "prefetch_factor": options.prefetch_factor}
        text = f"training.workers={options.num_workers}, training.prefetch_factor={options.prefetch_factor}"
        if order.action == "restart":
            text = "restarting leaking workers"
        if order.action == "drop":
            changes = {"num_workers": again, "processes": again > 0, "cache_in_memory": False}
            text = "dropping the volumes kept in memory; they are read again (data.resident=0)"
        log.warning("memory guard: %s: %s", text, order.reason)
        self._record(order.action, order.reason, **changes)
        began = time.monotonic()
        feed.stream.reconfigure(**changes)
        self._options = feed.stream.options
        log.info("memory guard: workers restarted in %.1f s", time.monotonic() - began)

    def _record(self, action: Action, reason: str, **changes: Any) -> None:
        self._run.metrics.write(
            "event", event="guard", step=self._run.progress.step, text=reason, action=action, **changes
        )
