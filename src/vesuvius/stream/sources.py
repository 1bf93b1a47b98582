"""Opens the source of a stream's regions: this process, Ray readers, or this process until Ray has started."""

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
from vesuvius.stream.reading.reading_log import TrainerReadingMarker, node_name
from vesuvius.stream.reading.resident import Resident

if TYPE_CHECKING:
    from vesuvius.stream.ray.session import Session  # Ray is not needed with workers: 0


class Sources:
    """Opens the sources of a stream, one at a time, and keeps Ray running from one to the next.

    The `marker` says that this process reads; None without readers.  `on_spill` and `on_death` are as in `RayRegions`.
    """

    def __init__(
        self,
        marker: TrainerReadingMarker | None,
        on_spill: Callable[[str, dict[str, Any]], None],
        on_death: Callable[[str, dict[str, Any]], DataError | None],
    ) -> None:
        self._marker, self._on_spill, self._on_death = marker, on_spill, on_death
        self._session: Session | None = None
        self._starting = threading.Lock()
        self.closed = False  # set when the stream is closed, so that Ray is stopped even if it is still starting

    def open(self, job: ReaderJob, options: StreamOptions, tasks: Iterable[Task], resident: Resident | None) -> Regions:
        """Open the regions of these tasks.  Raises ConfigError if /dev/shm is too small or Ray does not start."""
        if options.workers == 0:
            return LocalRegions(job, tasks, resident, self._marker)
        if not self.fits(job, options):
            self.end_ray()
        if self._session is None and not is_ray_connected():
            check_store(job, options)
            return LocalThenRay(job, tasks, resident, self._marker, partial(self._start_ray, job, options))
        return self._start_ray(job, options, tasks)

    def _start_ray(self, job: ReaderJob, options: StreamOptions, tasks: Iterable[Task]) -> Regions:
        # Ray takes a second to import and is not needed with workers: 0
        from vesuvius.stream.ray.private import unique_node_name
        from vesuvius.stream.ray.regions import RayRegions
        from vesuvius.stream.ray.session import Session

        with self._starting:  # an earlier start may still be under way if the stream was reconfigured
            if self._session is None:
                self._session = Session(options.cluster, options.workers, job.world, store_bytes(job, options))
            if self.closed:
                if threading.main_thread().is_alive():  # else Ray ends with the interpreter
                    self.end_ray()
                raise ConfigError("The stream was closed while Ray started; open another PatchStream")
        node_name(unique_node_name())
        return RayRegions(job, tasks, options, self._on_spill, self._on_death)

    @property
    def has_ray(self) -> bool:
        """Whether Ray has started for this stream."""
        return self._session is not None

    def fits(self, job: ReaderJob, options: StreamOptions) -> bool:
        """Whether Ray, if it runs, has room for the readers of these options."""
        need = options.workers, job.world, store_bytes(job, options)
        return self._session is None or self._session.fits(*need)

    def end_ray(self) -> None:
        """Stop using Ray; another source may start it again."""
        if self._session is not None:
            self._session.close()
            self._session = None
