"""Processes of `multiprocessing`, forked from one that has imported what they need: each spawned one takes a second."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(["vesuvius.volume_tools.child_reads", "tests.volumes.store.test_cache"])


def process(target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> BaseProcess:
    """One that is not started yet; it will have the environment of now, as a spawned one."""
    return _FORK_SERVER.Process(target=_run, args=(dict(os.environ), target, args), daemon=daemon)


def _run(environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


STAND_IN = SimpleNamespace(
    get_context=lambda method: SimpleNamespace(Pipe=_FORK_SERVER.Pipe, Value=_FORK_SERVER.Value, Process=process)
)
"""For `multiprocessing` in code under test."""
