"""`vesuvius report RUN --serve`: the page over HTTP on this machine; the browser reloads it while the runs train."""

import logging
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from vesuvius.errors import ConfigError, one_line
from vesuvius.report.model import page_of, read_report
from vesuvius.report.records import GONE
from vesuvius.runlog.redact import redact

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
_REFRESH_S = 10
_OVER = ("ended", "died", GONE)
# Another name may be that of a foreign page which resolves to this machine (DNS rebinding).  The port is that of a
# tunnel, perhaps.
_OWN_HOST = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?", re.I)


class LivePage:
    """The page, rebuilt for a request unless the last one is recent: at most a fifth of the time is spent building."""

    def __init__(self, runs: Sequence[Path], command: str) -> None:
        self._runs, self._command = runs, command
        self._lock, self._page, self._fresh_until = threading.Lock(), b"", 0.0

    def get(self) -> bytes:
        with self._lock:
            if (began := time.monotonic()) >= self._fresh_until:
                reports = [*map(read_report, self._runs)]
                is_over = all(each.facts["state"].startswith(_OVER) for each in reports)
                self._page = page_of(reports, self._command, 0 if is_over else _REFRESH_S).encode()
                now = time.monotonic()
                self._fresh_until = now + max(_REFRESH_S / 2, 4 * (now - began))
            return self._page


def open_server(page: LivePage, port: int) -> ThreadingHTTPServer:
    """Bind a server of the page on 127.0.0.1; port 0 = any free one.  Raises ConfigError: the port cannot be used."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(ConnectionError):  # the browser went away
                hosts = self.headers.get_all("Host", [])
                if len(hosts) != 1 or not _OWN_HOST.fullmatch(hosts[0].strip()):
                    self.send_error(421, "Misdirected Request", f"Open the page as http://{HOST} or http://localhost")
                    return
                if self.path.partition("?")[0] != "/":
                    self.send_error(404)
                    return
                try:
                    body = page.get()
                except Exception as error:  # of a file of the run, or of its disk
                    cause = f"{type(error).__name__}: {redact(one_line(error))}; the next request tries again"
                    log.error("cannot build the page: %s", cause)
                    self.send_error(500, "Cannot build the page", cause)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are not logged."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"Cannot serve on {HOST}:{port}: {error}; choose another port with --serve PORT") from error
