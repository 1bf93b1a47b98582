"""The ranks of a run as torchrun starts them: one process each, with its environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import fork_server

TRAIN = ("-m", "vesuvius.train")


@contextmanager
def started_ranks(
    config: Path | None, cwd: Path, world: int, *arguments: str, program: Sequence[str] = TRAIN
) -> Iterator[list[Any]]:
    """Start the ranks; kills all at the end.

    Args:
        config: None: the program takes no config.
        program: arguments of Python before `--config`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, *program, *(("--config", str(config)) if config else ()), *arguments]
    processes = []
    try:
        for rank in range(world):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with (cwd / f"rank_{rank}.txt").open("w") as out:
                processes.append(
                    fork_server.Popen(
                        command,
                        cwd=cwd,
                        env=os.environ | {name: str(value) for name, value in variables.items()},
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ends_of(processes: Sequence[Any], timeout_s: float = 240) -> list[int]:
    """Exit codes of all ranks; a hang raises before the limit of a test, 300 s, ends the process of the tests."""
    return [process.wait(timeout=timeout_s) for process in processes]


def output_of(cwd: Path, world: int) -> str:
    """Output of all ranks."""
    return "\n".join((cwd / f"rank_{rank}.txt").read_text(errors="replace") for rank in range(world))
