"""Starts a private Ray or connects to a cluster, and says in one line why that fails."""

from __future__ import annotations

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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from vesuvius.config import ClusterConfig
from vesuvius.errors import ConfigError, one_line
from vesuvius.stream.options import check_cluster
from vesuvius.stream.ray import private

log = logging.getLogger(__name__)

_ANNOUNCEMENT = b"RAY_BACKEND_LOG_LEVEL"
_AUTH_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_PASSED_ON = ("VESUVIUS_", "AWS_", "GOOGLE_", "NCCL_", "GLOO_")
_ANSWER_S = 10.0
_SAY_AFTER_S, _SAY_EVERY_S = 8.0, 30.0

# Reads what Ray's C++ core has written where it ends this process while stderr is held back.
_LAST_WORDS = (
    "read -r done || { echo 'this process was ended while Ray started; the last lines that it wrote:' >&2;"
    f' grep -v {_ANNOUNCEMENT.decode()} "$0" | grep . | tail -n 4 >&2; }}'
)

# What is found in an error or in Ray's logs, and what helps against it; the first that is found counts.
_REMEDIES = (
    ("InvalidAuthToken|Unauthenticated|AuthenticationError", ""),  # the message says more
    ("AF_UNIX|too long", "let RAY_TMPDIR name a folder with a short path, such as /tmp/ray-$USER"),
    (
        "start new thread|temporarily unavailable|pthread_create",
        "raise the limit of processes and threads (`ulimit -u`, docker run --pids-limit) or lower training.workers",
    ),
    ("Too many open files", "raise the limit of open files (`ulimit -n`)"),
    ("File too large", "raise the limit of a file's size (`ulimit -f unlimited`)"),
    ("No space left", "free some space there, or let RAY_TMPDIR name another folder"),
    ("/dev/shm|plasma|shared memory", "make /dev/shm writable for this user and large enough"),
    (
        "Permission denied|Read-only file system|not permitted",
        "let RAY_TMPDIR name a folder that this user can write",
    ),
)
_CAUSES = re.compile(
    "|".join(words for words, _ in _REMEDIES[1:]) + r"|Check failed:|what\(\):|No such file|Cannot allocate memory"
)


_STACK = re.compile(r"\[0x[0-9a-f]+\]")  # a frame of a C++ stack names functions, which say nothing of the cause


def start_ray(config: ClusterConfig, cpus: int, store_bytes: int) -> None:
    """Start a private Ray with an object store of `store_bytes`, or connect to the cluster that the config names.

    Does nothing where Ray is up already.  Leaves the process's signal handlers as they are.

    Raises:
        ConfigError: Ray does not start, or the cluster does not answer.
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
    began = time.time()
    try:
        # ray.init would handle SIGTERM by exiting on the spot; the trainer could not save.  Restoring the handler
        # afterwards is too late: a signal in between has left locks held for ever.
        with _stop_signals_blocked(), _stderr_held() as last_line, private.without_sigterm_handler():
            what = "a private Ray to start" if config.address is None else f"Ray at {config.address} to answer"
            with _said_while_waiting(what, last_line):
                ray.init(**settings, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises plain ones, too
        with suppress(Exception):
            ray.shutdown()  # what has started
        raise _not_started(config.address, error, began) from error


def _not_started(address: str | None, error: Exception, began: float) -> ConfigError:
    """Why, from the error or else from the logs of Ray's processes, and what helps."""
    without = "set training.workers=0, which runs without Ray"
    said = one_line(error, 300)
    if address is not None:
        return ConfigError(
            f"Cannot connect to the Ray cluster at cluster.address={address}: {said}; this process used "
            f"{_token_in_use()}; check the address and the cluster, or set cluster.address=null for a private Ray"
        )
    folder = session_folder(began)
    cause = said
    if not _CAUSES.search(said) and folder is not None and (logged := cause_in_logs(folder)):
        cause = logged
    remedy = next((helps for words, helps in _REMEDIES if re.search(words, cause)), "")
    logs = "" if folder is None else f"; its logs are in {folder / 'logs'}"
    return ConfigError(f"Ray did not start: {cause}{logs}; {f'{remedy}, or ' if remedy else ''}{without}")


def session_folder(began: float) -> Path | None:
    """The folder of the Ray that this process has started since then, with its logs; None where there is none."""
    parent = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    with suppress(OSError):
        made = [(path.stat().st_mtime, path) for path in parent.glob(f"session_*_{os.getpid()}")]
        return max(((at, path) for at, path in made if at >= began - 1), default=(0.0, None))[1]
    return None


