"""Sample numbers -> patch-sized samples: joins noise, noise levels, network and sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.estimate import Denoise, NetworkEstimate
from vesuvius.diffusion.levels import sampling_levels
from vesuvius.diffusion.preconditioning import Condition
from vesuvius.diffusion.randomness import Purpose, derive_seed, sample_noise
from vesuvius.diffusion.sampler import sample
from vesuvius.diffusion.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Generated:
    """A batch of samples: float32 [len(numbers), C, Z, Y, X], model values, and the network calls that it took."""

    x_0: Tensor
    evaluations: int


def generate(
    denoise: Denoise,
    schedule: Schedule,
    config: DiffusionConfig,
    seed: int,
    numbers: Sequence[int],
    shape_czyx: tuple[int, int, int, int],
    device: torch.device | str,
    *,
    condition: Condition = None,
    purpose: Purpose = Purpose.SAMPLE,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> Generated:
    """Draw the samples with these `numbers` as one batch, with the `sampler_*` keys of the config.

    The initial noise of a sample follows from (seed, purpose, number), that of step k from (seed, purpose, number, k).
    A sample therefore does not depend on the rest of its batch, except where `denoise` rounds differently for another
    batch size.  Uses no global generator.  The condition has one entry per number, on `device`; on_step(k, x) is called
    after each sampling step, with the standardised state.
    """
    estimate = NetworkEstimate(denoise, config, condition, schedule.mean, schedule.std)

    def step_noise(k: int) -> Tensor:
        step_seed = derive_seed(seed, Purpose.SAMPLER_NOISE, k)
        return sample_noise(step_seed, numbers, shape_czyx, device, purpose=purpose)

    standardised = sample(
        estimate,
        sampling_levels(schedule, config),
        sample_noise(seed, numbers, shape_czyx, device, purpose=purpose),
        config.sampler,
        step_noise=step_noise,
        on_step=on_step,
    )
    return Generated(schedule.model_values(standardised), estimate.evaluations)
