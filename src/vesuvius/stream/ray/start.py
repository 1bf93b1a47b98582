"""Starts a private Ray or connects to a cluster, and says in one line why that fails."""

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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from vesuvius.config import ClusterConfig
from vesuvius.errors import ConfigError, one_line
from vesuvius.stream.ray import private

log = logging.getLogger(__name__)

_ANNOUNCEMENT = "RAY_BACKEND_LOG_LEVEL"
_AUTH_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_PASSED_ON = ("VESUVIUS_", "AWS_", "GOOGLE_", "NCCL_", "GLOO_")
_ANSWER_S = 10.0
_FILTERED_S = 0.5
_SIGACTION_BYTES = 256  # more than the struct has anywhere

# What is found in an error or in Ray's logs, and what helps against it; the first that is found counts.
_REMEDIES = {
    "AF_UNIX|too long": "let RAY_TMPDIR name a folder with a short path, such as /tmp/ray-$USER",
    "start new thread|temporarily unavailable|pthread_create": "raise the limit of processes and threads (`ulimit -u`, "
    "docker run --pids-limit) or lower training.workers",
    "Too many open files": "raise the limit of open files (`ulimit -n`)",
    "File too large": "raise the limit of a file's size (`ulimit -f unlimited`)",
    "No space left": "free some space there, or let RAY_TMPDIR name another folder",
    "/dev/shm|plasma|shared memory": "make /dev/shm writable for this user and large enough",
    "Permission denied|Read-only file system|not permitted": "let RAY_TMPDIR name a folder that this user can write",
}
_CAUSES = re.compile("|".join([*_REMEDIES, r"Check failed:|what\(\):|No such file|Cannot allocate memory"]))
_STACK = re.compile(r"\[0x[0-9a-f]+\]")  # a frame of a C++ stack names functions, which say nothing of the cause


def start_ray(config: ClusterConfig, cpus: int, store_bytes: int) -> None:
    """Start a private Ray with an object store of `store_bytes`, or connect to the cluster that the config names.

    Does nothing where Ray is up already.  Leaves the process's signal handlers as they are.

    Raises:
        ConfigError: Ray does not start, or the cluster does not answer.
    """
    if ray.is_initialized():
        return
    settings: dict[str, Any] = {"address": config.address}
    if config.address is None:
        settings = {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": store_bytes,
            "num_cpus": cpus,
        }
    elif variables := passed_on(os.environ):
        settings["runtime_env"] = {"env_vars": variables}
    began = time.time()
    try:
        # ray.init would handle SIGTERM by exiting on the spot; the trainer could not save.  Restoring the handler
        # afterwards is too late: a signal in between has left locks held for ever.
        with _stop_signals_blocked(), _filtered_stderr(), private.without_sigterm_handler():
            ray.init(**settings, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises plain ones, too
        with suppress(Exception):
            ray.shutdown()  # what has started
        raise _not_started(config.address, one_line(error, 300), began) from error


def _not_started(address: str | None, said: str, began: float) -> ConfigError:
    """Why, from the error or else from the logs of Ray's processes, and what helps."""
    if address is not None:
        return ConfigError(
            f"Cannot connect to the Ray cluster at cluster.address={address}: {said}; this process used "
            f"{_token_in_use()}; check the address and the cluster, or set cluster.address=null for a private Ray"
        )
    parent = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    sessions = [path for path in parent.glob(f"session_*_{os.getpid()}") if path.stat().st_mtime >= began - 1]
    logs = max(sessions) / "logs" if sessions else None
    cause = said if logs is None or _CAUSES.search(said) else cause_in_logs(logs) or said
    remedy = next((f"{helps}, or " for words, helps in _REMEDIES.items() if re.search(words, cause)), "")
    where = f"; its logs are in {logs}" if logs else ""
    return ConfigError(f"Ray did not start: {cause}{where}; {remedy}set training.workers=0, which runs without Ray")


def cause_in_logs(folder: Path) -> str:
    """The last line in which a process of Ray says what went wrong; '' where none does."""
    for pattern in ("*.err", "*.out", "*.log"):
        for path in sorted(folder.glob(pattern), reverse=True):
            with suppress(OSError):
                lines = path.read_text(encoding="utf-8", errors="replace")[-100_000:].splitlines()
                if causes := [line for line in lines if _CAUSES.search(line) and not _STACK.search(line)]:
                    return f"{path.name}: {one_line(causes[-1], 300)}"
    return ""


@contextmanager
def authenticated(address: str | None) -> Iterator[None]:
    """Have Ray use the token that it needs, while the context lasts, unless the environment says how.

    A private Ray gets a token of its own: left to itself Ray would write one to ~/.ray/auth_token, which later changes
    how `ray start` makes clusters.  A cluster is asked whether it wants one.

    Raises:
        ConfigError: the cluster does not answer.
    """
    changes = {_AUTH_MODE: "token", _TOKEN: secrets.token_hex(32)} if address is None else {}
    if address is not None and _wants_token(address):
        changes = {_AUTH_MODE: "token"}
    if _AUTH_MODE in os.environ:
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


def _wants_token(address: str) -> bool:
    try:
        return private.wants_token(address, _ANSWER_S)
    except ConnectionError as error:
        raise ConfigError(
            f"The Ray cluster at cluster.address={address} does not answer: {one_line(error)}; "
            "check the address and its head, or set cluster.address=null for a private Ray"
        ) from error


def _token_in_use() -> str:
    """Which token and mode this process has, for people."""
    mode = os.environ.get(_AUTH_MODE) or "unset"
    if mode.lower() != "token":
        return f"no token ({_AUTH_MODE} {mode})"
    if _TOKEN in os.environ:
        return f"the token in {_TOKEN} ({_AUTH_MODE} {mode})"
    path = Path(os.environ.get(_TOKEN_PATH) or Path.home() / ".ray/auth_token")
    if not path.exists():
        return f"no token, as there is no {path}: copy it from the machine of the head ({_AUTH_MODE} {mode})"
    return f"the token of {path} ({_AUTH_MODE} {mode})"


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
    before, put_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP}), sigterm_handler()
    try:
        yield
    finally:
        put_back()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def sigterm_handler() -> Callable[[], object]:
    """What puts the present handler of SIGTERM back, which Ray's C++ core replaces: on any thread, unlike `signal`."""
    sigaction, present = ctypes.CDLL(None).sigaction, ctypes.create_string_buffer(_SIGACTION_BYTES)
    sigaction(int(signal.SIGTERM), None, present)
    return lambda: sigaction(int(signal.SIGTERM), present, None)


@contextmanager
def _filtered_stderr() -> Iterator[None]:
    """Drop the line in which Ray's C++ core announces its log level from what is written to file descriptor 2.

    Another process filters: what Ray writes before it aborts this one comes through.
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