def cause_in_logs(folder: Path) -> str:
    """The last line in which a process of Ray says what went wrong; '' where none does."""
    found = ""
    for pattern in ("*.err", "*.out", "*.log"):
        for path in sorted((folder / "logs").glob(pattern)):
            with suppress(OSError):
                lines = path.read_text(encoding="utf-8", errors="replace")[-100_000:].splitlines()
                if causes := [line for line in lines if _CAUSES.search(line) and not _STACK.search(line)]:
                    found = f"{path.name}: {one_line(causes[-1], 300)}"
        if found:
            break
    return found


@contextmanager
def authenticated(address: str | None) -> Iterator[None]:
    """Have Ray use the token that it needs, while the context lasts, unless the environment says how.

    A private Ray gets a token of its own: left to itself Ray would write one to ~/.ray/auth_token, which later changes
    how `ray start` makes clusters.  A cluster is asked whether it wants one.

    Raises:
        ConfigError: the cluster does not answer, or wants a token that is not here.
    """
    changes: dict[str, str] = {}
    if _AUTH_MODE not in os.environ:
        if address is None:
            changes = {_AUTH_MODE: "token", _TOKEN: secrets.token_hex(32)}
        elif _wants_token(address):
            changes = {_AUTH_MODE: "token"}
    before = {name: os.environ.get(name) for name in (_AUTH_MODE, _TOKEN)}
    os.environ.update(changes)
    try:
        private.reread_authentication()
        if address is not None and os.environ.get(_AUTH_MODE) == "token" and not private.has_token():
            raise ConfigError(
                f"The Ray cluster at cluster.address={address} wants a token, and there is none: {_token_in_use()}; "
                f"copy ~/.ray/auth_token from the machine of its head, or let {_TOKEN_PATH} name a copy"
            )
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        private.reread_authentication()


def _wants_token(address: str) -> bool:
    try:
        head = private.address_of_cluster(address)
        return head is not None and private.wants_token(head, _ANSWER_S)
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
    path = os.environ.get(_TOKEN_PATH) or Path.home() / ".ray/auth_token"
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        _listen_to_sigterm()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen_to_sigterm() -> None:
    """Install Python's handler of SIGTERM again, which Ray's C++ core has replaced."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


@contextmanager
def _said_while_waiting(what: str, last_line: Callable[[], str]) -> Iterator[None]:
    """Log what is waited for, after some seconds and then twice a minute."""
    over, began = threading.Event(), time.monotonic()

    def say() -> None:
        pause_s = _SAY_AFTER_S
        while not over.wait(pause_s):
            line = last_line()
            log.info(  # which goes to stdout: stderr is held back
                "waiting for %s for %.0f s%s", what, time.monotonic() - began, f"; it says: {line}" if line else ""
            )
            pause_s = _SAY_EVERY_S

    thread = threading.Thread(target=say, name="ray-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _stderr_held() -> Iterator[Callable[[], str]]:
    """Delay what is written to file descriptor 2, and drop the line in which Ray's C++ core announces its log level.

    After an error, which says it in one line, only the log at level debug has it.  Where the process dies meanwhile, a
    shell that outlives it prints the end of it.

    Yields:
        What returns the last line so far.
    """
    saved = os.dup(2)
    with tempfile.NamedTemporaryFile() as held, _last_words(held.name, saved):

        def lines() -> list[bytes]:
            written = os.pread(held.fileno(), os.fstat(held.fileno()).st_size, 0)
            return [line for line in written.splitlines(keepends=True) if _ANNOUNCEMENT not in line]

        os.dup2(held.fileno(), 2)
        try:
            yield lambda: one_line(b"".join(lines()[-1:]).decode(errors="replace"))
        except Exception:
            log.debug("while Ray started: %s", b"".join(lines()).decode(errors="replace"))
            raise
        else:
            for line in lines():
                os.write(saved, line)
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@contextmanager
def _last_words(held: str, stderr: int) -> Iterator[None]:
    """Have a shell print the end of a file if this process dies before the context ends."""
    command = ["sh", "-c", _LAST_WORDS, held]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr, start_new_session=True) as shell:
        assert shell.stdin is not None
        try:
            yield
        finally:
            with suppress(OSError):
                shell.stdin.write(b"done\n")
                shell.stdin.flush()
