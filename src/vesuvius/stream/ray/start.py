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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from vesuvius.config import ClusterConfig
from vesuvius.errors import ConfigError, one_line
from vesuvius.stream.options import check_cluster
from vesuvius.stream.ray import private

log = logging.getLogger(__name__)

_ANNOUNCEMENT = "RAY_BACKEND_LOG_LEVEL"
_AUTH_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_PASSED_ON = ("VESUVIUS_", "AWS_", "GOOGLE_", "NCCL_", "GLOO_")
_FILTERED_S = 0.5
_SIGACTION_BYTES = 256  # more than the struct has anywhere

# What is found in an error, and what helps against it; the first that is found counts.
_REMEDIES = {
    "AF_UNIX|too long": "let RAY_TMPDIR name a folder with a short path, such as /tmp/ray-$USER",
    "start new thread|temporarily unavailable|pthread_create": "raise the limit of processes and threads (`ulimit -u`, "
    "docker run --pids-limit) or lower training.workers",
    "No space left": "free some space there, or let RAY_TMPDIR name another folder",
    "Permission denied|Read-only file system|not permitted": "let RAY_TMPDIR name a folder that this user can write",
}


def start_ray(config: ClusterConfig, cpus: int, store_bytes: int) -> None:
    """Start a private Ray with an object store of `store_bytes`, or connect to the cluster that the config names.

    Does nothing where Ray is up already.  Leaves the process's signal handlers as they are.

    Raises:
        ConfigError: Ray does not start, or the cluster does not answer.
    """
    if ray.is_initialized():
        return
    settings: dict[str, Any]
    if config.address is None:
        settings = {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": store_bytes,
            "num_cpus": cpus,
        }
    else:
        check_cluster(config.address)
        settings = {"address": config.address, "runtime_env": {"env_vars": passed_on(os.environ)}}
    try:
        # ray.init would handle SIGTERM by exiting on the spot; the trainer could not save.  Restoring the handler
        # afterwards is too late: a signal in between has left locks held for ever.
        with _stop_signals_blocked(), _filtered_stderr(), private.without_sigterm_handler():
            ray.init(**settings, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises plain ones, too
        with suppress(Exception):
            ray.shutdown()  # what has started
        raise _not_started(config.address, one_line(error, 300)) from error


def _not_started(address: str | None, said: str) -> ConfigError:
    """Why, in Ray's words, and what helps."""
    if address is not None:
        return ConfigError(
            f"Cannot connect to the Ray cluster at cluster.address={address}: {said}; this process used "
            f"{_token_in_use()}; check the address and the cluster, or set cluster.address=null for a private Ray"
        )
    logs = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray/session_*/logs"
    remedy = next((f"{helps}, or " for words, helps in _REMEDIES.items() if re.search(words, said)), "")
    return ConfigError(
        f"Ray did not start: {said}; its logs are in {logs}; {remedy}set training.workers=0, which runs without Ray"
    )


@contextmanager
def authenticated(address: str | None) -> Iterator[None]:
    """Have Ray use a token while the context lasts, unless RAY_AUTH_MODE says otherwise.

    A private Ray gets a token of its own: left to itself Ray would write one to ~/.ray/auth_token, which later changes
    how `ray start` makes clusters.  A cluster is shown the token of this process, if it has one.
    """
    changes = {_AUTH_MODE: "token", _TOKEN: secrets.token_hex(32)} if address is None else {_AUTH_MODE: "token"}
    if _AUTH_MODE in os.environ or (address is not None and _TOKEN not in os.environ and not _token_file().exists()):
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
    return Path(os.environ.get(_TOKEN_PATH) or Path.home() / ".ray/auth_token")


def _token_in_use() -> str:
    """Which token and mode this process has, for people."""
    mode = os.environ.get(_AUTH_MODE) or "unset"
    found = _TOKEN if _TOKEN in os.environ else _token_file() if _token_file().exists() else None
    return (
        f"{_AUTH_MODE} {mode} and {f'the token in {found}' if found else f'no token, as there is no {_token_file()}'}"
    )


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
