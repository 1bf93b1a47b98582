"""Recomputes a non-finite step at once, to find the first layer, samples and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.stream.feeder import Batch
from vesuvius.training.step.feed import TrainingFeed
from vesuvius.training.step.step import TrainStep

MicroBatch = tuple[Batch, NDArray[np.int64]]
"""A batch as it was read, and its timesteps [B]."""

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Diagnosis:
    """Where the values of a step stop being finite."""

    layer: str | None  # first layer with a non-finite output; None if all are finite
    samples: list[int]  # with non-finite output
    input_max: float  # largest finite |x| of its input
    gradients: list[str]  # parameters with a non-finite gradient
    losses: list[float]  # per sample

    @property
    def finite(self) -> bool:
        """Whether all outputs, gradients and losses are finite."""
        return self.layer is None and not self.gradients and bool(np.isfinite(self.losses).all())

    def __str__(self) -> str:
        if self.layer is not None:
            return (
                f"first non-finite output: {self.layer}, sample {', '.join(map(str, self.samples))}; largest finite "
                f"|x| of its input {self.input_max:.4g}"
            )
        if not self.gradients:
            return "when recomputed, all layers and gradients are finite"
        more = ", ..." if len(self.gradients) > _NAMES_SHOWN else ""
        return f"non-finite gradients: {', '.join(self.gradients[:_NAMES_SHOWN])}{more}"


def diagnose(step: TrainStep, feed: TrainingFeed, batches: Sequence[MicroBatch]) -> Diagnosis:
    """Recompute a step with the current weights and discard it.  Call it between two steps; waits for the device."""
    first_bad: list[tuple[str, list[int], float]] = []
    indices, losses = np.empty(0, np.int64), list[Tensor]()

    @torch.no_grad()  # recomputed blocks must not save additional tensors
    def check(name: str, arguments: tuple[Any, ...], output: Tensor) -> None:
        if not first_bad and (bad := ~torch.isfinite(output).flatten(1).all(1)).any():
            inputs = [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]
            largest = max((float(x.abs().where(torch.isfinite(x), 0).max()) for x in inputs), default=0.0)
            first_bad.append((name, indices[bad.cpu().numpy()].tolist(), largest))

    with step.scratch_gradients(), ExitStack() as hooks:
        first = step.network.register_forward_pre_hook(lambda _, args: check("the network's input", args, args[0]))
        hooks.enter_context(first)
        for name, module in step.network.named_modules():
            hook = partial(lambda of, _, args, output: check(of, args, output), name or "the network")
            hooks.enter_context(module.register_forward_hook(hook))
        for stored, t in batches:
            batch = feed.to_device(stored)
            indices = batch.indices
            losses.append(step.accumulate(batch.x_0, indices, t, batch.condition, last=False, eps=batch.eps))
        parameters = step.network.named_parameters()
        bad = [name for name, p in parameters if p.grad is not None and not torch.isfinite(p.grad).all()]
    layer, samples, input_max = first_bad[0] if first_bad else (None, [], 0.0)
    return Diagnosis(layer, samples, input_max, bad, torch.cat(losses).tolist())
