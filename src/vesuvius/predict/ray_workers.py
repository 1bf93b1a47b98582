"""Runs tasks in Ray actors, on one machine or several; the tasks of one that dies are repeated in others."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from vesuvius.config import ClusterConfig
from vesuvius.errors import ConfigError, VesuviusError, one_line
from vesuvius.predict.tasks import OpenRunner, RunTasks, Task, TaskRunner
from vesuvius.runlog.units import format_count
from vesuvius.stream.ray.nodes import HeadCheck, Nodes, node_text
from vesuvius.stream.ray.session import Session
from vesuvius.threads import on_thread

log = logging.getLogger(__name__)

_POLL_S = 0.5
_END_S = 5.0
_SILENT_S = 3600.0
_IN_FLIGHT = 2  # tasks per actor, on a thread each: one reads and writes while the network computes
_RETRIES = 3
_STORE_BYTES = 2**27  # the object store carries no voxels


@contextmanager
def ray_workers(
    open_runner: OpenRunner,
    count: int,
    gpus: int,
    address: str | None,
    check: Callable[[], None],
    folder: Path | None = None,
    files: Iterable[str] = (),
) -> Iterator[RunTasks]:
    """Start Ray actors, each with 0 or 1 GPUs, and yield a function that runs tasks in them.

    Args:
        address: that of a cluster, or None for a private Ray on this machine.
        check: called twice a second; may raise to stop.
        folder, files: what the tasks need on each node of a cluster; a node without them gets no tasks (`Nodes`).

    Raises ConfigError: Ray does not start or is too small, or no node of the cluster can work; VesuviusError: a task
    keeps killing its actor, no actor answers, or the head of the cluster is gone.
    """
    session = Session(ClusterConfig(address=address), count, 0, _STORE_BYTES)
    actors: _Actors | None = None
    try:
        nodes = None
        if address is not None:
            nodes = Nodes(files, folder, check)
            nodes.check()
        resource = "GPU" if gpus else "CPU"
        have = float(ray.cluster_resources().get(resource, 0))  # type: ignore[no-untyped-call]
        if count > have:
            if address is None or have < 1:
                text = f"--workers {count} exceeds the {have:g} {resource}s of the Ray cluster; lower --workers"
                raise ConfigError(text)
            log.warning(
                "--workers %d exceeds the %g %ss of the Ray cluster; more start with new nodes", count, have, resource
            )
        actors = _Actors(open_runner, count, gpus, nodes, check)
        yield actors.run
    finally:
        if actors is not None:
            with suppress(TimeoutError, RayError):  # waits forever for a cluster whose head is gone
                on_thread(actors.close, name="ray-kill").result(_END_S)
        session.close()


class _Worker:
    def __init__(self, open_runner: OpenRunner) -> None:
        self._open_runner, self._opening = open_runner, threading.Lock()
        self._runner: TaskRunner | None = None

    def node(self) -> str:
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def run(self, task: Task) -> Task:
        with self._opening:
            self._runner = self._runner or self._open_runner()
        return self._runner.run(task)


class _Actors:
    """Actors that run tasks.  One gets tasks only once it runs: those of a node that is lost go to the others at once.

    A lost actor is replaced when a node has room, so a node that joins later gets work, too.
    """

    def __init__(
        self, open_runner: OpenRunner, count: int, gpus: int, nodes: Nodes | None, check: Callable[[], None]
    ) -> None:
        remote: Any = ray.remote
        # Ray would repeat the tasks of a lost actor on that actor alone, and wait for room to restart it.
        self._kind = remote(num_cpus=1, num_gpus=gpus, max_concurrency=_IN_FLIGHT, max_restarts=0)(_Worker)
        self._nodes, self._check, self._check_head = nodes, check, HeadCheck()
        self._runner_ref, self._failed_starts, self._starts_max = ray.put(open_runner), 0, _RETRIES * count
        self._starting: dict[Any, Any] = {}  # actor by the reference to its node
        self._load: dict[Any, int] = {}  # number of tasks by actor that runs
        self._node: dict[Any, str] = {}  # its node's id
        for _ in range(count):
            self._start()

    def run(self, tasks: Iterable[Task]) -> Iterator[Task]:
        waiting, running, deaths = deque(tasks), dict[Any, tuple[Any, Task]](), Counter[Task]()
        last_s = time.monotonic()
        while waiting or running:
            while waiting and (free := [actor for actor, load in self._load.items() if load < _IN_FLIGHT]):
                actor, task = min(free, key=self._load.__getitem__), waiting.popleft()
                self._load[actor] += 1
                running[actor.run.remote(task)] = actor, task
            ready = ray.wait([*running, *self._starting], timeout=_POLL_S)[0]
            self._check()
            self._check_head()
            for ref in ready:
                if ref in self._starting:
                    self._started(ref)
                    continue
                actor, task = running.pop(ref)
                try:
                    done = ray.get(ref)
                except RayTaskError as error:
                    raise error.cause from None
                except RayError as error:
                    self._lost(actor, error)
                    waiting.appendleft(task)
                    deaths[task] += 1
                    if deaths[task] > _RETRIES:
                        raise VesuviusError(
                            f"A task killed its worker {format_count(_RETRIES + 1, 'time')}, probably because memory "
                            "ran out; see the kernel log (dmesg), lower --batch-size or --workers, and run the same "
                            "command again to resume"
                        ) from error
                    continue
                if actor in self._load:
                    self._load[actor] -= 1
                last_s = time.monotonic()
                yield done
            if time.monotonic() - last_s > _SILENT_S:
                raise VesuviusError(
                    f"No worker has finished a task for {_SILENT_S / 60:.0f} min; check with `ray status` that the "
                    "nodes have enough GPUs and cores for --workers; run the same command again to resume"
                )

    def close(self) -> None:
        for actor in (*self._load, *self._starting.values()):
            ray.kill(actor)

    def _start(self) -> None:
        actor = self._kind.options(**self._nodes.placement() if self._nodes else {}).remote(self._runner_ref)
        self._starting[actor.node.remote()] = actor

    def _started(self, ref: Any) -> None:
        actor = self._starting.pop(ref)
        try:
            node_id = ray.get(ref)
        except RayError as error:
            self._failed_starts += 1
            if self._failed_starts > self._starts_max:
                raise VesuviusError(
                    f"Workers failed to start {format_count(self._failed_starts, 'time')}: {one_line(error)}; check "
                    "the memory of the nodes and `ray status`, and run the same command again to resume"
                ) from error
            self._start()
            return
        if self._nodes is not None:
            self._nodes.check()  # it may have joined
            if not self._nodes.can_work(node_id):
                ray.kill(actor)
                self._start()
                return
        self._failed_starts, self._load[actor], self._node[actor] = 0, 0, node_id

    def _lost(self, actor: Any, error: RayError) -> None:
        if self._load.pop(actor, None) is None:
            return  # another of its tasks has failed
        node, cause = self._node.pop(actor), one_line(error, 100)
        known = self._nodes and self._nodes.alive.get(node)
        on = f" on node {node_text(known)}" if known else ""
        log.warning("A worker%s was lost; others repeat its tasks (%s)", on, cause)
        on_thread(ray.kill, actor, name="ray-kill")  # it may only be out of reach
        self._start()
        for other in [each for each, load in self._load.items() if load == 0 and self._node[each] == node]:
            del self._load[other]  # until it answers: the node may be gone
            self._starting[other.node.remote()] = other
