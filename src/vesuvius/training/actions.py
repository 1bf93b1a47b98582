"""The memory guard's changes to the readers between two steps.

The stream is closed and reopened at the next sample, so no batch changes.  When memory runs short, the run first drops
the volumes kept in memory, then once halves the prefetch and stops a reader, then saves and exits with code 4.  Leaking
readers are restarted.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from vesuvius.errors import EXIT_GUARD
from vesuvius.loader.device import DeviceFeed
from vesuvius.monitor.memory.guard import Action, LoopStatus, Order
from vesuvius.monitor.memory.limits import CONFIGURED_NAME
from vesuvius.monitor.monitor import Monitor
from vesuvius.stream.options import StreamChanges, StreamOptions
from vesuvius.training.request import RunContext

log = logging.getLogger(__name__)


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
        """Execute the guard's pending order, and report the loop's status to the monitor."""
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
