"""Serve a folder over HTTP/1.1 with chosen latency and faults, to test and measure readers of remote zarr volumes.

    python tests/support/chunk_server.py ROOT [--port 0] [--latency-ms 30] [--with-parent]

It prints its address on one line once it listens.  Every request waits the latency by itself, however many are under
way.  `GET /__stats` returns counters; `POST /__control` with a JSON list replaces the fault rules (see `Rule`);
`POST /__reset` clears all counters, those of the rules too.  These three are neither counted, delayed nor faulted.
`ChunkServer` is that server in a process of its own, for the length of a `with`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import FileIO
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

Kind = Literal["status", "reset", "truncate", "stall", "corrupt", "delay"]
CUTS = ("reset", "truncate", "stall")
CORRUPT_EVERY = 64  # bytes; the first byte of a body is always among the flipped ones, so a chunk's header breaks too


class ChunkServer:
    """Serves `root` over HTTP at `url`, e.g. http://127.0.0.1:40001, until the `with` or this process ends."""

    def __init__(self, root: Path, latency_ms: float = 0) -> None:
        self.root = root
        self.latency_ms = latency_ms
        self.url = ""

    def __enter__(self) -> ChunkServer:
        self.start()
        return self

    def start(self) -> None:
        """Start the process, at its old address if it had one, and wait until it listens."""
        port = urlsplit(self.url).port or 0
        arguments = [str(self.root), f"--latency-ms={self.latency_ms}", f"--port={port}", "--with-parent"]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url, "the chunk server has ended; see its stderr above"

    def stop(self) -> None:
        with self._process as process:  # closes its pipes
            process.terminate()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def set_faults(self, rules: list[dict[str, Any]]) -> None:
        """Replace all rules; see `Rule`."""
        self._call("POST", "/__control", json.dumps(rules))

    def stats(self) -> dict[str, Any]:
        """Counters since the start or the last reset: bytes_sent, max_in_flight, paths and faults."""
        counters: dict[str, Any] = json.loads(self._call("GET", "/__stats"))
        return counters

    def reset(self) -> None:
        """Clear all counters, those of the rules too; the rules stay."""
        self._call("POST", "/__reset")

    def url_of(self, path: Path) -> str:
        """The address of a file or folder below `root`."""
        return f"{self.url}/{path.relative_to(self.root)}"

    def asked_for(self, path: Path, counter: str = "paths") -> Counter[str]:
        """Number of requests per object below a folder since the last reset, by path in the folder."""
        folder = f"/{path.relative_to(self.root)}/"
        counts = self.stats()[counter].items()
        return Counter({key.removeprefix(folder): count for key, count in counts if key.startswith(folder)})

    def reads_of(self, path: Path) -> Counter[str]:
        """Like `asked_for`, without requests for only the first byte, which test for existence."""
        return self.asked_for(path) - self.asked_for(path, "looks")

    def _call(self, method: str, path: str, body: str | None = None) -> bytes:
        """One control request.  Never through a proxy, unlike urllib."""
        with contextlib.closing(HTTPConnection(urlsplit(self.url).netloc, timeout=10)) as connection:
            connection.request(method, path, body)
            reply = connection.getresponse()
            text = reply.read()
        assert reply.status == 200, text
        return text


@dataclass
class Rule:
    """Which requests meet which fault; of several rules only the first that hits a request is applied to it.

    A rule hits the first `times` requests of each path that `path` (a regex) is found in, or each `every`-th such
    request over all paths, or all of them.  Paths are decoded and start with "/"; absent files match too.  All kinds
    first sleep `delay_s`.  Then status answers with that code; reset, truncate and stall send half of the body and
    continue with a RST, a clean close, or silence until the client leaves (an answer without a body, such as a 404, is
    cut before its headers); corrupt flips each 64th byte, and passes answers without a body by uncounted.
    """

    path: str
    kind: Kind
    status: int = 503
    times: int | None = None
    every: int | None = None
    delay_s: float = 0.0
    seen: Counter[str] = field(init=False, default_factory=Counter)

    def hits(self, path: str, has_body: bool) -> bool:
        """Whether a request meets the fault; counts the request if it matches."""
        if not re.search(self.path, path) or (self.kind == "corrupt" and not has_body):
            return False
        self.seen[path] += 1
        if self.every is not None:
            return self.seen.total() % self.every == 0
        return self.times is None or self.seen[path] <= self.times


@dataclass
class Stats:
    """Totals since the start or the last reset; bytes are those of bodies."""

    bytes_sent: int = 0
    max_in_flight: int = 0
    paths: Counter[str] = field(default_factory=Counter)
    looks: Counter[str] = field(default_factory=Counter)  # those for the first byte alone: is it there?
    faults: Counter[str] = field(default_factory=Counter)


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """Start and stop byte of a Range header in a file of `size` bytes; stop <= start if unsatisfiable.

    None, the whole file, for malformed and multiple ranges, as RFC 9110 (14.2) allows.
    """
    match = re.fullmatch(r"bytes=(?:(\d+)-(\d*)|-(\d+))", header)
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix:
        return max(0, size - int(suffix)), size
    if last and int(last) < int(first):
        return None
    return int(first), min(size, int(last) + 1) if last else size


