"""What stands between the network and the sampler: guidance, limits of x_0, dtypes, and the count of evaluations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vesuvius.config import DiffusionConfig, Prediction
from vesuvius.diffusion.condition import Condition
from vesuvius.diffusion.estimate import NetworkEstimate, limited
from vesuvius.diffusion.levels import NoiseLevel
from vesuvius.diffusion.schedule import x_0_and_eps

SHAPE = (3, 1, 2, 4, 5)
LEVEL = NoiseLevel(700, 0.6, 0.8)
KINDS: tuple[Prediction, ...] = ("v", "eps", "x_0", "flow")


def _x() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(8))


def _condition() -> Condition:
    channels = torch.randn(3, 2, 2, 4, 5, generator=torch.Generator().manual_seed(9))
    channels[:, -1] = 1
    return Condition(channels, torch.tensor([[0.3, 1.0], [0.5, 1.0], [-0.2, 1.0]]))


class _Network:
    """A denoiser that depends on all of its arguments and remembers them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Condition]] = []

    def __call__(self, x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        self.calls.append((x_t, t, condition))
        out = torch.sin(x_t) + 1e-3 * t.view(-1, 1, 1, 1, 1)
        if condition.channels is not None:
            out = out + 0.5 * condition.channels[:, :1] * x_t
        if condition.scalars is not None:
            out = out + condition.scalars[:, 0].view(-1, 1, 1, 1, 1)
        return out


def test_a_whole_t_goes_to_the_network_as_int64_and_one_between_as_float32() -> None:
    network = _Network()
    estimate = NetworkEstimate(network, DiffusionConfig())
    estimate(_x(), LEVEL)
    estimate(_x(), NoiseLevel(12.5, 0.6, 0.8))
    (_, whole, _), (_, between, _) = network.calls
    assert whole.dtype == torch.int64
    assert whole.tolist() == [700] * 3
    assert between.dtype == torch.float32
    assert between.tolist() == [12.5] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_pair_is_the_predictions_and_explains_x(kind: Prediction) -> None:
    x_0, eps = NetworkEstimate(_Network(), DiffusionConfig(noise="cosine", prediction=kind))(_x(), LEVEL)
    prediction = _Network()(_x(), torch.full((3,), 700), Condition(None, None))
    expected = x_0_and_eps(kind, prediction, _x(), 0.6, 0.8)
    assert torch.equal(x_0, expected[0])
    assert torch.equal(eps, expected[1])
    # 2e-6: float32 sums and quotients of numbers below 8.
    torch.testing.assert_close(0.6 * x_0 + 0.8 * eps, _x(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 3.0])
def test_guidance_parity_with_ho_and_salimans_on_eps(scale: float) -> None:
    # eq. 6: (1 + w) eps(x, c) - w eps(x) with w = scale - 1, whatever the network predicts.
    config = DiffusionConfig(sampler_guidance=scale)
    conditional = NetworkEstimate(_Network(), DiffusionConfig(), _condition())(_x(), LEVEL)[1]
    unconditional = NetworkEstimate(_Network(), DiffusionConfig(), _condition().left_out())(_x(), LEVEL)[1]
    expected = scale * conditional - (scale - 1) * unconditional
    # 2e-6: float32 sums of numbers below 8.
    ours = NetworkEstimate(_Network(), config, _condition())(_x(), LEVEL)[1]
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("scale", "shown"), [(1.0, ["condition"]), (0.0, ["nothing"]), (2.0, ["nothing", "condition"])]
)
def test_guidance_of_0_or_1_costs_one_evaluation_and_any_other_two(scale: float, shown: list[str]) -> None:
    network = _Network()
    estimate = NetworkEstimate(network, DiffusionConfig(sampler_guidance=scale), _condition())
    estimate(_x(), LEVEL)
    estimate(_x(), LEVEL)
    seen = ["condition" if condition.channels.any() else "nothing" for _, _, condition in network.calls]
    assert seen == 2 * shown
    assert [bool(condition.scalars.any()) for _, _, condition in network.calls] == [s == "condition" for s in seen]
    assert estimate.evaluations == len(network.calls)


def test_guidance_without_a_condition_is_refused() -> None:
    with pytest.raises(AssertionError, match="needs a condition"):
        NetworkEstimate(_Network(), DiffusionConfig(sampler_guidance=2.0))


