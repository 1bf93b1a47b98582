"""The run's latest figures where Prometheus may fetch them: `http://<address>:<port>/metrics`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric

from vesuvius.runlog.listeners.exposition import Exposition

log = logging.getLogger(__name__)


class Exporter:
    """Serves what it has been told.  A context manager.

    An address that cannot be had is no reason to end a run: the log says so.

    Args:
        port: to listen on; 0 = any free one.
        name: of the run, the label `run`.
        address: of this machine, to listen on.  Whoever reaches it may read.

    Attributes:
        port: that it listens on; None where it could not.
    """

    def __init__(self, port: int, name: str, address: str = "127.0.0.1") -> None:
        self._exposition = Exposition(name)
        self._server: Any = None
        self.port: int | None = None
        self.take = self._exposition.take
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, addr=address, registry=registry)
            self.port = self._server.server_port
        except OSError as error:
            log.warning(
                "monitor.prometheus_port must be free, and monitor.prometheus_address one of this machine; got %s for "
                "%s:%d; choose others; the run goes on without",
                error,
                address,
                port,
            )

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks for it."""
        return self._exposition.metrics()
