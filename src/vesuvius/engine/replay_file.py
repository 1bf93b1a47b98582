"""A step that was not finite, with all that it was computed from, in one file: `runs/<name>/nonfinite/step_*.pt`.

Written by the run that met it, read by `vesuvius train --replay` (`replay.py`), which needs neither volumes nor
checkpoint.
"""

from __future__ import annotations

import logging
import pickle
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
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.engine.checkpoint_files import sync, write_state
from vesuvius.engine.step import TrainStep
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.observe.units import GIB
from vesuvius.plan.plan import Augmentation
from vesuvius.stream.feeder import Batch
from vesuvius.stream.prepare import GreyRanges, PreparedData

log = logging.getLogger(__name__)

MicroBatch = tuple[Batch, NDArray[np.int64]]
"""A batch as it was read, and its timesteps [B]."""

MOST_FILES = 3
"""Of one run: each holds the weights, and a run that diverges would fill the disk."""


@dataclass(frozen=True)
class StoredStep:
    """What the file holds: tensors on the host and plain data.  G is the global batch, V the number of volumes.

    Attributes:
        step: counted from 1.
        later_steps: the weights may have moved in up to so many later steps before this one was noticed (on a GPU, with
            `training.max_nonfinite` above 1); 0: they are those that the step was computed with.
        lr: its learning rate.
        amp, device: the autocast dtype and the kind of device it was computed in.
        scale: what the loss was multiplied by.
        torch_threads: of the process; the order of sums on a CPU follows from it.
        indices, timesteps, volumes: int64 [G], the last being the numbers of the volumes that the samples come from.
        flips_zyx, turns, gains, offsets: their augmentations, [G, 3] and [G]; the latter two float64.
        patches, conditions: [G, Z, Y, X] in the stored dtypes; the latter None without conditions.
        volume_names: [V].
        greys, condition_greys: low and high of each volume, float64 [V, 2]; [0, 2] without grey conditions.
        scalars: what the network is told of each volume, float32 [V, n].
        spectrum: of the data, as `Spectrum.state_dict` gives it.
        config: of the run.
        weights: of the network, by the names of its parameters.
    """

    step: int
    later_steps: int
    lr: float
    amp: str
    device: str
    scale: float
    torch_threads: int
    indices: Tensor
    timesteps: Tensor
    volumes: Tensor
    flips_zyx: Tensor
    turns: Tensor
    gains: Tensor
    offsets: Tensor
    patches: Tensor
    conditions: Tensor | None
    volume_names: list[str]
    greys: Tensor
    condition_greys: Tensor
    scalars: Tensor
    spectrum: dict[str, Any]
    config: dict[str, Any]
    weights: dict[str, Tensor]

    @property
    def augmentations(self) -> list[Augmentation]:
        """Of each sample."""
        columns = (self.flips_zyx.tolist(), self.turns.tolist(), self.gains.tolist(), self.offsets.tolist())
        return [
            Augmentation((z, y, x), turns, gain, offset)
            for (z, y, x), turns, gain, offset in zip(*columns, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in (*tensors, *self.weights.values()))


class ReplayWriter:
    """Keeps the first few steps of a run that were not finite.

    Args:
        directory: where to; made with the first file.
        data: where the samples come from.
        scalars: what the network is told of each volume.
        train_step: whose weights are kept along.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        data: PreparedData,
        greys: GreyRanges,
        spectrum: Spectrum,
        scalars: NDArray[np.float32],
        train_step: TrainStep,
    ) -> None:
        self._directory = directory
        self._config = config
        self._data = data
        self._greys = greys
        self._spectrum = spectrum
        self._scalars = scalars
        self._train_step = train_step

    def write(self, step: int, lr: float, scale: float, batches: Sequence[MicroBatch], later_steps: int) -> Path | None:
        """Keep a step for replay; arguments as in `StoredStep`.  Waits for the device and the disk.

        Returns:
            Its file; None where that cannot be written or there are enough.  Says why; the run has other worries.
        """
        path = self._directory / f"step_{step:08d}.pt"
        others = [other for other in self._directory.glob("step_*.pt") if other != path]
        if len(others) >= MOST_FILES:
            log.warning("%s holds %d steps already: step %d is not kept for replay", path.parent, len(others), step)
            return None
        try:
            _write(path, self._stored(step, lr, scale, batches, later_steps))
        except (OSError, RuntimeError) as error:  # torch raises its own kind when a write fails
            log.error("step %d cannot be kept for replay: %s: %s", step, type(error).__name__, one_line(error))
            return None
        return path

    def _stored(
        self, step: int, lr: float, scale: float, batches: Sequence[MicroBatch], later_steps: int
    ) -> StoredStep:
        train_step, plan = self._train_step, self._data.plan
        parts = [batch for batch, _ in batches]
        indices = np.concatenate([part.indices for part in parts])
        augmentations = [plan.augmentation(int(index)) for index in indices]
        conditions = [part.condition for part in parts if part.condition is not None]
        weights = {name: weight.detach().cpu() for name, weight in train_step.network.named_parameters()}
        return StoredStep(
            step=step,
            later_steps=later_steps,
            lr=lr,
            amp=train_step.amp,
            device=next(train_step.network.parameters()).device.type,
            scale=scale,
            torch_threads=torch.get_num_threads(),
            indices=torch.from_numpy(indices),
            timesteps=torch.from_numpy(np.concatenate([t for _, t in batches])),
            volumes=torch.tensor([plan.volume_of(int(index)) for index in indices]),
            flips_zyx=torch.tensor([a.flip_zyx for a in augmentations]),
            turns=torch.tensor([a.turns for a in augmentations]),
            gains=torch.tensor([a.gain for a in augmentations], dtype=torch.float64),
            offsets=torch.tensor([a.offset for a in augmentations], dtype=torch.float64),
            patches=torch.from_numpy(np.concatenate([part.patches for part in parts])),
            conditions=torch.from_numpy(np.concatenate(conditions)) if conditions else None,
            volume_names=[volume.name for volume in self._data.volumes],
            greys=_pairs([(grey.low, grey.high) for grey in self._greys.volumes]),
            condition_greys=_pairs([(grey.low, grey.high) for grey in self._greys.conditions]),
            scalars=torch.from_numpy(self._scalars),
            spectrum=self._spectrum.state_dict(),
            config=self._config.model_dump(mode="json"),
            weights=weights,
        )


def read_stored_step(path: Path) -> StoredStep:
    """Read the file of a step.  Never runs code out of it.

    Raises:
        ConfigError: it is not there, or is another kind of file.
        StorageError: it is damaged or cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not look at the checksums
        found: Any = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(
            f"--replay needs a file that a run has kept; got {path}, which is not there; look for "
            "runs/NAME/nonfinite/step_*.pt"
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {one_line(error)}") from error
    if damaged:
        raise _unreadable(path, f"a wrong checksum of {damaged}")
    try:
        return StoredStep(**found)
    except TypeError:
        raise ConfigError(
            f"--replay needs a file that a run of this version has kept; got {path}, which holds something else; give "
            "runs/NAME/nonfinite/step_*.pt"
        ) from None


def _write(path: Path, stored: StoredStep) -> None:
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


def _pairs(pairs: list[tuple[float, float]]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)


def _unreadable(path: Path, got: str) -> StorageError:
    return StorageError(f"a file for --replay must be as it was written; got {got} for {path}; use another one")
