"""A step that was not finite, computed again: which layer, samples and gradients stop being finite first.

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
from vesuvius.training.step.conditioner import Conditioner
from vesuvius.training.step.feed import TrainingFeed
from vesuvius.training.step.setup import build_network, choose_device, configure_kernels
from vesuvius.training.step.step import TrainStep, check_initial_weights
from vesuvius.volumes.box import format_box

MicroBatch = tuple[Batch, NDArray[np.int64]]
"""A batch as it was read, and its timesteps [B]."""

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Diagnosis:
    """Where the numbers of a step stop being finite."""

    layer: str | None  # whose output is the first that is not finite; None where every output is
    samples: list[int]  # for which it is not
    input_max: float  # largest finite |x| that went into it
    gradients: list[str]  # names of the parameters whose gradient is not finite
    losses: list[float]  # of the samples, in their order

    @property
    def finite(self) -> bool:
        """Whether everything is."""
        return self.layer is None and not self.gradients and bool(np.isfinite(self.losses).all())

    def __str__(self) -> str:
        if self.layer is not None:
            return (
                f"first output that is not finite: {self.layer}, sample {', '.join(map(str, self.samples))}; largest "
                f"finite |x| of its input {self.input_max:.4g}"
            )
        if not self.gradients:
            return "computed again, every layer and gradient is finite"
        more = ", ..." if len(self.gradients) > _NAMES_SHOWN else ""
        return f"gradients that are not finite: {', '.join(self.gradients[:_NAMES_SHOWN])}{more}"


def diagnose(step: TrainStep, feed: TrainingFeed, batches: Sequence[MicroBatch]) -> Diagnosis:
    """Compute a step again with the present weights, and drop it.  Between two steps; waits for the device."""
    found: list[tuple[str, list[int], float]] = []
    indices, losses = np.empty(0, np.int64), list[Tensor]()

    @torch.no_grad()  # within blocks that are recomputed nothing may be saved beside
    def look(name: str, arguments: tuple[Any, ...], output: Tensor) -> None:
        """At the output of a layer, until one is not finite.  Each look waits for the device."""
        if not found and (bad := ~torch.isfinite(output).flatten(1).all(1)).any():
            inputs = [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]
            largest = max((float(x.abs().where(torch.isfinite(x), 0).max()) for x in inputs), default=0.0)
            found.append((name, indices[bad.cpu().numpy()].tolist(), largest))

    with step.scratch_gradients(), ExitStack() as hooks:
        first = step.network.register_forward_pre_hook(lambda _, args: look("the input of the network", args, args[0]))
        hooks.enter_context(first)
        for name, module in step.network.named_modules():
            hook = partial(lambda of, _, args, output: look(of, args, output), name or "the network")
            hooks.enter_context(module.register_forward_hook(hook))
        for stored, t in batches:
            batch = feed.to_device(stored)
            indices = batch.indices
            losses.append(step.accumulate(batch.x_0, indices, t, batch.condition, last=False, eps=batch.eps))
        parameters = step.network.named_parameters()
        bad = [name for name, p in parameters if p.grad is not None and not torch.isfinite(p.grad).all()]
    layer, samples, input_max = found[0] if found else (None, [], 0.0)
    return Diagnosis(layer, samples, input_max, bad, torch.cat(losses).tolist())


def replay(config: Config, number: int, overrides: Sequence[str] = ()) -> Iterator[str | int]:
    """Compute step `number`, counted from 1, of the run of `config` again; yields lines and at last the exit code.

    By the config with which the checkpoint was trained, its number of ranks included, and these overrides.  The weights
    are those of the newest checkpoint that does not lie behind the step; one of the step itself fits as well, as a step
    that is not finite leaves them alone.  Writes nothing.

    Raises:
        ConfigError: there is no such checkpoint, or its weights do not fit the network.
        DataError, StorageError: volumes or checkpoint cannot be read.
    """
    directory = run_dir(config).checkpoints
    *_, checkpoint = [None, *(path for path in list_checkpoints(directory) if step_of(path) <= number)]
    if checkpoint is None:
        raise ConfigError(f"{directory} has no checkpoint up to step {number}; give --replay a later step")
    state, device = load_checkpoint(checkpoint), choose_device()
    facts, config = DataFacts.from_state(state, checkpoint), parse_stored(state["config"], overrides, str(checkpoint))
    # Hooks must see every layer; one process computes the samples of all ranks.
    config = config.with_training(compile=False, workers=0)
    configure_kernels(device, config.training)
    if device.type == "cpu":
        torch.set_num_threads(state["torch_threads"])  # the order in which threads add up is part of a CPU result
    network = build_network(config, device)
    check_initial_weights(network, state["model"])
    step = TrainStep(config, network, Schedule.from_config(config.diffusion, facts.spectrum), device)
    step.set_weights(state["model"])
    if step.amp == "fp16" and state["scaler"]:
        step.scaler.load_state_dict(state["scaler"])
    data = prepare_data(config.seed, config.data)
    conditioner = Conditioner(config.data.labels, facts.greys.conditions, device)
    options = replace(StreamOptions.from_config(config.training, config.cluster), workers=0)
    feed = TrainingFeed(DeviceFeed(device, options, data.job, facts.greys.volumes), conditioner)
    first = state["sample_index"] + (number - 1 - state["step"]) * config.global_batch
    timesteps = stratified_timesteps(config.seed, number - 1, config.global_batch, config.diffusion.timesteps)
    parts = np.split(timesteps, config.global_batch // options.batch_size)
    with feed.open(first=first, stop=first + config.global_batch, quarantined=state["quarantined"]):
        batches = [(feed.next(HostClock()).stored, t) for t in parts]
    found = diagnose(step, feed, batches)
    behind = number - 1 - state["step"]
    yield f"step {number} of {config.name}, on {device.type} with amp {step.amp}, weights of {checkpoint}"
    if behind > 0:
        yield f"WARN  these weights are {behind} steps older than those that the step was computed with"
    samples = [sample for batch, _ in batches for sample in batch.samples]
    for sample, t, loss in zip(samples, timesteps.tolist(), found.losses, strict=True):
        volume = data.volumes[sample.volume].name
        yield f"sample {sample.index}  {volume} {format_box(sample.box)}  t {t}  loss {loss:.9g}"
    yield str(found)
    yield EXIT_OK if found.finite else EXIT_NONFINITE
