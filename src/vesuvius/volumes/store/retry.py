"""Reads of a store are tried again for as long as an outage may last, and the log says since when and why.

What the network, the server or the mount fails to give is an outage: a closed list.  An answer that breaks the protocol
is asked for twice, what a store refuses or what is damaged once.
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
from vesuvius.runlog.units import format_duration, format_time
from vesuvius.volumes.errors import ClosedError, OutageError, ProtocolError, is_protocol_error, reason

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
# A store that has never answered is more likely a wrong address than an outage.
_FIRST_ANSWER_S = 60.0
_SAID_AFTER_S = 10.0
_SAID_EVERY_S = 60.0


@dataclass(frozen=True)
class Outage:
    """A store does not answer."""

    since: float  # when the first read that is still being tried failed, seconds since 1970
    cause: str  # why the last try of that read failed
    address: str  # of the store

    def __str__(self) -> str:
        return f"{self.address} has not answered since {format_time(self.since)}: {self.cause}"


class Retrier:
    """Runs the reads of one store, each again while its error may pass.  Any thread may call it.

    Args:
        address: of the store, for messages.
        patient: whether to wait for `outage_minutes` from the start; else for a minute until it has answered once.
        may_pass: whether an error may pass by itself.
        count: told of requests and retries.

    Attributes:
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
        self.closed = threading.Event()
        self._address = address
        self._outage_s = 60 * config.outage_minutes
        self._patient = patient
        self._may_pass = may_pass
        self._count = count
        self._lock = threading.Lock()
        self._failing: dict[int, Outage] = {}  # by thread
        self._said = 0.0  # when a line last told of this outage

    @property
    def outage(self) -> Outage | None:
        """Set while reads fail and are tried again; the oldest of them.  May be read from any thread at any time."""
        with self._lock:
            return min(self._failing.values(), key=lambda failing: failing.since, default=None)

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
                        began = now if began is None else began
                        self._note_failure(error)
                        if now - began >= self._patience_s:
                            answered = False
                            raise self._outage_error(error, f"{tries} tries of {key} in {self._address}") from error
                self._count(retries=1)
                self.closed.wait(random.uniform(0, pause_s))  # at random, so that many readers do not ask at once
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            answered = False
            raise ClosedError(f"{self._address} was closed; open it again")
        finally:
            self._end(answered)

    @property
    def _patience_s(self) -> float:
        """Seconds for which a read is tried again."""
        return self._outage_s if self._patient else min(self._outage_s, _FIRST_ANSWER_S)

    def _note_failure(self, error: BaseException) -> None:
        """Take down, and say every minute, that the read of this thread fails."""
        now, thread = time.time(), threading.get_ident()
        with self._lock:
            since = self._failing[thread].since if thread in self._failing else now
            self._failing[thread] = Outage(since, reason(error), self._address)
            oldest = min(self._failing.values(), key=lambda failing: failing.since)
            if now - oldest.since < _SAID_AFTER_S or now - self._said < _SAID_EVERY_S:
                return
            self._said = now
        wait = f"{self._outage_s / 60:g} minutes (data.store.outage_minutes)"
        if self._patience_s < self._outage_s:
            wait = f"{self._patience_s:g} s, as it has never answered: check the address"
        log.warning("%s (for %s); trying again for up to %s", oldest, format_duration(now - oldest.since), wait)

    def _end(self, answered: bool) -> None:
        """A read of this thread has ended: with an answer of the store, or without."""
        self._patient |= answered
        with self._lock:
            ended, said = self._failing.pop(threading.get_ident(), None), self._said
            if ended is None or self._failing:
                return
            self._said = 0.0
        if said and answered:
            log.info("%s answers again after %s", self._address, format_duration(time.time() - ended.since))

    def _outage_error(self, error: BaseException, tries: str) -> OutageError:
        text, remedy = f"Cannot reach the store: {reason(error)} ({tries})", "check the address and the network"
        if self._patient:
            since = format_time(self._failing[threading.get_ident()].since)
            text += f", since {since}, and data.store.outage_minutes={self._outage_s / 60:g}"
            remedy = "check the network and the server, then continue a run with --resume, or run another command again"
        return OutageError(f"{text}; {remedy}")
