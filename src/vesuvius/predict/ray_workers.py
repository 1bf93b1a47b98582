"""Runs tasks in Ray actors, on one machine or several; Ray restarts an actor that dies and repeats its tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import ActorPool

from vesuvius.config import ClusterConfig
from vesuvius.errors import ConfigError, VesuviusError
from vesuvius.predict.tasks import OpenRunner, RunTasks, Task, TaskRunner
from vesuvius.runlog.units import format_count
from vesuvius.stream.ray.session import Session

_POLL_S = 0.5
_SILENT_S = 3600.0
_IN_FLIGHT = 2  # tasks per actor, on a thread each: one reads and writes while the network computes
_RETRIES = 3
_STORE_BYTES = 2**27  # the object store carries no voxels


@contextmanager
def ray_workers(
    open_runner: OpenRunner, count: int, gpus: int, address: str | None, check: Callable[[], None]
) -> Iterator[RunTasks]:
    """Start Ray actors, each with 0 or 1 GPUs, and yield a function that runs tasks in them.

    `address` is that of a cluster, or None for a private Ray on this machine; `check` is called twice a second, and may
    raise to stop.  Raises ConfigError if Ray does not start or is too small, VesuviusError if a task keeps killing its
    actor or no actor answers.
    """
    session = Session(ClusterConfig(address=address), count, 0, _STORE_BYTES)
    actors: list[Any] = []
    try:
        resource = "GPU" if gpus else "CPU"
        have = float(ray.cluster_resources().get(resource, 0))  # type: ignore[no-untyped-call]
        if count > have:
            raise ConfigError(f"--workers {count} exceeds the {have:g} {resource}s of the Ray cluster; lower --workers")
        remote: Any = ray.remote
        again = {"max_restarts": -1, "max_task_retries": _RETRIES}
        kind = remote(num_cpus=1, num_gpus=gpus, max_concurrency=_IN_FLIGHT, **again)(_Worker)
        # Ray drops the arguments of a started actor; a reference that we hold is still there for a restart.
        runner_ref = ray.put(open_runner)
        actors += [kind.remote(runner_ref) for _ in range(count)]
        yield lambda tasks: _run(tasks, actors, check)
    finally:
        for actor in actors:
            ray.kill(actor)
        session.close()


class _Worker:
    def __init__(self, open_runner: OpenRunner) -> None:
        self._open_runner, self._opening = open_runner, threading.Lock()
        self._runner: TaskRunner | None = None

    def run(self, task: Task) -> Task:
        with self._opening:
            self._runner = self._runner or self._open_runner()
        return self._runner.run(task)


def _run(tasks: Iterable[Task], actors: list[Any], check: Callable[[], None]) -> Iterator[Task]:
    pool, last = ActorPool(actors * _IN_FLIGHT), time.monotonic()
    for task in tasks:
        pool.submit(lambda actor, task: actor.run.remote(task), task)
    while pool.has_next():  # type: ignore[no-untyped-call]
        try:
            task = pool.get_next_unordered(timeout=_POLL_S)
        except TimeoutError:
            if time.monotonic() - last > _SILENT_S:
                raise VesuviusError(
                    f"No worker has finished a task for {_SILENT_S / 60:.0f} min; check with `ray status` that the "
                    "nodes have enough GPUs and cores for --workers; run the same command again to resume"
                ) from None
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise VesuviusError(
                f"A task killed its worker {format_count(_RETRIES + 1, 'time')}, probably because memory ran out; see "
                "the kernel log (dmesg), lower --batch-size or --workers, and run the same command again to resume"
            ) from error
        else:
            last = time.monotonic()
            yield task
        check()
