"""Serve a folder over HTTP/1.1 with chosen latency and faults, to test and measure readers of remote zarr volumes.

    python tests/support/chunk_server.py ROOT [--port 0] [--latency-ms 30] [--with-parent]

It prints its address on one line once it listens. Every request waits the latency by itself, however many are under
way. `GET /__stats` tells what was served; `POST /__control` with a JSON list replaces the fault rules (see `Rule`);
`POST /__reset` clears all counters, those of the rules too. These three are neither counted, delayed nor faulted.
`ChunkServer` is that server in a process of its own, for the length of a `with`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.client import HTTPConnection, responses
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

Kind = Literal["status", "reset", "truncate", "stall", "corrupt", "delay"]
CUTS = ("reset", "truncate", "stall")
CORRUPT_EVERY = 64  # bytes; the first byte of a body is always among the flipped ones, so a chunk's header breaks too
PARENT_POLL_S = 0.2


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
        """End the process: SIGTERM, and SIGKILL after 5 s."""
        with self._process as process:  # closes its pipes
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def set_faults(self, rules: list[dict[str, Any]]) -> None:
        """Replace all rules; see `Rule`."""
        self._call("POST", "/__control", json.dumps(rules))

    def stats(self) -> dict[str, Any]:
        """Counters since the start or the last reset: requests, bytes_sent, max_in_flight, paths and faults."""
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
        """One control request. Never through a proxy, unlike urllib."""
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
    request over all paths, or all of them. Paths are decoded and start with "/"; absent files match too. All kinds
    first sleep `delay_s`. Then status answers with that code; reset, truncate and stall send half of the body and go
    on with a RST, a clean close, or silence until the client leaves (an answer without a body, such as a 404, is cut
    before its headers); corrupt flips each 64th byte, and passes answers without a body by uncounted.
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

    requests: int = 0
    bytes_sent: int = 0
    max_in_flight: int = 0
    paths: Counter[str] = field(default_factory=Counter)
    looks: Counter[str] = field(default_factory=Counter)  # those for the first byte alone: is it there?
    faults: Counter[str] = field(default_factory=Counter)


class Request(NamedTuple):
    """One parsed request; header names are in lower case, the path is decoded and has no query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep_alive: bool


class Answer(NamedTuple):
    """A status, its headers, and as body a short `text` or the `length` bytes of `file` from `start` on."""

    status: int
    headers: dict[str, str]
    file: FileIO | None = None
    start: int = 0
    length: int = 0
    text: bytes = b""


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """Start and stop byte of a Range header in a file of `size` bytes; pure.

    None, the whole file, for malformed and multiple ranges, as RFC 9110 (14.2) allows; stop <= start if unsatisfiable.
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


def text_answer(status: int, text: str = "") -> Answer:
    """A status with a few words, or none."""
    return Answer(status, {"Content-Length": str(len(text.encode()))}, text=text.encode())


def file_answer(root: Path, request: Request) -> Answer:
    """The answer to GET or HEAD of a file below `root`, opened but not read; the caller closes it. Follows links.

    Only what is absent is a 404: a reader takes that for an empty chunk, so other trouble must not look like it.
    """
    if ".." in request.path.split("/") or "\0" in request.path:
        return text_answer(404)
    try:
        file = FileIO(f"{root}{request.path}")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return text_answer(404)
    except OSError as error:
        print(f"chunk_server: cannot open {request.path}: {error}", file=sys.stderr)
        return text_answer(500)
    entry = os.fstat(file.fileno())
    size, etag = entry.st_size, f'"{entry.st_mtime_ns:x}-{entry.st_size:x}"'
    headers = {"ETag": etag, "Last-Modified": formatdate(entry.st_mtime, usegmt=True), "Accept-Ranges": "bytes"}
    if request.method == "HEAD":
        return Answer(200, headers | {"Content-Length": str(size)}, file)
    part = parse_range(request.headers.get("range", ""), size)
    if part is None:
        return Answer(200, headers | {"Content-Length": str(size)}, file, 0, size)
    start, stop = part
    if stop <= start:
        return Answer(416, headers | {"Content-Length": "0", "Content-Range": f"bytes */{size}"}, file)
    headers |= {"Content-Length": str(stop - start), "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    return Answer(206, headers, file, start, stop - start)


async def read_request(reader: StreamReader) -> Request:
    """The next request of a connection. Raises EOFError when there is none, ValueError for what is not HTTP/1."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    match = re.fullmatch(r"(GET|HEAD|POST) (/[^ ?]*)[^ ]* HTTP/1\.([01])", first)
    if match is None or "transfer-encoding" in headers:
        raise ValueError(f"a request must GET, HEAD or POST a /path by HTTP/1, not in chunks; got {first!r}")
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    keep_alive = match[3] == "1" and headers.get("connection", "").lower() != "close"
    return Request(match[1], unquote(match[2], errors="surrogateescape"), headers, body, keep_alive)


