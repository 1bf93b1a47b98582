"""Checkpoints: `checkpoints/step_00000500/`, whole or not there.

    state.pt           all of the state but the averaged weights
    model.safetensors  weights of the average "ema"; `model_ema_0.999.safetensors` those of a further one
    config.yaml        config of the run, so that the weights can be used by themselves
    manifest.json      SHA-256 sums of the others

Written under a hidden name, flushed to disk and renamed when whole; only then are older ones deleted.  Killing the
process at any moment leaves the last whole checkpoint.  `checkpoints/best` is a link to the best one.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vesuvius.engine.checkpoint_files import digest, sync, tensors_in, write_state, write_text, write_weights
from vesuvius.errors import StorageError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.pt"
BEST = "best"
_CONFIG = "config.yaml"
_FORMAT = 2
_REMEDY = (
    "free some space: a run with steps left saves again, one that has ended goes on with --resume; older checkpoints "
    "are whole"
)
_PARTIAL = ".partial-"  # not whole yet
_PRUNED = ".pruned-"  # on its way out


@dataclass(frozen=True)
class Keep:
    """Which checkpoints outlive a save.

    Attributes:
        keep_last: so many of the newest.
        keep_every: multiples of this step, too.
        best_step: and this one, to which `checkpoints/best` points.
    """

    keep_last: int
    keep_every: int | None = None
    best_step: int | None = None

    def choose(self, steps: Sequence[int]) -> set[int]:
        """Those to keep of ascending steps.  Pure."""
        every = {step for step in steps if self.keep_every and step % self.keep_every == 0}
        return every | set(steps[-self.keep_last :]) | {step for step in steps if step == self.best_step}


def save_checkpoint(directory: Path, step: int, state: dict[str, Any], config_yaml: str, keep: Keep) -> Path:
    """Write checkpoint `step`, then point `best` to the best one and delete what is not to be kept.

    Args:
        directory: `runs/<name>/checkpoints`.
        state: tensors and plain data, as `torch.load(weights_only=True)` can read it; with "averages", by name, of
            which each has "weights", by name.
        config_yaml: resolved config of the run.

    Raises:
        StorageError: the disk is full or cannot be written; older checkpoints are untouched, nothing is left behind.
    """
    final = directory / f"step_{step:08d}"
    partial = directory / f"{_PARTIAL}{final.name}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _delete_leftovers(directory)
        _check_space(directory, state, final)
        partial.mkdir()
        _write_files(partial, step, state, config_yaml)
        if final.exists():  # damaged: a run that was resumed from the one before comes by here again
            shutil.rmtree(final)
        partial.rename(final)
        sync(directory)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"a checkpoint must fit on the disk; got {type(error).__name__}: {error} writing {final}; {_REMEDY}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # is there only where something went wrong
    _link_best(directory, keep.best_step)
    _prune(directory, step, keep)
    return final


def load_checkpoint(path: Path, *, verified: bool = False) -> dict[str, Any]:
    """The state of a whole checkpoint, on the CPU.  `verified`: `newest_checkpoint` has just read and found it whole.

    Raises:
        StorageError: a file is missing, or is not the one that was written.
    """
    if not verified and (damage := find_damage(path)):
        raise StorageError(f"a checkpoint must be as it was written; got {damage} in {path}; use an older one")
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    for name, average in state["averages"].items():
        average["weights"] = load_file(path / weights_file(name))
    return state


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint, or None where there is none.  Warns of damaged ones that it passes over.

    Raises:
        StorageError: one may not be read, or was written by another version.
    """
    for path in reversed(list_checkpoints(directory)):
        damage = find_damage(path)
        if damage is None:
            return path
        if not path.exists():  # deleted while it was read, because there are newer ones by now
            return newest_checkpoint(directory)
        log.warning("checkpoint %s is damaged (%s) and is passed over", path, damage)
    return None


