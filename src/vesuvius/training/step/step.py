"""One optimizer step: accumulate the gradient of micro-batches, check, clip and apply it, update the averages.

Gradient, norm, logged loss, learning rate and averages equal those of one large batch.  The host never waits for a GPU
here: a flag on the device tells optimizer and averages whether to apply the step, and its figures are read later.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from vesuvius.config import Config, TrainingConfig
from vesuvius.diffusion.estimate import Condition, Denoise, mask_condition, predict
from vesuvius.diffusion.randomness import condition_mask, sample_noise
from vesuvius.diffusion.schedule import Schedule, loss_per_sample
from vesuvius.loader.intensity import to_device
from vesuvius.monitor.clock import Timed, untimed
from vesuvius.training.ranks.ranks import SINGLE, Ranks
from vesuvius.training.step.optimizer import GradientSync, MovingAverage, average_decays, load_averages, make_optimizer
from vesuvius.training.step.setup import autocast, is_compiled, resolve_amp


@dataclass(frozen=True)
class StepOutcome:
    """Result of an optimizer step."""

    loss: float  # mean weighted loss of the global batch, before the update
    losses: tuple[float, ...]  # loss of each sample, in the order of the global batch
    grad_norm: float  # gradient norm before clipping
    finite: bool  # loss and gradient were finite
    applied: bool  # the weights changed: finite, and fewer than `max_nonfinite` non-finite steps before
    overflowed: bool  # fp16 gradient overflow: step skipped, scale halved; normal now and then
    # non-finite steps since the last applied one, including this one; an overflow neither counts nor resets the count
    nonfinite_in_a_row: int


class PendingOutcome:
    """Outcome of a step, copied to pinned memory right after it, so that reading it does not wait for later work.

    `scalars` are the fields of `StepOutcome` except the losses, in order; `losses` those of each micro-batch.
    """

    def __init__(self, scalars: Sequence[Tensor], losses: Sequence[Tensor]) -> None:
        figures = torch.cat([torch.stack([scalar.float() for scalar in scalars]), *losses])
        self._figures = figures
        if figures.device.type != "cpu":
            self._figures = torch.empty(figures.shape, pin_memory=True)
            self._figures.copy_(figures, non_blocking=True)

    def read(self) -> StepOutcome:
        """The outcome.  On a GPU valid only after an event recorded after `TrainStep.apply`."""
        loss, grad_norm, finite, applied, overflowed, in_a_row, *losses = self._figures.tolist()
        return StepOutcome(loss, tuple(losses), grad_norm, bool(finite), bool(applied), bool(overflowed), int(in_a_row))


class TrainStep:
    """Owns the network, its optimizer, its gradient scaler and the averages of its weights."""

    def __init__(
        self, config: Config, network: nn.Module, schedule: Schedule, device: torch.device, ranks: Ranks = SINGLE
    ) -> None:
        self._config, self._device, self.schedule = config, device, schedule.to(device)
        self.amp = resolve_amp(config.training.amp, device)
        self.network = network.to(device)
        self._sync = GradientSync(self.network, config.global_batch, ranks)
        self._forward: nn.Module = self._sync.forward
        self.optimizer = make_optimizer(self.network, config.training, ranks)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp == "fp16")
        decays = average_decays(config.training)
        # By name; "ema", the first, is used for sampling and publishing.
        self.averages = {name: MovingAverage(self.network, decay) for name, decay in decays.items()}
        self.weight_names = ("raw", *self.averages)  # as for `denoiser`; raw = the weights of the last step
        self.updating = False  # weights, moments and averages are being changed; after an error meanwhile unusable
        self.timed: Timed = untimed  # `StepClock.computing`, which times each phase
        self._loss = torch.zeros((), device=device)
        self._losses: list[Tensor] = []
        self._nonfinite_in_a_row = torch.zeros((), device=device)

    def accumulate(
        self,
        x_0: Tensor,
        indices: NDArray[np.int64],
        t: NDArray[np.int64],
        condition: Condition = None,
        last: bool = True,
        eps: Tensor | None = None,
    ) -> None:
        """Add the gradient of one micro-batch.

        Args:
            x_0: model values, float32 [B, 1, Z, Y, X], on the device like the condition.
            indices: sample indices [B], which determine the noise and the condition dropout.
            last: whether this is the last micro-batch of the step: its backward pass overlaps the gradient exchange.
            eps: noise drawn in advance, like x_0; None = draw it here.
        """
        seed = self._config.seed
        with self._sync.micro_batch(last):
            with self.timed("forward"):
                if eps is None:
                    eps = sample_noise(seed, indices, (1, *x_0.shape[2:]), self._device)
                t_device = to_device(torch.from_numpy(t), self._device)
                x_t = self.schedule.q_sample(x_0, eps, t_device)
                if condition is not None:
                    keep = condition_mask(seed, indices, self._config.diffusion.condition_dropout)
                    condition = mask_condition(condition, to_device(torch.from_numpy(keep), self._device))
                with autocast(self._device, self.amp):
                    prediction = predict(self._forward, self.schedule, x_t, t_device, condition)
                per_sample = loss_per_sample(prediction, x_0, eps, t_device, self.schedule, self._config.diffusion)
                loss = per_sample.sum() / self._config.global_batch
            with self.timed("backward"):
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                self._loss += loss.detach()
                self._losses.append(per_sample.detach())

    def apply(self, lr: float) -> PendingOutcome:
        """Update the weights with the accumulated gradient if it is finite, and reset the gradient."""
        if self._sync.parallel:
            with self.timed("comm"):
                self._sync.wait()
                self._losses = [self._sync.gather(self._losses)]
                self._loss = self._losses[0].sum() / self._config.global_batch
        with self.timed("optimizer"):
            return self._apply(lr)

    def _apply(self, lr: float) -> PendingOutcome:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        scale = torch.ones((), device=self._device)
        if self.amp == "fp16":
            assert self.scaler._scale is not None
            scale = self.scaler._scale.clone()  # `get_scale()` would wait for the device
        self.scaler.unscale_(self.optimizer)
        parameters = list(self.network.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        grad_norm = nn.utils.get_total_norm(gradients).detach()
        nn.utils.clip_grads_with_norm_(parameters, self._config.training.clip_norm, grad_norm)
        finite, overflowed, applied = self._judge(grad_norm, scale)
        # The fused AdamW skips the update if this flag is set, as for torch's GradScaler (`_step_supports_amp_scaling`)
        # but without its sync.
        self.optimizer.found_inf = (~applied).float()  # type: ignore[attr-defined]
        self.updating = True
        self.optimizer.step()
        del self.optimizer.found_inf  # type: ignore[attr-defined]
        if self.amp == "fp16":
            self.scaler.update()
        for average in self.averages.values():
            average.update(applied)
        scalars = [self._loss, grad_norm, finite, applied, overflowed, self._nonfinite_in_a_row]
        result = PendingOutcome(scalars, self._losses)
        self.drop()
        self.updating = False  # only now: the allocations above may fail before the step is counted
        return result

    def drop(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._loss, self._losses = torch.zeros((), device=self._device), []

    @contextmanager
    def scratch_gradients(self) -> Iterator[None]:
        """Context between two steps: gradients accumulated in it, eagerly and untimed, are discarded at the end."""
        compiled = is_compiled(self._config.training, self._device)
        forward, self._forward = self._forward, self.network
        timed, self.timed = self.timed, untimed
        try:
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                yield
        finally:
            self._forward, self.timed = forward, timed
            self.drop()

    def _judge(self, grad_norm: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether the step is finite, whether it overflowed fp16, and whether to apply it: flags on the device.

        The host reads them a step or more late.  Steps that it has launched by then must not train on after
        `max_nonfinite` bad ones, so the count lives on the device and stays at the limit once it is reached.
        """
        loss_finite = torch.isfinite(self._loss)
        finite = torch.isfinite(grad_norm) & loss_finite
        # At scale 1 the scale cannot be halved: an overflow then counts as a non-finite gradient.
        overflowed = ~finite & loss_finite & (scale > 1)
        applied = finite & (self._nonfinite_in_a_row < self._config.training.max_nonfinite)
        self._nonfinite_in_a_row = (self._nonfinite_in_a_row + ~(finite | overflowed)) * ~applied
        return finite, overflowed, applied

    def denoiser(self, weights: str) -> Denoise:
        """Prediction function with one of `weight_names`, without gradients."""
        # Detached, so that blocks compiled for one set of weights serve all.
        parameters = {name: parameter.detach() for name, parameter in self.network.named_parameters()}
        if weights != "raw":
            parameters = self.averages[weights].weights

        @torch.no_grad()
        def denoise(x_t: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
            def network(*arguments: Tensor) -> Tensor:
                output: Tensor = functional_call(self.network, parameters, arguments)
                return output

            with autocast(self._device, self.amp):
                return predict(network, self.schedule, x_t, t, condition)

        return denoise

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": dict(self.network.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "averages": {name: average.state_dict() for name, average in self.averages.items()},
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` of a run with any number of ranks; hyperparameters come from the config."""
        self.network.load_state_dict(state["model"])
        moments, own = state["optimizer"], self.optimizer.state_dict()["param_groups"]
        groups = [mine | {"params": saved["params"]} for mine, saved in zip(own, moments["param_groups"], strict=True)]
        self.optimizer.load_state_dict({"state": moments["state"], "param_groups": groups})
        self._lay_out_moments()
        if self.amp == "fp16" and state["scaler"]:  # empty if the run has not used fp16 so far
            self.scaler.load_state_dict(state["scaler"])
        load_averages(self.averages, state["averages"], state["model"])
        in_a_row = int(state["nonfinite_in_a_row"])
        # At the limit it ended the previous session; this one continues after the bad steps.
        self._nonfinite_in_a_row.fill_(in_a_row if in_a_row < self._config.training.max_nonfinite else 0)

    def _lay_out_moments(self) -> None:
        """Give moments the memory layout of their weights, which the fused AdamW assumes."""
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if value.shape == parameter.shape:
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 0: linear warm-up, then `lr_schedule`.  Pure.

    cosine reaches 0 at the end of the last epoch; inverse_sqrt is lr sqrt(w / (step + 1)) with w = max(warmup_steps, 1)
    (Vaswani et al. 2017, section 5.3), which is continuous at the end of the warm-up and independent of the run's
    length.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    match config.lr_schedule:
        case "constant":
            return config.lr
        case "inverse_sqrt":
            return config.lr * math.sqrt(max(config.warmup_steps, 1) / (step + 1))
        case "cosine":
            horizon = config.epochs * config.steps_per_epoch
            done = min((step - config.warmup_steps) / (horizon - config.warmup_steps), 1.0)
            return config.lr * 0.5 * (1 + math.cos(math.pi * done))


def weight_problems(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """First few differences in name and shape between given weights and a network's own; '' if they fit.  Pure."""
    problems = [f"{name} missing" for name in own if name not in given]
    problems += [f"{name} unexpected" for name in given if name not in own]
    problems += [
        f"{name} {tuple(given[name].shape)} instead of {tuple(weight.shape)}"
        for name, weight in own.items()
        if name in given and given[name].shape != weight.shape
    ]
    more = [f"and {len(problems) - 3} more"] if len(problems) > 3 else []
    return ", ".join(problems[:3] + more)
