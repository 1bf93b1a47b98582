"""A web server of this machine that keeps what is posted to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebhookServer:
    """Answers POSTs and keeps them.  A context manager.

    Args:
        statuses: of the first answers, the last of them of all others.  0 = no answer until `answer` is set.

    Attributes:
        posts: bodies, in the order in which they came, those included that were refused.
        others: requests that were no POST.
    """

    def __init__(self, statuses: Sequence[int] = (200,)) -> None:
        self.posts: list[dict[str, Any]] = []
        self.others: list[str] = []
        self.came = threading.Semaphore(0)
        self.answer = threading.Event()
        here = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.headers["Content-Type"] == "application/json"
                number = len(here.posts)
                here.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                here.came.release()
                status = statuses[min(number, len(statuses) - 1)]
                if status == 0:
                    here.answer.wait()
                    return
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                here.others.append(self.path)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook/secret"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> WebhookServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.answer.set()
        self._server.shutdown()
        self._server.server_close()
