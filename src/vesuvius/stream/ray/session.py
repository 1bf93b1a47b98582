"""Starts Ray, or connects to it, once per process, and ends it with the last stream that uses it."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import wait
from contextlib import ExitStack
from typing import ClassVar

import ray

from vesuvius.config import ClusterConfig
from vesuvius.errors import ConfigError
from vesuvius.stream.ray import private
from vesuvius.stream.ray.start import authenticated, sigterm_handler, start_ray
from vesuvius.threads import on_thread

log = logging.getLogger(__name__)

_JOIN_S = 3.0
_END_S = 5.0
_KILLED_S = 10.0


class Session:
    """One stream's use of Ray: of a private Ray that the first use starts and the last one ends, of a named cluster, or
    of the Ray that this process is already connected to.

    Args:
        store_bytes: size of a private Ray's object store.

    Raises:
        ConfigError: Ray does not start, the cluster does not answer, or Ray could not be ended in this process before.
    """

    _uses: ClassVar[int] = 0
    _ours: ClassVar[bool] = False
    _hangs: ClassVar[bool] = False
    # What lasts as long as our Ray.  It prints what its daemons report to the terminal, such as tasks of readers that
    # were ended on purpose.
    _held: ClassVar[ExitStack] = ExitStack()

    def __init__(self, config: ClusterConfig, workers: int, ranks: int, store_bytes: int) -> None:
        self._cpus, self._store_bytes = _cpus(workers, ranks), store_bytes
        if Session._hangs:
            raise ConfigError(
                "Ray must shut down before it can start again; got one that did not in this "
                "process; start another process, or set training.workers=0 to run without Ray"
            )
        if not ray.is_initialized():
            try:
                Session._held.enter_context(authenticated(config.address))
                start_ray(config, self._cpus, store_bytes)
            except BaseException:
                Session._held.close()
                raise
            Session._ours = True
            Session._held.enter_context(private.daemon_messages(lambda lines: log.debug("Ray: %s", lines)))
        Session._uses += 1
        self._open = True

    def fits(self, workers: int, ranks: int, store_bytes: int) -> bool:
        """Whether so many readers can run without a restart of Ray; on a shared cluster that is up to Ray."""
        return not Session._ours or (_cpus(workers, ranks) <= self._cpus and store_bytes <= self._store_bytes)

    def close(self) -> None:
        """End this use, and Ray with the last one where a use started it.  Safe to call again."""
        if not self._open:
            return
        self._open = False
        Session._uses -= 1
        if Session._uses == 0 and Session._ours:
            Session._ours = False
            _join_data_threads()
            Session._hangs = not _shut_down()
            Session._held.close()


def _cpus(workers: int, ranks: int) -> int:
    """CPUs to declare to Ray, which silently runs fewer readers than asked where they exceed its CPUs.

    Twice as many readers live while one execution hands over to the next.
    """
    return max(os.cpu_count() or 1, 2 * workers + ranks + 1)


def _join_data_threads() -> None:
    """Wait for the threads in which Ray Data fetched blocks: one that calls Ray after its shutdown ends the process."""
    deadline = time.monotonic() + _JOIN_S
    for thread, ends in private.data_threads():
        thread.join(max(deadline - time.monotonic(), 0) if ends else 0.2)


def _shut_down() -> bool:
    """Disconnect, and end the daemons of a private Ray, which takes seconds.  Returns whether it has succeeded.

    Ray waits for ever for a head that does not answer: then its daemons are killed, which ends the wait.

    Early in its shutdown Ray's C++ core restores the signal handlers that it found, and SIGTERM would end this process
    on the spot: the thread that shuts down puts the present one back right after that.
    """
    ended = on_thread(private.shut_down, sigterm_handler(), name="ray-shutdown")
    if wait([ended], _END_S).not_done:
        log.warning(
            "Ray did not shut down within %g s, probably because its head hangs; a private Ray is killed now", _END_S
        )
        private.kill_daemons()
        if wait([ended], _KILLED_S).not_done:
            log.warning("Ray did not shut down within another %g s, and is abandoned", _KILLED_S)
            private.leave_to_the_system()
            return False
    ended.result()
    return True
