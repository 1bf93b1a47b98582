"""Everything together: a tiny network learns a known distribution of 3D patches and every sampler draws from it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig, ModelConfig, SamplerMethod
from vesuvius.diffusion.estimate import Condition, generate, predict
from vesuvius.diffusion.network.unet import build_unet
from vesuvius.diffusion.randomness import sample_noise, stratified_timesteps
from vesuvius.diffusion.schedule import Schedule, loss_per_sample
from vesuvius.diffusion.spectrum import Spectrum

# A patch is dark or bright as a whole, and each of its voxels deviates from that by itself.
DARK, BRIGHT, SHARE_DARK, TEXTURE = -0.6, 0.4, 0.3, 0.2
SHAPE = (1, 4, 4, 4)
STEPS, BATCH, COUNT = 400, 64, 256
MODEL = ModelConfig(channels=(16,), stem_stride=(1, 1, 1), blocks_per_level=1, full_res_channels=0, attention_heads=0)


def _patches(step: int) -> Tensor:
    rng = np.random.default_rng((0, step))
    intensity = np.where(rng.random((BATCH, 1, 1, 1, 1)) < SHARE_DARK, DARK, BRIGHT)
    return torch.from_numpy(intensity + TEXTURE * rng.standard_normal((BATCH, *SHAPE))).float()


@dataclass(frozen=True)
class Trained:
    """A network and what it was trained with."""

    denoise: Callable[[Tensor, Tensor, Condition], Tensor]
    config: DiffusionConfig
    schedule: Schedule


@pytest.fixture
def trained(one_thread: None) -> Trained:
    """A network of 0.1 M parameters: 8 s on a free core."""
    config = DiffusionConfig()
    schedule, network = Schedule.from_config(config, Spectrum.of(_patches(-1 % 2**32)[:, 0])), build_unet(MODEL, 0, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / STEPS)) / 2
        x_0, eps = _patches(step), sample_noise(0, range(step * BATCH, (step + 1) * BATCH), SHAPE)
        t = torch.from_numpy(stratified_timesteps(0, step, BATCH, config.timesteps))
        prediction = predict(network, schedule, schedule.q_sample(x_0, eps, t), t)
        optimizer.zero_grad()
        loss_per_sample(prediction, x_0, eps, t, schedule, config).mean().backward()
        optimizer.step()
    network.eval()
    return Trained(partial(predict, network, schedule), config, schedule)


@pytest.mark.long
@pytest.mark.timeout(1200)  # minutes on a CPU without AVX-512
def test_samples_of_a_trained_network_have_the_moments_of_the_data(trained: Trained) -> None:
    """In one test, so that the network is trained once, whatever processes share the tests."""
    for method in get_args(SamplerMethod):
        check_moments(trained, method)


def check_moments(trained: Trained, method: SamplerMethod) -> None:
    # Heun evaluates twice; ancestral noise needs shorter steps.
    steps = {"ddim": 40, "dpmpp2m": 20, "heun": 10, "ddpm": 40}[method]
    config = trained.config.model_copy(update={"sampler": method, "sampler_steps": steps})
    denoise, schedule = trained.denoise, trained.schedule
    x_0 = generate(denoise, schedule, config, 0, range(COUNT), SHAPE, "cpu")[0]
    intensity, texture = x_0.mean((1, 2, 3, 4)), x_0.flatten(1).var(1).mean().sqrt().item()
    dark = intensity < (DARK + BRIGHT) / 2
    # 0.075: the spread of a patch's mean, TEXTURE / sqrt(64) = 0.025, three times; up to 0.04 seen.
    assert intensity[dark].mean().item() == pytest.approx(DARK, abs=0.075)
    assert intensity[~dark].mean().item() == pytest.approx(BRIGHT, abs=0.075)
    # Hardly anything in between: 0.15 is 6 of those spreads.  0.00 to 0.05 with spectral noise and three seeds;
    # a network that learned no more than the mean has nearly all there, one trained with half the batch a quarter.
    between = ((intensity - DARK).abs() > 0.15) & ((intensity - BRIGHT).abs() > 0.15)
    assert between.float().mean() < 0.12
    # 4 standard errors of a share of 256, and 0.05 for 400 steps of training and the few of sampling.  Seen with three
    # seeds of the weights: 0.34 to 0.37.
    error = 4 * math.sqrt(SHARE_DARK * (1 - SHARE_DARK) / COUNT)
    assert dark.float().mean().item() == pytest.approx(SHARE_DARK, abs=error + 0.05)
    # A third: so few steps give 0.17 (ddim) to 0.18 (dpmpp2m) of 0.2 even with the exact estimate; 0.15 to 0.18 seen.
    assert texture == pytest.approx(TEXTURE, rel=1 / 3)
