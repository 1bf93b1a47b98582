"""A loopback web server whose responses are written by a test: odd, broken, or of another protocol."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Asked:
    """One request: its method, its target as it was sent, and its headers by lower-case name."""

    method: str
    target: str
    headers: dict[str, str]

    @property
    def span(self) -> tuple[int | None, int | None] | None:
        """First and last byte of the Range header; (None, n) for the last n."""
        if "range" not in self.headers:
            return None
        first, _, last = self.headers["range"].removeprefix("bytes=").partition("-")
        return int(first) if first else None, int(last) if last else None


Answer = Callable[[Asked], bytes]


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    """Bytes of a response; the only added header closes the connection."""
    return "\r\n".join([f"HTTP/1.1 {status}", "Connection: close", *headers, "", ""]).encode() + body


def sized(status: str, body: bytes, *headers: str) -> bytes:
    """Like `answer`, with the length."""
    return answer(status, body, f"Content-Length: {len(body)}", *headers)


def served(data: bytes, asked: Asked, *headers: str) -> bytes:
    """Response of a well-behaved server for an object."""
    if asked.method == "HEAD":
        return answer("200 OK", b"", f"Content-Length: {len(data)}", *headers)
    if asked.span is None:
        return sized("200 OK", data, *headers)
    start, last = asked.span
    stop = len(data) if start is None or last is None else min(last + 1, len(data))
    start = max(len(data) - (last or 0), 0) if start is None else start
    if start >= stop:
        return sized("416 Range Not Satisfiable", b"", f"Content-Range: bytes */{len(data)}", *headers)
    part = f"Content-Range: bytes {start}-{stop - 1}/{len(data)}"
    return sized("206 Partial Content", data[start:stop], part, *headers)


@dataclass
class OddServer:
    """Address and received requests."""

    url: str
    asked: list[Asked] = field(default_factory=list)


@contextmanager
def odd_server(reply: Answer) -> Iterator[OddServer]:
    """Answer each request with the bytes returned by `reply`, then close its connection."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    server = OddServer(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def converse(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            text = b""
            while b"\r\n\r\n" not in text and (more := connection.recv(65536)):
                text += more
            first, *lines = text.decode("latin-1").split("\r\n\r\n")[0].split("\r\n")
            if not first:
                return
            method, target, _ = first.split(" ", 2)
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            request = Asked(method, target, headers)
            server.asked.append(request)
            connection.sendall(reply(request))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=converse, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def files_below(root: Path, reply: Callable[[bytes, Asked], bytes] = served) -> Answer:
    """Serve the files of a folder like `reply`; 404 for others."""

    def answer_file(asked: Asked) -> bytes:
        file = root / asked.target.partition("?")[0].lstrip("/")
        return reply(file.read_bytes(), asked) if file.is_file() else sized("404 Not Found", b"")

    return answer_file


@contextmanager
def serving(
    objects: Mapping[str, bytes],
    head: int | None = None,
    no_ranges: frozenset[str] | set[str] = frozenset(),
    headers: Callable[[bytes], Mapping[str, str]] = lambda body: {},
    asked: list[str] | None = None,
) -> Iterator[str]:
    """Serve `objects`, looked up at each request by path, at the address that is yielded.

    Args:
        head: the status of every answer to HEAD; None = as GET.
        no_ranges: paths of which a range is answered with all of it.
        headers: of an answer with this object, such as a validator.
        asked: takes 'METHOD PATH' of each request.
    """

    def reply(request: Asked) -> bytes:
        if asked is not None:
            asked.append(f"{request.method} {request.target}")
        path = request.target.partition("?")[0]
        body = objects.get(path)
        more = [f"{name}: {value}" for name, value in headers(body or b"").items()]
        if request.method == "HEAD" and head is not None:
            return answer(f"{head} As Told", b"", f"Content-Length: {len(body or b'')}", *more)
        if body is None:
            return sized("404 Not Found", b"", *more)
        return served(body, replace(request, headers={}) if path in no_ranges else request, *more)

    with odd_server(reply) as server:
        yield server.url


def objects_of(folder: Path, prefix: str = "") -> dict[str, bytes]:
    """The files of a folder, as objects."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {f"{prefix}/{file.relative_to(folder).as_posix()}": file.read_bytes() for file in files}
