"""The run directory `runs/<name>/`: where each file is, how it begins, and what env.json says of the machine."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vesuvius.config import Config
from vesuvius.config.load import dump_config, read_source
from vesuvius.errors import ConfigError, storage_errors
from vesuvius.runlog.files import take_lock, write_atomically
from vesuvius.runlog.find_run import runs_root
from vesuvius.runlog.redact import redacted

_PACKAGES = (
    "vesuvius-diffusion", "torch", "ray", "zarr", "numcodecs", "numpy", "pydantic", "safetensors", "tensorboard",
)  # fmt: skip


def describe_environment() -> dict[str, Any]:
    """Versions, machine and command line, for env.json."""
    import torch  # takes seconds: who only asks where a run is need not wait for it

    return {
        "command": redacted([sys.executable, *sys.argv]),
        "directory": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def installed_version(package: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this package's own checkout, with '+' where files differ; None where it is installed or unknown."""
    checkout = Path(__file__).resolve().parents[3]
    if not (repository := checkout / ".git").exists():
        return None
    command = ["git", f"--git-dir={repository}", f"--work-tree={checkout}"]  # within a hook, GIT_DIR is of another one
    command += ["describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


log = logging.getLogger(__name__)

TUNE, BENCHES = "tune", "benches"
_BESIDE = (TUNE, BENCHES, "profiles", "reports")
"""What other commands keep in a run directory, also before the run has begun."""

_LOCK = ".lock"
_OF_A_START = (
    *("config.source.yaml", "config.resolved.yaml", "env.json", "split.json", "metrics.jsonl", "system.jsonl"),
    *("recent.jsonl", "session.json", "post_mortem.jsonl", "quarantine.jsonl"),
    *("logs", "reading", "checkpoints", "samples", "stacks", "tb", "ranks"),
)
"""What a session writes before its first step."""
_LOOK_AGAIN_S = 0.2


class _Below:
    """A path in a run directory, as an attribute of `RunDir`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    path: Path
    log = _Below("logs/train_full.log")
    metrics = _Below("metrics.jsonl")
    system = _Below("system.jsonl")
    recent = _Below("recent.jsonl")
    session = _Below("session.json")
    post_mortem = _Below("post_mortem.jsonl")
    quarantine = _Below("quarantine.jsonl")
    reading = _Below("reading")  # notes of the processes that read, and what those left that crashed
    checkpoints = _Below("checkpoints")
    samples = _Below("samples")
    stacks = _Below("stacks")
    tensorboard = _Below("tb")

    @property
    def tune_command(self) -> str:
        """What to type to find the best setting for the run."""
        return shlex.join(["vesuvius", "tune", "--config", str(self.path / "config.resolved.yaml")])

    def exists(self) -> bool:
        """Whether a run has begun here: it has made a step, or saved.

        What a tune or a bench has written is none, nor is what a start that came to nothing has left.
        """
        try:
            names = {entry.name for entry in self.path.iterdir()} - {*_BESIDE, _LOCK}
            if not names <= {*_OF_A_START}:  # something that no run has written
                return True
            if any(next(folder.iterdir(), None) for folder in (self.checkpoints, self.samples) if folder.is_dir()):
                return True
            if not self.metrics.exists():
                return False
            with self.metrics.open("rb") as records:
                return any(re.search(rb'"kind": ?"step"', line) for line in records)
        except OSError:  # it is not there, is a file, or may not be read
            return self.path.exists()

    def clear(self) -> None:
        """Remove what a start that came to nothing has left: its records would be taken for the new run's."""
        for path in map(self.path.joinpath, _OF_A_START):
            if path.is_symlink():  # a folder that somebody has put on a larger disk
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def of_rank(self, rank: int) -> RunDir:
        """Where another rank than 0 keeps its log, its records and its notes."""
        return RunDir(self.path / "ranks" / str(rank)) if rank else self

    @contextmanager
    def locked(self, new: bool, wait_s: float = 0.0) -> Iterator[None]:
        """Make the directory (`new`) or continue in it, and keep other processes out of it while the context lasts.

        Args:
            wait_s: how long another process may take to let go of it.

        Raises:
            ConfigError: it exists although it is to be new, or another process is at work in it.
            StorageError: it cannot be made, or its file system has no locks.
        """
        if new:
            refuse_existing(self)
        with storage_errors(f"the run directory {self.path}", "free some space or choose another folder"):
            self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK).open("a") as lock:
            free, deadline = take_lock(lock.fileno(), self.path / _LOCK), time.monotonic() + wait_s
            if not free and wait_s:
                log.info("%s is locked by %s; waiting up to %g s for it to end", self.path, self.lock_owner(), wait_s)
            while not free:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"{self.path} is in use by another process: {self.lock_owner()}; wait for it or stop it"
                    )
                time.sleep(_LOOK_AGAIN_S)
                free = take_lock(lock.fileno(), self.path / _LOCK)
            if new:
                refuse_existing(self)  # another process may have begun and ended it meanwhile
                self.clear()
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%F %T')} {uuid.uuid4().hex}")
            lock.flush()
            os.fsync(lock.fileno())
            yield

    def lock_owner(self) -> str:
        """What the process that works on the run, or did so last, has written into its lock; '' where there is none."""
        try:
            return (self.path / _LOCK).read_text(encoding="utf-8")
        except OSError:
            return ""

    def refuse_other_path(self, mark: str, within_s: float = 90.0) -> None:
        """Raises ConfigError where this path is not that of rank 0: its mark does not appear here.

        Args:
            within_s: a network file system may show it late.
        """
        deadline = time.monotonic() + within_s
        while self.lock_owner() != mark:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"the run directory must be on a path that all nodes share; got {self.path.absolute()}, which "
                    f"is a different folder on {platform.node()} than on rank 0 ({mark}); put runs/ on a shared "
                    "file system, or point VESUVIUS_RUNS at one"
                )
            time.sleep(_LOOK_AGAIN_S)

    def make_folders(self) -> None:
        """Raises OSError where the directory is not writable."""
        for folder in (self.log.parent, self.checkpoints, self.samples):
            folder.mkdir(parents=True, exist_ok=True)

    def begin(self, config: Config, source: Path, split: dict[str, Any]) -> None:
        """Write down what this session runs with.  Raises StorageError: the disk is full or not writable."""
        with storage_errors(f"the run directory {self.path}", "free some space or choose another folder"):
            self.make_folders()
            write_atomically(self.path / "config.source.yaml", read_source(source))  # which may be that very file
            (self.path / "config.resolved.yaml").write_text(dump_config(config), encoding="utf-8")
            for name, content in (("env.json", describe_environment()), ("split.json", split)):
                (self.path / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run_dir(config: Config) -> RunDir:
    """The run directory of a config."""
    return RunDir(runs_root() / config.name)


def refuse_existing(directory: RunDir) -> None:
    """Raises ConfigError where the run exists: nothing of it may be overwritten by a new one."""
    if directory.exists():
        raise ConfigError(
            f"a new run needs a directory of its own; got {directory.path}, which exists; continue it with "
            "--resume, choose another name, or move it away"
        )
