"""What the run does when memory gets short: once half the prefetch and a reader fewer, then save and exit with code 4;
readers that leak are started anew; where it is others whose memory grows, it saves and goes on."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from vesuvius.errors import EXIT_GUARD
from vesuvius.monitor.memory.guard import Order, Rung
from vesuvius.monitor.memory.limits import CONFIGURED_NAME
from vesuvius.monitor.monitor import LoopStatus, Monitor
from vesuvius.stream.options import StreamChanges, StreamOptions, with_less_prefetch
from vesuvius.training.context import RunContext
from vesuvius.training.step.device import DeviceFeed

log = logging.getLogger(__name__)


class GuardActions:
    """Carries out the orders of the memory guard, between two steps.

    Batches do not change: the stream is closed and reopened at the next sample.

    Args:
        patch_bytes: of one sample.

    Attributes:
        reason: why the run was ended; None while it was not.
    """

    def __init__(self, run: RunContext, patch_bytes: int) -> None:
        self._run = run
        self._options = StreamOptions.from_config(run.config.training, run.config.cluster)
        self._patch_bytes = patch_bytes
        self.reason: str | None = None

    @property
    def workers(self) -> int:
        """Readers that there were when the stream was last seen; `autotune.py` changes them too."""
        return self._options.workers

    def exit(self, order: Order) -> None:
        """Request a stop; called in the monitor's thread, so that it also cuts a validation short."""
        self.reason = order.reason
        self._run.stop.ask(EXIT_GUARD, f"memory guard: {order.reason}")

    def obey(self, feed: DeviceFeed, monitor: Monitor, longest_step_s: float) -> bool:
        """Carry out the guard's present order, and tell the monitor how far the run is.

        Args:
            longest_step_s: of the recent steps, without their pauses.

        Returns:
            Whether a checkpoint is to be saved now.
        """
        order, saves = monitor.order, False
        self._options = feed.stream.options
        if order is not None and order.rung == "save":
            log.warning("memory guard: saves a checkpoint, and the run goes on: %s", order.reason)
            self._record(order.rung, order.reason)
            monitor.saved()
            saves = True
        elif order is not None and order.rung != "exit":
            self._reopen(order, feed)
            monitor.carried_out()
        stream, smaller = feed.stream, self._smaller()
        monitor.told = LoopStatus(
            step=self._run.progress.step,
            step_s=longest_step_s,
            readers=stream.reader_memory() if self.workers else {},
            readers_here=stream.readers_here(),
            workers=self.workers,
            can_shrink=(smaller.workers, smaller.prefetch_factor) != (self.workers, self._options.prefetch_factor),
        )
        return saves

    def record_exit(self) -> None:
        """Record that the guard ended the run."""
        self._record("exit", self.reason or "")

    def remedy(self, killer: str) -> str:
        """How to continue with less memory, or with a limit that fits the run."""
        workers = self._smaller().workers
        if workers == self.workers and self._options.prefetch_factor == 1:
            less = (
                f"continue with --resume once more memory is free, or with a smaller data.reader_mib; "
                f"training.workers={workers} and training.prefetch_factor=1 are already the least"
            )
        else:
            less = f"continue with --resume training.workers={workers} training.prefetch_factor=1"
        raised = ", or raise monitor.ram_limit_gib if the machine has more" if killer == CONFIGURED_NAME else ""
        return less + raised

    def _smaller(self) -> StreamOptions:
        """Half the prefetch and a reader fewer; never without readers: what they leak, or hold, the trainer would."""
        workers = max(self.workers - 1, min(self.workers, 1))
        return replace(with_less_prefetch(self._patch_bytes, self._options), workers=workers)

    def _reopen(self, order: Order, feed: DeviceFeed) -> None:
        options = self._options if order.rung == "restart" else self._smaller()
        changes: StreamChanges = {"workers": options.workers, "prefetch_factor": options.prefetch_factor}
        text = ", ".join(f"training.{key}={value}" for key, value in changes.items())
        text = "restarts the readers, which leak" if order.rung == "restart" else text
        log.warning("memory guard: before memory runs out: %s: %s", text, order.reason)
        self._record(order.rung, order.reason, **changes)
        began = time.monotonic()
        feed.reconfigure(**changes)
        self._options = feed.stream.options
        log.info("memory guard: readers restarted in %.1f s", time.monotonic() - began)

    def _record(self, rung: Rung, reason: str, **changes: int) -> None:
        self._run.metrics.write("event", event="guard", step=self._run.progress.step, text=reason, rung=rung, **changes)
