"""Where the regions of a stream come from: this process, the readers of Ray, or one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from vesuvius.errors import ConfigError, DataError
from vesuvius.plan.plan import Task
from vesuvius.stream.options import StreamOptions, check_store, is_ray_connected, store_bytes
from vesuvius.stream.reading.local import LocalRegions, LocalThenRay, Regions
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.reading.reading_log import TrainerReadingMarker
from vesuvius.stream.reading.resident import Resident

if TYPE_CHECKING:
    from vesuvius.stream.ray.session import Session  # Ray is not needed with workers: 0


class Sources:
    """Opens the sources of a stream, one at a time, and holds the Ray that readers need from one to the next.

    Args:
        reads: notes that this process reads; None where nobody else could.
        on_spill, on_death: as of `RayRegions`.

    Attributes:
        closed: the stream ends, so that a Ray that is starting is ended too.
    """

    def __init__(
        self,
        reads: TrainerReadingMarker | None,
        on_spill: Callable[[str, dict[str, Any]], None],
        on_death: Callable[[str, dict[str, Any]], DataError | None],
    ) -> None:
        self._reads, self._on_spill, self._on_death = reads, on_spill, on_death
        self._session: Session | None = None
        self._starting = threading.Lock()
        self.closed = False
        self._replaced: Callable[[str, int, str], None] | None = None

    def open(self, job: ReaderJob, options: StreamOptions, tasks: Iterable[Task], resident: Resident | None) -> Regions:
        """The regions of these tasks.  Raises ConfigError where /dev/shm is too small or, as `Session`, Ray does not
        start."""
        if options.workers == 0:
            return LocalRegions(job, tasks, resident, self._reads)
        if not self.fits(job, options):
            self.end_ray()
        if self._session is None and not is_ray_connected():
            check_store(job, options)
            return LocalThenRay(job, tasks, resident, self._reads, partial(self._start_ray, job, options))
        return self._start_ray(job, options, tasks)

    def _start_ray(self, job: ReaderJob, options: StreamOptions, tasks: Iterable[Task]) -> Regions:
        # Ray takes a second to import and is not needed with workers: 0
        from vesuvius.stream.ray.regions import RayRegions
        from vesuvius.stream.ray.session import Session

        with self._starting:  # where the stream was changed meanwhile, the start of before may go on
            if self._session is None:
                self._session = Session(options.cluster, options.workers, job.world, store_bytes(job, options))
            if self.closed:
                if threading.main_thread().is_alive():  # else Ray ends with the interpreter
                    self.end_ray()
                raise ConfigError("the stream was closed while Ray started")
        regions = RayRegions(job, tasks, options, self._on_spill, self._on_death)
        self._replaced = regions.replaced
        return regions

    @property
    def has_ray(self) -> bool:
        """Whether Ray has started for this stream."""
        return self._session is not None

    def fits(self, job: ReaderJob, options: StreamOptions) -> bool:
        """Whether the Ray in use, if there is one, has room for readers of these options."""
        need = options.workers, job.world, store_bytes(job, options)
        return self._session is None or self._session.fits(*need)

    def replaced(self, actor: str, pid: int, node: str) -> None:
        """Another process of the actor delivers blocks: report the death of this one."""
        if self._replaced is not None:
            self._replaced(actor, pid, node)

    def end_ray(self) -> None:
        """Use Ray no longer; another source may start it again."""
        if self._session is not None:
            self._session.close()
            self._session = None
