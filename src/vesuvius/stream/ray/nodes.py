"""Which nodes of a Ray cluster can work (same versions, same files), and whether its head answers."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vesuvius.config import DataConfig
from vesuvius.errors import ConfigError, VesuviusError, one_line, storage_errors, warn_once
from vesuvius.stream.reading.reading_log import STORE_REMEDY
from vesuvius.volumes.store.objects import is_remote

log = logging.getLogger(__name__)

_ANSWER_S = 60.0  # a node starts a process for it
_SILENT = f"it has not answered within {_ANSWER_S:.0f} s; see `ray status`"
_POLL_S = 0.5
_HEAD_EVERY_S = 2.0
_RAYS_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
_SAME_VERSIONS = "install the same versions on all nodes (constraints.txt pins them)"


class Nodes:
    """The nodes with cores, each checked once, by a process on it.  A node that cannot work is logged and left out.

    Args:
        files: paths that must exist on each node.
        folder: must be the same folder on each node: a file that is written here must appear there.
        poll: called twice a second while nodes are checked; may raise to stop.
    """

    def __init__(
        self, files: Iterable[str] = (), folder: Path | None = None, poll: Callable[[], None] = lambda: None
    ) -> None:
        self._files, self._folder, self._poll = [*files], folder, poll
        self._check_head = HeadCheck()
        self._unusable: dict[str, str | None] = {}  # reason by node id; None = usable
        self.alive: dict[str, dict[str, Any]] = {}  # the nodes at the last check

    def check(self) -> None:
        """Check the nodes that have joined since the last call.

        Raises ConfigError: none can work; VesuviusError: the head is gone.
        """
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        self.alive = {each["NodeID"]: each for each in nodes if each["Alive"] and each["Resources"].get("CPU")}
        known = {node_id for node_id, reason in self._unusable.items() if reason != _SILENT}
        reasons = self._ask(new) if (new := self.alive.keys() - known) else {}
        self._unusable |= reasons
        for node_id, reason in reasons.items():
            if reason is not None:
                log.warning("Node %s gets no work: %s", node_text(self.alive[node_id]), reason)
        if self.alive and not self.usable:
            raise ConfigError(f"No node of the Ray cluster can work: {self._unusable[next(iter(self.alive))]}")

    def can_work(self, node_id: str) -> bool:
        """Whether a node can work, as far as it has been checked."""
        return self._unusable.get(node_id) is None

    @property
    def usable(self) -> dict[str, dict[str, Any]]:
        """The nodes that were alive at the last check and can work, by id, as in `ray.nodes()`."""
        return {node_id: node for node_id, node in self.alive.items() if self.can_work(node_id)}

    def room(self, wanted: int, ranks: int, minutes: float, is_stopped: Callable[[], bool]) -> int:
        """Return how many of a rank's readers fit on the nodes that can work; waits for a node.

        Raises ConfigError: no node can work; VesuviusError: for so many minutes there is none.
        """
        started = time.monotonic()
        while True:
            self.check()
            if (usable := self.usable) or is_stopped():
                break
            if time.monotonic() - started > 60 * minutes:
                raise VesuviusError(
                    f"No node of the Ray cluster has had cores for workers for {minutes:g} min "
                    "(cluster.rank_timeout_minutes); add nodes, and continue with --resume"
                )
            time.sleep(_POLL_S)
        cores = sum(int(node["Resources"]["CPU"]) for node in usable.values())
        fitting = (cores - (ranks if ranks > 1 else 0)) // ranks  # each of several ranks has reserved a core
        return max(1, min(wanted, fitting))

    @property
    def options(self) -> dict[str, Any]:
        """Options of an actor that keep it off nodes that cannot work; one that joins may get it."""
        # After a comma and a blank Ray 2.60 does not recognize a name.
        out = ",".join(sorted(node for node, reason in self._unusable.items() if reason))
        return {"label_selector": {"ray.io/node-id": f"!in({out})"}} if out else {}

    def _ask(self, node_ids: Iterable[str]) -> dict[str, str | None]:
        """Return for each node why it cannot work, or None."""
        describe, token = _describer(), None if self._folder is None else self._folder / f".{uuid.uuid4().hex}.seen"
        ours, remote = describe([], None), ray.remote(num_cpus=0, max_retries=0)(describe)
        try:
            if token is not None:
                with storage_errors(f"the folder {self._folder}", "choose a folder that all nodes share and can write"):
                    token.touch()
            on = {each: NodeAffinitySchedulingStrategy(each, soft=False) for each in node_ids}
            seen = None if token is None else str(token)
            asked = {remote.options(scheduling_strategy=on[each]).remote(self._files, seen): each for each in on}
            deadline, left = time.monotonic() + _ANSWER_S, [*asked]
            while left and time.monotonic() < deadline:
                left = ray.wait(left, num_returns=len(left), timeout=_POLL_S)[1]
                self._check_head()
                self._poll()
            return {each: _SILENT if ref in left else _problem(ref, ours) for ref, each in asked.items()}
        finally:
            if token is not None:
                with suppress(OSError):
                    token.unlink()


def _describer() -> Callable[[list[str], str | None], dict[str, Any]]:
    """Return a function that describes the node it runs on; it is sent as code, as vesuvius may be missing there."""

    def describe(files: list[str], token: str | None) -> dict[str, Any]:
        import hashlib
        import importlib.metadata
        import importlib.util
        import os
        import pathlib
        import platform

        versions, sources = {"python": platform.python_version()}, hashlib.sha256()
        for name, distribution in (
            ("vesuvius", "vesuvius-diffusion"),
            *((n, n) for n in ("ray", "torch", "numpy", "zarr")),
        ):
            try:
                versions[name] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "missing"
        spec = importlib.util.find_spec("vesuvius")
        folder = pathlib.Path((spec and spec.origin) or "/nowhere/vesuvius").parent
        for file in sorted(folder.rglob("*.py")):
            sources.update(str(file.relative_to(folder)).encode() + file.read_bytes())
        return {
            "versions": versions,
            "sources": sources.hexdigest(),
            "missing": [file for file in files if not os.path.exists(file)],
            "other_folder": token and not os.path.exists(token) and os.path.dirname(token),
        }

    return describe


def _problem(answer: Any, ours: dict[str, Any]) -> str | None:
    try:
        theirs = ray.get(answer)
    except RayError as error:
        return f"it cannot run a task: {one_line(error)}; {_SAME_VERSIONS}"
    return conflict(theirs, ours)


def conflict(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Return why a node cannot work, with the remedy, from `_describer` there and here; None = it can.  Pure.

    Numbers may differ with any release of torch; of numpy and zarr, patch releases are the same to us.
    """
    exact = ("vesuvius", "torch", "ray")

    def kept(name: str, version: str) -> str:
        return version if name in exact else ".".join(version.split(".")[:2])

    there, here = theirs["versions"], ours["versions"]
    differing = [name for name in here if kept(name, there[name]) != kept(name, here[name])]
    if differing:
        return f"{', '.join(f'{name} {there[name]} there, {here[name]} here' for name in differing)}; {_SAME_VERSIONS}"
    if theirs["sources"] != ours["sources"]:
        return f"its vesuvius {there['vesuvius']} has other source files than the one here; {_SAME_VERSIONS}"
    if theirs["missing"]:
        return f"{theirs['missing'][0]} does not exist there; mount it at the same path on all nodes"
    if theirs["other_folder"]:
        return f"{theirs['other_folder']} is another folder there; mount one file system at this path on all nodes"
    return None


