"""Runs `vesuvius train` as a real process, kills it repeatedly without warning, and continues with `--resume`."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.support import fork_server
from vesuvius.runlog.records import read_records
from vesuvius.training.checkpoint.format import find_damage, list_checkpoints

_EARLY_SHARE = 0.2
_HANG_S = 300


class Session:
    """One process of a run or another command.  A context manager that leaves no process behind."""

    def __init__(
        self,
        config: Path,
        cwd: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        module: str = "vesuvius.train",
        program: Sequence[str] = (),
    ) -> None:
        self._output = cwd / f"{config.stem}.session.txt"
        self._started = time.monotonic()
        with self._output.open("w") as out:
            self.process = fork_server.Popen(
                [sys.executable, *(program or ("-m", module)), "--config", str(config), *arguments],
                cwd=cwd,
                env=os.environ | (environment or {}),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # as a shell does: its process group is its own
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started

    def text(self) -> str:
        """Output so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, count: int = 1, at_most_s: float | None = None) -> None:
        """Wait until a text was printed `count` times, or until the timeout."""

        def happened() -> bool:
            return (at_most_s is not None and self.age_s >= at_most_s) or self.text().count(text) >= count

        self.wait_until(happened, f"{text!r} x {count}")

    def wait_until(self, happened: Callable[[], bool], what: str, every_s: float = 0.02) -> None:
        """Wait for an action of the running process."""
        deadline = time.monotonic() + _HANG_S
        while True:
            ended = self.process.poll() is not None
            if happened():
                return
            assert not ended, f"the run ended with {self.process.returncode} before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"the run hangs before {what}:\n{self.text()}"
            time.sleep(every_s)

    def end(self) -> int:
        """Let it finish.  Returns the exit code."""
        return self.process.wait(timeout=10 * _HANG_S)


def run_with_kills(
    config: Path,
    cwd: Path,
    kills: int,
    seed: int,
    most_steps: int = 5,
    arguments: Callable[[int], Sequence[str]] = lambda session: (),
    environment: dict[str, str] | None = None,
) -> tuple[int, int]:
    """Kill a run at random times, resume it each time, and let it finish.  Every visible checkpoint must be intact.

    A session is killed anywhere in its first `most_steps` + 2 steps, one in five before the first.  The run must be
    longer than these together.  Returns the number of kills before a first step, and of optimizer steps repeated.

    Args:
        arguments: command line of session 0, 1, ...
    """
    rng, run = random.Random(seed), run_directory(config, cwd)
    before_first_step, start_s = 0, 0.0
    for number in range(kills):
        with Session(config, cwd, "training.resume=auto", *arguments(number), environment=environment) as session:
            early = start_s and rng.random() < _EARLY_SHARE
            session.wait_for("Train step", at_most_s=rng.uniform(0, start_s) if early else None)
            if not early:
                start_s = session.age_s
                session.wait_for("Train step", count=1 + rng.randrange(most_steps))
                step_s = min(map(float, re.findall(r" step_s ([\d.]+)", session.text())))
                time.sleep(rng.uniform(0, 2 * step_s))
            assert session.process.poll() is None, f"the run was over before it could be killed:\n{session.text()}"
            session.process.kill()
            session.process.wait()
            before_first_step += "Train step" not in session.text()
        for path in list_checkpoints(run / "checkpoints"):
            assert (damage := find_damage(path)) is None, f"kill {number} left {path} damaged: {damage}"
    with Session(config, cwd, "training.resume=auto", *arguments(kills), environment=environment) as session:
        assert session.end() == 0, session.text()
    assert not list((run / "checkpoints").glob(".*")), "what the kills left behind is deleted"
    steps = [record["step"] for record in read_records(run / "metrics.jsonl") if record["kind"] == "step"]
    return before_first_step, len(steps) - len(set(steps))


def run_directory(config: Path, cwd: Path) -> Path:
    """Run directory of a config."""
    return cwd / "runs" / str(yaml.safe_load(config.read_text())["name"])


def processes_with(marker: str) -> list[str]:
    """Command lines of the processes that have this text in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def left_after(marker: str, at_most_s: float, kept: Sequence[str] = ()) -> list[str]:
    """Command lines of those still running after this time, except those containing a word of `kept`."""
    deadline = time.monotonic() + at_most_s
    while True:
        left = [line.strip() for line in processes_with(marker) if not any(word in line for word in kept)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def final_difference(run: Path, other: Path) -> str | None:
    """Difference between the last checkpoints of two runs in weights, optimizer, averages or scaler; None:
    bit-identical."""
    ours, theirs = (list_checkpoints(path / "checkpoints")[-1] for path in (run, other))
    if ours.name != theirs.name:
        return f"{ours.name} and {theirs.name}"
    for name in sorted({path.name for path in [*ours.glob("*.safetensors"), *theirs.glob("*.safetensors")]}):
        if (ours / name).read_bytes() != (theirs / name).read_bytes():
            return name
    states = [torch.load(path / "state.pt", map_location="cpu", weights_only=True) for path in (ours, theirs)]
    parts = [key for key in states[0] if key in ("model", "optimizer", "scaler") or "ema" in key or "average" in key]
    assert {"model", "optimizer"} <= set(parts)
    return next((f"state.pt: {key}" for key in parts if not _same(states[0][key], states[1][key])), None)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
