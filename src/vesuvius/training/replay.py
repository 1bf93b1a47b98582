"""Recomputes a non-finite step to find the first layer, samples and gradients that are not finite.

A run does this at once (`diagnose`), `vesuvius train --replay STEP` later, from a checkpoint and the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import Config
from vesuvius.config.load import parse_stored
from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import EXIT_NONFINITE, EXIT_OK, ConfigError
from vesuvius.loader.device import DeviceFeed
from vesuvius.monitor.clock import HostClock
from vesuvius.runlog.run_dir import run_dir
from vesuvius.stream.feeder import Batch
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint, step_of
from vesuvius.training.checkpoint.trained import DataFacts
from vesuvius.training.step.feed import Conditioner, TrainingFeed
from vesuvius.training.step.setup import build_network, choose_device, configure_kernels
from vesuvius.training.step.step import TrainStep
from vesuvius.volumes.box import format_box

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
        """Check the output of a layer until one is not finite.  Waits for the device."""
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


def replay(config: Config, step: int, overrides: Sequence[str] = ()) -> Iterator[str | int]:
    """Recompute step `step`, counted from 1, of the run of `config`; yields lines and finally the exit code.

    Uses the checkpoint's config, including its number of ranks, with these overrides.  The weights are those of the
    newest checkpoint up to the step; one of the step itself also works, because a non-finite step does not change
    them.  Writes nothing.

    Raises ConfigError: no such checkpoint, or its weights do not fit; DataError, StorageError: data cannot be read.
    """
    directory = run_dir(config).checkpoints
    *_, checkpoint = [None, *(path for path in list_checkpoints(directory) if step_of(path) <= step)]
    if checkpoint is None:
        raise ConfigError(f"{directory} has no checkpoint up to step {step}; choose a later step")
    state, device = load_checkpoint(checkpoint), choose_device()
    facts, config = DataFacts.from_state(state, checkpoint), parse_stored(state["config"], overrides, str(checkpoint))
    # Hooks need eager layers; this process computes the samples of all ranks.
    config = config.with_training(compile=False, workers=0)
    configure_kernels(device, config.training)
    if device.type == "cpu":
        torch.set_num_threads(state["torch_threads"])  # the summation order of threads is part of a CPU result
    schedule = Schedule.from_config(config.diffusion, facts.spectrum)
    train_step = TrainStep(config, build_network(config, device), schedule, device)
    train_step.set_weights(state["model"])
    if train_step.amp == "fp16" and state["scaler"]:
        train_step.scaler.load_state_dict(state["scaler"])
    data = prepare_data(config.seed, config.data)
    conditioner = Conditioner(config.data.labels, facts.greys.conditions, device)
    options = replace(StreamOptions.from_config(config.training, config.cluster), workers=0)
    feed = TrainingFeed(DeviceFeed(device, options, data.job, facts.greys.volumes), conditioner)
    first = state["sample_index"] + (step - 1 - state["step"]) * config.global_batch
    timesteps = stratified_timesteps(config.seed, step - 1, config.global_batch, config.diffusion.timesteps)
    parts = np.split(timesteps, config.global_batch // options.batch_size)
    with feed.open(first=first, stop=first + config.global_batch, quarantined=state["quarantined"]):
        batches = [(feed.next(HostClock()).stored, t) for t in parts]
    diagnosis = diagnose(train_step, feed, batches)
    age = step - 1 - state["step"]
    yield f"step {step} of {config.name} on {device.type}, amp {train_step.amp}, weights of {checkpoint}"
    if age > 0:
        yield f"WARN  these weights are {age} steps older than those of the original step"
    samples = [sample for batch, _ in batches for sample in batch.samples]
    for sample, t, loss in zip(samples, timesteps.tolist(), diagnosis.losses, strict=True):
        volume = data.volumes[sample.volume].name
        yield f"sample {sample.index}  {volume} {format_box(sample.box)}  t {t}  loss {loss:.9g}"
    yield str(diagnosis)
    yield EXIT_OK if diagnosis.finite else EXIT_NONFINITE
