"""Writes checkpoints and prunes old ones: a step pays for one copy, a thread does the rest.

A checkpoint is written under a hidden name, flushed to disk and renamed when complete; only then are older ones
deleted.  Killing the process at any time leaves the last complete checkpoint, and `best` points to a complete one as
soon as one exists.  torch and safetensors release the GIL while writing: another thread is at most 10 ms late in 99 of
100 cases (256 MB in 64 tensors, 2 loaded cores of an AMD EPYC).
"""

import json
import logging
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from vesuvius.config import TrainingConfig
from vesuvius.errors import StorageError, disk_remedy, one_line
from vesuvius.runlog.files import directory_bytes, flush_to_disk, free_disk_bytes
from vesuvius.runlog.held import folder_of, shown, where
from vesuvius.threads import on_thread
from vesuvius.training.checkpoint.format import (
    BEST,
    BEST_JUDGED,
    CONFIG,
    FORMAT,
    MANIFEST,
    REPLACED,
    STATE,
    digest,
    list_checkpoints,
    step_of,
    weights_file,
)

log = logging.getLogger(__name__)

_LATER = "a running run saves again later, a finished one needs --resume; older checkpoints are intact"
_PARTIAL = ".partial-"  # incomplete
_PRUNED = ".pruned-"  # being deleted


