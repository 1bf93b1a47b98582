"""Detects a hung run and logs what it waits for.

Runs on a thread of its own, so that a hung loop, monitor or disk cannot block it.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from vesuvius.errors import disk_remedy, one_line
from vesuvius.runlog.held import where
from vesuvius.threads import on_thread, thread_stacks

log = logging.getLogger(__name__)

_POLL_S = 1.0
_JOIN_S = 1.0
_WITHIN_S, _NEXT_AFTER_S = 5.0, 0.5


class _Expected(NamedTuple):
    what: str
    waiting_for: str | Callable[[], str]
    since_s: float


@dataclass(eq=False)
class Watchdog:
    """Logs one ERROR with the stacks of all threads when the run hangs, and one INFO when it continues.

    A context manager.  The loop calls `expects`, which is nearly free.
    """

    stall_s: float  # seconds without progress after which the run counts as hung; 0 = off
    stacks: Path  # folder for stacks, created on first use
    record: Callable[..., object]  # writes a record to `metrics.jsonl`: its kind, then its fields
    step: Callable[[], tuple[int, int]]  # returns the last finished optimizer step and the final one
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._expected = _Expected("step", "the run to begin", self.now())
        self._sampled_s = self._awake_s = self.now()
        self._stalled: _Expected | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self.stall_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def expects(self, what: str, waiting_for: str | Callable[[], str]) -> None:
        """Note a sign of life; from now on the loop waits for `what`, e.g. "batch".  For the loop's thread.

        `waiting_for` is the cause, for the log; a function is called in the watchdog's thread.
        """
        self._expected = _Expected(what, waiting_for, self.now())

    def silence(self) -> tuple[str, float]:
        """Return what the loop waits for, and seconds since the last sign of life.  Thread-safe."""
        expected = self._expected
        return expected.what, self.now() - expected.since_s

    def sample(self) -> None:
        """Compare the last sign of life with the clock, and log if the run has hung or recovered."""
        expected, now = self._expected, self.now()
        if now - self._sampled_s > self.stall_s / 2:  # the whole process was stopped
            self._awake_s = now
        self._sampled_s = now
        if self._stalled is not None and self._stalled != expected:
            before, self._stalled = self._stalled, None
            self._report_recovered(before)
        if self._stalled is None and now - max(expected.since_s, self._awake_s) >= self.stall_s:
            self._stalled = expected
            self._report_hung(expected, now - expected.since_s)

    def _run(self) -> None:
        poll_s = min(_POLL_S, self.stall_s / 10)
        while not self._stop.wait(poll_s):
            try:
                self.sample()
            except Exception:
                log.exception("the watchdog failed; retrying")

    def _report_hung(self, expected: _Expected, seconds: float) -> None:
        try:
            waiting_for = expected.waiting_for if isinstance(expected.waiting_for, str) else expected.waiting_for()
        except Exception as error:  # the hang matters more than its cause
            waiting_for = f"an unknown cause ({type(error).__name__}: {one_line(error)})"
        text = f"hung: no {expected.what} for {seconds / 60:.1f} min: waiting for {waiting_for}"
        path = self.stacks / time.strftime("%Y%m%dT%H%M%S.txt")
        step, last = self.step()
        line = f"Verdict step {step}/{last} {text}; stacks of all threads in {path}"
        fields: dict[str, Any] = {"step": step, "text": text, "stacks": f"{self.stacks.name}/{path.name}"}
        event = {"event": "hung", "what": expected.what, "waiting_for": waiting_for, "seconds": seconds}
        _write_all(
            lambda: self._dump(path, text),
            lambda: log.error("%s; the run keeps waiting, and stopping it saves step %d", line, step),
            lambda: self.record("verdict", **fields, bound="hung", cause=None, overrides=[]),
            lambda: self.record("event", **fields, **event),
        )

    def _report_recovered(self, expected: _Expected) -> None:
        seconds = self.now() - expected.since_s
        text = f"no longer hung: the wait for a {expected.what} is over after {seconds / 60:.1f} min"
        _write_all(
            lambda: log.info("%s", text),
            lambda: self.record("event", event="recovered", step=self.step()[0], text=text, seconds=seconds),
        )

    def _dump(self, path: Path, text: str) -> None:
        try:
            path = where(path)
            path.parent.mkdir(exist_ok=True)
            with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{text}\n\nthreads of the trainer:\n")
                file.writelines(thread_stacks())
        except OSError as error:
            log.warning("cannot write the stacks of a hung run to %s: %s; %s", path, error, disk_remedy(error))


def _write_all(*writes: Callable[[], object]) -> None:
    """Run each write on a thread of its own, and wait only briefly: the disk may be what hangs."""
    deadline = time.monotonic() + _WITHIN_S
    for write in writes:
        call = on_thread(write, name="watchdog-writer")
        wait([call], max(deadline - time.monotonic(), _NEXT_AFTER_S))
        if call.done() and (error := call.exception()):
            log.error("the watchdog could not write its report", exc_info=error)
