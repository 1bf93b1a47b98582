"""`training.autotune`: readers and prefetch follow the verdicts while a run trains.

The reporter gives a verdict, `monitor/steering.py` decides, and between two steps the stream is closed and reopened at
the next sample: no batch changes.  The memory guard (`guard_actions.py`) has priority: once it has acted, nothing is
raised any more.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

from vesuvius.errors import ConfigError
from vesuvius.monitor.memory.limits import left_bytes
from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.steering import Decision, Headroom, Learned, ReaderSetup, carried_out, decide
from vesuvius.monitor.verdict import Verdict
from vesuvius.runlog.units import size_text
from vesuvius.stream.options import batches_ahead, changes_to, check_store_need, store_need_bytes
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.stream import PatchStream
from vesuvius.training.context import RunContext
from vesuvius.training.step.device import DeviceFeed

log = logging.getLogger(__name__)

Outcome = Literal["advised", "refused", "done"]

# As many readers again live while one execution of Ray Data hands over to the next.
_READERS_AT_ONCE = 2


class Autotuner:
    """Advises or makes the changes that the verdicts of one session call for.

    What it learned is not kept over a resume: a session starts from the config.

    Args:
        job: of the stream.
    """

    def __init__(self, run: RunContext, job: ReaderJob) -> None:
        config = run.config
        self._run = run
        self._mode = config.training.autotune
        self._last_step = config.stop_step - config.monitor.verdict_every
        self._batch_bytes = config.training.train_batch_size * job.patch_bytes
        mib = config.training.prefetch_mib
        self._most_ahead = None if mib is None else max(mib * 2**20 // self._batch_bytes, 1)
        self._job = job
        self._verdict: Verdict | None = None
        self._learned = Learned()
        self._said: set[tuple[Outcome, str, str]] = set()
        self._failed: set[tuple[str, str]] = set()

    def take(self, verdict: Verdict) -> None:
        """Keep a verdict for the next `act`."""
        if self._mode != "off":
            self._verdict = verdict

    def ended(self) -> None:
        """Nothing is left to do."""

    def act(self, stream: PatchStream, feed: DeviceFeed, monitor: Monitor) -> None:
        """Make or advise the change that the last verdict calls for; none without a new verdict or near the end."""
        verdict, self._verdict = self._verdict, None
        if verdict is None or self._run.progress.step > self._last_step:
            return
        options = stream.options
        now = ReaderSetup(options.workers, batches_ahead(self._job.patch_bytes, options))
        decision, self._learned = decide(verdict, now, self._headroom(stream, feed, monitor), self._learned)
        if decision is None:
            return
        if decision.refused:
            self._say_once("refused", decision)
        elif self._mode == "advise":
            self._say_once("advised", decision)
        elif self._carry_out(decision, stream, feed):
            self._learned = carried_out(decision, verdict.window, self._learned)
            monitor.readers_changed()

    def _headroom(self, stream: PatchStream, feed: DeviceFeed, monitor: Monitor) -> Headroom:
        return Headroom(
            # All ranks of a node may act at once.
            left_bytes=left_bytes(monitor.risk.killers, self._run.session.limits) // self._run.ranks.local_world,
            batch_bytes=feed.memory_of_batch,
            reader_bytes=self._reader_bytes(stream),
            most_ahead=self._most_ahead,
            memory_is_short=monitor.memory_is_short(),
        )

    def _reader_bytes(self, stream: PatchStream) -> int | None:
        """What one more reader takes: as much as the largest one, and its share of the object store."""
        peaks = [figures.rss_anon_peak_bytes for figures in list(stream.readers.values())]
        known = [peak for peak in peaks if peak is not None]
        if not known:
            return None
        options = stream.options
        more = replace(options, workers=options.workers + 1)
        store_bytes = store_need_bytes(self._job, more) - store_need_bytes(self._job, options)
        return _READERS_AT_ONCE * (max(known) + store_bytes)

    def _carry_out(self, decision: Decision, stream: PatchStream, feed: DeviceFeed) -> bool:
        """Returns whether it was done.  A change that failed is not tried again."""
        if (decision.action, decision.override) in self._failed:
            return False
        options, after = stream.options, decision.after
        changes = changes_to(self._job.patch_bytes, options.batch_size, after.workers, after.ahead)
        try:
            check_store_need(self._job, replace(options, **changes))
            feed.reconfigure(**changes)
        except ConfigError as error:
            if stream.options is not options:  # it is not as it was
                raise
            self._failed.add((decision.action, decision.override))
            self._say_once("refused", replace(decision, refused=str(error)))
            return False
        self._say("done", decision)
        return True

    def _say_once(self, outcome: Outcome, decision: Decision) -> None:
        said = (outcome, decision.action, decision.override)
        if said not in self._said:
            self._said.add(said)
            self._say(outcome, decision)

    def _say(self, outcome: Outcome, decision: Decision) -> None:
        text = self._text(outcome, decision)
        log.info("%s", text)
        before, after = (self._figure(decision, setup) for setup in (decision.before, decision.after))
        self._run.metrics.write(
            "event",
            event="autotune",
            step=self._run.progress.step,
            text=text,
            mode=self._mode,
            outcome=outcome,
            action=decision.action,
            **{"from": before, "to": after},
            override=decision.override,
            reason=decision.reason,
            refused=decision.refused or None,
        )

    def _text(self, outcome: Outcome, decision: Decision) -> str:
        change = self._change(decision)
        match outcome:
            case "advised":
                return f"autotune advises {decision.override} ({change}): {decision.reason}"
            case "refused":
                return f"autotune skipped {change}: {decision.refused}; {decision.reason}"
            case "done":
                return f"autotune: {change}: {decision.reason}"

    def _change(self, decision: Decision) -> str:
        if decision.action in ("more_workers", "fewer_workers"):
            return f"readers {decision.before.workers} -> {decision.after.workers}"
        sizes = f"{size_text(self._figure(decision, decision.before))} -> "
        sizes += size_text(self._figure(decision, decision.after))
        return f"batches ahead {decision.before.ahead} -> {decision.after.ahead}, {sizes}"

    def _figure(self, decision: Decision, setup: ReaderSetup) -> int:
        """What changes: readers, or bytes of the batches ahead."""
        if decision.action in ("more_workers", "fewer_workers"):
            return setup.workers
        return setup.ahead * self._batch_bytes