class CheckpointWriter:
    """Writes one checkpoint at a time on a background thread.  A context manager that waits for the last one.

    A checkpoint that cannot be copied or written is logged, and the run may continue; other exceptions are raised by
    the next call.  `ended` has a record of each finished or failed (`text`) save, for the caller to remove.
    """

    def __init__(self, directory: Path, training: TrainingConfig, config_yaml: str) -> None:
        self._directory, self._training, self._config_yaml = directory, training, config_yaml
        self._snapshot = Snapshot()
        self._job: Future[None] | None = None
        self._error: StorageError | None = None
        self.ended: deque[dict[str, Any]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.wait()
        except Exception as defect:
            if error is None:
                raise
            log.error("the checkpoint writer also failed", exc_info=defect)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copy the state (as for `save_checkpoint`) and write it in the background.  Waits for the previous save."""
        self.wait()
        self._error = None
        try:
            self._snapshot.take(state)
        except StorageError as error:
            self._note_failure(step, error)
            return
        # A daemon thread: a second signal ends the process at once.
        self._job = on_thread(self._write, step, name="checkpoint-writer")

    def wait(self) -> StorageError | None:
        """Wait for the pending save; returns why the last save failed, or None.

        There is no timeout: a hanging disk may recover, and the watchdog reports what is waited for.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()
        return self._error

    def _write(self, step: int) -> None:
        started = time.monotonic()
        try:
            path = save_checkpoint(self._directory, step, self._snapshot.state, self._config_yaml, self._training)
        except StorageError as error:
            self._note_failure(step, error)
        else:
            log.info("saved %s", path)
            seconds, size = time.monotonic() - started, directory_bytes(path)
            self.ended.append({"step": step, "seconds": seconds, "bytes": size, "saved_time": time.time()})

    def _note_failure(self, step: int, error: StorageError) -> None:
        self._error = type(error)(str(error))  # a copy without frames, which would keep memory alive
        self.ended.append({"step": step, "text": str(error)})
        log.error("%s", error)


class Snapshot:
    """Host copy of a state, in reused buffers: fresh memory is filled several times more slowly.

    Buffers for GPU tensors are pinned; torch rounds their size up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self.state: dict[str, Any] = {}

    def take(self, state: dict[str, Any]) -> None:
        """Copy a state over the previous one; waits for it.  Raises StorageError: it does not fit into host memory."""
        tensors = tensors_in(state)
        if [_layout(buffer) for buffer in self._buffers] != [_layout(tensor) for tensor in tensors]:
            self._buffers, self.state = [], {}  # free the old buffers first
            self._buffers = [_allocate(tensor) for tensor in tensors]
        buffers = iter(self._buffers)
        with torch.no_grad():  # new dicts and lists: nothing is shared
            self.state = tree_map_only(Tensor, lambda tensor: next(buffers).copy_(tensor, non_blocking=True), state)
        for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
            # Not for the entire device: after an error, sums with other ranks may be queued that never complete.
            torch.accelerator.current_stream(device).synchronize()


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    """Layout of a torch copy: the memory order of the original without its gaps."""
    return tensor.shape, tensor.dtype, torch.empty_like(tensor, device="meta").stride()


def _allocate(tensor: Tensor) -> Tensor:
    pinned = tensor.device.type != "cpu"
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError for any kind of memory
        if pinned:  # after an error of the GPU, every call raises it
            torch.accelerator.current_stream(tensor.device).synchronize()
        raise StorageError(
            f"Cannot allocate host memory for a checkpoint ({tuple(tensor.shape)}, {tensor.dtype}"
            f"{', pinned' if pinned else ''}): {one_line(error)}; give the run more memory, or lower "
            "training.workers or training.prefetch_factor"
        ) from error


def save_checkpoint(
    directory: Path, step: int, state: dict[str, Any], config_yaml: str, training: TrainingConfig
) -> Path:
    """Write checkpoint `step`, replacing one of the same step, point `best` to the best one, and prune the others.

    If `directory` moves meanwhile, the checkpoint is written where it is.  `state` holds tensors and plain data:
    "averages" by name, each with its "weights" by name; BEST_JUDGED with the "step" of the best checkpoint, or None.

    Raises StorageError: the disk is full or not writable; older checkpoints are untouched, and nothing is left behind.
    """
    with ExitStack() as opened:
        try:
            return _save_in(opened.enter_context(folder_of(directory)), step, state, config_yaml, training)
        except (OSError, SafetensorError) as error:
            final, remedy = where(directory) / f"step_{step:08d}", f"{disk_remedy(error)}: {_LATER}"
            text = f"Cannot write checkpoint {final}: {type(error).__name__}: {error}; {remedy}"
            raise StorageError(shown(text)) from error


def _save_in(folder: Path, step: int, state: dict[str, Any], config_yaml: str, training: TrainingConfig) -> Path:
    """Like `save_checkpoint`, by names in an open folder.  Raises OSError and SafetensorError."""
    final = folder / f"step_{step:08d}"
    unfinished = folder / f"{_PARTIAL}{final.name}"
    _clean_up(folder)
    try:
        # Each tensor's entry takes a few hundred bytes; the rest is plain data.
        needed = sum(tensor.nbytes + 1024 for tensor in tensors_in(state)) + 2**20
        if needed > (free := free_disk_bytes(folder)):  # others also write to this disk
            raise OSError(f"{-(-needed // 2**20)} MiB needed and {free // 2**20} MiB free")
        unfinished.mkdir()
        _write_files(unfinished, step, state, config_yaml)
        if final.exists():
            final.rename(final.with_name(f"{REPLACED}{final.name}"))
        unfinished.rename(final)
        flush_to_disk(folder)
        flush_to_disk(folder / "..")  # the folder itself may be new
    finally:
        _clean_up(folder)
    best_step = best["step"] if (best := state.get(BEST_JUDGED)) else None
    best_path = folder / f"step_{best_step or 0:08d}"
    if best_path.is_dir() and _linked_best(folder) != best_path.name:  # may lag behind after a kill
        _link_best(best_path)
    _prune(folder, step, training, best_step)
    return Path(shown(final))


def _write_files(partial: Path, step: int, state: dict[str, Any], config_yaml: str) -> None:
    """Write all files of a checkpoint, the manifest last, and flush them to disk."""
    averages = {name: dict(average) for name, average in state["averages"].items()}
    for name, average in averages.items():
        _write_weights(partial / weights_file(name), average.pop("weights"))
    write_state(partial / STATE, state | {"averages": averages})
    (partial / CONFIG).write_text(config_yaml, encoding="utf-8")
    digests = {path.name: digest(path) for path in sorted(partial.iterdir())}
    manifest = {"format": FORMAT, "step": step, "files": digests}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in (*partial.iterdir(), partial):
        flush_to_disk(path)


def _clean_up(directory: Path) -> None:
    """Delete leftovers of killed or failed saves; restore a checkpoint whose replacement never arrived."""
    with _only_a_warning(f"cannot clean up {directory} after earlier saves"):
        for path in directory.glob(".*step_*"):
            final = path.with_name(path.name.removeprefix(REPLACED))
            if path.name.startswith(REPLACED) and not final.exists():
                path.rename(final)
            elif path.name.startswith((REPLACED, _PARTIAL, _PRUNED)):
                with _only_a_warning(f"cannot delete {path}; delete it manually"):
                    shutil.rmtree(path)


def _link_best(best: Path) -> None:
    """Point the link `best` to a checkpoint; the link exists at all times."""
    directory, link = best.parent, best.with_name(".new-best")
    with _only_a_warning(f"cannot link {directory / BEST} to the best checkpoint"):
        link.unlink(missing_ok=True)
        link.symlink_to(best.name)
        link.replace(directory / BEST)
        flush_to_disk(directory)


def _linked_best(directory: Path) -> str:
    """Name of the checkpoint that `best` points to; '' if it is not a link."""
    link = directory / BEST
    return link.readlink().name if link.is_symlink() else ""


def _prune(directory: Path, step: int, training: TrainingConfig, best_step: int | None) -> None:
    """Delete old checkpoints, except the one `best` points to: saving a better one may have failed."""
    with _only_a_warning(f"cannot prune older checkpoints in {directory}"):
        # Later checkpoints were skipped as damaged on resume; they must not displace intact ones.
        until_now = [path for path in list_checkpoints(directory) if step_of(path) <= step]
        best = {f"step_{best_step or 0:08d}", _linked_best(directory)}
        for old in until_now[: -training.keep_last]:
            if old.name in best or (training.keep_every and step_of(old) % training.keep_every == 0):
                continue
            with _only_a_warning(f"cannot delete {old}; delete it manually"):
                # Renamed first, so that readers (`vesuvius sample`) never find it half deleted.
                shutil.rmtree(old.rename(old.with_name(f"{_PRUNED}{old.name}")))


@contextmanager
def _only_a_warning(text: str) -> Iterator[None]:
    """Log a failure instead of raising it: the checkpoint itself is complete."""
    try:
        yield
    except (OSError, StorageError) as error:
        log.warning("%s", shown(f"{text}: {error}"))


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write tensors and plain data for `torch.load`.  Raises OSError."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # The disk's error: torch hides it behind a complaint about the file position.
            raise error.__context__ or error from None


def _write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights as safetensors; equal weights give equal bytes.  Raises OSError and SafetensorError."""
    path.touch()
    mode = path.stat().st_mode
    save_file({name: weight.detach().cpu().contiguous() for name, weight in weights.items()}, path)
    path.chmod(mode)  # safetensors replaces it with a temporary file that only the owner can read


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
