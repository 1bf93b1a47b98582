"""Reads of a store are tried again for as long as an outage may last, and the log says since when and why.

What the network, the server or the mount fails to give is an outage: a closed list.  An answer that breaks the protocol
is asked for twice (one that always breaks off at the same byte for five seconds), what a store refuses or what is
damaged once.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from obstore.exceptions import BaseError

from vesuvius.config import StoreConfig
from vesuvius.volumes.errors import BrokenOffError, ClosedError, OutageError, ProtocolError, is_protocol_error, reason

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
# A store that has never answered is more likely a wrong address than an outage.
_FIRST_ANSWER_S = 60.0
# A body that breaks off at one byte for as long, at three tries or more, is no outage: it is all that the server has.
_SAME_BREAK_S = 5.0
_SAID_AFTER_S = 10.0
_SAID_EVERY_S = 60.0


@dataclass(frozen=True)
class Outage:
    """A store does not answer."""

    since: float  # when the first read that is still being tried failed, seconds since 1970
    cause: str  # why the last try of that read failed
    address: str  # of the store

    @property
    def clock(self) -> str:
        """`since`, as a local time."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))

    def __str__(self) -> str:
        return f"{self.address} has not answered since {self.clock}: {self.cause}"


class Retrier:
    """Runs the reads of one store, each again while its error may pass.  Any thread may call it.

    Args:
        address: of the store, for messages.
        patient: whether to wait for `outage_minutes` from the start; else for a minute until it has answered once.
        may_pass: whether an error may pass by itself.
        count: told of requests and retries.

    Attributes:
        outage: set while reads fail and are tried again; the oldest of them.  May be read from any thread at any time.
        closed: once it is set, all pauses end, and what is being read is not tried again.
    """

    def __init__(
        self,
        address: str,
        config: StoreConfig,
        patient: bool,
        may_pass: Callable[[BaseException], bool],
        count: Callable[..., None],
    ) -> None:
        self.outage: Outage | None = None
        self._address = address
        self._outage_s = 60 * config.outage_minutes
        self._patient = patient
        self._may_pass = may_pass
        self._count = count
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._failing: dict[int, Outage] = {}  # by thread
        self._said: float | None = None  # when a line last told of this outage

    def run(self, key: str, read: Callable[[], T]) -> T:
        """What `read` returns.

        Args:
            key: the object that is read, for messages.

        Raises:
            OutageError: it has failed for as long as an outage may last.
            ClosedError: another thread has set `closed`.
            Exception: whatever else `read` raises.
        """
        pause_s, tries, answered, broke_protocol = _FIRST_PAUSE_S, 0, True, False
        began: float | None = None
        breaks: list[tuple[int, float]] = []  # bytes that came, and when, while these are as many at each try
        try:
            while not self.closed.is_set():
                tries += 1
                self._count(requests=1)
                try:
                    return read()
                except (BaseError, OSError, ProtocolError) as error:
                    now = time.monotonic()
                    if is_protocol_error(error) and not broke_protocol:
                        broke_protocol = True
                    elif not self._may_pass(error):
                        raise
                    else:
                        if isinstance(error, BrokenOffError):
                            breaks = [each for each in breaks if each[0] == error.after] + [(error.after, now)]
                            if len(breaks) > 2 and now - breaks[0][1] >= _SAME_BREAK_S:
                                raise ProtocolError(f"{error} at each of {len(breaks)} tries") from error
                        began = now if began is None else began
                        failing = self._note_failure(error)
                        if now - began >= self._patience_s:
                            answered = False
                            raise self._outage_error(failing, f"{tries} tries of {key} in {self._address}") from error
                self._count(retries=1)
                self.closed.wait(random.uniform(0, pause_s))  # at random, so that many readers do not ask at once
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            answered = False
            raise ClosedError(self._address)
        finally:
            self._end_failing(answered)

    @property
    def _patience_s(self) -> float:
        """Seconds for which a read is tried again."""
        return self._outage_s if self._patient else min(self._outage_s, _FIRST_ANSWER_S)

    def _note_failure(self, error: BaseException) -> Outage:
        """Take down, and say every minute, that the read of this thread fails; since when it does."""
        moment, thread = time.time(), threading.get_ident()
        with self._lock:
            since = self._failing[thread].since if thread in self._failing else moment
            failing = self._failing[thread] = Outage(since, reason(error), self._address)
            outage = self.outage = min(self._failing.values(), key=lambda failing: failing.since)
            say = moment - outage.since >= _SAID_AFTER_S and moment - (self._said or 0) >= _SAID_EVERY_S
            self._said = moment if say else self._said
        if say:
            wait = f"{self._outage_s / 60:g} minutes (data.store.outage_minutes)"
            if self._patience_s < self._outage_s:
                wait = f"{self._patience_s:g} s, as it has never answered: check the address"
            log.warning("%s (for %s); trying again for up to %s", outage, _duration(moment - outage.since), wait)
        return failing

    def _end_failing(self, answered: bool) -> None:
        """A read of this thread has ended: with an answer of the store, or without."""
        self._patient |= answered
        with self._lock:
            before, said = self.outage, self._said
            if self._failing.pop(threading.get_ident(), None) is None:
                return
            self.outage = min(self._failing.values(), key=lambda failing: failing.since, default=None)
            over = self.outage is None
            self._said = None if over else said
        if over and said and answered and before:
            log.info("%s answers again after %s", self._address, _duration(time.time() - before.since))

    def _outage_error(self, outage: Outage, tries: str) -> OutageError:
        rule, since = "a store must answer", ""
        remedy = "check the address and the network"
        if self._patient:
            rule, since = f"{rule} within data.store.outage_minutes={self._outage_s / 60:g}", f" since {outage.clock}"
            remedy = "check the network and the server, then continue a run with --resume, or run another command again"
        return OutageError(f"{rule}; got {outage.cause}{since} ({tries}); {remedy}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
