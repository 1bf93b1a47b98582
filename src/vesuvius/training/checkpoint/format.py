"""Checkpoints: `checkpoints/step_00000500/`, whole or not there.  What they hold, and how they are found and read.

    state.pt           all of the state but the averaged weights
    model.safetensors  weights of the average "ema"; `model_ema_0.999.safetensors` those of a further one
    config.yaml        config of the run, so that the weights can be used by themselves
    manifest.json      SHA-256 sums of the others

`checkpoints/best` is a link to the best one.  `save.py` writes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vesuvius.diffusion.network.boxes import boxed_weights, to_current_format
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.runlog.find_run import runs_root
from vesuvius.runlog.run_dir import RunDir
from vesuvius.training.step.optimizer import group_weights

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.pt"
CONFIG = "config.yaml"
BEST = "best"
REPLACED = ".replaced-"
"""Before the name of a checkpoint while another of the same step takes its place."""
FORMAT = 3
_READ_FORMATS = (2, FORMAT)  # of 2, weights come to the order of now as they are read
_MOST_LOOKS = 10


def load_checkpoint(path: Path, *, verified: bool = False) -> dict[str, Any]:
    """The state of a whole checkpoint, on the CPU.  `verified`: `newest_checkpoint` has just read and found it whole.

    Raises StorageError: a file is missing, or is not the one that was written.
    """
    if not verified:
        check_files(path)
    state = load_state(path / STATE)
    for name, average in state["averages"].items():
        average["weights"] = load_weights_file(path / weights_file(name))
    return state


def load_state(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Tensors and plain data of a `state.pt`, on the CPU; with `mmap` tensors stay on the disk until they are used.

    Never runs code out of it.  Raises StorageError: it is missing, damaged, or holds Python objects of other kinds.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:  # torch's own words advise to load it all the same
        raise unreadable(path, "a file that holds more than tensors and plain data, which is not loaded") from error
    except (OSError, RuntimeError, EOFError, IndexError) as error:
        raise unreadable(path, error) from error
    if "model" in state:
        _bring_up_to_date(state)
    return state


def _bring_up_to_date(state: dict[str, Any]) -> None:
    """Give weights and moments the names and the order of now."""
    before, state["model"] = state["model"], to_current_format(state["model"])
    if before.keys() == state["model"].keys():
        return
    boxed, optimizer = boxed_weights(state["model"]), state["optimizer"]
    groups = group_weights(state["model"], muon="orthogonal" in optimizer["param_groups"][0])
    for number, name in enumerate(name for names in groups for name in names):
        for key, moment in optimizer["state"].get(number, {}).items():
            if name in boxed and moment.ndim:
                optimizer["state"][number][key] = boxed[name].offsets_first(moment)


def load_weights_file(path: Path) -> dict[str, Tensor]:
    """Weights of a `.safetensors` file, by name, on the CPU.  Raises StorageError."""
    try:
        return to_current_format(load_file(path))
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error) from error


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest whole checkpoint, or None where there is none.  Warns of damaged ones that it passes over.

    Raises:
        StorageError: all are damaged, one may not be read or was written by another version, or they change faster than
            they are read.
    """
    for _ in range(_MOST_LOOKS):
        listed = list_checkpoints(directory)
        for path in reversed(listed):
            damage = find_damage(path) and find_damage(path)  # again: a run may have replaced it meanwhile
            if damage is None:
                return path
            if not path.exists():  # or deleted it
                break
            log.warning("checkpoint %s is damaged (%s) and is skipped", path, damage)
        else:
            if not listed:
                return None
            raise StorageError(
                f"all checkpoints in {directory} are damaged: {', '.join(path.name for path in listed)}; restore one "
                "from a backup, or move them away and train again from step 0 with --resume"
            )
    raise StorageError(
        f"checkpoints in {directory} were deleted while they were read, {_MOST_LOOKS} times; raise training.keep_last "
        "of the run that writes there, or copy one elsewhere"
    )


def list_checkpoints(directory: Path) -> list[Path]:
    """All finished checkpoints, oldest first, also one that was about to be replaced when the process was killed.

    What else lies there (a copy that somebody made) is left alone.  Raises StorageError: they may not be read.
    """
    name = re.compile(rf"({re.escape(REPLACED)})?step_\d{{8,}}")
    with readable():
        try:
            found = [path for path in directory.iterdir() if name.fullmatch(path.name) and path.is_dir()]
        except FileNotFoundError:
            return []
    return sorted(found, key=lambda path: (step_of(path), not path.name.startswith(REPLACED)))