def check_object_stores(need_here: int, readers: int = 0, per_reader: int = 0) -> None:
    """Log each node of a cluster whose object store may be too small; before a run, as spills come late and are slow.

    Args:
        need_here: bytes on this node.
        readers: number of readers that may run on other nodes.
        per_reader: bytes of each there.
    """
    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        count = min(int(node["Resources"].get("CPU", 0)), readers)
        need = need_here if node["NodeID"] == here else count * per_reader
        size = node["Resources"].get("object_store_memory", 0)
        if node["Alive"] and need > size:
            warn_once(
                "Ray's object store on node %s has %.2f GiB, but the regions of this run may take %.2f GiB there, and "
                "what does not fit is spilled to disk; %s",
                node_text(node),
                *(size / 2**30, need / 2**30, STORE_REMEDY),
            )


def local_paths(data: DataConfig) -> list[str]:
    """Paths of the arrays that readers open, without addresses.  Pure."""
    arrays = (array for volume in data.volumes for array in (*volume.images, *volume.labels))
    return sorted({array.path for array in arrays if not is_remote(array.path)})


def node_text(node: dict[str, Any]) -> str:
    """Name of a node of `ray.nodes()`."""
    return f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"


class HeadCheck:
    """Notices that the head of the cluster is gone; to be called several times a second.

    Ray's C++ core ends all processes of a cluster that cannot reach the head for a minute, without a word to Python.
    """

    def __init__(self) -> None:
        self._address = ray.get_runtime_context().gcs_address
        self._limit_s = float(os.environ.get(_RAYS_LIMIT, 60)) / 2
        self._answered_s = self._tried_s = time.monotonic()

    def __call__(self) -> None:
        """Raise VesuviusError if the head has not answered for half of Ray's own limit."""
        if (now := time.monotonic()) - self._tried_s < _HEAD_EVERY_S:
            return
        self._tried_s = now
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_HEAD_EVERY_S).close()
            self._answered_s = now
        except OSError as error:
            if (silent_s := now - self._answered_s) >= self._limit_s:
                raise VesuviusError(
                    f"The head of the Ray cluster at {self._address} has not answered for {silent_s:.0f} s "
                    f"({one_line(error)}); start the cluster again, then the same command, or train with --resume"
                ) from error