class _Server(ThreadingHTTPServer):
    """Root, latency, rules and counters, shared by the threads of all connections."""

    request_queue_size = 1024

    def __init__(self, root: Path, port: int, latency_s: float) -> None:
        super().__init__(("127.0.0.1", port), _Connection)
        self.root, self.latency_s = root, latency_s
        self.rules, self.stats = list[Rule](), Stats()
        self.in_flight, self.lock = 0, threading.Lock()

    def handle_error(self, *_: object) -> None:
        """A client that leaves, even in the middle of an answer, is no trouble of ours."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            sys.excepthook(type(error), error, error.__traceback__)

    def shutdown_request(self, request: Any) -> None:
        self.close_request(request)  # without the FIN that would precede a RST

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a request that waits for its answer: while one is sent its client may have it and ask for more."""
        with self.lock:
            self.in_flight += 1
            self.stats.max_in_flight = max(self.stats.max_in_flight, self.in_flight)
        try:
            yield
        finally:
            with self.lock:
                self.in_flight -= 1


class _Connection(BaseHTTPRequestHandler):
    """One connection, request after request."""

    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are sent one after the other

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            if self.path == "/__control":
                self.server.rules = [Rule(**rule) for rule in json.loads(body)]
            else:
                self.server.stats = Stats()
                for rule in self.server.rules:
                    rule.seen.clear()
        self.answer(200)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path == "/__stats":
            with self.server.lock:
                text = json.dumps(vars(self.server.stats)).encode()
            self.answer(200, length=len(text))
            self.wfile.write(text)
            return
        path = unquote(urlsplit(self.path).path, errors="surrogateescape")
        with self.server.lock:
            self.server.stats.paths[path] += 1
            self.server.stats.looks[path] += self.headers.get("Range") == "bytes=0-0"
        with self.server.waiting():
            time.sleep(self.server.latency_s)
        try:
            with FileIO(f"{self.server.root}{path}") as file:
                self.serve(path, file)
        # Only what is absent is a 404: a reader takes that for an empty chunk, so other trouble must not look like it.
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self.serve(path, None)

    def serve(self, path: str, file: FileIO | None) -> None:
        """Answer with a file, or that it is absent, through the fault that hits, if any."""
        status, start, stop, headers = 404, 0, 0, dict[str, str]()
        if file:
            entry = os.fstat(file.fileno())
            status, stop = 200, entry.st_size
            headers = {"ETag": f'"{entry.st_mtime_ns:x}-{stop:x}"', "Accept-Ranges": "bytes"}
            headers["Last-Modified"] = self.date_time_string(int(entry.st_mtime))
            if self.command == "GET" and (part := parse_range(self.headers.get("Range", ""), stop)):
                status, said = (206, f"{part[0]}-{part[1] - 1}") if part[0] < part[1] else (416, "*")
                headers["Content-Range"] = f"bytes {said}/{stop}"
                start, stop = part if status == 206 else (0, 0)
        has_body = self.command == "GET" and start < stop
        with self.server.lock:
            rule = next((rule for rule in self.server.rules if rule.hits(path, has_body)), None)
            kind = rule.kind if rule else None
            self.server.stats.faults.update([kind] if kind else [])
        if rule:
            with self.server.waiting():
                time.sleep(rule.delay_s)
        if rule and kind == "status":
            self.answer(rule.status)
        elif has_body or kind not in CUTS:
            self.answer(status, headers, stop - start)
        if has_body and file and kind != "status":
            count = (stop - start) // 2 if kind in CUTS else stop - start
            if kind == "corrupt":
                body = bytearray(os.pread(file.fileno(), count, start))
                body[::CORRUPT_EVERY] = bytes(byte ^ 0xFF for byte in body[::CORRUPT_EVERY])
                self.wfile.write(body)
            elif count:  # by sendfile: the bytes never enter Python
                self.connection.sendfile(file, start, count)
            with self.server.lock:
                self.server.stats.bytes_sent += count
        self.close_connection |= kind in CUTS
        if kind == "stall":
            with self.server.waiting():
                self.rfile.read()
        elif kind == "reset":  # a close that lingers for 0 s is a RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def answer(self, status: int, headers: dict[str, str] | None = None, length: int = 0) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", type=Path, help="folder to serve")
    parser.add_argument("--port", type=int, default=0, help="0 (default) takes a free one")
    parser.add_argument("--latency-ms", type=float, default=30.0, help="sleep before each answer")
    parser.add_argument("--with-parent", action="store_true", help="end with the parent process, or a pipe on stdin")
    options = parser.parse_args()
    if not options.root.is_dir():
        parser.error(f"ROOT must be a folder; got {options.root}; create it first")
    server, parent = _Server(options.root, options.port, options.latency_ms / 1000), os.getppid()
    threading.Thread(target=server.serve_forever).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    # PR_SET_PDEATHSIG would fire when the thread that started us ends, not the process; hence the poll.
    while options.with_parent and os.getppid() == parent:
        if select.select([0], [], [], 0.2)[0] and not os.read(0, 4096):
            break
    if options.with_parent:
        os._exit(0)


if __name__ == "__main__":
    main()
