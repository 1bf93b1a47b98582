"""Checkpoints: `checkpoints/step_00000500/` with `state.pt`, `ema.safetensors` and a `manifest.json` vouching for both.

A checkpoint is written under another name, flushed to disk, and renamed when it is whole; only then are older ones
pruned.  Killing the process at any moment leaves the last whole checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vesuvius.errors import StorageError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_PARTIAL = ".partial-"


def save_checkpoint(
    directory: Path, step: int, state: dict[str, Any], ema: Mapping[str, torch.Tensor], keep_last: int
) -> Path:
    """Write checkpoint `step`, then delete all but the newest `keep_last`.

    Args:
        directory: `runs/<name>/checkpoints`.
        state: tensors and plain data, as `torch.load(weights_only=True)` can read it.
        ema: weights of the moving average; the bytes of their file depend on them alone.

    Raises:
        StorageError: the disk is full or cannot be written; older checkpoints are untouched.
    """
    final = directory / f"step_{step:08d}"
    partial = directory / f"{_PARTIAL}{final.name}"
    _remove_partial(directory)
    try:
        partial.mkdir(parents=True)
        manifest = {
            "step": step,
            "files": {
                "state.pt": _write(partial / "state.pt", lambda path: torch.save(state, path)),
                "ema.safetensors": _write(partial / "ema.safetensors", lambda path: _save_weights(ema, path)),
            },
        }
        _write(partial / MANIFEST, lambda path: path.write_text(json.dumps(manifest, indent=1) + "\n"))
        _sync(partial)
        if final.exists():  # a run that was resumed from an earlier checkpoint comes by here again
            shutil.rmtree(final)
        partial.rename(final)
        _sync(directory)
    except (OSError, RuntimeError) as error:  # torch and safetensors raise their own kinds when a write fails
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"a checkpoint must fit on the disk; got {type(error).__name__}: {error} writing {final} "
            f"({_free_gib(directory):.2f} GiB free); free some space and start again with --resume; "
            "older checkpoints are whole"
        ) from error
    # What lies beyond this step was passed over as damaged when the run was resumed: it must not push out whole ones.
    until_now = [path for path in list_checkpoints(directory) if step_of(path) <= step]
    for old in until_now[:-keep_last]:
        shutil.rmtree(old)
    return final


def load_checkpoint(path: Path, *, verified: bool = False) -> dict[str, Any]:
    """The state of a whole checkpoint, on the CPU.  `verified`: `newest_checkpoint` has just read and found it whole.

    Raises:
        StorageError: a file is missing, or is not the one that was written.
    """
    if not verified and (damage := find_damage(path)):
        raise StorageError(f"a checkpoint must be as it was written; got {damage} in {path}; use an older one")
    state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    return state


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint, or None where there is none at all.  Says which damaged ones it passes over.

    Raises:
        StorageError: there are checkpoints and none is whole: starting at 0 would throw the run away.
    """
    damages = []
    for path in reversed(list_checkpoints(directory)):
        damage = find_damage(path)
        if damage is None:
            return path
        log.warning("checkpoint %s is damaged (%s) and is passed over", path, damage)
        damages.append(f"{path.name}: {damage}")
    if damages:
        raise StorageError(
            f"one checkpoint must be whole to go on; got {'; '.join(damages)} in {directory}; restore one from a "
            "backup, or move the run away to start anew"
        )
    return None


def list_checkpoints(directory: Path) -> list[Path]:
    """All finished checkpoints, oldest first.  What else lies there (a copy that somebody made) is left alone."""
    found = [path for path in directory.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint was saved behind, from its name."""
    return int(path.name.removeprefix("step_"))


def find_damage(path: Path, names: Sequence[str] | None = None) -> str | None:
    """What is wrong with a checkpoint, or with the files of these names in it; None where nothing is.  Reads them."""
    try:
        digests = json.loads((path / MANIFEST).read_text())["files"]
        for name in names or digests:
            if _digest(path / name) != digests[name]:
                return f"{name} has another checksum"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _save_weights(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    # Sorted and contiguous on the CPU, without metadata: the same weights give the same bytes.
    save_file({name: weights[name].detach().cpu().contiguous() for name in sorted(weights)}, path)


def _write(path: Path, write: Callable[[Path], Any]) -> str:
    """Write a file, flush it to disk and return its digest."""
    write(path)
    _sync(path)
    return _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_partial(directory: Path) -> None:
    for partial in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial)


def _free_gib(directory: Path) -> float:
    return shutil.disk_usage(directory).free / 2**30
