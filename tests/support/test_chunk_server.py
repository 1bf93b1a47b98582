"""The chunk server as a plain client meets it: what readers of remote volumes are tested against must itself hold."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse, IncompleteRead, RemoteDisconnected
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.support.chunk_server import SERVER, ChunkServer

CHUNK = np.random.default_rng(0).bytes(300_001)  # an odd length: its half is rounded down
HALF = len(CHUNK) // 2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkServer]:
    root = tmp_path_factory.mktemp("chunk_server") / "root"
    (root / "volume").mkdir(parents=True)
    (root.parent / "secret").write_bytes(b"not below the root")
    for name in ("volume/0.0", "volume/0.1"):
        (root / name).write_bytes(CHUNK)
    (root / "a b%#é.bin").write_bytes(b"odd name")
    with ChunkServer(root) as server:
        yield server


@pytest.fixture
def server(served: ChunkServer) -> ChunkServer:
    """The server of this module, without rules and with all counters at zero."""
    served.set_faults([])
    served.reset()
    return served


def connect(server: ChunkServer, timeout: float = 5) -> HTTPConnection:
    return HTTPConnection(urlsplit(server.url).netloc, timeout=timeout)


def ask(client: HTTPConnection, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    client.request(method, path, headers=headers)
    response = client.getresponse()
    return response, response.read()


def status(client: HTTPConnection, path: str) -> int:
    return ask(client, path)[0].status


def test_files_ranges_and_absent_ones_are_answered_on_one_connection_and_counted(server: ChunkServer) -> None:
    client = connect(server)
    response, body = ask(client, "/volume/0.0?query=ignored")
    assert (response.status, body) == (200, CHUNK)
    head, nothing = ask(client, "/volume/0.0", "HEAD")
    assert nothing == b""
    for name in ("Content-Length", "ETag", "Last-Modified", "Accept-Ranges"):
        assert head.headers[name] == response.headers[name]
    for asked, start, stop in (("0-0", 0, 1), ("100-200099", 100, 200_100), ("7-999999999", 7, 300_001),
                               ("-5", 299_996, 300_001)):  # fmt: skip
        response, body = ask(client, "/volume/0.0", Range=f"bytes={asked}")
        assert (response.status, body) == (206, CHUNK[start:stop])
        assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/300001"
    assert ask(client, "/volume/0.0", Range="bytes=300001-")[0].status == 416
    assert ask(client, "/volume/0.0", Range="bytes=0-1,5-6")[1] == CHUNK, "several ranges are ignored"
    assert ask(client, "/a%20b%25%23%C3%A9.bin")[1] == b"odd name"
    for path in ("/absent", "/volume", "/volume/0.0/x", "/../secret", "/%2e%2e/secret"):
        assert status(client, path) == 404
    stats = server.stats()
    assert (stats["requests"], stats["paths"]["/volume/0.0"], stats["max_in_flight"]) == (14, 8, 1)
    assert stats["looks"]["/volume/0.0"] == 1


def test_latency_is_per_request_and_a_status_hits_as_often_as_its_rule_says(server: ChunkServer) -> None:
    with ChunkServer(server.root, latency_ms=200) as slow:
        began = time.perf_counter()
        status(connect(slow), "/absent")
        assert time.perf_counter() - began >= 0.2
    client = connect(server)
    server.set_faults([{"path": r"^/volume/", "kind": "status", "status": 429, "times": 2}])
    assert [status(client, "/volume/0.0") for _ in range(3)] == [429, 429, 200]
    assert server.stats()["faults"] == {"status": 2}
    server.set_faults([{"path": "volume", "kind": "status", "every": 3}])
    assert [status(client, f"/volume/0.{n % 2}") for n in range(6)] == [200, 200, 503, 200, 200, 503]


def test_a_body_is_cut_stalled_corrupted_or_late_as_the_rule_says(server: ChunkServer) -> None:
    server.set_faults([{"path": "", "kind": "reset"}])
    with pytest.raises(ConnectionResetError) as caught:
        ask(connect(server), "/volume/0.0")
    assert caught.type is ConnectionResetError, "and not RemoteDisconnected, which is one and means a clean close"
    server.set_faults([{"path": "", "kind": "truncate"}])
    with pytest.raises(IncompleteRead) as cut:
        ask(connect(server), "/volume/0.0")
    assert cut.value.partial == CHUNK[:HALF]
    with pytest.raises(RemoteDisconnected):
        ask(connect(server), "/absent")
    server.set_faults([{"path": "0.0", "kind": "stall"}])
    stalled = connect(server, timeout=0.3)
    stalled.request("GET", "/volume/0.0")
    response = stalled.getresponse()
    assert response.read(HALF) == CHUNK[:HALF]
    assert ask(connect(server), "/volume/0.1")[1] == CHUNK, "it holds up nobody else"
    with pytest.raises(TimeoutError):
        response.read(1)
    server.set_faults([{"path": "0.0", "kind": "corrupt", "times": 1}])
    body = ask(connect(server), "/volume/0.0")[1]
    differ = np.flatnonzero(np.frombuffer(body, np.uint8) != np.frombuffer(CHUNK, np.uint8))
    np.testing.assert_array_equal(differ, np.arange(0, len(body), 64))
    server.set_faults([{"path": "0.0", "kind": "delay", "delay_s": 0.3}])
    began = time.perf_counter()
    assert ask(connect(server), "/volume/0.0")[1] == CHUNK
    assert time.perf_counter() - began >= 0.3


def test_it_ends_with_its_parent_and_one_that_cannot_start_is_an_error(server: ChunkServer, tmp_path: Path) -> None:
    parent = "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL); input()"
    command = [sys.executable, "-c", parent, sys.executable, str(SERVER), str(server.root), "--with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.kill()
        assert process.stdout.read() == "", "all who hold it have ended"
    with pytest.raises(RuntimeError, match="ended with status 2"), ChunkServer(tmp_path / "absent"):
        pass
