"""Between network and sampler: guidance, clipping of x_0, dtypes, and the number of network calls."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig, Prediction
from vesuvius.diffusion.estimate import Condition, Denoise, NetworkEstimate, predict
from vesuvius.diffusion.sampler import NoiseLevel
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum

SHAPE = (3, 1, 2, 4, 5)
LEVEL = NoiseLevel(700, 0.6, 0.8)
PLAIN = Schedule.from_config(DiffusionConfig(noise="cosine"))
KINDS: tuple[Prediction, ...] = ("v", "eps", "x_0", "flow")


def _x() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(8))


def _condition() -> Tensor:
    channels = torch.randn(3, 2, 2, 4, 5, generator=torch.Generator().manual_seed(9))
    channels[:, -1] = 1
    return channels


class _Network:
    """A denoiser that depends on all of its arguments and remembers them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Condition]] = []

    def __call__(self, x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        self.calls.append((x_t, t, condition))
        out = torch.sin(x_t) + 1e-3 * t.view(-1, 1, 1, 1, 1)
        return out if condition is None else out + 0.5 * condition[:, :1] * x_t


def test_an_integer_t_is_passed_as_int64_and_a_fractional_one_as_float32() -> None:
    network = _Network()
    estimate = NetworkEstimate(network, DiffusionConfig(), PLAIN)
    estimate(_x(), LEVEL)
    estimate(_x(), NoiseLevel(12.5, 0.6, 0.8))
    (_, whole, _), (_, between, _) = network.calls
    assert whole.dtype == torch.int64
    assert whole.tolist() == [700] * 3
    assert between.dtype == torch.float32
    assert between.tolist() == [12.5] * 3


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 3.0])
def test_guidance_parity_with_ho_and_salimans_on_eps(scale: float) -> None:
    # eq. 6: (1 + w) eps(x, c) - w eps(x) with w = scale - 1, whatever the network predicts.
    config = DiffusionConfig(sampler_guidance=scale)
    conditional = NetworkEstimate(_Network(), DiffusionConfig(), PLAIN, _condition())(_x(), LEVEL)[1]
    unconditional = NetworkEstimate(_Network(), DiffusionConfig(), PLAIN, torch.zeros_like(_condition()))(_x(), LEVEL)[
        1
    ]
    expected = scale * conditional - (scale - 1) * unconditional
    # 2e-6: float32 sums of numbers below 8.
    ours = NetworkEstimate(_Network(), config, PLAIN, _condition())(_x(), LEVEL)[1]
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("scale", "shown"), [(1.0, ["condition"]), (0.0, ["nothing"]), (2.0, ["nothing", "condition"])]
)
def test_guidance_of_0_or_1_costs_one_network_call_and_other_values_two(scale: float, shown: list[str]) -> None:
    network = _Network()
    estimate = NetworkEstimate(network, DiffusionConfig(sampler_guidance=scale), PLAIN, _condition())
    estimate(_x(), LEVEL)
    estimate(_x(), LEVEL)
    seen = ["nothing" if condition is None or not condition.any() else "condition" for _, _, condition in network.calls]
    assert seen == 2 * shown
    assert estimate.evaluations == len(network.calls)


