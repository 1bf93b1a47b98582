"""Which nodes of a Ray cluster can work (same versions, same files), and whether its head answers."""

import logging
import math
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
from vesuvius.volumes.store.objects import is_remote

log = logging.getLogger(__name__)

_ANSWER_S = 60.0  # after the last answer of another node
_FIRST_S = 600.0  # for the first one: a node starts a process, and may have to install its packages
_SILENT = "it has not answered; see `ray status`, and whether its file systems answer"
_SHM = "give its container a larger /dev/shm (`docker run --shm-size`), or lower `ray start --object-store-memory`"
_POLL_S = 0.5
_HEAD_EVERY_S = 2.0
_RAYS_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
_SELF = "vesuvius-diffusion"
_SAME_VERSIONS = "install the same versions on all nodes (constraints.txt pins them)"


class Nodes:
    """The nodes with cores, each checked once, by a process on it.  A node that cannot work is logged and left out.

    `files` must exist on each node, and `folder` be the same there.  `poll` is called twice a second during checks and
    waits; may raise to stop.
    """

    def __init__(
        self, files: Iterable[str] = (), folder: Path | None = None, poll: Callable[[], None] = lambda: None
    ) -> None:
        self._files, self._folder, self._poll = [*files], folder, poll
        self._check_head = HeadCheck()
        self._unusable: dict[str, str | None] = {}  # reason by node id; None = usable
        self._late: dict[str, Any] = {}  # references to the answers of nodes that have not answered in time
        self.alive: dict[str, dict[str, Any]] = {}  # the nodes at the last check

    def check(self) -> None:
        """Check the nodes that have joined since the last call, and late ones that have answered by now.

        Raises ConfigError: none can work; VesuviusError: the head is gone, or Ray was shut down.
        """
        self._check()
        self.alive = nodes_alive()
        # A node that hangs is not asked again until then: each question would block a process there, and this one.
        answered = {each for each, ref in self._late.items() if ray.wait([ref], timeout=0)[0]}
        self._late = {each: ref for each, ref in self._late.items() if each not in answered}
        new = self.alive.keys() - self._unusable.keys() | self.alive.keys() & answered
        reasons = self._ask(new) if new else {}
        self._unusable |= reasons
        for node_id, reason in reasons.items():
            if reason is not None:
                log.warning("Node %s gets no work: %s", node_text(self.alive[node_id]), reason)
            elif node_id in answered:
                log.info("Node %s has answered and may get work", node_text(self.alive[node_id]))
        if self.alive and not self.usable:
            raise ConfigError(f"No node of the Ray cluster can work: {self._unusable[next(iter(self.alive))]}")

    def can_work(self, node_id: str) -> bool:
        """Whether a node can work, as far as it has been checked."""
        return self._unusable.get(node_id) is None

    @property
    def usable(self) -> dict[str, dict[str, Any]]:
        """The nodes that were alive at the last check and can work, by id, as in `ray.nodes()`."""
        return {node_id: node for node_id, node in self.alive.items() if self.can_work(node_id)}

    def room(self, wanted: int, ranks: int, minutes: float) -> int:
        """Return how many of a rank's readers fit on the nodes that can work; waits for a node.

        Raises ConfigError: no node can work; VesuviusError: for so many minutes there is none.
        """
        started = time.monotonic()
        self.check()
        while not self.usable:
            if time.monotonic() - started > 60 * minutes:
                raise VesuviusError(
                    f"No node of the Ray cluster has had cores for workers for {minutes:g} min "
                    "(cluster.rank_timeout_minutes); add nodes, and continue with --resume"
                )
            time.sleep(_POLL_S)
            self.check()
        cores = sum(int(node["Resources"]["CPU"]) for node in self.usable.values())
        fitting = (cores - (ranks if ranks > 1 else 0)) // ranks  # each of several ranks has reserved a core
        if fitting < wanted:
            text = "Only %s workers fit on the nodes of the Ray cluster that can work; more start when nodes join"
            warn_once(text, f"{max(1, fitting)} of {wanted}")
        return max(1, min(wanted, fitting))

    def placement(self, unchecked: bool = True) -> dict[str, Any]:
        """Options of an actor that keep it off nodes that cannot work, and off `unchecked` ones, as those that join."""
        out = [node for node, reason in self._unusable.items() if reason]
        operator, nodes = ("!in", out) if unchecked else ("in", [*self.usable])
        # After a comma and a blank Ray 2.60 does not recognize a name.
        return {"label_selector": {"ray.io/node-id": f"{operator}({','.join(sorted(nodes))})"}} if nodes else {}

    def _ask(self, node_ids: Iterable[str]) -> dict[str, str | None]:
        """Return for each node why it cannot work, or None.  All are asked at the same time."""
        describe, token = _describer(), None if self._folder is None else self._folder / f".{uuid.uuid4().hex}.seen"
        ours, remote = describe([], None), ray.remote(num_cpus=0, max_retries=0)(describe)
        try:
            if token is not None:
                with storage_errors(f"the folder {self._folder}", "choose a folder that all nodes share and can write"):
                    token.touch()
            on = {each: NodeAffinitySchedulingStrategy(each, soft=False) for each in node_ids}
            seen = None if token is None else str(token)
            asked = {remote.options(scheduling_strategy=on[each]).remote(self._files, seen): each for each in on}
            left = self._wait_for([*asked])
            self._late |= {asked[ref]: ref for ref in left}
            return {each: _SILENT if ref in left else self._reason(each, ref, ours) for ref, each in asked.items()}
        finally:
            if token is not None:
                with suppress(OSError):
                    token.unlink()

    def _wait_for(self, left: list[Any]) -> list[Any]:
        """Wait for answers.  Returns those that have not come: a minute after the last one, or after ten in all."""
        end_s = time.monotonic() + _FIRST_S
        last_s = time.monotonic() if self._unusable else math.inf
        while left and (now := time.monotonic()) < min(last_s + _ANSWER_S, end_s):
            self._check()
            done, left = ray.wait(left, num_returns=len(left), timeout=_POLL_S)
            last_s = now if done else last_s
        return left

    def _check(self) -> None:
        self._poll()
        self._check_head()
        if not ray.is_initialized():  # the next call would start another one
            raise VesuviusError("Ray was shut down while the nodes of its cluster were checked; start again")

    def _reason(self, node_id: str, answer: Any, ours: dict[str, Any]) -> str | None:
        try:
            theirs = ray.get(answer)
        except RayError as error:
            return f"it cannot run a task: {one_line(error)}; see `ray status` and Ray's logs on the node"
        store, shm, node = 0.0, theirs["shm"], self.alive[node_id]
        if self._folder is None:  # else no voxels pass through the stores
            store = node["Resources"].get("object_store_memory", 0)
        if shm is not None and store > shm:
            text = "Ray's object store on node %s has %.2f GiB, but /dev/shm there %.2f GiB: it may be on a disk; %s"
            warn_once(text, node_text(node), store / 2**30, shm / 2**30, _SHM)
        return conflict(theirs, ours)


