"""Checkpoints such as `checkpoints/step_00000500/`, complete or absent: their contents, and how they are found and
read.

    state.pt           the state except the averaged weights
    model.safetensors  weights of the average "ema"; `model_ema_0.999.safetensors` of another average
    config.yaml        config of the run, so that the weights can be used on their own
    manifest.json      SHA-256 sums of the other files

`checkpoints/best` is a link to the best one.  `save.py` writes them.
"""

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

from vesuvius.errors import ConfigError, StorageError, broken_link, one_line
from vesuvius.runlog.files import named_in_utf8
from vesuvius.runlog.find_run import runs_root
from vesuvius.runlog.run_dir import RunDir
from vesuvius.training.checkpoint.model_file import SPECTRUM, is_model_file

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.pt"
CONFIG = "config.yaml"
BEST = "best"
BEST_JUDGED = "best_judged"
"""Key of the best validation in the state; "best" of earlier versions was the mean over all levels: not comparable."""
REPLACED = ".replaced-"
"""Prefix of a checkpoint while another of the same step replaces it."""
FORMAT = 3
_MAX_TRIES = 10


def load_checkpoint(path: Path, *, verified: bool = False) -> dict[str, Any]:
    """State of a complete checkpoint, on the CPU.  `verified`: `newest_checkpoint` has just checked it.

    Raises StorageError: a file is missing or was changed.
    """
    if not verified:
        check_files(path)
    state = load_state(path / STATE)
    for name, average in state["averages"].items():
        average["weights"] = load_weights_file(path / weights_file(name))
    return state


