"""What the run does when memory gets short: fewer batches ahead, fewer readers, then save and end with exit code 4."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from vesuvius.config import Config
from vesuvius.engine.progress import Progress
from vesuvius.engine.stop import StopRequest
from vesuvius.errors import EXIT_GUARD
from vesuvius.observe.metrics import Metrics
from vesuvius.observe.monitor import Monitor, Told
from vesuvius.observe.risk.guard import Order, Rung
from vesuvius.observe.risk.killers import CONFIGURED_NAME
from vesuvius.stream.options import StreamChanges, StreamOptions, batches_ahead, with_less_prefetch
from vesuvius.stream.stream import PatchStream

log = logging.getLogger(__name__)


class MemoryActs:
    """Carries out the orders of the memory guard, between two steps.

    Batches do not change: the stream is closed and opened again at the next sample.  How it is run now, the stream
    says: `autotune.py` changes it too.

    Args:
        patch_bytes: of one sample.
        pinned: the batches ahead lie in a ring of pinned buffers, on a GPU, which torch may keep: fewer of them are not
            counted on to free anything.

    Attributes:
        workers: readers that there were when the stream was last seen.
        reason: why the run was ended; None while it was not.
    """

    def __init__(
        self,
        config: Config,
        stop: StopRequest,
        metrics: Metrics,
        progress: Progress,
        patch_bytes: int,
        pinned: bool,
    ) -> None:
        self._options = StreamOptions.from_config(config.training, config.cluster)
        self._stop = stop
        self._metrics = metrics
        self._progress = progress
        self._patch_bytes = patch_bytes
        self._pinned = pinned
        self.reason: str | None = None

    @property
    def workers(self) -> int:
        return self._options.workers

    def exit(self, order: Order) -> None:
        """A wish to stop; called in the monitor's thread, because a validation looks at it too."""
        self.reason = order.reason
        self._stop.ask(EXIT_GUARD, f"memory guard: {order.reason}")

    def obey(self, stream: PatchStream, monitor: Monitor, longest_step_s: float) -> None:
        """Do what the guard wants done now, and tell the monitor how far the run is.

        Args:
            longest_step_s: of the recent steps, without their pauses.
        """
        self._options = stream.options
        if (order := monitor.order) is not None and order.rung != "exit":
            self._make_smaller(order, stream)
            monitor.carried_out()
        monitor.told = Told(
            step=self._progress.step,
            step_s=longest_step_s,
            readers=stream.reader_memory() if self.workers else {},
            workers=self.workers,
            prefetch_left=not self._pinned and self._ahead(self._with_less("prefetch")) < self._ahead(self._options),
            workers_left=self.workers > 1,
        )

    def record_exit(self) -> None:
        """Write down that the guard has ended the run."""
        self._record("exit", self.reason or "", {})

    def remedy(self, killer: str) -> str:
        """How to start again with less memory, or with a limit that the run fits into."""
        if killer == CONFIGURED_NAME:
            return f"{self._less()}, or raise monitor.ram_limit_gib where the machine has more"
        return self._less()

    def _less(self) -> str:
        if self.workers == 0 and self._options.prefetch_factor == 1:
            return (
                "go on with --resume where more memory is free; with training.workers=0 and training.prefetch_factor=1 "
                "the readers need no less"
            )
        return f"go on with --resume training.workers={max(self.workers - 1, 0)} training.prefetch_factor=1"

    def _make_smaller(self, order: Order, stream: PatchStream) -> None:
        less = self._with_less(order.rung)
        prefetch: StreamChanges = {"prefetch_factor": less.prefetch_factor}
        changed: StreamChanges = prefetch if order.rung == "prefetch" else {"workers": less.workers}
        text = ", ".join(f"training.{key}={value}" for key, value in changed.items())
        log.warning("memory guard: before the run is out of memory: %s: %s", text, order.reason)
        self._record(order.rung, order.reason, changed)
        began = time.monotonic()
        stream.reconfigure(**changed)
        self._options = stream.options
        log.info("memory guard: readers started anew in %.1f s", time.monotonic() - began)

    def _with_less(self, rung: Rung) -> StreamOptions:
        if rung == "prefetch":
            return with_less_prefetch(self._patch_bytes, self._options)
        return replace(self._options, workers=max(self.workers - 1, 1))

    def _ahead(self, options: StreamOptions) -> int:
        return batches_ahead(self._patch_bytes, options)

    def _record(self, rung: Rung, reason: str, changed: StreamChanges) -> None:
        self._metrics.write("event", event="guard", step=self._progress.step, text=reason, rung=rung, **changed)
