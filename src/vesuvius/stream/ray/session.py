"""Starts Ray, or connects to it, once per process, and ends it with the last stream that uses it."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import ray

from vesuvius.config import ClusterConfig
from vesuvius.errors import ConfigError, one_line
from vesuvius.stream.options import check_cluster
from vesuvius.stream.ray import private
from vesuvius.threads import on_thread

log = logging.getLogger(__name__)

_JOIN_S = 3.0
_END_S = 5.0
_KILLED_S = 10.0
_SIGACTION_BYTES = 256  # more than the struct has anywhere
_ANNOUNCEMENT = b"RAY_BACKEND_LOG_LEVEL"
_AUTH_MODE = "RAY_AUTH_MODE"
_PASSED_ON = ("VESUVIUS_", "AWS_", "GOOGLE_", "NCCL_", "GLOO_")


class Session:
    """One stream's use of Ray: of a private Ray that the first use starts and the last one ends, of a named cluster, or
    of the Ray that this process is already connected to.

    Args:
        store_bytes: size of a private Ray's object store.

    Raises:
        ConfigError: the cluster does not answer, or Ray could not be ended in this process before.
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
            if _AUTH_MODE not in os.environ:  # Ray sets it for good, but the next cluster may have no tokens
                Session._held.callback(os.environ.pop, _AUTH_MODE, None)
            try:
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
    on the spot: the thread that shuts down puts the present one back right after that, without waiting for the main
    thread, which alone may call `signal.signal`.
    """
    sigaction = ctypes.CDLL(None).sigaction
    present = ctypes.create_string_buffer(_SIGACTION_BYTES)
    sigaction(int(signal.SIGTERM), None, present)
    ended = on_thread(private.shut_down, lambda: sigaction(int(signal.SIGTERM), present, None), name="ray-shutdown")
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


def _listen_to_sigterm() -> None:
    """Install Python's handler of SIGTERM again, which Ray's C++ core has replaced."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def start_ray(config: ClusterConfig, cpus: int, store_bytes: int) -> None:
    """Start a private Ray with an object store of `store_bytes`, or connect to the cluster that the config names.

    Does nothing where Ray is up already.  Leaves the process's signal handlers as they are.

    Raises:
        ConfigError: the cluster does not answer.
    """
    if ray.is_initialized():
        return
    settings: dict[str, Any] = {
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": store_bytes,
        "num_cpus": cpus,
    }
    if config.address is not None:
        check_cluster(config.address)
        settings = {"address": config.address}
        if variables := passed_on(os.environ):
            settings["runtime_env"] = {"env_vars": variables}
    try:
        # ray.init would handle SIGTERM by exiting on the spot; the trainer could not save.  Restoring the handler
        # afterwards is too late: a signal in between has left locks held for ever.
        with _stop_signals_blocked(), _without_announcement(), private.without_sigterm_handler():
            ray.init(**settings, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Ray must start or answer; got cluster.address={config.address!r}: {one_line(error)}; start one with "
            "`ray start --head`, set cluster.address=null for a private one, or training.workers=0 to run without Ray"
        ) from error


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process that those on other nodes need: run directory, credentials, network.  Pure.

    Not those that a submitted job has given Ray for all its processes, which Ray would refuse.
    """
    job = json.loads(environment.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    given = ((job.get("runtime_env") or {}).get("env_vars")) or {}
    return {name: value for name, value in environment.items() if name.startswith(_PASSED_ON) and name not in given}


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block SIGTERM and SIGHUP here, and for good in all processes that are started meanwhile, and in theirs.

    A scheduler, or a terminal that closes, sends them to all processes of a job: without its daemons Ray would abort
    this process before it saves.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        _listen_to_sigterm()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_announcement() -> Iterator[None]:
    """Delay what is written to file descriptor 2, and drop the line in which Ray's C++ core announces its log level."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            held.seek(0)
            for line in held:
                if _ANNOUNCEMENT not in line:
                    os.write(saved, line)
            os.close(saved)
