"""`vesuvius train --replay FILE`: compute a step that was not finite again, and say where it stops being finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vesuvius.config import Config
from vesuvius.config.load import parse_stored
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import EXIT_NONFINITE, EXIT_OK, ConfigError, GpuMemoryError
from vesuvius.plan.plan import augmentation_of
from vesuvius.training.checkpoint.data_facts import DataFacts
from vesuvius.training.replay.file import NonFiniteStep, read_nonfinite_step
from vesuvius.training.step.conditioning import Conditioner
from vesuvius.training.step.device import make_condition, model_values, synchronize
from vesuvius.training.step.grey_values import grey_scales
from vesuvius.training.step.network import build_network, lay_out_network
from vesuvius.training.step.outcome import StepOutcome
from vesuvius.training.step.step import AmpMode, TrainStep, choose_device, choose_kernels, weight_problems

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Fault:
    """The first place in a forward pass where numbers stop being finite."""

    module: str  # name of the module, or "the input of the network"
    samples: list[int]  # whose output it is
    input_max: float  # largest finite |x| that went into it


@dataclass(frozen=True)
class ReplayResult:
    """What a step came to the second time."""

    stored: NonFiniteStep
    amp: AmpMode
    device: str
    outcome: StepOutcome
    fault: Fault | None  # None where every module's output was finite
    bad_gradients: list[str]  # names of the parameters whose gradient is not finite
    parameters: int  # how many there are in all

    @property
    def exit_code(self) -> int:
        return EXIT_OK if self.outcome.finite else EXIT_NONFINITE

    def lines(self) -> list[str]:
        """What is printed.  Pure."""
        stored, outcome = self.stored, self.outcome
        lines = [
            f"step {stored.step} of {stored.config['name']}: occurred on {stored.device} with amp {stored.amp}, "
            f"replayed on {self.device} with amp {self.amp}"
        ]
        if stored.device == "cuda" and self.device == "cpu":
            lines.append("no GPU here: the CPU uses the same amp, but rounds differently")
        if stored.later_steps:
            lines.append(
                f"the weights are not exactly those of the step: up to {stored.later_steps} later steps changed them"
            )
        columns = (stored.indices.tolist(), stored.volumes.tolist(), stored.timesteps.tolist(), outcome.losses)
        lines += [
            f"sample {index}  {stored.facts['volumes'][volume]['name']}  t {t}  loss {loss:.9g}"
            for index, volume, t, loss in zip(*columns, strict=True)
        ]
        return [
            *lines,
            self._fault_line(),
            self._gradient_line(),
            f"gradient norm {outcome.grad_norm:.9g}",
            self._verdict(),
        ]

    def _fault_line(self) -> str:
        if self.fault is None:
            return "the output of every module is finite"
        samples = ", ".join(map(str, self.fault.samples))
        return (
            f"first output that is not finite: {self.fault.module}, sample {samples}; largest finite |x| of its input "
            f"{self.fault.input_max:.4g}"
        )

    def _gradient_line(self) -> str:
        if not self.bad_gradients:
            return "the gradient of every parameter is finite"
        more = ", ..." if len(self.bad_gradients) > _NAMES_SHOWN else ""
        names = ", ".join(self.bad_gradients[:_NAMES_SHOWN])
        return f"the gradient is not finite in {len(self.bad_gradients)} of {self.parameters} parameters: {names}{more}"

    def _verdict(self) -> str:
        if self.outcome.finite:
            return f"finite now: loss {self.outcome.loss:.9g}"
        what = "the gradient" if math.isfinite(self.outcome.loss) else "the loss"
        return f"not finite again: {what}; try overrides such as training.amp=off, and look at the samples above"


def replay(path: Path, overrides: Sequence[str] = ()) -> ReplayResult:
    """Compute the step in a file again, from its own weights, patches, noise and timesteps.  Writes nothing.

    Args:
        path: a file that a `ReplayWriter` has written.
        overrides: `key.path=value`, put on top of the config of the run.

    Raises:
        ConfigError: the file is not one of these, or the overrides make another step of it.
        StorageError: the file is damaged.
        GpuMemoryError: the GPU is smaller than the run's.
    """
    stored = read_nonfinite_step(path)
    config = _config(stored, overrides, path)
    device = choose_device()
    choose_kernels(device, config.training)
    if device.type == stored.device == "cpu":
        torch.set_num_threads(stored.torch_threads)  # the order in which threads add up is part of a CPU result
    try:
        return _replay(stored, config, device)
    except torch.OutOfMemoryError as error:
        raise GpuMemoryError(
            f"a replayed step must fit the GPU's memory; got train_batch_size {config.training.train_batch_size}: "
            f"{error}; add training.train_batch_size=1 training.accumulate_steps={config.global_batch}"
        ) from error


def _config(stored: NonFiniteStep, overrides: Sequence[str], path: Path) -> Config:
    """The config of the run in the amp that it had come to, with the overrides on top."""
    config = parse_stored(stored.config, [f"training.amp={stored.amp}", *overrides], source=str(path))
    samples, patch_size, last_t = len(stored.indices), tuple(stored.patches.shape[1:]), int(stored.timesteps.max())
    problems = weight_problems(dict(lay_out_network(config).named_parameters()), stored.weights)
    if config.global_batch != samples:
        problems = f"a global batch of {config.global_batch} for {samples} samples"
    elif config.data.patch_size != patch_size:
        problems = f"data.patch_size {config.data.patch_size} for patches of {patch_size}"
    elif config.diffusion.timesteps <= last_t:
        problems = f"diffusion.timesteps {config.diffusion.timesteps} for timestep {last_t}"
    if problems:
        raise ConfigError(
            f"a replay must keep the network, the samples and the timesteps of its file; got {problems}; drop "
            "these overrides"
        )
    # Hooks must see every module.
    return config.with_training(compile=False)


def _replay(stored: NonFiniteStep, config: Config, device: torch.device) -> ReplayResult:
    facts = DataFacts.from_state(stored.facts)
    network = build_network(config, device)
    step = TrainStep(config, network, Schedule.from_config(config.diffusion, facts.spectrum), device)
    step.set_weights(stored.weights)
    if step.amp == stored.amp == "fp16":
        step.scaler.load_state_dict(step.scaler.state_dict() | {"scale": stored.scale})
    conditioner = Conditioner(config.data.labels, facts.greys.conditions, facts.scalars, device)
    scales = grey_scales(facts.greys.volumes)
    watch = _Watch()
    with watch.watching(network):
        for part in np.split(np.arange(len(stored.indices)), config.training.accumulate_steps):
            indices, volumes = stored.indices[part].numpy(), stored.volumes[part].tolist()
            augmentations = [augmentation_of(config.seed, config.data.augment, index) for index in indices.tolist()]
            raw_condition = None if stored.conditions is None else stored.conditions[part].to(device)
            # As `DeviceFeed` makes them.
            x_0 = model_values(stored.patches[part].to(device), augmentations, scales[volumes])
            condition = make_condition(raw_condition, augmentations, volumes, conditioner)
            watch.indices = indices
            step.accumulate(x_0, indices, stored.timesteps[part].numpy(), condition)
    gradients = [(name, p.grad) for name, p in network.named_parameters() if p.grad is not None]
    bad = [name for name, gradient in gradients if not torch.isfinite(gradient).all()]
    result = step.apply(stored.lr)
    synchronize(device)
    return ReplayResult(stored, step.amp, device.type, result.read(), watch.fault, bad, len(gradients))


class _Watch:
    """Looks at the output of each module as it is computed, until one is not finite.  Each look waits for the device.

    Attributes:
        indices: of the samples that are computed at present.
        fault: what was found.
    """

    def __init__(self) -> None:
        self.indices = np.empty(0, np.int64)
        self.fault: Fault | None = None

    @contextmanager
    def watching(self, network: nn.Module) -> Iterator[None]:
        """Have a network's modules looked at."""
        with ExitStack() as hooks:
            hooks.enter_context(
                network.register_forward_pre_hook(
                    lambda module, args: self._look("the input of the network", module, args, args[0])
                )
            )
            for name, module in network.named_modules():
                hooks.enter_context(module.register_forward_hook(partial(self._look, name or "the network")))
            yield

    def _look(self, name: str, _: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if self.fault is not None:
            return
        bad = ~torch.isfinite(output).flatten(1).all(1)
        if bad.any():
            inputs = [x.detach() for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]
            largest = max((float(x.abs().where(torch.isfinite(x), 0).max()) for x in inputs), default=0.0)
            self.fault = Fault(name, self.indices[bad.cpu().numpy()].tolist(), largest)
