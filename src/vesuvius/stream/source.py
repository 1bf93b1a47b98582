"""The regions of a stream's tasks, in order: read by threads of this process, or by Ray workers once they run."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, TypeGuard

from vesuvius.errors import ConfigError, DataError
from vesuvius.plan.plan import Task
from vesuvius.stream.options import StreamOptions, store_bytes
from vesuvius.stream.reading.local import LocalRegions
from vesuvius.stream.reading.reader import ReaderJob, Region
from vesuvius.stream.reading.reading_log import TrainerReadingMarker, node_name
from vesuvius.stream.reading.resident import Resident
from vesuvius.threads import on_thread
from vesuvius.volumes.errors import Outage

if TYPE_CHECKING:  # Ray is not needed without processes
    from vesuvius.stream.ray.regions import RayRegions
    from vesuvius.stream.ray.session import Session

log = logging.getLogger(__name__)

_RAY_START_TIMEOUT_S = 30.0


class RegionSource(Iterator[Region]):
    """The regions of consecutive tasks: here, on `threads`, the first `local_slots` slots (None = all); then Ray's.

    `start`, called on its own thread, starts Ray and the workers of the other tasks, if there are any; `next` raises
    its ConfigError.  `marker` says that this process reads.  With a `resident` copy, regions are kept in it and are
    views of it.  One thread iterates; another calls the rest.
    """

    def __init__(
        self,
        job: ReaderJob,
        tasks: Iterable[Task],
        resident: Resident | None,
        marker: TrainerReadingMarker | None,
        start: Callable[[Iterator[Task]], RayRegions],
        local_slots: int | None = None,
        threads: int = 1,
    ) -> None:
        self._resident, self._interrupted = resident, False
        tasks = iter(tasks)
        local, later = (tasks, None) if local_slots is None else _first_window(tasks, local_slots)
        self._local = LocalRegions(job, local, resident, marker, threads) if local else None
        rest = takewhile(lambda _: not self._interrupted, chain([later or ()], tasks))
        self._ray = on_thread(start, rest, name="ray-start") if later else None

    def __next__(self) -> Region:
        if self._ray is not None and self._ray.done():
            self._ray.result()  # raises if it did not start
        if self._local is not None:
            with suppress(StopIteration):
                return next(self._local)
            self._local = None
        if self._ray is None:
            raise StopIteration
        ray = self._ray.result()
        if self._interrupted:  # while Ray started
            raise StopIteration
        region = next(ray)
        return region if self._resident is None else self._resident.take(region)

    @property
    def tasks_left(self) -> int:
        """Number of tasks that workers have not finished."""
        if self._ray is None:
            return 0
        return self._ray.result().tasks_left if _has_started(self._ray) else sys.maxsize

    def report_replaced(self, actor: str, pid: int, node: str) -> None:
        """Report the death of a worker process: another one of the same actor delivers blocks."""
        if _has_started(self._ray):
            self._ray.result().report_replaced(actor, pid, node)

    @property
    def outages(self) -> list[Outage]:
        local, ray = self._local, self._ray
        return (local.outages if local else []) + (ray.result().outages if _has_started(ray) else [])

    def interrupt(self) -> None:
        """Make a waiting `next` return soon, with any error."""
        self._interrupted = True
        if (local := self._local) is not None:
            local.interrupt()
        if _has_started(self._ray):
            self._ray.result().interrupt()

    def close(self) -> None:
        """Stop reading, once iteration has ended."""
        if (local := self._local) is not None:
            local.close()
        if self._ray is None:
            return
        if wait([self._ray], _RAY_START_TIMEOUT_S).not_done:
            log.warning("Ray has not started within %g s; giving up on it", _RAY_START_TIMEOUT_S)
        elif _has_started(self._ray):
            self._ray.result().close()


def _first_window(tasks: Iterator[Task], slots: int) -> tuple[list[Task], Task | None]:
    """Take the tasks of the first `slots` slots.  Returns them and the task after them, if any."""
    first = list[Task]()
    for task in tasks:
        if task[0] >= (first or [task])[0][0] + slots:
            return first, task
        first.append(task)
    return first, None


def _has_started(ray: Future[RayRegions] | None) -> TypeGuard[Future[RayRegions]]:
    return ray is not None and ray.done() and ray.exception() is None


class RayOfStream:
    """Starts Ray when a stream needs workers, and keeps it until `end`; `on_spill`, `on_death` as in `RayRegions`."""

    def __init__(
        self,
        on_spill: Callable[[str, dict[str, Any]], None],
        on_death: Callable[[str, dict[str, Any]], DataError | None],
    ) -> None:
        self._on_spill, self._on_death = on_spill, on_death
        self._session: Session | None = None
        self._starting = threading.Lock()
        self.closed = False  # set when the stream is closed, so that Ray is stopped even if it is still starting

    def start(self, job: ReaderJob, options: StreamOptions, tasks: Iterable[Task]) -> RayRegions:
        """Return the regions of tasks that workers read.  Raises ConfigError: Ray does not start."""
        # Ray takes a second to import
        from vesuvius.stream.ray.private import unique_node_name
        from vesuvius.stream.ray.regions import RayRegions
        from vesuvius.stream.ray.session import Session

        with self._starting:  # an earlier start may still be under way if the stream was reconfigured
            if self._session is None:
                self._session = Session(
                    options.cluster, options.num_processes, job.world_size, store_bytes(job, options)
                )
            if self.closed:
                if threading.main_thread().is_alive():  # else Ray ends with the interpreter
                    self.end()
                raise ConfigError("The stream was closed while Ray started; open another PatchStream")
        node_name(unique_node_name())
        return RayRegions(job, tasks, options, self._on_spill, self._on_death)

    @property
    def has_started(self) -> bool:
        return self._session is not None

    def fits(self, job: ReaderJob, options: StreamOptions) -> bool:
        """Whether Ray, if it runs, has room for the workers of these options."""
        need = options.num_processes, job.world_size, store_bytes(job, options)
        return self._session is None or self._session.fits(*need)

    def end(self) -> None:
        """Stop using Ray; `start` may start it again."""
        if self._session is not None:
            self._session.close()
            self._session = None
