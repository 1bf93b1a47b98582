"""The chunk server as a plain client meets it: what readers of remote volumes are tested against must itself hold.

Nothing here compares the Date header, nor how many bytes arrive before a RST: TCP may drop what it had not delivered.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPResponse, IncompleteRead, RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.support.chunk_server import SERVER, ChunkServer

CHUNK = np.random.default_rng(0).bytes(300_001)  # an odd length: its half is rounded down
HALF = len(CHUNK) // 2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkServer]:
    folder = tmp_path_factory.mktemp("chunk_server")
    (folder / "secret").write_bytes(b"not below the root")
    root = folder / "root"
    (root / "volume").mkdir(parents=True)
    (root / "volume" / "0.0").write_bytes(CHUNK)
    (root / "volume" / "0.1").write_bytes(CHUNK)
    (root / "a b%#é.bin").write_bytes(b"odd name")
    (root / "empty").touch()
    with ChunkServer(root) as server:
        yield server


@pytest.fixture
def server(served: ChunkServer) -> ChunkServer:
    """The server of this module, without rules and with all counters at zero."""
    served.set_faults([])
    served.reset()
    return served


@pytest.fixture
def client(server: ChunkServer) -> Iterator[HTTPConnection]:
    connection = connect(server)
    yield connection
    connection.close()


def connect(server: ChunkServer, timeout: float = 5) -> HTTPConnection:
    return HTTPConnection(urlsplit(server.url).netloc, timeout=timeout)


def ask(client: HTTPConnection, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    client.request(method, path, headers=headers)
    response = client.getresponse()
    return response, response.read()


def status(client: HTTPConnection, path: str) -> int:
    return ask(client, path)[0].status


def say(server: ChunkServer, words: bytes) -> bytes:
    """Send bytes on a bare socket; returns all that comes back until the server closes."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=5) as bare:
        bare.sendall(words)
        return b"".join(iter(lambda: bare.recv(65536), b""))


# Files


def test_get_answers_the_whole_file_with_its_headers(server: ChunkServer, client: HTTPConnection) -> None:
    response, body = ask(client, "/volume/0.0?query=ignored")
    assert (response.status, body) == (200, CHUNK)
    assert response.headers["Content-Length"] == str(len(CHUNK))
    assert response.headers["Accept-Ranges"] == "bytes"
    modified = parsedate_to_datetime(response.headers["Last-Modified"]).timestamp()
    assert modified == int((server.root / "volume" / "0.0").stat().st_mtime)


def test_etag_stays_for_a_file_and_changes_with_it(server: ChunkServer, client: HTTPConnection) -> None:
    path = server.root / "changing"
    path.write_bytes(b"one")
    first, again = (ask(client, "/changing")[0].headers["ETag"] for _ in range(2))
    path.write_bytes(b"three")
    assert first == again != ask(client, "/changing")[0].headers["ETag"]


def test_head_has_the_headers_of_get_and_no_body(client: HTTPConnection) -> None:
    head, nothing = ask(client, "/volume/0.0", "HEAD")
    get, _ = ask(client, "/volume/0.0")
    assert nothing == b""
    same = ("Content-Length", "ETag", "Last-Modified", "Accept-Ranges")
    assert [head.headers[name] for name in same] == [get.headers[name] for name in same]


def test_one_connection_carries_many_requests(client: HTTPConnection) -> None:
    paths = ["/volume/0.0", "/absent", "/empty", "/volume/0.1"]
    client.connect()
    port = client.sock.getsockname()[1]
    assert [status(client, path) for path in paths] == [200, 404, 200, 200]
    assert client.sock.getsockname()[1] == port


def test_connection_close_is_obeyed(server: ChunkServer) -> None:
    for request in (b"GET /empty HTTP/1.1\r\nConnection: close\r\n\r\n", b"GET /empty HTTP/1.0\r\n\r\n"):
        assert say(server, request).startswith(b"HTTP/1.1 200 OK\r\n")  # returns: the server did close


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-200099", 100, 200_100),
        ("bytes=300000-", 300_000, 300_001),
        ("bytes=7-999999999", 7, 300_001),
        ("bytes=-5", 299_996, 300_001),
        ("bytes=-999999999", 0, 300_001),
    ],
)
def test_range_answers_those_bytes(client: HTTPConnection, asked: str, start: int, stop: int) -> None:
    response, body = ask(client, "/volume/0.0", Range=asked)
    assert (response.status, body) == (206, CHUNK[start:stop])
    assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/300001"
    assert response.headers["Content-Length"] == str(stop - start)


