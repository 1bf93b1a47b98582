"""Retries reads of a store for as long as an outage may last, and logs its start and cause.

Failures of the network, the server or the mount are outages (a closed list).  An answer that violates the protocol is
retried once; refusals and damage are not.
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
from vesuvius.threads import renew_after_fork
from vesuvius.volumes.errors import ClosedError, OutageError, ProtocolError, is_protocol_error, reason

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
# A store that has never answered is more likely a wrong address than an outage.
_FIRST_ANSWER_S = 60.0
_LOG_AFTER_S = 10.0
_LOG_EVERY_S = 60.0


@dataclass(frozen=True)
class Outage:
    since: float  # time of the first failure of the oldest failing read, seconds since 1970
    cause: str  # of that read's last failure
    address: str  # of the store

    def __str__(self) -> str:
        return f"{self.address} has not answered since {format_time(self.since)}: {self.cause}"


class Retrier:
    """Runs the reads of one store, and retries transient errors.  Thread-safe.

    A `patient` one retries for `outage_minutes` from the start, others for a minute until the first answer.  `count`
    receives the number of requests and retries.  Once `closed` is set, all pauses end and no read is retried.
    """

    def __init__(
        self,
        address: str,
        config: StoreConfig,
        patient: bool,
        is_retryable: Callable[[BaseException], bool],
        count: Callable[..., None],
    ) -> None:
        self.closed = threading.Event()
        self._address = address
        self._outage_s = 60 * config.outage_minutes
        self._patient = patient
        self._is_retryable = is_retryable
        self._count = count
        self._logged = 0.0  # time of the last log line about this outage
        renew_after_fork(self)

    def renew(self) -> None:
        """Make the locks anew in a forked child; the failing threads are not there."""
        self._lock = threading.Lock()
        self._failing: dict[int, Outage] = {}  # by thread
        was_closed, self.closed = self.closed.is_set(), threading.Event()
        if was_closed:
            self.closed.set()

    @property
    def outage(self) -> Outage | None:
        """The oldest read that is failing and being retried; None if there is none.  Thread-safe."""
        with self._lock:
            return min(self._failing.values(), key=lambda failing: failing.since, default=None)

    def run(self, key: str, read: Callable[[], T]) -> T:
        """Call `read`, with retries; `key` is the object, for messages.

        Raises OutageError if it has failed for as long as an outage may last, ClosedError once `closed` is set, and any
        other error of `read`.
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
                    elif not self._is_retryable(error):
                        raise
                    else:
                        began = now if began is None else began
                        self._record_failure(error)
                        if now - began >= self._patience_s:
                            answered = False
                            raise self._outage_error(error, f"{tries} attempts of {key} in {self._address}") from error
                self._count(retries=1)
                self.closed.wait(random.uniform(0, pause_s))  # jitter, so that many readers do not retry in step
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            answered = False
            raise ClosedError(f"{self._address} was closed; open it again")
        finally:
            self._end(answered)

    @property
    def _patience_s(self) -> float:
        return self._outage_s if self._patient else min(self._outage_s, _FIRST_ANSWER_S)

    def _record_failure(self, error: BaseException) -> None:
        """Record that this thread's read fails, and log it every minute."""
        now, thread = time.time(), threading.get_ident()
        with self._lock:
            since = self._failing[thread].since if thread in self._failing else now
            self._failing[thread] = Outage(since, reason(error), self._address)
            oldest = min(self._failing.values(), key=lambda failing: failing.since)
            if now - oldest.since < _LOG_AFTER_S or now - self._logged < _LOG_EVERY_S:
                return
            self._logged = now
        wait = f"{self._outage_s / 60:g} minutes (data.store.outage_minutes)"
        if self._patience_s < self._outage_s:
            wait = f"{self._patience_s:g} s, because it has never answered: check the address"
        log.warning("%s (for %s); retrying for up to %s", oldest, format_duration(now - oldest.since), wait)

    def _end(self, answered: bool) -> None:
        """Record that this thread's read has ended, whether or not the store answered."""
        self._patient |= answered
        with self._lock:
            ended, logged = self._failing.pop(threading.get_ident(), None), self._logged
            if ended is None or self._failing:
                return
            self._logged = 0.0
        if logged and answered:
            log.info("%s responds again after %s", self._address, format_duration(time.time() - ended.since))

    def _outage_error(self, error: BaseException, tries: str) -> OutageError:
        text, remedy = f"Cannot reach the store: {reason(error)} ({tries})", "check the address and the network"
        if self._patient:
            since = format_time(self._failing[threading.get_ident()].since)
            text += f", since {since}, and data.store.outage_minutes={self._outage_s / 60:g}"
            remedy = "check the network and the server, then continue the run with --resume, or repeat the command"
        return OutageError(f"{text}; {remedy}")