def _describer() -> Callable[[list[str], str | None], dict[str, Any]]:
    """Return a function that describes the node it runs on; it is sent as code, as vesuvius may be missing there."""

    def describe(files: list[str], token: str | None) -> dict[str, Any]:
        import hashlib
        import importlib.metadata
        import importlib.util
        import os
        import pathlib
        import platform
        import shutil

        versions, sources = {"python": platform.python_version()}, hashlib.sha256()
        for name in ("vesuvius-diffusion", "ray", "torch", "numpy", "zarr"):
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "missing"
        spec = importlib.util.find_spec("vesuvius")
        folder = pathlib.Path((spec and spec.origin) or "/nowhere/vesuvius").parent
        for file in sorted(folder.rglob("*.py")):
            if "/." not in (path := f"/{file.relative_to(folder)}"):  # not in the folder of a notebook or an editor
                sources.update(path.encode() + file.read_bytes())
        return {
            "versions": versions,
            "sources": sources.hexdigest(),
            "missing": [file for file in files if not os.path.exists(file)],
            "other_folder": token and not os.path.exists(token) and os.path.dirname(token),
            "shm": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        }

    return describe


def conflict(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Return why a node cannot work, with the remedy, from `_describer` there and here; None = it can.  Pure.

    Numbers may differ with any release of torch, not with its build (`+cpu`); of the others, patch releases are the
    same to us.  Of vesuvius its sources count: its version may be that of an old editable install.
    """

    def kept(name: str, version: str) -> str:
        return version.partition("+")[0] if name in ("torch", "ray") else ".".join(version.split(".")[:2])

    there, here = theirs["versions"], ours["versions"]
    differing = [name for name in here if name != _SELF and kept(name, there[name]) != kept(name, here[name])]
    if (others := theirs["sources"] != ours["sources"]) and there[_SELF] != here[_SELF]:
        differing.insert(0, _SELF)
    if differing:
        return f"{', '.join(f'{name} {there[name]} there, {here[name]} here' for name in differing)}; {_SAME_VERSIONS}"
    if others:
        return f"its vesuvius {there[_SELF]} has other source files than the one here; {_SAME_VERSIONS}"
    if theirs["missing"]:
        return f"{theirs['missing'][0]} does not exist there; mount it at the same path on all nodes"
    if theirs["other_folder"]:
        return f"{theirs['other_folder']} is another folder there; mount one file system at this path on all nodes"
    return None


def nodes_alive() -> dict[str, dict[str, Any]]:
    """The nodes with cores, by id, as in `ray.nodes()`."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {each["NodeID"]: each for each in nodes if each["Alive"] and each["Resources"].get("CPU")}


def local_paths(data: DataConfig) -> list[str]:
    """Paths of the arrays that readers open, without addresses.  Pure."""
    return sorted({path for path in data.paths if not is_remote(path)})


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
        self._tried_s, self._failed_s = time.monotonic(), math.inf

    def __call__(self) -> None:
        """Raise VesuviusError if the head has not answered for half of Ray's own limit."""
        if (now := time.monotonic()) - self._tried_s < _HEAD_EVERY_S:
            return
        self._tried_s = now
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_HEAD_EVERY_S).close()
            self._failed_s = math.inf
        except OSError as error:
            # From the first failure on: before it, this process may have been suspended.
            if self._failed_s > now:  # logged at once, because Ray's C++ core may end this process at any time
                log.warning("The head of Ray at %s does not answer (%s)", self._address, one_line(error))
            self._failed_s = min(self._failed_s, now)
            if now - self._failed_s >= self._limit_s:
                raise VesuviusError(
                    f"The head of Ray at {self._address} has not answered for {now - self._failed_s:.0f} s "
                    f"({one_line(error)}); start its cluster again, if it has one, then the same command, or train "
                    "with --resume"
                ) from error
