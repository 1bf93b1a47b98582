"""Rows of `gpu_check.py` that run commands: real training, killed and resumed; the tests for GPUs; two ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from gpu.checks import ROOT, ROUNDING, SLACK
from gpu.measure import LOSS_LIMIT, Bench, Row, RowError, judged
from gpu.runner import die_with_parent

PACKAGES = ("zarr", "obstore", "numcodecs", "safetensors", "rich", "PIL")
SYNTH = ("-m", "vesuvius", "volume", "synth", "volumes/demo.zarr", "--shape", "96,128,128")
TESTS = ("-m", "pytest", "-m", "gpu", "-v", "--tb=line", "-p", "no:cacheprovider")
RANK_TIMEOUT, RANK_END_S = "cluster.rank_timeout_minutes=1", 120.0  # a message of a killed rank is waited for so long


class Commands:
    """Starts commands in a folder, and waits for them no longer than the row may take."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self._bench, self.folder, self.started = bench, folder, list[subprocess.Popen[bytes]]()
        self._demo = ("-m", "vesuvius.train", "--config", str(ROOT / "configs" / "demo.yaml"))
        self._demo += () if bench.on_gpu else ("model.full_res_channels=4", "training.workers=0")

    def start(self, log: str, *arguments: str, cwd: Path | None = None, **variables: Any) -> subprocess.Popen[bytes]:
        """Start Python with these arguments."""
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        environment["VESUVIUS_RUNS"] = str(self.folder / "runs")
        options = {"cwd": cwd or self.folder, "env": environment, "preexec_fn": die_with_parent}
        with (self.folder / log).open("wb") as out:
            process = subprocess.Popen([sys.executable, *arguments], stdout=out, stderr=subprocess.STDOUT, **options)
        self.started.append(process)
        return process

    def train(self, name: str, *overrides: str) -> subprocess.Popen[bytes]:
        return self.start(name, *self._demo, f"name={name}", *overrides)

    def ranks(self, name: str, *overrides: str) -> list[subprocess.Popen[bytes]]:
        """Two, as torchrun starts them; rank 0 has the log `name`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        command, logs = (*self._demo, f"name={name}", *overrides), (name, f"{name}.1")
        return [self.start(log, *command, RANK=n, LOCAL_RANK=n, **fixed) for n, log in enumerate(logs)]

    def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self._bench.check_time()
            time.sleep(0.01)

    def end(self, process: subprocess.Popen[bytes], log: str) -> None:
        """Wait for it.  Raises RowError: it failed."""
        self.until(lambda: process.poll() is not None)
        if process.returncode:
            raise RowError("wrong", f"{log} ended with {process.returncode}: {self.last_line(log)}")

    def last_line(self, log: str) -> str:
        lines = (self.folder / log).read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line[:300] for line in reversed(lines) if line.strip()), "no output")

    def records(self, name: str) -> list[Row]:
        path = self.folder / "runs" / name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def losses(self, name: str) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in self.records(name) if row["kind"] == "step"}

    def weights(self, name: str) -> bytes:
        return max((self.folder / "runs" / name / "checkpoints").glob("step_*/model.safetensors")).read_bytes()


@contextmanager
def commands(bench: Bench, *packages: str) -> Iterator[Commands]:
    """Commands in a new folder.  Raises RowError: a package is missing."""
    if missing := [name for name in (*PACKAGES, *packages) if importlib.util.find_spec(name) is None]:
        raise RowError("skipped", f"needs {', '.join(missing)}; run: python -m pip install -e '{ROOT}[dev]'")
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as folder:
        them = Commands(bench, Path(folder))
        try:
            yield them
        finally:
            for process in them.started:
                process.kill()
                process.wait()


def train(bench: Bench, steps: int) -> Row:
    """Real training with validation, preview and checkpoints: straight; killed with -9 and resumed; as configs have it.

    With deterministic kernels the first two must be equal bit by bit.
    """
    fifth, exact = steps // 5, "training.deterministic=true"
    keys = [f"training.max_steps={steps}", f"training.save_every={fifth}", "diffusion.sampler_steps=2"]
    keys += [f"training.validate_every={2 * fifth}", f"training.preview_every={2 * fifth}"]
    with commands(bench) as them:
        them.end(them.start("synth", *SYNTH), "synth")
        them.end(them.train("straight", *keys, exact), "straight")
        killed = them.train("killed", *keys, exact)
        them.until(lambda: killed.poll() is not None or max(them.losses("killed"), default=0) > 2 * fifth)
        if killed.poll() is not None:
            raise RuntimeError(f"the run was over before it was killed: {them.last_line('killed')}")
        killed.kill()
        killed.wait()
        them.end(them.train("killed", *keys, exact, "--resume"), "killed")
        them.end(them.train("auto", *keys), "auto")
        straight, resumed, auto = map(them.losses, ("straight", "killed", "auto"))
        if straight != resumed or them.weights("straight") != them.weights("killed"):
            step = next((step for step in straight if straight[step] != resumed.get(step)), steps)
            raise RowError("wrong", f"a killed and resumed run differs from an uninterrupted one from step {step} on")
        kinds = Counter(row["kind"] for row in them.records("auto"))
        if missing := {"validation", "preview", "checkpoint"} - set(kinds):
            raise RowError("wrong", f"the run has no record of {', '.join(missing)}")
    return judged("the loss of the first step", abs(auto[1] / straight[1] - 1), LOSS_LIMIT) | {"steps": steps}


def gpu_tests(bench: Bench) -> Row:
    """`pytest -m gpu`, without the test of this command."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path.name != "test_gpu_check.py"]
    files = [path for path in files if re.search("mark.gpu|support.gpu", path.read_text())][
        : None if bench.on_gpu else 1
    ]
    with commands(bench, "pytest", "hypothesis", "ray") as them:
        process = them.start("pytest", *TESTS, *map(str, files), cwd=ROOT)
        with suppress(RowError):  # there is no more time
            them.until(lambda: process.poll() is not None)
        results = re.findall(r"^(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)", (them.folder / "pytest").read_text(), re.M)
        counts, last = Counter(result.lower() for _, result in results), them.last_line("pytest")
        if failed := [name for name, result in results if result in ("FAILED", "ERROR")]:
            raise RowError("wrong", f"{len(failed)} of {len(results)} tests failed: {', '.join(failed)}")
        if process.returncode != 0 or not (counts["passed"] if bench.on_gpu else results):
            raise RowError("out of time" if process.returncode is None else "wrong", f"{dict(counts)}, then: {last}")
    return dict(counts)


