"""Changes to the readers between two steps, by the memory guard or, with `training.autotune: act`, by a verdict.

The stream is closed and reopened at the next sample, so no batch changes.  When memory runs short, the run first drops
the volumes kept in memory, then once halves the prefetch and stops a reader, then saves and exits with code 4.  Leaking
readers are restarted; if other processes are growing, the run saves and continues.  No verdict adds readers or prefetch
while memory is short, or beyond what the guard would leave.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vesuvius.errors import EXIT_GUARD, ConfigError
from vesuvius.loader.device import DeviceFeed
from vesuvius.monitor.memory.guard import Action, LoopStatus, Order
from vesuvius.monitor.memory.limits import CONFIGURED_NAME, left_bytes
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.verdict import Verdict
from vesuvius.runlog.units import format_size
from vesuvius.stream.options import StreamChanges, StreamOptions, batches_ahead, store_peak_bytes
from vesuvius.training.reporting.verdicts import Verdicts
from vesuvius.training.request import RunContext

log = logging.getLogger(__name__)

# The readers of two Ray Data executions overlap during the handover.
_READERS_AT_ONCE = 2


class GuardActions:
    """Executes the orders of the memory guard; `reason` says why it ended the run, or is None."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._options = StreamOptions.from_config(run.config.training, run.config.cluster)  # as last seen
        self._kept, self._readers_again = False, self._options.workers  # whether volumes were, and readers without them
        self.reason: str | None = None

    def exit(self, order: Order) -> None:
        """Request a stop; called in the monitor's thread, so that it also interrupts a validation."""
        self.reason = order.reason
        self._run.stop.request(EXIT_GUARD, f"memory guard: {order.reason}", logging.ERROR)

    def execute(self, feed: DeviceFeed, monitor: Monitor, longest_step_s: float) -> None:
        """Execute the guard's pending order, and report the loop's status to the monitor.

        `longest_step_s`: of recent steps, without pauses.
        """
        order, self._options = monitor.order, feed.stream.options
        self._kept = self._kept or feed.stream.has_resident
        self._readers_again = feed.stream.num_readers_without_resident
        if order is not None and order.action != "exit":
            self._reopen(order, feed)
            monitor.carried_out()
        stream, workers, smaller = feed.stream, self._options.workers, self._smaller()
        monitor.loop_status = LoopStatus(
            step=self._run.progress.step,
            step_s=longest_step_s,
            readers=stream.reader_memory() if workers else {},
            local_readers=stream.local_readers(),
            workers=workers,
            can_drop=stream.resident_frees_memory,
            can_shrink=(smaller.workers, smaller.prefetch_factor) != (workers, self._options.prefetch_factor),
        )

    def record_exit(self, limit_name: str) -> tuple[str, str]:
        """Record that the guard ended the run; returns why, and how to continue with less memory or a higher limit."""
        assert self.reason is not None
        self._record("exit", self.reason)
        self._options = replace(self._options, workers=self._readers_again)
        workers, kept = self._smaller().workers, "data.resident=0 " if self._kept else ""
        remedy = f"continue with --resume {kept}training.workers={workers} training.prefetch_factor=1"
        if not kept and workers == self._options.workers and self._options.prefetch_factor == 1:
            remedy = (
                "continue with --resume once more memory is free, or with a smaller data.regions_in_flight; "
                f"training.workers={workers} and training.prefetch_factor=1 are already minimal"
            )
        raised = ", or raise monitor.ram_limit_gib if the machine has more" if limit_name == CONFIGURED_NAME else ""
        return self.reason, remedy + raised

    def _smaller(self) -> StreamOptions:
        """Return half the prefetch and one reader less, but at least one: its memory would move to the trainer."""
        workers = max(self._options.workers - 1, min(self._options.workers, 1))
        return replace(self._options, workers=workers, prefetch_factor=max(self._options.prefetch_factor // 2, 1))

    def _reopen(self, order: Order, feed: DeviceFeed) -> None:
        options = self._smaller() if order.action == "shrink" else self._options
        changes: StreamChanges = {"workers": options.workers, "prefetch_factor": options.prefetch_factor}
        text = ", ".join(f"training.{key}={value}" for key, value in changes.items())
        if order.action == "restart":
            text = "restarting leaking readers"
        if order.action == "drop":
            changes = {"workers": self._readers_again, "resident": False}
            text = "dropping the volumes kept in memory; they are read again (data.resident=0)"
        log.warning("memory guard: %s: %s", text, order.reason)
        self._record(order.action, order.reason, **changes)
        began = time.monotonic()
        feed.stream.reconfigure(**changes)
        self._options = feed.stream.options
        log.info("memory guard: readers restarted in %.1f s", time.monotonic() - began)

    def _record(self, action: Action, reason: str, **changes: Any) -> None:
        self._run.metrics.write(
            "event", event="guard", step=self._run.progress.step, text=reason, action=action, **changes
        )


class Autotuner:
    """Applies the advice of a session's verdicts, as far as a running stream can."""

    def __init__(self, run: RunContext, feed: DeviceFeed, monitor: Monitor, verdicts: Verdicts) -> None:
        self._run, self._feed, self._monitor, self._verdicts = run, feed, monitor, verdicts
        self._seen: Verdict | None = None
        self._refused: set[tuple[str, ...]] = set()  # overrides that were refused and are not retried

    def apply(self) -> None:
        """Apply the last verdict if it is new and `training.autotune` is `act`."""
        before, verdict = self._feed.stream.options, self._verdicts.last
        if verdict is None or verdict is self._seen or self._run.config.training.autotune == "off":
            return
        self._seen, changes = verdict, changes_of(verdict.overrides, before)
        if not changes or verdict.overrides in self._refused:
            return
        refused = self._refusal(replace(before, **changes))
        if not refused:
            try:
                self._feed.stream.reconfigure(**changes)
                self._monitor.readers_changed()
            except ConfigError as error:
                if self._feed.stream.options is not before:  # already changed
                    raise
                refused = str(error)
        override = " ".join(verdict.overrides)
        text = f"autotune: {override}: {verdict.evidence}"
        if refused:
            self._refused.add(verdict.overrides)
            text = f"autotune skipped {override}: {refused}; {verdict.evidence}"
        log.info("%s", text)
        fields = {"override": override, "refused": refused or None}
        self._run.metrics.write("event", event="autotune", step=self._run.progress.step, text=text, **fields)

    def _refusal(self, options: StreamOptions) -> str:
        """Return why memory does not suffice for the options; '' if it does."""
        stream, job = self._feed.stream, self._feed.job
        now = stream.options
        peaks = [figures.rss_anon_peak_bytes or 0 for figures in list(stream.readers.values())]
        readers = max(options.workers - now.workers, 0) * max(peaks, default=0)
        store = max(store_peak_bytes(job, options) - store_peak_bytes(job, now), 0)
        batches = batches_ahead(options) - batches_ahead(now)
        need_bytes = _READERS_AT_ONCE * (readers + store) + max(batches, 0) * self._feed.batch_bytes
        # All ranks of a node may act at the same time.
        left = left_bytes(self._monitor.risk.limits, self._run.session.limits) // self._run.ranks.local_world
        if need_bytes <= max(left, 0):
            return ""
        return f"it needs {format_size(need_bytes)} more, but only {format_size(max(left, 0))} are free"


def changes_of(overrides: Sequence[str], options: StreamOptions) -> StreamChanges:
    """The overrides of a verdict that a running stream can apply; may be empty.  Pure.

    No readers are started if the trainer reads the data itself, because Ray is not running.
    """
    changes: StreamChanges = {}
    for key, _, value in (override.partition("=") for override in overrides):
        match key:
            case "training.workers" if options.workers:
                changes["workers"] = int(value)
            case "training.prefetch_factor":
                changes["prefetch_factor"] = int(value)
            case "data.store.requests":
                changes["requests"] = int(value)
    return changes