async def send(writer: StreamWriter, answer: Answer, keep_alive: bool, kind: Kind | None = None) -> int:
    """Send an answer through a fault of `kind`, if any; returns the bytes of its file sent, fewer if that shrank."""
    headers = answer.headers | {"Date": formatdate(usegmt=True), "Connection": "keep-alive" if keep_alive else "close"}
    phrase = responses.get(answer.status, "Unnamed")
    lines = [f"HTTP/1.1 {answer.status} {phrase}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode("latin-1") + answer.text)
    await writer.drain()
    length = answer.length // 2 if kind in CUTS else answer.length
    if answer.file is None or length == 0:
        return 0
    if kind != "corrupt":  # by sendfile: the bytes never enter Python
        return await asyncio.get_running_loop().sendfile(writer.transport, answer.file, answer.start, length)
    body = bytearray(os.pread(answer.file.fileno(), length, answer.start))
    body[::CORRUPT_EVERY] = bytes(byte ^ 0xFF for byte in body[::CORRUPT_EVERY])
    writer.write(body)
    await writer.drain()
    return len(body)


class _Server:
    """Root, latency, rules and counters, shared by all connections."""

    def __init__(self, root: Path, latency_s: float, rules: list[Rule]) -> None:
        self.root = root
        self.latency_s = latency_s
        self.rules = rules
        self.stats = Stats()
        self.in_flight = 0

    async def converse(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one connection, request after request, until either side or a fault ends it."""
        # A client that leaves, even in the middle of an answer, is no trouble of ours. Only our own end cancels this
        # task, and asyncio.streams of Python 3.11 prints a traceback for a task that stays cancelled.
        left = (ConnectionError, EOFError, asyncio.CancelledError)
        with contextlib.suppress(*left), contextlib.closing(writer):
            keep_alive = True
            while keep_alive:
                try:
                    request = await read_request(reader)
                    reply = self._control(request)
                except (ValueError, TypeError, asyncio.LimitOverrunError) as error:
                    await send(writer, text_answer(400, str(error)), keep_alive=False)
                    return
                if reply is None:
                    keep_alive = await self._serve_file(request, reader, writer)
                else:
                    keep_alive = request.keep_alive
                    await send(writer, text_answer(200, reply), keep_alive)

    def _control(self, request: Request) -> str | None:
        """Obey a control request and return its reply; None for a request of a file."""
        match request.method, request.path:
            case "GET", "/__stats":
                return json.dumps(vars(self.stats))
            case "POST", "/__control":
                self.rules = [Rule(**rule) for rule in json.loads(request.body)]
            case "POST", "/__reset":
                self.stats = Stats()
                for rule in self.rules:
                    rule.seen.clear()
            case "POST", path:
                raise ValueError(f"only /__control and /__reset take a POST; got {path}; files take GET and HEAD")
            case _:
                return None
        return ""

    async def _serve_file(self, request: Request, reader: StreamReader, writer: StreamWriter) -> bool:
        """Count, wait, and answer through the fault that hits, if any; tells whether the connection stays open."""
        self.stats.requests += 1
        self.stats.paths[request.path] += 1
        self.stats.looks[request.path] += request.headers.get("range") == "bytes=0-0"
        with self._in_flight():
            await asyncio.sleep(self.latency_s)
        answer = file_answer(self.root, request)
        with answer.file or contextlib.nullcontext():
            rule = next((rule for rule in self.rules if rule.hits(request.path, answer.length > 0)), None)
            kind = rule.kind if rule else None
            if rule:
                self.stats.faults[rule.kind] += 1
                with self._in_flight():
                    await asyncio.sleep(rule.delay_s)
                answer = text_answer(rule.status) if kind == "status" else answer
            bare_cut = kind in CUTS and not answer.length
            sent = 0 if bare_cut else await send(writer, answer, request.keep_alive, kind)
            self.stats.bytes_sent += sent
        if kind == "stall":
            with self._in_flight():
                await reader.read()
        elif kind == "reset":  # a close that lingers for 0 s is a RST
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return request.keep_alive and kind not in CUTS and sent == answer.length

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        """Count a request that waits for its answer: while one is sent its client may have it and ask for more."""
        self.in_flight += 1
        self.stats.max_in_flight = max(self.stats.max_in_flight, self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1


async def serve(server: _Server, port: int, with_parent: bool) -> None:
    """Listen, print the address, and return on SIGTERM, SIGINT or, if asked, with the parent or a pipe on stdin."""
    loop, stop, parent = asyncio.get_running_loop(), asyncio.Event(), os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listener = await asyncio.start_server(server.converse, "127.0.0.1", port, backlog=1024)
    print(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", flush=True)
    if with_parent and stat.S_ISFIFO(os.fstat(0).st_mode):
        loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())
    # PR_SET_PDEATHSIG would fire when the thread that started us ends, not the process; hence the poll.
    while not stop.is_set() and (not with_parent or os.getppid() == parent):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), PARENT_POLL_S)


def main() -> None:
    """Parse the command line and serve until told to end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", type=Path, help="folder to serve")
    parser.add_argument("--port", type=int, default=0, help="0 (default) takes a free one")
    parser.add_argument("--latency-ms", type=float, default=30.0, help="sleep before each answer")
    parser.add_argument("--with-parent", action="store_true", help="end with the parent process, or a pipe on stdin")
    options = parser.parse_args()
    if not options.root.is_dir():
        parser.error(f"ROOT must be a folder; got {options.root}; create it first")
    asyncio.run(serve(_Server(options.root, options.latency_ms / 1000, []), options.port, options.with_parent))


if __name__ == "__main__":
    main()
