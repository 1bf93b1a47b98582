"""A client of chunk_server_process.py: the real server in its own process, for the length of a `with`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

SERVER = Path(__file__).with_name("chunk_server_process.py")


class ChunkServer:
    """Serves `root` over HTTP at `url`, e.g. http://127.0.0.1:40001, until the `with` or this process ends."""

    def __init__(self, root: Path, latency_ms: float = 0) -> None:
        self.root = root
        self.latency_ms = latency_ms
        self.url = ""

    def __enter__(self) -> ChunkServer:
        """As `start`."""
        self.start()
        return self

    def start(self) -> None:
        """Starts the process, at its old address if it had one, and waits until it listens. Raises RuntimeError if it
        ends instead."""
        port = urlsplit(self.url).port or 0
        arguments = [str(self.root), f"--latency-ms={self.latency_ms}", f"--port={port}", "--with-parent"]
        command = [sys.executable, str(SERVER), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            self.stop()
            raise RuntimeError(f"the chunk server ended with status {self._process.returncode}; see its stderr above")

    def stop(self) -> None:
        """Ends the process: SIGTERM, and SIGKILL after 5 s."""
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
        """Replaces all rules; see `Rule` in chunk_server_process.py. Raises ValueError with the server's words."""
        self._call("POST", "/__control", json.dumps(rules))

    def stats(self) -> dict[str, Any]:
        """Counters since the start or the last reset: requests, bytes_sent, max_in_flight, paths and faults."""
        counters: dict[str, Any] = json.loads(self._call("GET", "/__stats"))
        return counters

    def url_of(self, path: Path) -> str:
        """The address of a file or folder below `root`."""
        return f"{self.url}/{path.relative_to(self.root)}"

    def asked_for(self, path: Path) -> Counter[str]:
        """How often each object below a folder was asked for since the last reset, by its path in the folder."""
        folder = f"/{path.relative_to(self.root)}/"
        counts = self.stats()["paths"].items()
        return Counter({key.removeprefix(folder): count for key, count in counts if key.startswith(folder)})

    def reads_of(self, path: Path) -> Counter[str]:
        """As `asked_for`, without the requests for the first byte alone, which ask whether an object is there."""
        folder = f"/{path.relative_to(self.root)}/"
        looks = self.stats()["looks"].items()
        return self.asked_for(path) - Counter({key.removeprefix(folder): count for key, count in looks})

    def reset(self) -> None:
        """Clears all counters, those of the rules too; the rules stay."""
        self._call("POST", "/__reset")

    def _call(self, method: str, path: str, body: str | None = None) -> bytes:
        """One control request. Never through a proxy, unlike urllib."""
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=10)
        try:
            connection.request(method, path, body)
            reply = connection.getresponse()
            text = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise ValueError(text.decode())
        return text
