"""Logs, once a minute, each store that the readers wait for: nobody sees their own logs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vesuvius.volumes.store.retry import Outage

log = logging.getLogger(__name__)

# Shorter outages end with the next retry.
_SAID_AFTER_S = 10.0
_SAID_EVERY_S = 60.0


class OutageLog:
    """Turns what the readers report several times a second into log lines."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[Outage, float]] = {}

    def take(self, outages: Sequence[Outage], now: float) -> None:
        """Log what is due.

        Args:
            outages: of all readers, now.
            now: seconds since 1970.
        """
        oldest: dict[str, Outage] = {}
        for outage in sorted(outages, key=lambda outage: outage.since):
            oldest.setdefault(outage.address, outage)
        for address, outage in oldest.items():
            _, said = self._said.get(address, (outage, 0.0))
            if now - outage.since >= _SAID_AFTER_S and now - said >= _SAID_EVERY_S:
                self._said[address] = outage, now
                log.warning("%s (for %.0f s); the readers try again", outage, now - outage.since)
        for address in self._said.keys() - oldest.keys():
            outage, _ = self._said.pop(address)
            log.info("%s answers again after %.0f s", address, now - outage.since)