@pytest.mark.parametrize("asked", ["bytes=300001-", "bytes=300001-300005", "bytes=-0"])
def test_range_beyond_the_file_is_416(client: HTTPConnection, asked: str) -> None:
    response, body = ask(client, "/volume/0.0", Range=asked)
    assert (response.status, body) == (416, b"")
    assert response.headers["Content-Range"] == "bytes */300001"


@pytest.mark.parametrize("asked", ["bytes=5-4", "bytes=-", "bytes=0-1,5-6", "voxels=0-1", "bytes=one-2"])
def test_malformed_and_multiple_ranges_are_ignored(client: HTTPConnection, asked: str) -> None:
    response, body = ask(client, "/volume/0.0", Range=asked)
    assert (response.status, body) == (200, CHUNK)


def test_paths_are_percent_decoded(client: HTTPConnection) -> None:
    assert ask(client, "/a%20b%25%23%C3%A9.bin")[1] == b"odd name"


@pytest.mark.parametrize(
    "path",
    [
        *("/absent", "/volume", "/volume/", "/", "/volume/0.0/", "/volume/0.0/x", "/%00", "/__control"),
        *("/../secret", "/%2e%2e/secret", "/..%2Fsecret", "/volume/../../secret"),
    ],
)
def test_absent_files_folders_and_ways_out_of_the_root_are_404(client: HTTPConnection, path: str) -> None:
    response, body = ask(client, path)
    assert (response.status, body) == (404, b"")


def test_a_file_that_cannot_be_opened_is_not_called_absent(server: ChunkServer, client: HTTPConnection) -> None:
    (server.root / "loop").symlink_to("loop")
    assert status(client, "/loop") == 500


def test_what_is_not_http_is_refused_with_400(server: ChunkServer) -> None:
    chunked = b"POST /__reset HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    long = b"GET /" + b"x" * 100_000 + b"\r\n\r\n"
    for words in (b"voxels, please\r\n\r\n", b"PUT /empty HTTP/1.1\r\n\r\n", chunked, long):
        assert say(server, words).startswith(b"HTTP/1.1 400 Bad Request\r\n")


# Latency and counters


def test_latency_is_per_request_and_requests_wait_together(server: ChunkServer) -> None:
    with ChunkServer(server.root, latency_ms=200) as slow, ThreadPoolExecutor(8) as pool:

        def seconds(_: int) -> float:
            client = connect(slow)
            begin = time.perf_counter()
            assert status(client, "/empty") == status(client, "/empty") == 200
            client.close()
            return time.perf_counter() - begin

        begin = time.perf_counter()
        took = list(pool.map(seconds, range(8)))
        # Two requests on each connection: 0.4 s each, 3.2 s in turn. The margin is for a loaded machine.
        assert min(took) >= 0.4
        assert time.perf_counter() - begin < 2
        assert slow.stats()["max_in_flight"] == 8


def test_stats_count_file_requests_only_and_reset_clears_them(server: ChunkServer, client: HTTPConnection) -> None:
    ask(client, "/volume/0.0")
    ask(client, "/volume/0.0", Range="bytes=0-9")
    ask(client, "/volume/0.1", "HEAD")
    ask(client, "/absent%20")
    server.stats()
    expected = {
        "requests": 4,
        "bytes_sent": len(CHUNK) + 10,
        "max_in_flight": 1,
        "paths": {"/volume/0.0": 2, "/volume/0.1": 1, "/absent ": 1},
        "looks": {"/volume/0.0": 0, "/volume/0.1": 0, "/absent ": 0},
        "faults": {},
    }
    assert server.stats() == expected
    server.reset()
    assert server.stats() == {
        "requests": 0,
        "bytes_sent": 0,
        "max_in_flight": 0,
        "paths": {},
        "looks": {},
        "faults": {},
    }


# Faults


def test_status_hits_the_first_requests_of_each_path(server: ChunkServer, client: HTTPConnection) -> None:
    server.set_faults([{"path": r"^/volume/", "kind": "status", "status": 429, "times": 2}])
    paths = ["/volume/0.0", "/volume/0.1", "/empty", "/volume/0.0", "/volume/0.0", "/volume/0.1", "/volume/0.1"]
    assert [status(client, path) for path in paths] == [429, 429, 200, 429, 200, 429, 200]
    assert server.stats()["faults"] == {"status": 4}


