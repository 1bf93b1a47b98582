"""What the run does when memory gets short: restart readers, reduce prefetch, stop readers, then save and exit with
code 4; or save and go on, where it is others whose memory grows."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from vesuvius.errors import EXIT_GUARD
from vesuvius.monitor.memory.guard import Order, Rung
from vesuvius.monitor.memory.limits import CONFIGURED_NAME
from vesuvius.monitor.monitor import LoopStatus, Monitor
from vesuvius.stream.options import StreamChanges, StreamOptions, batches_ahead, with_less_prefetch
from vesuvius.stream.stream import PatchStream
from vesuvius.training.context import RunContext

log = logging.getLogger(__name__)


class GuardActions:
    """Carries out the orders of the memory guard, between two steps.

    Batches do not change: the stream is closed and reopened at the next sample.  Its present options are read from the
    stream, as `autotune.py` changes them too.

    Args:
        patch_bytes: of one sample.

    Attributes:
        workers: readers that there were when the stream was last seen.
        reason: why the run was ended; None while it was not.
    """

    def __init__(self, run: RunContext, patch_bytes: int) -> None:
        self._run = run
        self._options = StreamOptions.from_config(run.config.training, run.config.cluster)
        self._patch_bytes = patch_bytes
        # On a GPU the batches ahead lie in pinned buffers, which torch may keep: fewer of them may free nothing.
        self._pinned = run.device.type == "cuda"
        self.reason: str | None = None

    @property
    def workers(self) -> int:
        return self._options.workers

    def exit(self, order: Order) -> None:
        """Request a stop; called in the monitor's thread, so that it also cuts a validation short."""
        self.reason = order.reason
        self._run.stop.ask(EXIT_GUARD, f"memory guard: {order.reason}")

    def obey(self, stream: PatchStream, monitor: Monitor, longest_step_s: float) -> bool:
        """Carry out the guard's present order, and tell the monitor how far the run is.

        Args:
            longest_step_s: of the recent steps, without their pauses.

        Returns:
            Whether a checkpoint is to be saved now.
        """
        self._options = stream.options
        saves = False
        if (order := monitor.order) is not None and order.rung == "save":
            log.warning("memory guard: saves a checkpoint, and the run goes on: %s", order.reason)
            self._record(order.rung, order.reason, {})
            monitor.saved()
            saves = True
        elif order is not None and order.rung != "exit":
            self._make_smaller(order, stream)
            monitor.carried_out()
        monitor.told = LoopStatus(
            step=self._run.progress.step,
            step_s=longest_step_s,
            readers=stream.reader_memory() if self.workers else {},
            readers_here=stream.readers_here(),
            workers=self.workers,
            prefetch_left=not self._pinned and self._ahead(self._with_less("prefetch")) < self._ahead(self._options),
            workers_left=self.workers > 1,
        )
        return saves

    def record_exit(self) -> None:
        """Record that the guard ended the run."""
        self._record("exit", self.reason or "", {})

    def remedy(self, killer: str) -> str:
        """How to continue with less memory, or with a limit that fits the run."""
        if killer == CONFIGURED_NAME:
            return f"{self._less()}, or raise monitor.ram_limit_gib if the machine has more"
        return self._less()

    def _less(self) -> str:
        # Never without readers: what they leak, or hold, the trainer would, who cannot be started anew.
        workers = max(self.workers - 1, min(self.workers, 1))
        if workers == self.workers and self._options.prefetch_factor == 1:
            return (
                f"continue with --resume once more memory is free, or with a smaller data.reader_mib; "
                f"training.workers={workers} and training.prefetch_factor=1 are already the least"
            )
        return f"continue with --resume training.workers={workers} training.prefetch_factor=1"

    def _make_smaller(self, order: Order, stream: PatchStream) -> None:
        less = self._with_less(order.rung)
        prefetch: StreamChanges = {"prefetch_factor": less.prefetch_factor}
        changed: StreamChanges = prefetch if order.rung == "prefetch" else {"workers": less.workers}
        text = ", ".join(f"training.{key}={value}" for key, value in changed.items())
        text = "restarts the readers, which leak" if order.rung == "restart" else text
        log.warning("memory guard: before memory runs out: %s: %s", text, order.reason)
        self._record(order.rung, order.reason, changed)
        began = time.monotonic()
        stream.reconfigure(**changed)
        self._options = stream.options
        log.info("memory guard: readers restarted in %.1f s", time.monotonic() - began)

    def _with_less(self, rung: Rung) -> StreamOptions:
        if rung == "prefetch":
            return with_less_prefetch(self._patch_bytes, self._options)
        if rung == "restart":
            return self._options
        return replace(self._options, workers=max(self.workers - 1, 1))

    def _ahead(self, options: StreamOptions) -> int:
        return batches_ahead(self._patch_bytes, options)

    def _record(self, rung: Rung, reason: str, changed: StreamChanges) -> None:
        self._run.metrics.write("event", event="guard", step=self._run.progress.step, text=reason, rung=rung, **changed)
