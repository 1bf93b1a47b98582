"""A web server in a thread whose objects are a dict, for answers that no server of files gives."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Headers = Callable[[bytes], Mapping[str, str]]
"""Headers of an answer with this object, such as a validator."""


@contextmanager
def serving(
    objects: Mapping[str, bytes],
    head: int | None = None,
    no_ranges: frozenset[str] | set[str] = frozenset(),
    headers: Headers = lambda body: {},
    asked: list[str] | None = None,
) -> Iterator[str]:
    """Serve `objects`, looked up at each request by path, at the address that is yielded.

    Args:
        head: the status of every answer to HEAD; None = as GET.
        no_ranges: paths of which a range is answered with all of it.
        asked: takes 'METHOD PATH' of each request.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(head)

        def do_GET(self) -> None:
            self._answer(None)

        def _answer(self, status: int | None) -> None:
            if asked is not None:
                asked.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            whole = objects.get(path)
            body, status, extra = whole or b"", status or (404 if whole is None else 200), dict[str, str]()
            wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
            if wanted and status == 200 and path not in no_ranges:
                first, last = wanted.groups()
                start = int(first) if first else max(len(body) - int(last), 0)
                stop = min(int(last) + 1, len(body)) if first and last else len(body)
                status = 206 if start < stop else 416
                extra["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}" if start < stop else "bytes */0"
                body = body[start:stop]
            self.send_response(status)
            for name, value in {**headers(whole or b""), **extra, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def objects_of(folder: Path, prefix: str = "") -> dict[str, bytes]:
    """The files of a folder, as objects."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {f"{prefix}/{file.relative_to(folder).as_posix()}": file.read_bytes() for file in files}
