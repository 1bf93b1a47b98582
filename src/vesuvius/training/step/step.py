"""One optimizer step: micro-batches accumulate a gradient, it is checked, clipped and applied, the averages follow.

The accumulated gradient, its norm, the logged loss, the learning rate and the averages equal those of one large batch.
Nothing here makes the host wait for a GPU: whether a step is applied is a flag on the device that the optimizer and the
averages obey, and its figures are read later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from vesuvius.errors import ConfigError
from vesuvius.loader.intensity import to_device
from vesuvius.monitor.clock import Timed, untimed
from vesuvius.training.ranks.ranks import SINGLE, Ranks
from vesuvius.training.ranks.share import RankShare, rank_share
from vesuvius.training.step.optimizer import GradientSync, MovingAverage, average_decays, load_averages, make_optimizer
from vesuvius.training.step.setup import autocast, is_compiled, resolve_amp


@dataclass(frozen=True)
class StepOutcome:
    """What a step came to."""

    loss: float  # mean weighted loss of the global batch, before the update
    losses: tuple[float, ...]  # that of each sample, in the order of the global batch
    grad_norm: float  # length of the gradient before clipping
    finite: bool  # whether loss and gradient were finite
    applied: bool  # whether the weights moved: finite, and not after `max_nonfinite` steps that were not
    overflowed: bool  # an fp16 gradient too large for its scale: skipped, the scale halved; normal now and then
    # steps so far, this one included, that were not finite, since the last that was applied; an overflow neither counts
    # nor resets the count: it says nothing about the run
    nonfinite_in_a_row: int
    scale: float  # what the loss was multiplied by for fp16; 1 without it


class PendingOutcome:
    """The figures of a step on their way from the device.

    They are copied to pinned memory right after the step, so that reading them once the device has finished the step
    waits for nothing that was queued after it.

    Args:
        scalars: the fields of `StepOutcome` in its order, but for the losses.
        losses: those of each micro-batch.
    """

    def __init__(self, scalars: Sequence[Tensor], losses: Sequence[Tensor]) -> None:
        figures = torch.cat([torch.stack([scalar.float() for scalar in scalars]), *losses])
        self._figures = figures
        if figures.is_cuda:
            self._figures = torch.empty(figures.shape, pin_memory=True)
            self._figures.copy_(figures, non_blocking=True)

    def read(self) -> StepOutcome:
        """The figures.  On a GPU only valid after an event that was recorded after `TrainStep.apply`."""
        loss, grad_norm, finite, applied, overflowed, in_a_row, scale, *losses = self._figures.tolist()
        flags = bool(finite), bool(applied), bool(overflowed)
        return StepOutcome(loss, tuple(losses), grad_norm, *flags, int(in_a_row), scale)


class TrainStep:
    """Owns the network, its optimizer, its gradient scaler and the averages of its weights.

    Attributes:
        schedule: noise levels, on the device.
        averages: by name; the first is "ema", what a run is sampled and published with.
        timed: `computing` of the clock that says where the time goes, if there is one.
        before_update: called in each step just before they change.
        updating: weights, moments and averages are being changed; where an error ended that, they are of no use.
    """

    def __init__(
        self,
        config: Config,
        network: nn.Module,
        schedule: Schedule,
        device: torch.device,
        part: RankShare | None = None,
        ranks: Ranks = SINGLE,
    ) -> None:
        self._config = config
        self.schedule = schedule.to(device)
        self._device = device
        self.amp = resolve_amp(config.training.amp, device)
        self.network = network.to(device)
        self._sync = GradientSync(self.network, part or rank_share(config, 0, 1), ranks)
        self._forward: nn.Module = self._sync.forward
        self.optimizer = make_optimizer(self.network, config.training, ranks)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp == "fp16")
        decays = average_decays(config.training)
        self.averages = {name: MovingAverage(self.network, decay) for name, decay in decays.items()}
        self.before_update: Callable[[], None] = lambda: None
        self.updating = False
        self.timed: Timed = untimed
        self._loss = torch.zeros((), device=device)
        self._losses: list[Tensor] = []
        self._nonfinite_in_a_row = torch.zeros((), device=device)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """What `denoiser` takes: "raw" for the weights of the last step, and each average."""
        return ("raw", *self.averages)

    def accumulate(
        self,
        x_0: Tensor,
        indices: NDArray[np.int64],
        t: NDArray[np.int64],
        condition: Condition = None,
        last: bool = True,
        eps: Tensor | None = None,
    ) -> Tensor:
        """Add the gradient of one micro-batch; returns the loss of each sample, float32 [B] on the device.

        Args:
            x_0: model values, float32 [B, 1, Z, Y, X] on the device, as is the condition.
            indices: sample indices [B]; the noise, and whether the condition is shown, follow from them.
            last: it is the last one of the step, whose backward pass hides the exchange of gradients with other ranks;
                where none is, `apply` exchanges them.
            eps: the noise, where it was drawn ahead; like x_0.
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
        return self._losses[-1]

    def apply(self, lr: float) -> PendingOutcome:
        """Update the weights with the accumulated gradient, if it is finite, and start the next one."""
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
        # The fused AdamW leaves weights, moments and step counts alone where this flag is set: the contract that
        # torch's own GradScaler uses (`_step_supports_amp_scaling`), without its sync.
        self.optimizer.found_inf = (~applied).float()  # type: ignore[attr-defined]
        self.before_update()
        self.updating = True
        self.optimizer.step()
        del self.optimizer.found_inf  # type: ignore[attr-defined]
        if self.amp == "fp16":
            self.scaler.update()
        for average in self.averages.values():
            average.update(applied)
        scalars = [self._loss, grad_norm, finite, applied, overflowed, self._nonfinite_in_a_row, scale]
        result = PendingOutcome(scalars, self._losses)
        self.drop()
        self.updating = False  # not before: what is allocated here may fail, and the step is not counted yet
        return result

    def drop(self) -> None:
        """Drop the accumulated gradient and losses."""
        self.optimizer.zero_grad(set_to_none=True)
        self._loss, self._losses = torch.zeros((), device=self._device), []

    @contextmanager
    def scratch_gradients(self) -> Iterator[None]:
        """Between two steps: what is accumulated here, by the plain network, is dropped at the end, and not timed."""
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
        `max_nonfinite` bad ones, where the run ends: so the count of bad steps lives here, and nothing lowers it again
        once it is full.  The weights at the end are those before the last bad step, on a GPU as on a CPU.
        """
        loss_finite = torch.isfinite(self._loss)
        finite = torch.isfinite(grad_norm) & loss_finite
        # Down at scale 1 there is nothing left to halve: then an overflow is a gradient that is not finite.
        overflowed = ~finite & loss_finite & (scale > 1)
        applied = finite & (self._nonfinite_in_a_row < self._config.training.max_nonfinite)
        self._nonfinite_in_a_row = (self._nonfinite_in_a_row + ~(finite | overflowed)) * ~applied
        return finite, overflowed, applied

    def denoiser(self, weights: str) -> Denoise:
        """The prediction with one of `weight_names`, without a gradient."""
        parameters: dict[str, Tensor] = dict(self.network.named_parameters())
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

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Start the network and every average from these weights.  Raises ConfigError for those of another network."""
        check_initial_weights(self.network, weights)
        for name, parameter in self.network.named_parameters():
            parameter.copy_(weights[name])
        for average in self.averages.values():
            average.restart(weights)

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs of this object: tensors and plain data."""
        return {
            "model": dict(self.network.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "averages": {name: average.state_dict() for name, average in self.averages.items()},
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, of any number of ranks; the rest, such as weight decay, is the config's."""
        self.network.load_state_dict(state["model"])
        moments, own = state["optimizer"], self.optimizer.state_dict()["param_groups"]
        groups = [mine | {"params": saved["params"]} for mine, saved in zip(own, moments["param_groups"], strict=True)]
        self.optimizer.load_state_dict({"state": moments["state"], "param_groups": groups})
        self._lay_out_moments()
        if self.amp == "fp16" and state["scaler"]:  # empty where the run has not used fp16 so far
            self.scaler.load_state_dict(state["scaler"])
        load_averages(self.averages, state["averages"], state["model"])
        in_a_row = int(state["nonfinite_in_a_row"])
        # Full, it has ended the session before; this one is to train on after the bad steps.
        self._nonfinite_in_a_row.fill_(in_a_row if in_a_row < self._config.training.max_nonfinite else 0)

    def _lay_out_moments(self) -> None:
        """Bring the moments into the memory order of their weights, in which the fused AdamW walks both."""
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if value.shape == parameter.shape:
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 0: linear warm-up, then as `lr_schedule` says.  Pure.

    cosine ends at 0 with the last epoch; inverse_sqrt is lr sqrt(w / (step + 1)) with w = max(warmup_steps, 1) (Vaswani
    et al. 2017, section 5.3), which meets the warm-up's end and does not know how long the run will be.
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


def weight_problems(own: Mapping[str, Tensor], given: Mapping[str, Tensor], limit: int = 3) -> str:
    """How given weights differ from a network's own in names and shapes, the first few; '' where they fit.  Pure."""
    problems = [f"{name} missing" for name in own if name not in given]
    problems += [f"{name} unexpected" for name in given if name not in own]
    problems += [
        f"{name} {tuple(given[name].shape)} instead of {tuple(weight.shape)}"
        for name, weight in own.items()
        if name in given and given[name].shape != weight.shape
    ]
    more = [f"and {len(problems) - limit} more"] if len(problems) > limit else []
    return ", ".join(problems[:limit] + more)


def check_initial_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises ConfigError where a network, which may have no memory yet, cannot start from these weights."""
    if problems := weight_problems(dict(network.named_parameters()), weights):
        raise ConfigError(
            f"training.init_from needs weights of the same network; got {problems}; set model.* as in "
            "their run, or remove training.init_from"
        )
