"""Where a trained model lies, from what a user names: a run, a checkpoint of it, or a file in one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vesuvius.engine.checkpoint import (
    BEST,
    MANIFEST,
    STATE,
    find_damage,
    list_checkpoints,
    newest_checkpoint,
    readable,
    weights_file,
)
from vesuvius.engine.run_dir import RunDir
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.observe.run_files import runs_root


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint directory; `verified` where all of it was just read and found whole."""

    path: Path
    verified: bool

    def check(self, *names: str) -> None:
        """Raises StorageError where the manifest, or a file of these names, is not as it was written."""
        if not self.verified and (damage := find_damage(self.path, names)):
            raise unreadable(self.path.joinpath(*names), damage)


def find_checkpoint(given: Path, asked: str = "--checkpoint") -> FoundCheckpoint:
    """Where a trained model is: a run's newest whole checkpoint, or the one that is named.

    Args:
        given: a run directory, the name of one in `runs/`, a checkpoint directory (also by the link `best`), or a file
            with weights in one.
        asked: the option that it is given to, for messages.

    Raises:
        ConfigError: it is none of these, or the run has no checkpoint yet.
        StorageError: the run has checkpoints and none is whole, its manifest is damaged, or it may not be read.
    """
    named = [runs_root() / given] if given.name == str(given) else []
    with readable():
        for path in (given, *named):
            directory = path.parent if _holds_weights(path.name) and path.is_file() else path
            if _is_checkpoint(directory):
                return _named(directory)
            if RunDir(path).checkpoints.is_dir():
                return FoundCheckpoint(_newest_of(path), verified=True)
        what = "which holds none of these" if given.exists() else "which is not there"
    raise ConfigError(
        f"{asked} must be a run directory, the name of one in runs/, a checkpoint directory, or the model.safetensors "
        f"or state.pt in one; got {given}, {what}; try runs/NAME or runs/NAME/checkpoints/{BEST}"
    )


def _newest_of(run: Path) -> Path:
    """The newest whole checkpoint of a run.  Raises as `find_checkpoint`."""
    directory = RunDir(run).checkpoints
    newest = newest_checkpoint(directory)
    if newest is not None:
        return newest
    if damaged := list_checkpoints(directory):
        names = ", ".join(path.name for path in damaged)
        raise StorageError(
            f"one checkpoint of a run must be whole; got {names} in {directory}, all damaged; restore one from a backup"
        )
    raise ConfigError(
        f"a run must have a checkpoint by now; got {run}, which has none yet; wait for its first (training.save_every)"
    )


def unreadable(path: Path, error: Exception | str) -> StorageError:
    """The error for a checkpoint, or a file of one, that cannot be used."""
    got = error if isinstance(error, str) else f"{type(error).__name__}: {one_line(error)}"
    return StorageError(f"a checkpoint must be as it was written; got {got} for {path}; use another checkpoint")


def _named(directory: Path) -> FoundCheckpoint:
    # What the link `best` points to now: it may point elsewhere before all is read.
    path = directory.parent / directory.readlink() if directory.is_symlink() else directory
    found = FoundCheckpoint(path, verified=False)
    found.check()
    return found


def _holds_weights(name: str) -> bool:
    """Whether a file of this name in a checkpoint holds weights."""
    return name == STATE or (name.startswith("model") and name.endswith(".safetensors"))


def _is_checkpoint(path: Path) -> bool:
    """Whether a directory holds any part of a checkpoint: a damaged one is reported as such."""
    return any((path / name).is_file() for name in (MANIFEST, STATE, weights_file("ema")))