def step_of(path: Path) -> int:
    """The step after which a checkpoint was saved, from its name."""
    return int(path.name.rpartition("step_")[2])


def find_damage(path: Path, names: Sequence[str] | None = None) -> str | None:
    """What is wrong with a checkpoint, or with its files of these names; None where nothing is.  Reads them.

    Raises StorageError: it may not be read, or was written by another version.
    """
    try:
        with readable():
            digests = read_digests(path)
            for name in digests if names is None else names:
                if digest(path / name) != digests[name]:
                    return f"{name} has another checksum"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def check_files(checkpoint: Path, *names: str) -> None:
    """Raises StorageError where a file of these names, by default any, is not as it was written.  Reads them."""
    if damage := find_damage(checkpoint, names or None):
        raise unreadable(checkpoint.joinpath(*names), damage)


def find_checkpoint(given: Path, asked: str = "--checkpoint") -> Path:
    """The checkpoint of a trained model: a run's newest whole one, or the one that is named, whose manifest is whole.

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
            holds_weights = path.name == STATE or (path.name.startswith("model") and path.suffix == ".safetensors")
            directory = path.parent if holds_weights and path.is_file() else path
            # Any part of a checkpoint: a damaged one is reported as such.
            if any((directory / name).is_file() for name in (MANIFEST, STATE, weights_file("ema"))):
                # What the link `best` points to now: it may point elsewhere before all is read.
                linked = directory.parent / directory.readlink() if directory.is_symlink() else directory
                if damage := find_damage(linked, ()):
                    raise unreadable(linked, damage)
                return linked
            if RunDir(path).checkpoints.is_dir():
                if newest := newest_checkpoint(RunDir(path).checkpoints):
                    return newest
                raise ConfigError(f"{path} has no checkpoint yet; wait for its first (training.save_every)")
        what = "which holds none of these" if given.exists() else "which is not there"
    raise ConfigError(
        f"{asked} must be a run directory, the name of one in runs/, a checkpoint directory, or the model.safetensors "
        f"or state.pt in one; got {given}, {what}; try runs/NAME or runs/NAME/checkpoints/{BEST}"
    )


def unreadable(path: Path, error: Exception | str) -> StorageError:
    """The error for a checkpoint, or a file of one, that cannot be used."""
    got = error if isinstance(error, str) else f"{type(error).__name__}: {one_line(error)}"
    return StorageError(
        f"a checkpoint must be unchanged since it was written; got {got} for {path}; use another checkpoint"
    )


@contextmanager
def readable() -> Iterator[None]:
    """What may not be read is not damaged: an error with a remedy."""
    try:
        yield
    except PermissionError as error:
        raise StorageError(
            f"a checkpoint must be readable; got {error}; change the permissions or run as its owner"
        ) from error


def read_digests(path: Path) -> dict[str, str]:
    """The manifest's sums by file.  Raises StorageError for another version's, many kinds for a damaged one."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    digests: dict[str, str] = manifest["files"]
    written_by = manifest.get("format", 1)
    if written_by not in _READ_FORMATS:
        age = "an earlier" if written_by < FORMAT else "a later"
        raise StorageError(
            f"a checkpoint must be of format {' or '.join(map(str, _READ_FORMATS))}; got {path}, written by {age} "
            "version of vesuvius; use that version, or start a new run"
        )
    if missing := {STATE, CONFIG, weights_file("ema")} - digests.keys():
        raise ValueError(f"{MANIFEST} does not name {', '.join(sorted(missing))}")
    return digests


def stored_averages(path: Path) -> list[str]:
    """Names of the averages in a checkpoint whose manifest was found whole."""
    files = (re.fullmatch(r"model(?:_(.+))?\.safetensors", name) for name in read_digests(path))
    return [found[1] or "ema" for found in files if found]


def weights_file(average: str) -> str:
    """The file with the weights of an average."""
    return "model.safetensors" if average == "ema" else f"model_{average}.safetensors"


def digest(path: Path) -> str:
    """SHA-256 sum of a file.  Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
