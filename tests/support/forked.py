"""`multiprocessing` processes forked from one with imports done: spawning takes a second each."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(["vesuvius.volume_tools.verify", "tests.volumes.store.test_cache"])


def process(target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> BaseProcess:
    """A process not yet started, with the current environment, like a spawned one."""
    return _FORK_SERVER.Process(target=_run, args=(dict(os.environ), target, args), daemon=daemon)


def _run(environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


class _Context(type(_FORK_SERVER)):  # type: ignore[misc]
    def Process(self, target: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:  # noqa: N802
        return process(target, args, daemon=False)


def in_child(act: Callable[[], object]) -> int:
    """Run in a fork of this process; returns its exit code, or minus the number of the signal that ended it.

    Any exception ends it; otherwise it would continue as a second pytest on the same pipes.
    """
    if (child := os.fork()) == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


STAND_IN = SimpleNamespace(get_context=lambda method: _Context())
"""For `multiprocessing` in code under test."""
