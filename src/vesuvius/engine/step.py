"""One optimizer step: micro-batches accumulate a gradient, it is checked, clipped and applied, and the EMA follows.

The accumulated gradient, its norm, the logged loss, the learning rate and the EMA equal those of one large batch.
Nothing here makes the host wait for a GPU: whether a step was finite is a flag on the device that the optimizer and the
EMA obey, and its figures are read later.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from vesuvius.config import Config, TrainingConfig
from vesuvius.diffusion.condition import NO_CONDITION, Condition
from vesuvius.diffusion.loss import loss_per_sample
from vesuvius.diffusion.randomness import condition_kept, sample_noise
from vesuvius.diffusion.schedule import Schedule
from vesuvius.engine.transfer import to_device

AmpMode = Literal["off", "bf16", "fp16"]


@dataclass(frozen=True)
class StepOutcome:
    """What a step came to.

    Attributes:
        loss: mean weighted loss of the global batch, before the update.
        grad_norm: length of the gradient before clipping.
        finite: whether loss and gradient were finite, i.e. whether the step was applied.
        overflowed: an fp16 gradient too large for its scale: skipped, the scale halved; normal now and then.
    """

    loss: float
    grad_norm: float
    finite: bool
    overflowed: bool


class StepResult:
    """The figures of a step on their way from the device.

    They are copied to pinned memory right behind the step, so that reading them once the device has finished the step
    waits for nothing that was queued after it.
    """

    def __init__(self, loss: Tensor, grad_norm: Tensor, finite: Tensor, scale: Tensor) -> None:
        figures = torch.stack([loss.float(), grad_norm.float(), finite.float(), scale.float()])
        self._figures = figures
        if figures.is_cuda:
            self._figures = torch.empty(4, pin_memory=True)
            self._figures.copy_(figures, non_blocking=True)

    def read(self) -> StepOutcome:
        """The figures.  On a GPU only valid after an event that was recorded behind `TrainStep.apply`."""
        loss, grad_norm, finite, scale = self._figures.tolist()
        # Down at scale 1 there is nothing left to halve: then an overflow is a gradient that is not finite.
        overflowed = not finite and math.isfinite(loss) and scale > 1
        return StepOutcome(loss, grad_norm, bool(finite), overflowed)


class TrainStep:
    """Owns the network, its optimizer, its gradient scaler and its moving average."""

    def __init__(self, config: Config, network: nn.Module, schedule: Schedule, device: torch.device) -> None:
        self._config = config
        self._schedule = schedule.to(device)
        self._device = device
        self.amp = resolve_amp(config.training.amp, device)
        self.network = network.to(device)
        self._forward: Any = torch.compile(self.network, dynamic=False) if config.training.compile else self.network
        self.optimizer = make_optimizer(self.network, config.training)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp == "fp16")
        self.ema = MovingAverage(self.network, config.training.ema_decay)
        self._loss = torch.zeros((), device=device)

    def accumulate(
        self, x_0: Tensor, indices: NDArray[np.int64], t: NDArray[np.int64], condition: Condition = NO_CONDITION
    ) -> None:
        """Add the gradient of one micro-batch.

        Args:
            x_0: model values, float32 [B, 1, Z, Y, X] on the device.
            indices: sample indices [B]; the noise, and whether the condition is shown, follow from them.
            t: timesteps [B].
            condition: of the same samples, on the device.
        """
        seed = self._config.seed
        eps = sample_noise(seed, indices, (1, *x_0.shape[2:]), self._device)
        t_device = to_device(torch.from_numpy(t), self._device)
        x_t = self._schedule.q_sample(x_0, eps, t_device)
        if not condition.empty:
            keep = condition_kept(seed, indices, self._config.diffusion.condition_dropout)
            condition = condition.kept(to_device(torch.from_numpy(keep), self._device))
        with autocast(self._device, self.amp):
            prediction = self._forward(condition.joined(x_t), t_device, condition.scalars)
        per_sample = loss_per_sample(prediction, x_0, eps, t_device, self._schedule, self._config.diffusion)
        loss = per_sample.sum() / self._config.global_batch
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._loss += loss.detach()

    def apply(self, lr: float) -> StepResult:
        """Update the weights with the accumulated gradient, if it is finite, and start the next one."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        scale = torch.ones((), device=self._device)
        if self.amp == "fp16":
            assert self.scaler._scale is not None
            scale = self.scaler._scale.clone()  # `get_scale()` would wait for the device
        self.scaler.unscale_(self.optimizer)
        grad_norm = nn.utils.clip_grad_norm_(self.network.parameters(), self._config.training.clip_norm)
        finite = torch.isfinite(grad_norm) & torch.isfinite(self._loss)
        # The fused AdamW leaves weights, moments and step counts alone where this flag is set: the contract that
        # torch's own GradScaler uses (`_step_supports_amp_scaling`), without its sync.
        self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        del self.optimizer.found_inf  # type: ignore[attr-defined]
        if self.amp == "fp16":
            self.scaler.update()
        self.ema.update(self.network, finite)
        result = StepResult(self._loss, grad_norm.detach(), finite, scale)
        self.optimizer.zero_grad(set_to_none=True)
        self._loss = torch.zeros((), device=self._device)
        return result

    @torch.no_grad()
    def denoise(self, x_t: Tensor, t: Tensor, condition: Condition = NO_CONDITION) -> Tensor:
        """The network's prediction with the averaged weights, for sampling."""
        arguments = (condition.joined(x_t), t, condition.scalars)
        with autocast(self._device, self.amp):
            prediction: Tensor = functional_call(self.network, self.ema.weights, arguments)
        return prediction

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs of this object: tensors and plain data."""
        return {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._lay_out_moments()
        if self.amp == "fp16" and state["scaler"]:  # empty where the run has not used fp16 so far
            self.scaler.load_state_dict(state["scaler"])
        self.ema.load_state_dict(state["ema"])

    def _lay_out_moments(self) -> None:
        """Bring the moments into the memory order of their weights, in which the fused AdamW walks both.

        They come in that of the run that saved them, with or without `training.channels_last`.
        """
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if value.shape == parameter.shape:
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class MovingAverage:
    """Exponential moving average of the weights in float32, with decay min(ema_decay, (1 + n) / (10 + n)) at update n.

    Lives on the device and counts there, so that a step that was not finite leaves it alone without a sync.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._decay = decay
        self.weights = {name: p.detach().clone().float() for name, p in network.named_parameters()}
        self.updates = torch.zeros((), device=next(iter(self.weights.values())).device)

    @torch.no_grad()
    def update(self, network: nn.Module, finite: Tensor) -> None:
        decay = torch.clamp((1 + self.updates) / (10 + self.updates), max=self._decay)
        keep = (1 - decay) * finite
        for name, parameter in network.named_parameters():
            self.weights[name].lerp_(parameter.float(), keep)
        self.updates += finite

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
        self.updates.copy_(state["updates"])


def resolve_amp(amp: Literal["auto", "off", "bf16", "fp16"], device: torch.device) -> AmpMode:
    """The autocast dtype for a device: auto = bf16 on Ampere and newer, fp16 on older GPUs, off on a CPU."""
    if amp != "auto":
        return amp
    if device.type != "cuda":
        return "off"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def autocast(device: torch.device, amp: AmpMode) -> AbstractContextManager[Any]:
    """The context in which the network, and nothing else, is computed."""
    if amp == "off":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if amp == "bf16" else torch.float16)


def make_optimizer(network: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Fused AdamW; weight decay on matrices and kernels only, not on biases and norms."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.999), fused=True)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 0: linear warm-up, then cosine to 0 or constant.  Pure."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    horizon = config.epochs * config.steps_per_epoch
    done = min((step - config.warmup_steps) / (horizon - config.warmup_steps), 1.0)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))


def choose_device() -> torch.device:
    """The GPU where there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parameter_count(network: nn.Module) -> int:
    """Number of trainable weights."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)
