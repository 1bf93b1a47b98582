"""The run directory `runs/<name>/`: paths, creation, lock, and env.json."""

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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vesuvius.config import Config
from vesuvius.config.load import dump_config, read_source
from vesuvius.errors import ConfigError, broken_link, storage_errors
from vesuvius.runlog.files import take_lock, write_atomically
from vesuvius.runlog.find_run import is_run, runs_root
from vesuvius.runlog.held import LOCK, holding
from vesuvius.runlog.redact import redacted

_PACKAGES = (
    "vesuvius-diffusion", "torch", "ray", "zarr", "numcodecs", "numpy", "pydantic", "safetensors", "tensorboard",
)  # fmt: skip


def describe_environment() -> dict[str, Any]:
    """Versions, machine and command line, for env.json."""
    import torch  # takes seconds; only needed here

    from vesuvius.accelerator import device_names

    return {
        "command": redacted([sys.executable, *sys.argv]),
        "directory": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "gpus": device_names(),
        "cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this checkout, with '+' if files are modified; None if installed or unknown."""
    checkout = Path(__file__).resolve().parents[3]
    if not (repository := checkout / ".git").exists():
        return None
    # Within a git hook, GIT_DIR is that of another repository.
    command = ["git", f"--git-dir={repository}", f"--work-tree={checkout}"]
    command += ["describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


log = logging.getLogger(__name__)

SOURCE = "config.source.yaml"
TUNE, BENCHES = "tune", "benches"
_OTHER_COMMANDS = (TUNE, BENCHES, "profiles", "reports")
"""Written by other commands, also before the run has begun."""

_OF_A_START = (
    *(SOURCE, "config.resolved.yaml", "env.json", "split.json", "metrics.jsonl", "system.jsonl"),
    *("recent.jsonl", "recent.before.jsonl", "session.json", "post_mortem.jsonl", "quarantine.jsonl"),
    *("logs", "reading", "checkpoints", "samples", "stacks", "tb", "ranks"),
)
"""Written by a session."""
_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")  # of `write_atomically`, left behind by a kill
_POLL_S = 0.2


class _Below:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    path: Path
    log = _Below("logs/train_full.log")
    metrics = _Below("metrics.jsonl")
    system = _Below("system.jsonl")
    recent = _Below("recent.jsonl")
    session = _Below("session.json")
    post_mortem = _Below("post_mortem.jsonl")
    quarantine = _Below("quarantine.jsonl")
    reading = _Below("reading")  # reading logs of the reader processes
    checkpoints = _Below("checkpoints")
    samples = _Below("samples")
    stacks = _Below("stacks")
    tensorboard = _Below("tb")

    @property
    def tune_command(self) -> str:
        """Command to find the best setting for the run."""
        return shlex.join(["vesuvius", "tune", "--config", str(self.path / "config.resolved.yaml")])

    def exists(self) -> bool:
        """Whether a run has made a step or saved here; files of other commands and of failed starts do not count."""
        try:
            if self.others():
                return True
            if any(next(folder.iterdir(), None) for folder in (self.checkpoints, self.samples) if folder.is_dir()):
                return True
            if not self.metrics.exists():
                return False
            with self.metrics.open("rb") as records:
                return any(re.search(rb'"kind": ?"step"', line) for line in records)
        except OSError:  # missing, a file, or unreadable
            return os.path.exists(self.path)

    def others(self) -> set[str]:
        """Names in the directory that no vesuvius command writes there.  Raises OSError."""
        names = {entry.name for entry in self.path.iterdir()}
        began = LOCK in names or is_run(self.path)  # otherwise even `logs` is somebody else's
        own = {*_OTHER_COMMANDS, LOCK, *(_OF_A_START if began else ())}
        return {name for name in names if _written_as(name) not in own}

    def clear(self) -> None:
        """Remove files of an earlier session, whose records would be taken for the new run's."""
        # The config is last: after a kill, the rest is still known as an earlier session's.
        for path in sorted(self.path.iterdir(), key=lambda path: path.name == SOURCE):
            if _written_as(path.name) not in _OF_A_START:
                continue
            if path.is_symlink():  # a folder moved to another disk
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def of_rank(self, rank: int) -> RunDir:
        """Return the directory for the log, records and reading logs of a rank; for rank 0, the run directory."""
        return RunDir(self.path / "ranks" / str(rank)) if rank else self

    @contextmanager
    def locked(self, new: bool, wait_s: float = 0.0) -> Iterator[int]:
        """Create the directory (`new`) or continue in it, and lock it; yields the lock's descriptor.

        A process that inherits the descriptor holds the lock, too.  Raises ConfigError, StorageError.
        """
        if new:
            refuse_existing(self)
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK).open("ab", buffering=0)
        with lock:
            free, deadline = take_lock(lock.fileno(), self.path / LOCK), time.monotonic() + wait_s
            if not free and wait_s:
                log.info("%s is locked by %s; waiting up to %g s for it to end", self.path, self.lock_owner(), wait_s)
            while not free:
                if time.monotonic() >= deadline:
                    owner = f"{self.lock_owner()} or a process that it started"
                    raise ConfigError(f"{self.path} is in use by {owner}; wait for it or stop it")
                time.sleep(_POLL_S)
                free = take_lock(lock.fileno(), self.path / LOCK)
            with self.writing():
                if new:
                    refuse_existing(self)  # another process may have begun and ended a run meanwhile
                    self.clear()
                owner = f"process {os.getpid()} on {platform.node()} since {time.strftime('%F %T')} {uuid.uuid4().hex}"
                lock.truncate(0)
                lock.write(owner.encode())
                os.fsync(lock.fileno())
            with holding(self.path, lock.fileno()):
                yield lock.fileno()

    @contextmanager
    def held_by_rank_0(self, mark: str) -> Iterator[None]:
        """Follow the directory, which rank 0 has locked, while the context lasts; see `refuse_other_path`."""
        self.refuse_other_path(mark)
        with self.writing(), (self.path / LOCK).open("rb") as lock, holding(self.path, lock.fileno()):
            yield

    def writing(self) -> AbstractContextManager[None]:
        return storage_errors(f"the run directory {self.path}", "free some space or choose another folder")

    def lock_owner(self) -> str:
        """Return the text in the lock file, which identifies its latest owner; '' if there is none."""
        try:
            return (self.path / LOCK).read_text(encoding="utf-8")
        except OSError:
            return ""

    def refuse_other_path(self, mark: str, within_s: float = 90.0) -> None:
        """Raise ConfigError if the directory's lock text is not that of rank 0, `mark`; network disks may be late."""
        deadline = time.monotonic() + within_s
        while self.lock_owner() != mark:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"the run directory {self.path.absolute()} is not shared: on {platform.node()} it is a different "
                    f"folder than on rank 0 ({mark}); put runs/ on a file system that all nodes share, or set "
                    "VESUVIUS_RUNS to one"
                )
            time.sleep(_POLL_S)

    def make_folders(self) -> None:
        for folder in (self.log.parent, self.checkpoints, self.samples):
            folder.mkdir(parents=True, exist_ok=True)

    def begin(self, config: Config, source: Path, split: dict[str, Any]) -> None:
        """Write the config, environment and split of this session.  Raises StorageError."""
        with self.writing():
            self.make_folders()
            write_atomically(self.path / SOURCE, read_source(source))  # possibly this very file
            write_atomically(self.path / "config.resolved.yaml", dump_config(config).encode())
            for name, content in (("env.json", describe_environment()), ("split.json", split)):
                write_atomically(self.path / name, f"{json.dumps(content, indent=1)}\n".encode())


def _written_as(name: str) -> str:
    """The name under which a temporary file would have been kept."""
    return temporary[1] if (temporary := _TEMPORARY.fullmatch(name)) else name


def run_dir(config: Config) -> RunDir:
    return RunDir(runs_root() / config.name)


def require_run(directory: RunDir) -> None:
    """Raise ConfigError if there is no run to resume; one that was killed before it saved anything counts."""
    if not (directory.exists() or is_run(directory.path)):
        places = "check the name, the working directory (or VESUVIUS_RUNS) and that its disk is mounted"
        raise ConfigError(
            f"Cannot resume: there is no run in {directory.path.absolute()}; {broken_link(directory.path) or places}, "
            "or start without --resume (training.resume=auto does both)"
        )


def refuse_existing(directory: RunDir) -> None:
    """Raise ConfigError if the run exists, as a new run must not overwrite it."""
    if directory.exists():
        raise ConfigError(
            f"{directory.path} already contains a run; continue it with --resume, choose another name, or move it away"
        )
