"""Writing checkpoints, and which of them stay.

Written under a hidden name, flushed to disk and renamed when whole; only then are older ones deleted.  Killing the
process at any moment leaves the last whole checkpoint, and `best` points to a whole one as soon as there has been one.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from vesuvius.errors import StorageError
from vesuvius.training.checkpoint.files import sync, tensors_in, write_state, write_text, write_weights
from vesuvius.training.checkpoint.format import (
    BEST,
    CONFIG,
    FORMAT,
    MANIFEST,
    REPLACED,
    STATE,
    find_damage,
    list_checkpoints,
    step_of,
    weights_file,
)

log = logging.getLogger(__name__)

_REMEDY = (
    "free some space: a run with steps left saves again, one that has ended continues with --resume; older checkpoints "
    "are whole"
)
_PARTIAL = ".partial-"  # not whole yet
_PRUNED = ".pruned-"  # on its way out


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints outlive a save."""

    keep_last: int  # so many of the newest
    keep_every: int | None = None  # multiples of this step, too
    best_step: int | None = None  # and this one, to which `checkpoints/best` points

    def choose(self, steps: Sequence[int]) -> set[int]:
        """Those to keep of ascending steps.  Pure."""
        every = {step for step in steps if self.keep_every and step % self.keep_every == 0}
        return every | set(steps[-self.keep_last :]) | {step for step in steps if step == self.best_step}


def save_checkpoint(
    directory: Path,
    step: int,
    state: dict[str, Any],
    config_yaml: str,
    retention: RetentionPolicy,
    on_progress: Callable[[], None] = lambda: None,
) -> Path:
    """Write checkpoint `step`, then point `best` to the best one and delete what is not to be kept.

    One of the same step that is there already is replaced.

    Args:
        directory: `runs/<name>/checkpoints`.
        state: tensors and plain data, as `torch.load(weights_only=True)` can read it; with "averages", by name, of
            which each has "weights", by name.
        config_yaml: resolved config of the run.
        on_progress: called often while the disk takes the bytes.

    Raises:
        StorageError: the disk is full or cannot be written; older checkpoints are untouched, nothing is left behind.
    """
    final = directory / f"step_{step:08d}"
    partial = directory / f"{_PARTIAL}{final.name}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _clean_up(directory)
        _check_space(directory, state, final)
        partial.mkdir()
        _write_files(partial, step, state, config_yaml, on_progress)
        if final.exists():
            final.rename(final.with_name(f"{REPLACED}{final.name}"))
        partial.rename(final)
        sync(directory)
        sync(directory.parent)  # which has not flushed the name of a new directory yet
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"a checkpoint must fit on the disk; got {type(error).__name__}: {error} writing {final}; {_REMEDY}"
        ) from error
    finally:
        _clean_up(directory)
    _link_best(directory, step, retention.best_step)
    _prune(directory, step, retention)
    return final


def _write_files(
    partial: Path, step: int, state: dict[str, Any], config_yaml: str, on_progress: Callable[[], None]
) -> None:
    """Write and flush all files of a checkpoint, the manifest last."""
    averages: dict[str, dict[str, Any]] = state["averages"]
    without_weights = {
        name: {key: value for key, value in average.items() if key != "weights"} for name, average in averages.items()
    }
    digests = {STATE: write_state(partial / STATE, state | {"averages": without_weights}, on_progress)}
    for name, average in averages.items():
        digests[weights_file(name)] = write_weights(partial / weights_file(name), average["weights"])
        on_progress()
    digests[CONFIG] = write_text(partial / CONFIG, config_yaml)
    manifest = {"format": FORMAT, "step": step, "files": digests}
    write_text(partial / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    sync(partial)


def _check_space(directory: Path, state: dict[str, Any], final: Path) -> None:
    # A tensor's entry in its file takes some hundred bytes; the rest is plain data.
    needed = sum(tensor.nbytes + 1024 for tensor in tensors_in(state)) + 2**20
    free = shutil.disk_usage(directory).free
    if needed > free:
        tenths = 10 / 2**20
        raise StorageError(  # rounded apart: a little too small must not read as large enough
            f"a checkpoint must fit on the disk; got {math.ceil(needed * tenths) / 10:.1f} MiB needed and "
            f"{math.floor(free * tenths) / 10:.1f} MiB free for {final}; {_REMEDY}"
        )


def _clean_up(directory: Path) -> None:
    """Delete what a killed or failed save has left; what was to be replaced comes back where nothing took its place."""
    with _only_a_warning(f"what earlier saves left in {directory} is kept"):
        for path in directory.glob(".*step_*"):
            final = path.with_name(path.name.removeprefix(REPLACED))
            if path.name.startswith(REPLACED) and not final.exists():
                path.rename(final)
            elif path.name.startswith((REPLACED, _PARTIAL, _PRUNED)):
                with _only_a_warning(f"{path} could not be deleted; delete it by hand"):
                    shutil.rmtree(path)


def _link_best(directory: Path, step: int, best_step: int | None) -> None:
    """Let `best` point to the best checkpoint, where that is there and whole; at no moment is the link missing.

    Args:
        step: the checkpoint that has just been written, and need not be read.
    """
    if best_step is None:
        return
    best, link = directory / f"step_{best_step:08d}", directory / ".new-best"
    if linked_best(directory) == best.name:
        return
    with _only_a_warning(f"{directory / BEST} cannot be made a link to the best checkpoint"):
        link.unlink(missing_ok=True)
        link.symlink_to(best.name)  # first: where there are no links nothing is read in vain
        if best_step != step and find_damage(best):
            link.unlink()
            return
        link.replace(directory / BEST)
        sync(directory)


def linked_best(directory: Path) -> str | None:
    """The name of the checkpoint that `best` points to; None where it is no link."""
    try:
        return (directory / BEST).readlink().name
    except OSError:
        return None


def _prune(directory: Path, step: int, retention: RetentionPolicy) -> None:
    """Delete what is not to be kept.  What `best` points to is: a better one may have failed to be saved."""
    with _only_a_warning(f"older checkpoints in {directory} are kept"):
        # What lies beyond this step was passed over as damaged when the run was resumed: it must not push out whole
        # ones.
        until_now = [path for path in list_checkpoints(directory) if step_of(path) <= step]
        kept, best = retention.choose([step_of(path) for path in until_now]), linked_best(directory)
        for old in until_now:
            if step_of(old) not in kept and old.name != best:
                with _only_a_warning(f"{old} could not be deleted; delete it by hand"):
                    # Renamed first: who reads it (`vesuvius sample`) finds it whole or gone, never half of it.
                    shutil.rmtree(old.rename(old.with_name(f"{_PRUNED}{old.name}")))


@contextmanager
def _only_a_warning(text: str) -> Iterator[None]:
    """What goes wrong around a checkpoint that is whole is no reason for its save to fail."""
    try:
        yield
    except (OSError, StorageError) as error:
        log.warning("%s: %s", text, error)
