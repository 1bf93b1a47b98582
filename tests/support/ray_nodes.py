"""Nodes of a Ray cluster as real `ray start` processes, each of which can be killed, or lack a folder or a version."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

_START_S = 200


class Node:
    """One node.  With `covered`, a folder, it runs in a mount namespace of its own in which this folder is empty."""

    def __init__(
        self, *arguments: str, cores: int, store_mib: int = 80, covered: Path | None = None, env: Mapping[str, str] = {}
    ) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--block", "--disable-usage-stats"]
        command += ["--num-cpus", str(cores), "--object-store-memory", str(store_mib * 2**20)]
        if covered is not None:
            mount = 'mount -t tmpfs none "$0" && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mount, str(covered), *command]
        with tempfile.TemporaryFile("w+") as output:
            self.process = subprocess.Popen(
                command, env=os.environ | env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            deadline, text = time.monotonic() + _START_S, ""
            try:
                while "will now block" not in text:  # two that start at the same time on one machine disturb each other
                    assert self.process.poll() is None, text
                    assert time.monotonic() < deadline, text
                    time.sleep(0.1)
                    text = os.pread(output.fileno(), 2**20, 0).decode()
            except BaseException:
                self.kill()
                raise

    def kill(self) -> None:
        """SIGKILL all its processes, as a machine that loses power."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for process in [*root.children(recursive=True), root]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


class Nodes:
    """A head without cores, and nodes that come and go.

    A driver on this machine uses the head's raylet, or, with `apart`, that of the first other node: then the head can
    be killed without it.
    """

    def __init__(self, apart: bool) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        head = ["--head", "--port", self.address.split(":")[1], "--include-dashboard=false"]
        self.head = Node(*head, *(["--node-ip-address", "127.0.0.1"] if apart else []), cores=0)
        self.nodes = [self.head]

    def add(self, cores: int = 1, **lacking: Any) -> Node:
        node = Node("--address", self.address, cores=cores, **lacking)
        self.nodes.append(node)
        return node


def _free_port() -> int:
    """A port below those of connections, which any process may take at any moment."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port := random.randrange(20000, 32000)))
            return port


@contextmanager
def ray_nodes(apart: bool = False) -> Iterator[Nodes]:
    nodes = Nodes(apart)
    try:
        yield nodes
    finally:
        for node in nodes.nodes[::-1]:
            node.kill()


def other_version(folder: Path, name: str, version: str) -> dict[str, str]:
    """Environment of a node on which a distribution has another version."""
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