def load_state(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Tensors and plain data of a `state.pt`, on the CPU; with `mmap` tensors stay on disk until they are used.

    Never executes code.  Raises StorageError: the file is missing, damaged, or holds other Python objects.
    """
    try:
        with named_in_utf8(path) as named:
            state: dict[str, Any] = torch.load(named, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message suggests loading it anyway
        raise checkpoint_error(path, "it is not safe to load: it holds more than tensors and data") from error
    except (OSError, RuntimeError, EOFError, IndexError) as error:
        raise checkpoint_error(path, error) from error
    return state


def load_weights_file(path: Path) -> dict[str, Tensor]:
    """Weights by name, on the CPU, also those of a model file.  Raises StorageError."""
    try:
        with named_in_utf8(path) as named:
            return {name: weight for name, weight in load_file(named).items() if name != SPECTRUM}
    except (OSError, SafetensorError) as error:
        raise checkpoint_error(path, error) from error


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest intact checkpoint, or None if there are no checkpoints.  Warns about damaged ones that it skips.

    Raises StorageError: all are damaged, one is not readable or from another version, or they are deleted faster than
    they can be read.
    """
    for _ in range(_MAX_TRIES):
        listed = list_checkpoints(directory)
        for path in reversed(listed):
            damage = find_damage(path) and find_damage(path)  # twice: a run may just have replaced it
            if damage is None:
                return path
            if not path.exists():  # deleted meanwhile
                break
            log.warning("skipping damaged checkpoint %s: %s", path, damage)
        else:
            if not listed:
                return None
            raise StorageError(
                f"All checkpoints in {directory} are damaged: {', '.join(path.name for path in listed)}; restore one "
                "from a backup, or move them away and start again at step 0 with --resume"
            )
    raise StorageError(
        f"Cannot read a checkpoint in {directory}: each was deleted while it was read, {_MAX_TRIES} times; raise "
        "training.keep_last of the run that writes there, or copy one elsewhere"
    )


def list_checkpoints(directory: Path) -> list[Path]:
    """All finished checkpoints, oldest first, including one that a killed process was about to replace.

    Other directories, such as copies, are ignored.  Raises StorageError: no read permission.
    """
    name = re.compile(rf"({re.escape(REPLACED)})?step_\d{{8,}}")
    with permission_checked():
        try:
            found = [path for path in directory.iterdir() if name.fullmatch(path.name) and path.is_dir()]
        except FileNotFoundError:
            return []
    return sorted(found, key=lambda path: (step_of(path), not path.name.startswith(REPLACED)))


def step_of(path: Path) -> int:
    return int(path.name.rpartition("step_")[2])


def find_damage(path: Path, names: Sequence[str] | None = None) -> str | None:
    """Damage of a checkpoint, or of its files `names`; None if intact.  Reads the files.

    Raises StorageError: no read permission, or another version wrote it.
    """
    try:
        with permission_checked():
            digests = read_digests(path)
            for name in digests if names is None else names:
                if digest(path / name) != digests[name]:
                    return f"the checksum of {name} is wrong"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def check_files(checkpoint: Path, *names: str) -> None:
    """Raises StorageError if one of these files (default: any) was changed.  Reads them."""
    if damage := find_damage(checkpoint, names or None):
        raise checkpoint_error(checkpoint.joinpath(*names), damage)


def find_checkpoint(given: Path, asked: str = "--checkpoint") -> Path:
    """Checkpoint of a trained model: the newest intact one of a run, or the given one if its manifest is intact.

    `given` is a run directory, the name of a run in `runs/`, a checkpoint directory (or the link `best`), a weights
    file in one, or a model file (`model_file.py`), which is returned itself; `asked` the option's name for messages.

    Raises ConfigError: no such run or checkpoint, or none yet; StorageError: none intact, or no read permission.
    """
    named = [runs_root() / given] if given.name == str(given) else []
    with permission_checked():
        for path in (given.absolute(), *named):
            if is_model_file(path):  # whatever its name and the files around it
                return path
            holds_weights = path.name == STATE or (path.name.startswith("model") and path.suffix == ".safetensors")
            directory = path.parent if holds_weights and path.is_file() else path
            # Any file of a checkpoint, so that a damaged one is reported as such.
            if any((directory / name).is_file() for name in (MANIFEST, STATE, weights_file("ema"))):
                # Resolved now: the link `best` may change before all files are read.
                linked = directory.parent / directory.readlink() if directory.is_symlink() else directory
                if damage := find_damage(linked, ()):
                    raise checkpoint_error(linked, damage)
                return linked
            if RunDir(path).checkpoints.is_dir():
                if newest := newest_checkpoint(RunDir(path).checkpoints):
                    return newest
                raise ConfigError(f"{path} has no checkpoint yet; wait for the first one (training.save_every)")
        for path in (given.absolute(), *named):
            if link := broken_link(RunDir(path).checkpoints):
                raise ConfigError(f"{asked}={given} cannot be read: {link}")
        nowhere = f"is neither {given.absolute()} nor a run in {runs_root().absolute()}"
        problem = "is not a run or checkpoint" if given.exists() else nowhere
    raise ConfigError(
        f"{asked}={given} {problem}; give a run directory, a run's name in runs/, a checkpoint directory, the "
        f"model.safetensors or state.pt in one, such as runs/NAME or runs/NAME/checkpoints/{BEST}, or a model file"
    )


def checkpoint_error(path: Path, error: Exception | str) -> StorageError:
    """Error for a checkpoint, or one of its files, that cannot be used."""
    cause = error if isinstance(error, str) else f"{type(error).__name__}: {one_line(error)}"
    return StorageError(f"Cannot read {path}: {cause}; use another checkpoint")


@contextmanager
def permission_checked() -> Iterator[None]:
    """Turn a missing read permission, which is not damage, into a StorageError with a remedy."""
    try:
        yield
    except PermissionError as error:
        raise StorageError(f"Cannot read a checkpoint: {error}; change the permissions or run as its owner") from error


def read_digests(path: Path) -> dict[str, str]:
    """SHA-256 sums by file name.  Raises StorageError for another version's manifest, others for a damaged one."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    digests: dict[str, str] = manifest["files"]
    written_by = manifest.get("format", 1)
    if written_by != FORMAT:
        age = "an earlier" if written_by < FORMAT else "a later"
        raise StorageError(
            f"Cannot read {path}: {age} version of vesuvius wrote it; use that version, or start a new run"
        )
    if missing := {STATE, CONFIG, weights_file("ema")} - digests.keys():
        raise ValueError(f"{MANIFEST} does not name {', '.join(sorted(missing))}")
    return digests


def stored_averages(path: Path) -> list[str]:
    """Names of the averages in a checkpoint with an intact manifest."""
    files = (re.fullmatch(r"model(?:_(.+))?\.safetensors", name) for name in read_digests(path))
    return [found[1] or "ema" for found in files if found]


def weights_file(average: str) -> str:
    return "model.safetensors" if average == "ema" else f"model_{average}.safetensors"


def digest(path: Path) -> str:
    """SHA-256 sum of a file.  Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