def list_checkpoints(directory: Path) -> list[Path]:
    """All finished checkpoints, oldest first.  What else lies there (a copy that somebody made) is left alone.

    Raises:
        StorageError: they may not be read.
    """
    with readable():
        try:
            found = [path for path in directory.iterdir() if re.fullmatch(r"step_\d{8,}", path.name) and path.is_dir()]
        except FileNotFoundError:
            return []
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint was saved behind, from its name."""
    return int(path.name.removeprefix("step_"))


def find_damage(path: Path, names: Sequence[str] | None = None) -> str | None:
    """What is wrong with a checkpoint, or with its files of these names; None where nothing is.  Reads them.

    Raises:
        StorageError: it may not be read, or was written by another version.
    """
    try:
        with readable():
            digests = _read_digests(path)
            for name in digests if names is None else names:
                if digest(path / name) != digests[name]:
                    return f"{name} has another checksum"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def stored_averages(path: Path) -> list[str]:
    """Names of the averages in a checkpoint whose manifest was found whole."""
    files = (re.fullmatch(r"model(?:_(.+))?\.safetensors", name) for name in _read_digests(path))
    return [found[1] or "ema" for found in files if found]


def weights_file(average: str) -> str:
    """The file with the weights of an average."""
    return "model.safetensors" if average == "ema" else f"model_{average}.safetensors"


@contextmanager
def readable() -> Iterator[None]:
    """What may not be read is not damaged: an error with a remedy."""
    try:
        yield
    except PermissionError as error:
        raise StorageError(
            f"a checkpoint must be readable; got {error}; change the permissions or run as its owner"
        ) from error


def _read_digests(path: Path) -> dict[str, str]:
    """The manifest's sums by file.  Raises StorageError for another version's, many kinds for a damaged one."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    digests: dict[str, str] = manifest["files"]
    written_by = manifest.get("format", 1 if "ema.safetensors" in digests else None)
    if isinstance(written_by, int) and written_by != _FORMAT:
        age = "an earlier" if written_by < _FORMAT else "a later"
        raise StorageError(
            f"a checkpoint must be of format {_FORMAT}; got {path}, written by {age} version of vesuvius; use that "
            "version, or start a new run"
        )
    return digests


def _write_files(partial: Path, step: int, state: dict[str, Any], config_yaml: str) -> None:
    """Write and flush all files of a checkpoint, the manifest last."""
    averages: dict[str, dict[str, Any]] = state["averages"]
    without_weights = {
        name: {key: value for key, value in average.items() if key != "weights"} for name, average in averages.items()
    }
    digests = {STATE: write_state(partial / STATE, state | {"averages": without_weights})}
    for name, average in averages.items():
        digests[weights_file(name)] = write_weights(partial / weights_file(name), average["weights"])
    digests[_CONFIG] = write_text(partial / _CONFIG, config_yaml)
    manifest = {"format": _FORMAT, "step": step, "files": digests}
    write_text(partial / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    sync(partial)


def _check_space(directory: Path, state: dict[str, Any], final: Path) -> None:
    # A tensor's entry in its file takes some hundred bytes; the rest is plain data.
    needed = sum(tensor.nbytes + 1024 for tensor in tensors_in(state)) + 2**20
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise StorageError(
            f"a checkpoint must fit on the disk; got {needed / 2**20:.0f} MiB needed and {free / 2**20:.0f} MiB free "
            f"for {final}; {_REMEDY}"
        )


def _link_best(directory: Path, best_step: int | None) -> None:
    """Let `best` point to the best checkpoint, where that is there; at no moment is the link missing."""
    if best_step is None or not (best := directory / f"step_{best_step:08d}").is_dir():
        return
    link = directory / ".new-best"
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(best.name)
        link.replace(directory / BEST)
        sync(directory)
    except OSError as error:
        _warn_once(f"{directory / BEST} cannot be made a link to the best checkpoint: {error}")


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _prune(directory: Path, step: int, keep: Keep) -> None:
    # What lies beyond this step was passed over as damaged when the run was resumed: it must not push out whole ones.
    until_now = [path for path in list_checkpoints(directory) if step_of(path) <= step]
    kept = keep.choose([step_of(path) for path in until_now])
    for old in until_now:
        if step_of(old) not in kept:
            with _warning_that_it_stays(old):
                # Renamed first: who reads it (`vesuvius sample`) finds it whole or gone, never half of it.
                shutil.rmtree(old.rename(old.with_name(f"{_PRUNED}{old.name}")))


def _delete_leftovers(directory: Path) -> None:
    """What a killed process has left."""
    for prefix in (_PARTIAL, _PRUNED):
        for path in directory.glob(f"{prefix}*"):
            with _warning_that_it_stays(path):
                shutil.rmtree(path)


@contextmanager
def _warning_that_it_stays(path: Path) -> Iterator[None]:
    """A checkpoint that cannot be deleted takes space, and is no reason for a save to fail."""
    try:
        yield
    except OSError as error:
        log.warning("%s could not be deleted: %s; delete it by hand", path, error)
