"""Starts Ray or connects to it, once per process, and ends it with the last stream that uses it."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import ray

from vesuvius.config import ClusterConfig
from vesuvius.errors import STOP_SIGNALS, ConfigError, one_line
from vesuvius.stream.options import check_cluster
from vesuvius.stream.ray import private
from vesuvius.threads import on_thread

log = logging.getLogger(__name__)

_JOIN_S = 3.0
_END_S = 5.0
_KILLED_S = 10.0
_ANNOUNCEMENT = "RAY_BACKEND_LOG_LEVEL"
_AUTH_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_PASSED_ON = ("VESUVIUS_", "AWS_", "GOOGLE_", "AZURE_", "HF_", "NCCL_", "GLOO_")
_FILTERED_S = 0.5
_SIGACTION_BYTES = 256  # more than the struct has anywhere

# Pattern in Ray's error -> remedy; the first match counts.
_REMEDIES = {
    "AF_UNIX|too long": "set RAY_TMPDIR to a folder with a short path, such as /tmp/ray-$USER",
    "start new thread|temporarily unavailable|pthread_create": "raise the limit on processes and threads (`ulimit -u`, "
    "docker run --pids-limit) or lower training.workers",
    "No space left": "free space there, or set RAY_TMPDIR to another folder",
    "Permission denied|Read-only file system|not permitted": "set RAY_TMPDIR to a writable folder",
}


class Session:
    """One stream's use of Ray: a private Ray, as large as the first use needs, which the last one ends; a cluster; or
    the Ray that this process is already connected to.

    Raises ConfigError: Ray does not start, the cluster does not answer, or an earlier Ray of this process did not end.
    """

    _open: ClassVar[list[Session]] = []
    _ours: ClassVar[bool] = False
    _size: ClassVar[tuple[int, int]] = (0, 0)  # CPUs and bytes of the object store of our Ray
    _hangs: ClassVar[bool] = False
    _held: ClassVar[ExitStack] = ExitStack()  # contexts that last as long as our Ray
    _lock: ClassVar[threading.RLock] = threading.RLock()  # streams open and close sessions on their own threads

    def __init__(self, config: ClusterConfig, workers: int, ranks: int, store_bytes: int) -> None:
        self._workers = workers
        with Session._lock:
            if Session._hangs:
                text = "an earlier Ray in this process did not shut down; start another process"
                raise ConfigError(f"Cannot start Ray: {text}, or set training.workers=0 to run without Ray")
            if not ray.is_initialized():
                try:
                    Session._held.enter_context(authenticated(config.address))
                    Session._size = _cpus(workers, ranks), store_bytes
                    Session._held.enter_context(_started(config, *Session._size))
                except BaseException:
                    Session._held.close()
                    raise
                Session._ours = True
                # Ray would print daemon messages to the terminal, e.g. about readers that were ended on purpose.
                Session._held.enter_context(private.daemon_messages(lambda lines: log.debug("Ray: %s", lines)))
            Session._open.append(self)
            cpus, size = Session._size
            wanted = sum(each._workers for each in Session._open)
            if Session._ours and (wanted + ranks > cpus or store_bytes > size):
                log.warning(
                    "Ray of this process, which another stream started, has room for %d workers and %.2f GiB of "
                    "regions, but %d workers are wanted and %.2f GiB for %d of them: reading may be slow; open the "
                    "stream with the most workers first, or close the others before it",
                    *(cpus - ranks, size / 2**30, wanted, store_bytes / 2**30, workers),
                )

    def fits(self, workers: int, ranks: int, store_bytes: int) -> bool:
        """Whether this many readers can run without restarting Ray; always True on a shared cluster."""
        return not Session._ours or (_cpus(workers, ranks) <= Session._size[0] and store_bytes <= Session._size[1])

    def close(self) -> None:
        """End this use, and Ray with the last use if the first one started it.  Safe to call again."""
        with Session._lock:
            if self not in Session._open:
                return
            Session._open.remove(self)
            if not Session._open and Session._ours:
                Session._ours = False
                _join_data_threads()
                Session._hangs = not _shut_down()
                Session._held.close()


@contextmanager
def _started(config: ClusterConfig, cpus: int, store_bytes: int) -> Iterator[None]:
    """Start Ray on a thread that lives as long as the context: daemons die with their thread (PR_SET_PDEATHSIG)."""
    with ThreadPoolExecutor(1, "ray") as thread:
        thread.submit(start_ray, config, cpus, store_bytes).result()
        yield


def _cpus(workers: int, ranks: int) -> int:
    """CPUs to declare to Ray, which silently runs fewer readers than requested if they exceed its CPUs.

    Twice as many readers are alive while two executions overlap.
    """
    return max(os.cpu_count() or 1, 2 * workers + ranks + 1)


def _join_data_threads() -> None:
    """Wait for the threads in which Ray Data fetches blocks: calling Ray after its shutdown would end the process."""
    deadline = time.monotonic() + _JOIN_S
    for thread, ends in private.data_threads():
        thread.join(max(deadline - time.monotonic(), 0) if ends else 0.2)


def _shut_down() -> bool:
    """Disconnect, and end the daemons of a private Ray, which takes seconds.  Returns whether it succeeded.

    Ray waits forever for a head that does not answer; killing its daemons ends the wait.  Early in its shutdown its C++
    core restores the default signal handlers; the thread that shuts down reinstates ours right afterwards.
    """
    ended = on_thread(private.shut_down, sigterm_handler(), name="ray-shutdown")
    if wait([ended], _END_S).not_done:
        why = "probably because its head hangs or is gone"
        log.warning("Ray did not shut down within %g s, %s; killing a Ray that this command started", _END_S, why)
        private.kill_daemons()
        if wait([ended], _KILLED_S).not_done:
            log.warning("Ray did not shut down within another %g s; giving up on it", _KILLED_S)
            private.skip_shutdown_at_exit()
            return False
    ended.result()
    return True


def start_ray(config: ClusterConfig, cpus: int, store_bytes: int) -> None:
    """Start a private Ray with an object store of `store_bytes`, or connect to the configured cluster.

    Signal handlers stay.  Raises ConfigError: Ray does not start, or the cluster does not answer.
    """
    settings: dict[str, Any] = {"address": "local", "include_dashboard": False}
    settings |= {"object_store_memory": store_bytes, "num_cpus": cpus}
    if config.address is not None:
        check_cluster(config.address)
        settings = {"address": config.address, "runtime_env": {"env_vars": passed_on(os.environ)}}
    try:
        # ray.init would make SIGTERM exit at once, before the trainer can save.  Restoring the handler afterwards is
        # too late: a signal in between left locks held forever.
        with _stop_signals_blocked(), _filtered_stderr(), private.without_sigterm_handler():
            ray.init(**settings, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray also raises Exception itself
        with suppress(Exception):
            ray.shutdown()  # the parts that have started
        raise _start_error(config.address, one_line(error, 300)) from error


def _start_error(address: str | None, cause: str) -> ConfigError:
    if address is not None and "Version mismatch" in cause:
        return ConfigError(f"Cannot use the Ray cluster at {address}: {cause}; install the same versions on all nodes")
    if address is not None:
        return ConfigError(
            f"Cannot connect to the Ray cluster at cluster.address={address}: {cause}; this process used "
            f"{_token_in_use()}; check the address and the cluster, or set cluster.address=null for a private Ray"
        )
    logs = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray/session_*/logs"
    remedy = next((f"{remedy}, or " for pattern, remedy in _REMEDIES.items() if re.search(pattern, cause)), "")
    return ConfigError(
        f"Ray did not start: {cause}; its logs are in {logs}; {remedy}set training.workers=0 to run without Ray"
    )


@contextmanager
def authenticated(address: str | None) -> Iterator[None]:
    """Make Ray use token authentication within the context, unless RAY_AUTH_MODE is set.

    A private Ray gets its own token: otherwise Ray would write one to ~/.ray/auth_token, which changes how a later `ray
    start` creates clusters.  A cluster gets the token of this process, if it has one.
    """
    changes = {_AUTH_MODE: "token", _TOKEN: secrets.token_hex(32)} if address is None else {_AUTH_MODE: "token"}
    has_token = _TOKEN in os.environ or os.path.exists(_token_file())  # False in the home of another user
    if _AUTH_MODE in os.environ or (address is not None and not has_token):
        changes = {}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        private.reread_authentication()
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        private.reread_authentication()


def _token_file() -> Path:
    return Path(os.environ.get(_TOKEN_PATH) or os.path.expanduser("~/.ray/auth_token"))


def _token_in_use() -> str:
    mode = os.environ.get(_AUTH_MODE) or "unset"
    source = _TOKEN if _TOKEN in os.environ else _token_file() if os.path.exists(_token_file()) else None
    token = f"the token in {source}" if source else f"no token, as there is no {_token_file()}"
    return f"{_AUTH_MODE} {mode} and {token}"


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that processes on other nodes need: run directory, credentials, network.  Pure.

    Excludes those that a submitted job already sets for all its processes: Ray refuses duplicates.
    """
    job = json.loads(environment.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    own = ((job.get("runtime_env") or {}).get("env_vars")) or {}
    return {name: value for name, value in environment.items() if name.startswith(_PASSED_ON) and name not in own}


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block `STOP_SIGNALS` here, and permanently in all processes started within the context and their children.

    A scheduler, or a closing terminal, sends them to all processes of a job: Ray, without its daemons, would abort this
    process before it saves.
    """
    before, put_back = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS), sigterm_handler()
    try:
        yield
    finally:
        put_back()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def sigterm_handler() -> Callable[[], object]:
    """Return a function that restores the current SIGTERM handler: on any thread, unlike `signal.signal`."""
    sigaction, present = ctypes.CDLL(None).sigaction, ctypes.create_string_buffer(_SIGACTION_BYTES)
    sigaction(int(signal.SIGTERM), None, present)
    return lambda: sigaction(int(signal.SIGTERM), present, None)


@contextmanager
def _filtered_stderr() -> Iterator[None]:
    """Remove the line in which Ray's C++ core announces its log level from file descriptor 2.

    Filters in another process, so that Ray's output before it aborts this one is not lost.
    """
    saved = os.dup(2)
    command = ["grep", "--line-buffered", "-v", _ANNOUNCEMENT]
    grep = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=saved, start_new_session=True)
    assert grep.stdin is not None
    os.dup2(grep.stdin.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        grep.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # a daemon has inherited its input
            grep.wait(_FILTERED_S)