@pytest.mark.parametrize("kind", KINDS)
def test_clipped_x_0_and_its_eps_still_reproduce_x(kind: Prediction) -> None:
    config = DiffusionConfig(noise="cosine", prediction=kind, sampler_clip=0.5)
    free, _ = NetworkEstimate(_Network(), DiffusionConfig(noise="cosine", prediction=kind), PLAIN)(_x(), LEVEL)
    x_0, eps = NetworkEstimate(_Network(), config, PLAIN)(_x(), LEVEL)
    assert free.abs().max() > 0.6  # there is something to limit
    assert torch.equal(x_0, free.clamp(-0.5, 0.5))
    # 2e-6: float32 sums and quotients of numbers below 8.
    torch.testing.assert_close(0.6 * x_0 + 0.8 * eps, _x(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("guidance", [1.0, 1.25])
def test_residual_guidance_scales_only_the_difference_to_the_wiener_filter(guidance: float) -> None:
    """A program that scaled the full prediction would change the Wiener filter itself, and the spectrum."""
    power = np.ones((2, 4, 3), np.float32)
    power[0, 0] = 40
    schedule = Schedule.from_config(DiffusionConfig(), Spectrum(0.3, 1.4, power, 5))
    alpha, sigma = (float(factor) for factor in schedule.alpha_and_sigma(torch.tensor([600])))
    level = NoiseLevel(600, alpha, sigma)
    config = DiffusionConfig(residual_guidance=guidance, residual_guidance_interval=(0.3, 3000))

    def denoise(gain: float) -> Denoise:
        return lambda x, t, condition: predict(lambda shown, t: gain * shown[:, :1].sin(), schedule, x, t)

    linear, _ = NetworkEstimate(denoise(0.0), config, schedule)(_x(), level)
    by_network, _ = NetworkEstimate(denoise(1.0), DiffusionConfig(), schedule)(_x(), level)
    x_0, eps = NetworkEstimate(denoise(1.0), config, schedule)(_x(), level)
    torch.testing.assert_close(x_0, linear + guidance * (by_network - linear), rtol=0, atol=2e-6)
    torch.testing.assert_close(alpha * x_0 + sigma * eps, _x(), rtol=0, atol=2e-6)
    assert (x_0 - linear).abs().max() > 0.05
    if guidance == 1:
        assert torch.equal(x_0, by_network)


def test_a_guide_replaces_the_wiener_filter_and_sees_the_same_condition() -> None:
    """A program that called the guide without the condition would turn the correction against the labels."""
    network, guide = _Network(), _Network()
    config = DiffusionConfig(noise="cosine", residual_guidance=1.5, prediction="x_0")
    estimate = NetworkEstimate(network, config, PLAIN, _condition(), guide=lambda x, t, c: 0.25 * guide(x, t, c))
    x_0, _ = estimate(_x(), LEVEL)
    alone, _ = NetworkEstimate(_Network(), DiffusionConfig(noise="cosine", prediction="x_0"), PLAIN, _condition())(
        _x(), LEVEL
    )
    torch.testing.assert_close(x_0, (0.25 + 1.5 * 0.75) * alone, rtol=1e-6, atol=1e-6)
    assert guide.calls[0][2] is not None
    assert torch.equal(guide.calls[0][2], _condition())
    assert estimate.evaluations == 2
    without = config.model_copy(update={"sampler_guidance": 0.0})
    NetworkEstimate(network, without, PLAIN, _condition(), guide=guide)(_x(), LEVEL)
    assert not network.calls[-1][2].any()
    assert not guide.calls[-1][2].any(), "both without the condition"


@pytest.mark.parametrize(("ratio", "is_inside"), [(0.49, False), (0.51, True), (3.9, True), (4.1, False)])
def test_outside_its_interval_the_guide_is_not_called_and_the_condition_still_guides(
    ratio: float, is_inside: bool
) -> None:
    """A program that took sigma for sigma / alpha, or masked the classifier-free guidance, would fail here."""
    network, guide, alpha = _Network(), _Network(), (1 + ratio**2) ** -0.5
    level = NoiseLevel(700, alpha, ratio * alpha)
    plain = DiffusionConfig(noise="cosine", sampler_guidance=2)
    config = plain.model_copy(update={"residual_guidance": 1.5, "residual_guidance_interval": (0.5, 4.0)})
    estimate = NetworkEstimate(network, config, PLAIN, _condition(), lambda x, t, c: 0.25 * guide(x, t, c))
    x_0, _ = estimate(_x(), level)
    without, _ = NetworkEstimate(_Network(), plain, PLAIN, _condition())(_x(), level)
    assert torch.equal(x_0, without) is not is_inside
    assert len(guide.calls) == is_inside
    assert estimate.calls(level) == estimate.evaluations == len(network.calls) + len(guide.calls)
