"""What the run does when memory gets short: fewer batches ahead, fewer readers, then save and end with exit code 4."""

from __future__ import annotations

import logging
import os
import time

from vesuvius.config import Config
from vesuvius.data.stream import PatchStream
from vesuvius.engine.progress import Progress
from vesuvius.engine.stop import StopRequest
from vesuvius.errors import EXIT_GUARD
from vesuvius.observe.metrics import Metrics
from vesuvius.observe.monitor import Monitor, Told
from vesuvius.observe.risk.guard import Order

log = logging.getLogger(__name__)

_RECENT_STEPS = 10


class MemoryActs:
    """Carries out the orders of the memory guard, between two steps.

    Batches do not change: the stream is closed and opened again at the next sample.

    Attributes:
        workers: readers that there are now.
        reason: why the run was ended; None while it was not.
    """

    def __init__(self, config: Config, stop: StopRequest, metrics: Metrics, progress: Progress) -> None:
        self.workers = config.training.workers
        self._prefetch_factor = config.training.prefetch_factor
        self._stop = stop
        self._metrics = metrics
        self._progress = progress
        self._order: Order | None = None
        self.reason: str | None = None

    def take(self, order: Order) -> None:
        """Note an order; called in the monitor's thread.  To exit is not left for later: a validation looks at it."""
        if order.rung == "exit":
            self.reason = order.reason
            self._stop.ask(EXIT_GUARD, f"memory guard: {order.reason}")
        self._order = order

    def obey(self, stream: PatchStream, monitor: Monitor) -> None:
        """Do what was ordered since the last step, and tell the monitor how far the run is."""
        order, self._order = self._order, None
        if order is not None:
            self._carry_out(order, stream)
            monitor.carried_out()
        monitor.told = Told(
            step=self._progress.step,
            step_s=max(list(self._progress.pace)[-_RECENT_STEPS:], default=0.0),
            readers=stream.reader_memory() if self.workers else {},
            prefetch_left=self._prefetch_factor > 1,
            workers_left=self.workers > 1,
        )

    def remedy(self) -> str:
        """How to start again with less memory."""
        if self.workers == 0 and self._prefetch_factor == 1:
            return (
                "go on with --resume where more memory is free; with training.workers=0 and training.prefetch_factor=1 "
                "the readers need no less"
            )
        return f"go on with --resume training.workers={max(self.workers - 1, 0)} training.prefetch_factor=1"

    def _carry_out(self, order: Order, stream: PatchStream) -> None:
        changed = {}
        if order.rung == "prefetch":
            self._prefetch_factor = max(self._prefetch_factor // 2, 1)
            changed = {"prefetch_factor": self._prefetch_factor}
        elif order.rung == "worker":
            self.workers = max(self.workers - 1, 1)
            changed = {"workers": self.workers}
        text = ", ".join(f"training.{key}={value}" for key, value in changed.items()) or "save and exit"
        log.warning("memory guard: before the run is out of memory: %s: %s", text, order.reason)
        self._metrics.write(
            "event",
            event="guard",
            step=self._progress.step,
            text=order.reason,
            rung=order.rung,
            pid=os.getpid(),
            **changed,
        )
        if changed:
            began = time.monotonic()
            stream.reconfigure(**changed)
            log.info("memory guard: readers started anew in %.1f s", time.monotonic() - began)