def test_every_counts_matching_requests_over_all_paths(server: ChunkServer, client: HTTPConnection) -> None:
    server.set_faults([{"path": "volume", "kind": "status", "every": 3}])
    paths = ["/volume/0.0", "/volume/0.1", "/empty", "/volume/0.0", "/volume/0.0", "/volume/absent", "/volume/0.1"]
    assert [status(client, path) for path in paths] == [200, 200, 200, 503, 200, 404, 503]


def test_a_rule_without_counts_hits_for_ever_until_rules_change(server: ChunkServer, client: HTTPConnection) -> None:
    server.set_faults([{"path": "", "kind": "status", "status": 500, "times": None}])
    assert [status(client, "/empty") for _ in range(5)] == [500] * 5
    server.set_faults([])
    assert status(client, "/empty") == 200


def test_the_first_rule_that_hits_wins(server: ChunkServer, client: HTTPConnection) -> None:
    rules: list[dict[str, Any]] = [{"path": "0.0", "kind": "status", "times": 1}, {"path": "", "kind": "status"}]
    server.set_faults([rules[0], rules[1] | {"status": 500, "times": 1}])
    assert [status(client, "/volume/0.0") for _ in range(3)] == [503, 500, 200]


def test_reset_lets_rules_count_anew(server: ChunkServer, client: HTTPConnection) -> None:
    server.set_faults([{"path": "", "kind": "status", "times": 1}])
    assert [status(client, "/empty") for _ in range(2)] == [503, 200]
    server.reset()
    assert [status(client, "/empty") for _ in range(2)] == [503, 200]


def test_reset_fault_is_a_tcp_reset_within_the_body(server: ChunkServer, client: HTTPConnection) -> None:
    server.set_faults([{"path": "0.0", "kind": "reset"}])
    with pytest.raises(ConnectionResetError) as caught:
        ask(client, "/volume/0.0")
    assert caught.type is ConnectionResetError  # and not RemoteDisconnected, which is one and means a clean close
    assert server.stats()["bytes_sent"] == HALF


def test_truncate_ends_cleanly_after_half_of_the_promised_body(server: ChunkServer, client: HTTPConnection) -> None:
    server.set_faults([{"path": "0.0", "kind": "truncate"}])
    client.request("GET", "/volume/0.0")
    response = client.getresponse()
    assert (response.status, response.headers["Content-Length"]) == (200, str(len(CHUNK)))
    with pytest.raises(IncompleteRead) as caught:
        response.read()
    assert caught.value.partial == CHUNK[:HALF]


def test_truncate_halves_a_range(server: ChunkServer, client: HTTPConnection) -> None:
    server.set_faults([{"path": "0.0", "kind": "truncate"}])
    with pytest.raises(IncompleteRead) as caught:
        ask(client, "/volume/0.0", Range="bytes=10-19")
    assert caught.value.partial == CHUNK[10:15]


def test_stall_sends_half_then_nothing_and_holds_up_nobody_else(server: ChunkServer) -> None:
    server.set_faults([{"path": "0.0", "kind": "stall"}])
    stalled = connect(server, timeout=0.3)
    stalled.request("GET", "/volume/0.0")
    response = stalled.getresponse()
    assert response.read(HALF) == CHUNK[:HALF]
    with pytest.raises(TimeoutError):
        response.read(1)
    other = connect(server)
    assert ask(other, "/volume/0.1")[1] == CHUNK
    assert server.stats()["max_in_flight"] == 2
    response.close()
    stalled.close()
    server.reset()
    deadline = time.monotonic() + 5
    while server.stats()["max_in_flight"] != 1 and time.monotonic() < deadline:  # the stalled one ends with its client
        server.reset()
        ask(other, "/empty")
    assert server.stats()["max_in_flight"] == 1
    other.close()


def test_corrupt_changes_bytes_but_not_their_number(server: ChunkServer, client: HTTPConnection) -> None:
    server.set_faults([{"path": "0.0", "kind": "corrupt", "times": 1}])
    assert ask(client, "/volume/0.0", "HEAD")[0].status == 200  # has no body, so the fault waits for one
    response, body = ask(client, "/volume/0.0", Range="bytes=100-")
    assert (response.status, len(body)) == (206, len(CHUNK) - 100)
    differ = np.flatnonzero(np.frombuffer(body, np.uint8) != np.frombuffer(CHUNK[100:], np.uint8))
    np.testing.assert_array_equal(differ, np.arange(0, len(body), 64))
    assert ask(client, "/volume/0.0")[1] == CHUNK
    assert server.stats()["faults"] == {"corrupt": 1}


