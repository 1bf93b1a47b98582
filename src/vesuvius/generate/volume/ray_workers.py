"""Does the parts in actors of Ray, on one machine or on many.

Parts go from files to files and can be repeated: Ray starts an actor that died again, and repeats its parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import ActorPool

from vesuvius.config import ClusterConfig
from vesuvius.errors import ConfigError, VesuviusError
from vesuvius.generate.volume.tasks import OpenWork, Part, RunParts, TaskRunner
from vesuvius.runlog.units import format_count
from vesuvius.stream.ray.session import Session

_POLL_S = 0.5
_SILENT_S = 3600.0
_IN_FLIGHT = 2  # parts per actor: it need not wait for the next one
_RETRIES = 3
_STORE_BYTES = 2**27  # the object store carries no voxels


@contextmanager
def ray_workers(
    open_work: OpenWork, count: int, gpus: int, address: str | None, check: Callable[[], None]
) -> Iterator[RunParts]:
    """Actors of Ray.

    Args:
        gpus: of each actor, 0 or 1.
        address: of a cluster; None = a private Ray on this machine.
        check: called twice a second; what it raises ends the work.

    Raises:
        ConfigError: Ray does not start, the cluster does not answer, or it has fewer GPUs or cores than actors.
        VesuviusError: a part killed its actor again and again, or no actor answers.
    """
    session = Session(ClusterConfig(address=address), count, 0, _STORE_BYTES)
    actors: list[Any] = []
    try:
        resource = "GPU" if gpus else "CPU"
        have = float(ray.cluster_resources().get(resource, 0))  # type: ignore[no-untyped-call]
        if count > have:
            raise ConfigError(f"--workers {count} is more than the {have:g} {resource}s that Ray has; lower it")
        kind: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=_RETRIES)(_Worker)
        held = ray.put(open_work)  # Ray would drop the argument of an actor that has started, and not find it again
        actors += [kind.remote(held) for _ in range(count)]
        yield lambda parts: _run(parts, actors, check)
    finally:
        for actor in actors:
            ray.kill(actor)
        session.close()


class _Worker:
    """An actor; its first part opens the network."""

    def __init__(self, open_work: OpenWork) -> None:
        self._open = open_work
        self._work: TaskRunner | None = None

    def do(self, part: Part) -> Part:
        self._work = self._work or self._open()
        self._work.do(part)
        return part


def _run(parts: Iterable[Part], actors: list[Any], check: Callable[[], None]) -> Iterator[Part]:
    pool, last = ActorPool(actors * _IN_FLIGHT), time.monotonic()
    for part in parts:
        pool.submit(lambda actor, part: actor.do.remote(part), part)
    while pool.has_next():  # type: ignore[no-untyped-call]
        try:
            part = pool.get_next_unordered(timeout=_POLL_S)
        except TimeoutError:
            if time.monotonic() - last > _SILENT_S:
                raise VesuviusError(
                    f"No worker has finished a part for {_SILENT_S / 60:.0f} min; `ray status` says whether the nodes "
                    "have the GPUs and cores of --workers; what is done is kept"
                ) from None
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise VesuviusError(
                f"A part of the volume ended its worker {format_count(_RETRIES + 1, 'time')}, probably because memory "
                "ran out; see the kernel log (dmesg), and lower --batch-size or --workers; what is done is kept"
            ) from error
        else:
            last = time.monotonic()
            yield part
        check()
