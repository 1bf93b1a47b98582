"""A step that was not finite, with all that it was computed from, in one file: `runs/<name>/nonfinite/step_*.pt`.

Written by the run that met it, read by `vesuvius train --replay` (`replay.py`), which needs neither volumes nor
checkpoint.
"""

from __future__ import annotations

import logging
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import Config
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.runlog.units import GIB
from vesuvius.stream.feeder import Batch
from vesuvius.training.checkpoint.data_facts import DataFacts
from vesuvius.training.checkpoint.files import read_state, sync, tensors_in, write_state
from vesuvius.training.step.step import TrainStep

log = logging.getLogger(__name__)

MicroBatch = tuple[Batch, NDArray[np.int64]]
"""A batch as it was read, and its timesteps [B]."""

MOST_FILES = 3
"""Of one run: each holds the weights, and a run that diverges would fill the disk."""


@dataclass(frozen=True, eq=False)
class NonFiniteStep:
    """What the file holds: tensors on the host and plain data.  G is the global batch.

    The augmentations follow from the config and the indices.
    """

    step: int  # counted from 1
    # the weights may have moved in up to so many later steps before this one was noticed (on a GPU, with
    # `training.max_nonfinite` above 1); 0: they are those that the step was computed with
    later_steps: int
    lr: float  # its learning rate
    # amp, device: the autocast dtype and the kind of device it was computed in
    amp: str
    device: str
    scale: float  # what the loss was multiplied by
    torch_threads: int  # of the process; the order of sums on a CPU follows from it
    # indices, timesteps, volumes: int64 [G], the last being the numbers of the volumes that the samples come from
    indices: Tensor
    timesteps: Tensor
    volumes: Tensor
    # patches, conditions: [G, Z, Y, X] in the stored dtypes; the latter None without conditions
    patches: Tensor
    conditions: Tensor | None
    facts: dict[str, Any]  # what the run knows of its data, as `DataFacts.state_dict` gives it
    config: dict[str, Any]  # of the run
    weights: dict[str, Tensor]  # of the network, by the names of its parameters

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in tensors_in(vars(self)))


class ReplayWriter:
    """Keeps the first few steps of a run that were not finite.

    Args:
        directory: where to; made with the first file.
        facts: what the run knows of its data.
        train_step: whose weights are kept along.
    """

    def __init__(self, directory: Path, config: Config, facts: DataFacts, train_step: TrainStep) -> None:
        self._directory = directory
        self._config = config
        self._facts = facts
        self._train_step = train_step

    def write(self, step: int, lr: float, scale: float, batches: Sequence[MicroBatch], later_steps: int) -> Path | None:
        """Keep a step for replay; arguments as in `NonFiniteStep`.  Waits for the device and the disk.

        Returns:
            Its file; None where that cannot be written or there are enough.  Says why; the run has other worries.
        """
        path = self._directory / f"step_{step:08d}.pt"
        others = [other for other in self._directory.glob("step_*.pt") if other != path]
        if len(others) >= MOST_FILES:
            log.warning("%s already holds %d steps: step %d is not kept for replay", path.parent, len(others), step)
            return None
        try:
            _write(path, self._gather(step, lr, scale, batches, later_steps))
        except (OSError, RuntimeError) as error:  # torch raises its own kind when a write fails
            log.error("step %d cannot be kept for replay: %s: %s", step, type(error).__name__, one_line(error))
            return None
        return path

    def _gather(
        self, step: int, lr: float, scale: float, batches: Sequence[MicroBatch], later_steps: int
    ) -> NonFiniteStep:
        network = self._train_step.network
        parts = [batch for batch, _ in batches]
        conditions = [part.condition for part in parts if part.condition is not None]
        return NonFiniteStep(
            step=step,
            later_steps=later_steps,
            lr=lr,
            amp=self._train_step.amp,
            device=next(network.parameters()).device.type,
            scale=scale,
            torch_threads=torch.get_num_threads(),
            indices=torch.from_numpy(np.concatenate([part.indices for part in parts])),
            timesteps=torch.from_numpy(np.concatenate([t for _, t in batches])),
            volumes=torch.tensor([sample.volume for part in parts for sample in part.samples]),
            patches=torch.from_numpy(np.concatenate([part.patches for part in parts])),
            conditions=torch.from_numpy(np.concatenate(conditions)) if conditions else None,
            facts=self._facts.state_dict(),
            config=self._config.model_dump(mode="json"),
            weights={name: weight.detach().cpu() for name, weight in network.named_parameters()},
        )


def read_nonfinite_step(path: Path) -> NonFiniteStep:
    """Read the file of a step.  Never runs code out of it.

    Raises:
        ConfigError: it is not there, or is another kind of file.
        StorageError: it is damaged or cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not look at the checksums
        found: Any = None if damaged else read_state(path)
    except FileNotFoundError:
        raise ConfigError(
            f"--replay needs a file that a run has kept; got {path}, which does not exist; look for "
            "runs/NAME/nonfinite/step_*.pt"
        ) from None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise _unreadable(path, f"{type(error).__name__}: {one_line(error)}") from error
    if damaged:
        raise _unreadable(path, f"a wrong checksum of {damaged}")
    try:
        return NonFiniteStep(**found)
    except TypeError:
        raise ConfigError(
            f"--replay needs a file that a run of this version has kept; got {path}, which holds something else; give "
            "runs/NAME/nonfinite/step_*.pt"
        ) from None


def _write(path: Path, stored: NonFiniteStep) -> None:
    """Write under another name, flush and rename: what has the name of a step is whole."""
    path.parent.mkdir(exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if stored.nbytes > free:
        raise OSError(f"{stored.nbytes / GIB:.2f} GiB must fit on the disk and {free / GIB:.2f} GiB are free")
    partial = path.with_name(f".partial-{path.name}")
    try:
        write_state(partial, vars(stored))
        partial.rename(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _unreadable(path: Path, got: str) -> StorageError:
    return StorageError(
        f"a file for --replay must be unchanged since it was written; got {got} for {path}; use another one"
    )
