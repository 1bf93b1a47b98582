"""From blended network outputs to the voxels of a predicted volume.  Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.errors import ConfigError

Activation = Literal["softmax", "sigmoid", "argmax"]
_ACTIVATIONS = (None, "softmax", "sigmoid", "argmax")


@dataclass(frozen=True)
class Output:
    activation: Activation | None
    threshold: float | None
    kept: tuple[int, ...]  # channels of the network that are written; () = one channel of labels (argmax)
    dtype: np.dtype[Any]

    @property
    def is_labels(self) -> bool:
        return self.activation == "argmax" or self.threshold is not None

    @property
    def channels(self) -> int:
        return len(self.kept) or 1

    @property
    def blended(self) -> tuple[int, ...] | None:
        """The channels that are blended; None = all of the network, because they depend on each other."""
        return None if self.activation in ("softmax", "argmax") else self.kept

    def voxels(self, values: Tensor) -> NDArray[Any]:
        """Map blended outputs (`blended`, Z, Y, X), which it may overwrite, to voxels (`channels`, Z, Y, X).

        Raises OverflowError: a value does not fit float16.
        """
        if self.activation == "sigmoid":
            values = values.sigmoid_()
        elif self.activation is not None:
            values = values.softmax(0)
        if self.activation == "argmax":
            highest, labels = values.max(0, keepdim=True)
            if self.threshold is not None:
                labels[highest < self.threshold] = 0
            return labels.numpy().astype(self.dtype)
        values = values[list(self.kept)] if self.blended is None else values
        if self.threshold is not None:
            return (values >= self.threshold).numpy().astype(self.dtype)
        if self.dtype.kind == "u":
            return values.mul_(255).round_().to(torch.uint8).numpy()
        with np.errstate(over="ignore"):
            voxels = values.numpy().astype(self.dtype)
        if self.dtype == np.float16 and not np.isfinite(voxels).all():
            raise OverflowError(f"{float(values.abs().max()):.6g} does not fit float16")
        return voxels


def make_output(
    channels: int, activation: str | None, threshold: float | None, kept: Sequence[int] | None, dtype: Any
) -> Output:
    """Check the arguments of a prediction for a network with this many channels.  Raises ConfigError."""
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"activation {activation!r} does not exist; choose softmax, sigmoid, argmax or None")
    labels = activation == "argmax"
    if labels and kept is not None:
        raise ConfigError("channels has no effect with argmax, which writes one channel of labels; remove it")
    if labels and channels < 2:
        raise ConfigError("argmax needs a network with two channels or more; use sigmoid and a threshold for one")
    if kept is not None and not (isinstance(kept, (list, tuple)) and set(kept) <= {*range(channels)} and kept):
        raise ConfigError(f"channels {kept!r} are not channels of the network (0 to {channels - 1}); list some")
    if kept is not None and len({*kept}) < len(kept):
        raise ConfigError(f"channels {kept!r} are not distinct; name each once")
    if threshold is not None and (not isinstance(threshold, Real) or math.isnan(threshold)):
        raise ConfigError(f"threshold {threshold!r} is not a number; try 0.5")
    if activation is not None and threshold is not None and not 0 < threshold < 1:
        raise ConfigError(f"threshold {threshold:g} is not between 0 and 1, where probabilities are; try 0.5")
    smallest = np.dtype(np.uint8 if not labels or channels <= 256 else np.uint16)
    default = smallest if labels or threshold is not None else np.dtype(np.float32)
    try:
        chosen = default if dtype is None else np.dtype(dtype)
    except TypeError:
        raise ConfigError(f"dtype {dtype!r} is not a dtype of numpy; use float32, float16 or uint8") from None
    if labels or threshold is not None:
        if chosen not in (smallest, np.dtype(np.uint16)):
            raise ConfigError(f"dtype {chosen} is not that of labels; use {smallest} or uint16")
    elif chosen not in (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint8)):
        raise ConfigError(f"dtype {chosen} is not possible; use float32, float16 or uint8")
    elif chosen == np.uint8 and activation is None:
        raise ConfigError("dtype uint8 is for values from 0 to 1; set activation to softmax or sigmoid, or a threshold")
    every = tuple(range(channels)) if kept is None else tuple(kept)
    return Output(activation, threshold, () if labels else every, chosen)  # type: ignore[arg-type]
