"""Samples as functions of seed and number."""

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig, SamplerMethod
from vesuvius.diffusion.estimate import Condition, generate
from vesuvius.diffusion.randomness import Purpose, sample_noise
from vesuvius.diffusion.sampler import step_table, trailing_levels
from vesuvius.diffusion.schedule import Schedule

SHAPE = (1, 4, 4, 4)
METHODS: tuple[SamplerMethod, ...] = get_args(SamplerMethod)


def _wavy(x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
    """Works voxel by voxel, so that a batch's size cannot change how it is computed."""
    shift = 0.0 if condition is None else condition[:, :1]
    return torch.sin(2 * x_t) * 0.3 - 1e-3 * t.view(-1, 1, 1, 1, 1) * x_t + shift


def _generate(
    config: DiffusionConfig, numbers: list[int], seed: int = 0, condition: Condition = None, **options: Any
) -> Tensor:
    return generate(
        _wavy, Schedule.from_config(config), config, seed, numbers, SHAPE, "cpu", condition=condition, **options
    )[0]


def _config(method: SamplerMethod = "ddim", **options: Any) -> DiffusionConfig:
    return DiffusionConfig(sampler=method, sampler_steps=6, **options)


def _shown(*values: float) -> Condition:
    channels = torch.ones(len(values), 2, *SHAPE[1:])
    channels[:, 0] = torch.tensor(values).view(-1, 1, 1, 1)
    return channels


@pytest.mark.parametrize(
    "config",
    [*(_config(method) for method in METHODS), _config(sampler_clip=1.0)],
    ids=[*METHODS, "clip"],
)
def test_a_sample_depends_on_seed_and_index_not_on_its_batch(config: DiffusionConfig) -> None:
    batch = _generate(config, [3, 5, 900])
    assert batch.dtype == torch.float32
    assert batch.shape == (3, *SHAPE)
    assert torch.equal(batch[1:2], _generate(config, [5]))
    assert torch.equal(batch[[1, 2, 0]], _generate(config, [5, 900, 3]))
    assert not torch.equal(batch[0], batch[1])
    assert not torch.equal(batch, _generate(config, [3, 5, 900], seed=1))
    assert not torch.equal(batch, _generate(config, [3, 5, 900], purpose=Purpose.PREVIEW))


def test_each_sample_gets_its_own_condition() -> None:
    config = _config(sampler_guidance=2.0)
    both = _generate(config, [0, 1], condition=_shown(0.3, -0.2))
    assert torch.equal(both[:1], _generate(config, [0], condition=_shown(0.3)))
    assert torch.equal(both[1:], _generate(config, [1], condition=_shown(-0.2)))
    assert not torch.equal(both[:1], _generate(config, [0], condition=_shown(-0.2)))


def _noise_of_each_step(purpose: Purpose) -> Tensor:
    """Return the noise of two samples, initial and of the three noisy steps: [8, voxels]."""
    shape, config = (1, 16, 16, 16), DiffusionConfig(noise="cosine", sampler="ddpm", sampler_steps=4, prediction="x_0")
    schedule = Schedule.from_config(config)
    states = [sample_noise(0, [0, 1], shape, purpose=purpose)]
    generate(
        lambda x_t, t, condition: torch.zeros_like(x_t),
        schedule,
        config,
        0,
        [0, 1],
        shape,
        "cpu",
        purpose=purpose,
        on_step=lambda k, x: states.append(x),
    )
    noise, levels = [states[0]], trailing_levels(schedule, 4)
    for k, row in enumerate(step_table(levels, "ddpm")[:3]):
        # x_0 is 0, so eps = x / sigma and what is left of the next state is the step's noise.
        noise.append((states[k + 1] - row.eps * states[k] / levels[k].sigma) / row.noise)
    return torch.cat(noise).flatten(1)


def test_noise_of_each_step_index_and_purpose_is_standard_normal_and_independent() -> None:
    noise = torch.cat([_noise_of_each_step(purpose) for purpose in (Purpose.SAMPLE, Purpose.PREVIEW)])
    rows, n = noise.shape
    assert rows == 16
    # 5 standard deviations of mean, standard deviation and correlation of n independent normals.
    assert noise.mean(1).abs().max() < 5 / math.sqrt(n)
    assert (noise.std(1) - 1).abs().max() < 5 / math.sqrt(2 * n)
    assert (torch.corrcoef(noise) - torch.eye(rows)).abs().max() < 5 / math.sqrt(n)
