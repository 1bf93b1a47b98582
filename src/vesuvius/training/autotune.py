"""`training.autotune: act`: the override of a verdict that a running stream can change is applied between two steps.

The stream is closed and reopened at the next sample: no batch changes.  Nothing is raised while memory is short, or
where memory for it is not left before the guard (`guard_actions.py`) would take it back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from vesuvius.errors import ConfigError
from vesuvius.monitor.memory.limits import left_bytes
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.verdict import Verdict
from vesuvius.runlog.units import size_text
from vesuvius.stream.options import StreamChanges, StreamOptions, batches_ahead, check_store_need, store_need_bytes
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.stream import PatchStream
from vesuvius.training.context import RunContext
from vesuvius.training.step.device import DeviceFeed

log = logging.getLogger(__name__)

# As many readers again live while one execution of Ray Data hands over to the next.
_READERS_AT_ONCE = 2


class Autotuner:
    """Applies what the verdicts of one session advise.  A session starts from the config.

    Args:
        job: of the stream.
    """

    def __init__(self, run: RunContext, job: ReaderJob) -> None:
        self._run = run
        self._acts = run.config.training.autotune == "act"
        self._last_step = run.config.stop_step - run.config.monitor.verdict_every
        self._job = job
        self._verdict: Verdict | None = None
        self._refused: set[tuple[str, ...]] = set()  # overrides that were refused, and are not tried again

    def take(self, verdict: Verdict) -> None:
        """Keep a verdict for the next `act`."""
        self._verdict = verdict

    def ended(self) -> None:
        """Nothing is left to do."""

    def act(self, stream: PatchStream, feed: DeviceFeed, monitor: Monitor) -> None:
        """Make the change that the last verdict calls for; none without a new verdict or near the end."""
        verdict, self._verdict = self._verdict, None
        if verdict is None or not self._acts or self._run.progress.step > self._last_step:
            return
        changes = changes_of(verdict.overrides, stream.options)
        if not changes or verdict.overrides in self._refused:
            return
        options = replace(stream.options, **changes)
        before, refused = stream.options, self._refusal(options, stream, feed, monitor)
        if not refused:
            try:
                check_store_need(self._job, options)
                feed.reconfigure(**changes)
            except ConfigError as error:
                if stream.options is not before:  # it is not as it was
                    raise
                refused = str(error)
        override = " ".join(verdict.overrides)
        text = f"autotune: {override}: {verdict.evidence}"
        if refused:
            self._refused.add(verdict.overrides)
            text = f"autotune skipped {override}: {refused}; {verdict.evidence}"
        else:
            monitor.readers_changed()
        log.info("%s", text)
        fields = {"override": override, "refused": refused or None}
        self._run.metrics.write("event", event="autotune", step=self._run.progress.step, text=text, **fields)

    def _refusal(self, options: StreamOptions, stream: PatchStream, feed: DeviceFeed, monitor: Monitor) -> str:
        """Why there is no memory for the options; '' where there is."""
        now, patch_bytes = stream.options, self._job.patch_bytes
        peaks = [figures.rss_anon_peak_bytes or 0 for figures in list(stream.readers.values())]
        readers = max(options.workers - now.workers, 0) * max(peaks, default=0)
        store = max(store_need_bytes(self._job, options) - store_need_bytes(self._job, now), 0)
        batches = batches_ahead(patch_bytes, options) - batches_ahead(patch_bytes, now)
        need_bytes = _READERS_AT_ONCE * (readers + store) + max(batches, 0) * feed.memory_of_batch
        # All ranks of a node may act at once.
        left = left_bytes(monitor.risk.killers, self._run.session.limits) // self._run.ranks.local_world
        if need_bytes <= max(left, 0):
            return ""
        return f"it would take {size_text(need_bytes)} more, and {size_text(max(left, 0))} are left for it"


def changes_of(overrides: Sequence[str], options: StreamOptions) -> StreamChanges:
    """What a running stream can change of a verdict's overrides; empty where it can change nothing.  Pure.

    Readers are not started where the trainer reads itself: Ray does not run.  `training.prefetch_mib` is the user's own
    limit, and stays.
    """
    values = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    changes: StreamChanges = {}
    if options.workers and "training.workers" in values:
        changes["workers"] = int(values["training.workers"])
    if "training.prefetch_factor" in values:
        changes["prefetch_factor"] = int(values["training.prefetch_factor"])
    if "data.store.requests" in values:
        changes["requests"] = int(values["data.store.requests"])
    return changes