def test_delay_comes_late_but_whole(server: ChunkServer, client: HTTPConnection) -> None:
    server.set_faults([{"path": "0.0", "kind": "delay", "delay_s": 0.3, "times": 1}])
    begin = time.perf_counter()
    assert ask(client, "/volume/0.0")[1] == CHUNK
    late = time.perf_counter()
    assert ask(client, "/volume/0.0")[1] == CHUNK
    assert late - begin >= 0.3 > time.perf_counter() - late


@pytest.mark.parametrize(
    ("kind", "error"),
    [("reset", ConnectionResetError), ("truncate", RemoteDisconnected), ("stall", TimeoutError)],
)
def test_an_absent_file_is_cut_before_its_404(server: ChunkServer, kind: str, error: type[Exception]) -> None:
    server.set_faults([{"path": "absent", "kind": kind}])
    client = connect(server, timeout=0.3)
    with pytest.raises(error) as caught:
        ask(client, "/absent")
    assert caught.type is error  # RemoteDisconnected is also a ConnectionResetError
    client.close()


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"path": "", "kind": "explode"}], "kind must be one of .* got 'explode'"),
        ([{"path": "", "kind": "status", "times": 1, "every": 2}], "not both"),
        ([{"path": "", "kind": "status", "every": 0}], "must be >= 1"),
        ([{"path": "", "kind": "delay", "delay_s": -1}], "delay_s >= 0"),
        ([{"path": "", "kind": "status", "status": 42}], "status 200 to 599"),
        ([{"path": "", "kind": "status", "times": "3"}], "list of rules"),
        ([{"path": "(", "kind": "status"}], "list of rules"),
        ([{"kind": "status"}], "list of rules"),
        ([{"path": "", "kind": "status", "colour": 1}], "list of rules"),
        ({"path": "", "kind": "status"}, "list of rules"),
    ],
)
def test_bad_rules_are_refused_and_leave_the_old_ones(
    server: ChunkServer, client: HTTPConnection, rules: Any, words: str
) -> None:
    server.set_faults([{"path": "", "kind": "status", "status": 418}])
    with pytest.raises(ValueError, match=words):
        server.set_faults(rules)
    assert status(client, "/empty") == 418


def test_rules_of_a_file_hold_from_the_start(server: ChunkServer, tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text('[{"path": "empty", "kind": "status", "status": 502}]')
    command = [sys.executable, SERVER, server.root, "--latency-ms", "0", "--faults", faults]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        client = HTTPConnection(urlsplit(process.stdout.readline().strip()).netloc, timeout=5)
        try:
            assert status(client, "/empty") == 502
        finally:
            client.close()
            process.terminate()


# Its end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_under_open_requests(server: ChunkServer, number: signal.Signals) -> None:
    command = [sys.executable, str(SERVER), str(server.root), "--latency-ms=60000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = urlsplit(process.stdout.readline().strip()).netloc
        waiting, watching = HTTPConnection(address, timeout=5), HTTPConnection(address, timeout=5)
        waiting.request("GET", "/empty")
        while b'"requests": 1' not in ask(watching, "/__stats")[1]:
            pass
        process.send_signal(number)
        try:
            assert process.wait(5) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
            waiting.close()
            watching.close()


def test_it_ends_when_its_stdin_does(server: ChunkServer) -> None:
    with ChunkServer(server.root) as other:
        assert other._process.poll() is None
        assert other._process.stdin is not None
        other._process.stdin.close()
        assert other._process.wait(5) == 0


def test_it_ends_when_its_parent_is_killed(server: ChunkServer) -> None:
    # No pipe on stdin here: only the death of the parent can tell the server, which holds the other end of `stdout`.
    parent = (
        "import subprocess, sys, time; server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL);"
        "print(server.pid, file=sys.stderr, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", parent, sys.executable, str(SERVER), str(server.root), "--with-parent"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        server_pid = int(process.stderr.readline())
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        alive, _, _ = select.select([process.stdout], [], [], 0.5)  # longer than the server's poll of its parent
        process.kill()
        ended, _, _ = select.select([process.stdout], [], [], 5)
        if not ended:
            os.kill(server_pid, signal.SIGKILL)
        assert (alive, ended) == ([], [process.stdout])


def test_a_server_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with status 2"), ChunkServer(tmp_path / "absent"):
        pass