def ranks(bench: Bench, steps: int) -> Row:
    """Two ranks train like one; if one is killed or told to stop, the other ends in bounded time and says why."""
    if bench.on_gpu and torch.accelerator.device_count() < 2:
        raise RowError("skipped", "one GPU")
    keys = ("training.deterministic=true", "training.amp=off", "training.validate_every=0", "training.preview_every=0")
    with commands(bench) as them:
        them.end(them.start("synth", *SYNTH), "synth")
        few = (*keys, f"training.max_steps={steps}")
        them.end(them.train("one", *few), "one")
        for process in them.ranks("two", *few):
            them.end(process, "two")
        two = them.losses("two")
        off = max(abs(two.get(step, float("nan")) / loss - 1) for step, loss in them.losses("one").items())
        row = judged("losses of two ranks", off, SLACK * ROUNDING["off"])
        for sent in (signal.SIGKILL, signal.SIGTERM)[: None if bench.on_gpu else 1]:
            first, second = them.ranks(sent.name, *keys, RANK_TIMEOUT, "training.max_steps=100000")
            them.until(lambda: first.poll() is not None or len(them.losses(sent.name)) > 1)  # noqa: B023
            if first.poll() is not None:
                raise RowError("wrong", f"two ranks ended before {sent.name}: {them.last_line(sent.name)}")
            second.send_signal(sent)
            began = time.monotonic()
            them.until(lambda: first.poll() is not None or time.monotonic() > began + RANK_END_S)  # noqa: B023
            if not first.returncode:
                raise RowError("wrong", f"rank 0 does not end {RANK_END_S:.0f} s after {sent.name} to rank 1")
            row |= {f"{sent.name} s": time.monotonic() - began, f"{sent.name} reason": them.last_line(sent.name)}
    return row
