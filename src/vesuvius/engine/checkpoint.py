"""Checkpoints: `checkpoints/step_00000500/`, whole or not there.  What they hold, and how they are found and read.

    state.pt           all of the state but the averaged weights
    model.safetensors  weights of the average "ema"; `model_ema_0.999.safetensors` those of a further one
    config.yaml        config of the run, so that the weights can be used by themselves
    manifest.json      SHA-256 sums of the others

`checkpoints/best` is a link to the best one.  `checkpoint_save.py` writes them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vesuvius.engine.checkpoint_files import digest
from vesuvius.errors import StorageError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.pt"
CONFIG = "config.yaml"
BEST = "best"
REPLACED = ".replaced-"
"""Before the name of a checkpoint while another of the same step takes its place."""
FORMAT = 2


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
    for path in reversed(list_with_replaced(directory)):
        looked_at = _inode(path)
        damage = find_damage(path)
        if damage is None:
            return path
        if looked_at is None or _inode(path) != looked_at:  # a run has deleted or replaced it meanwhile
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


def list_with_replaced(directory: Path) -> list[Path]:
    """As `list_checkpoints`, and those that were about to be replaced when the process was killed.

    They are only looked at: `vesuvius sample` comes by here beside a run.  The run's next save gives them their name.
    """
    listed = list_checkpoints(directory)
    names = {path.name for path in listed}
    replaced = [path for path in directory.glob(f"{REPLACED}step_*") if path.name.removeprefix(REPLACED) not in names]
    return sorted([*listed, *replaced], key=step_of)


def _inode(path: Path) -> int | None:
    """What tells a directory from another one of this name; None where there is none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def step_of(path: Path) -> int:
    """The step that a checkpoint was saved behind, from its name."""
    return int(path.name.rpartition("step_")[2])


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
    if isinstance(written_by, int) and written_by != FORMAT:
        age = "an earlier" if written_by < FORMAT else "a later"
        raise StorageError(
            f"a checkpoint must be of format {FORMAT}; got {path}, written by {age} version of vesuvius; use that "
            "version, or start a new run"
        )
    if missing := {STATE, CONFIG, weights_file("ema")} - digests.keys():
        raise ValueError(f"{MANIFEST} does not name {', '.join(sorted(missing))}")
    return digests