@pytest.mark.parametrize("quantile", [None, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_a_limited_x_0_and_its_eps_still_explain_x(kind: Prediction, quantile: float | None) -> None:
    config = DiffusionConfig(noise="cosine", prediction=kind, sampler_clip=0.5, sampler_quantile=quantile)
    free, _ = NetworkEstimate(_Network(), DiffusionConfig(noise="cosine", prediction=kind))(_x(), LEVEL)
    x_0, eps = NetworkEstimate(_Network(), config)(_x(), LEVEL)
    assert free.abs().max() > 0.6  # there is something to limit
    assert x_0.abs().max() <= 0.5 * (1 + 1e-6)  # one rounding of the scale
    assert torch.equal(x_0, limited(free, 0.5, quantile))
    # 2e-6: float32 sums and quotients of numbers below 8.
    torch.testing.assert_close(0.6 * x_0 + 0.8 * eps, _x(), rtol=0, atol=2e-6)


def test_a_limit_that_nothing_exceeds_changes_nothing() -> None:
    x_0 = _x()
    far = float(x_0.abs().max())
    assert torch.equal(limited(x_0, far, None), x_0)
    assert torch.equal(limited(x_0, far, 0.9), x_0)


def test_dynamic_thresholding_parity_with_diffusers() -> None:
    from diffusers import DDIMScheduler  # takes seconds, so where it is needed

    # 101 voxels: the 0.9 quantile is the 91st of them, with diffusers' interpolation too.
    x_0 = 3 * torch.randn(4, 1, 1, 1, 101, generator=torch.Generator().manual_seed(2))
    x_0[0] /= 100  # nothing to limit in this one
    oracle = DDIMScheduler(thresholding=True, dynamic_thresholding_ratio=0.9, sample_max_value=1e9)
    # 1e-6: multiplied by 1/s against divided by s.
    torch.testing.assert_close(limited(x_0, 1.0, 0.9), oracle._threshold_sample(x_0), rtol=1e-6, atol=0)


@given(st.floats(0.001, 1.0), st.integers(1, 60), st.floats(0.1, 2.0))
def test_the_threshold_is_numpys_quantile_of_each_sample_without_interpolation(
    quantile: float, voxels: int, clip: float
) -> None:
    x_0 = torch.randn(2, 1, 1, 1, voxels, generator=torch.Generator().manual_seed(voxels), dtype=torch.float64)
    size = np.abs(x_0.flatten(1).numpy())
    limit = np.maximum(np.quantile(size, quantile, axis=1, method="inverted_cdf"), clip)[:, None]
    expected = np.clip(x_0.flatten(1).numpy(), -limit, limit) * clip / limit
    # a few ulp of float64
    np.testing.assert_allclose(limited(x_0, clip, quantile).flatten(1).numpy(), expected, rtol=1e-14)


class _Names(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_thresholding_takes_nothing_that_deterministic_kernels_of_cuda_lack() -> None:
    with _Names() as names:
        limited(_x(), 0.5, 0.8)
    # Those of torch.use_deterministic_algorithms that pick an order statistic: they raise on CUDA alone.
    assert not names.seen & {"kthvalue", "median", "nanmedian", "histc"}


def test_the_threshold_of_a_sample_does_not_depend_on_its_neighbours() -> None:
    x_0 = _x() * torch.tensor([1.0, 5.0, 25.0]).view(-1, 1, 1, 1, 1)
    alone = torch.cat([limited(x_0[i : i + 1], 0.5, 0.8) for i in range(3)])
    assert torch.equal(limited(x_0, 0.5, 0.8), alone)


def test_thresholding_takes_more_voxels_than_torch_quantile() -> None:
    x_0 = torch.linspace(-2, 2, 2**24 + 1).view(1, 1, 1, 1, -1)
    with pytest.raises(RuntimeError, match="too large"):
        x_0.flatten().quantile(0.5)
    half = limited(x_0, 0.1, 0.5)  # |x_0| is uniform in 0..2: its median 1 becomes the limit, shown as 0.1
    # 1e-6: the spacing of x_0, times 0.1, and float32.
    assert half[..., 5 * 2**21].item() == pytest.approx(0.05, abs=1e-6)
    assert half[..., -1].item() == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_everything_outside_a_bf16_network_is_float32_also_under_autocast(scale: float) -> None:
    def rounded(x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        assert x_t.dtype == torch.float32
        return _Network()(x_t, t, condition).bfloat16()

    config = DiffusionConfig(sampler_guidance=scale, sampler_clip=1.0, sampler_quantile=0.9)
    outside = NetworkEstimate(lambda *shown: rounded(*shown).float(), config, _condition())(_x(), LEVEL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = NetworkEstimate(rounded, config, _condition())(_x(), LEVEL)
    for a, b in zip(outside, inside, strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a, b)


def test_a_float64_state_stays_float64() -> None:
    x_0, eps = NetworkEstimate(lambda x, t, c: x.float(), DiffusionConfig())(_x().double(), LEVEL)
    assert x_0.dtype == eps.dtype == torch.float64
