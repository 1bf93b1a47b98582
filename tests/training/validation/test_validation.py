"""Validation: training loss on fixed inputs per noise level and set of weights, independent of anything else."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.training.step.test_step import make_config, make_step, train
from vesuvius.config import Config, DiffusionConfig
from vesuvius.diffusion.estimate import Condition
from vesuvius.diffusion.randomness import Purpose, sample_noise, validation_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.stream.start.prepare import IntensityRange, IntensityRanges
from vesuvius.training.ranks.ranks import Ranks
from vesuvius.training.step.feed import Conditioner
from vesuvius.training.validation.fixed_patches import FixedPatches
from vesuvius.training.validation.validation import (
    BEST_BY_WEIGHTS,
    Losses,
    ValidationPatches,
    ValidationResult,
    bin_sigmas,
    judged_error,
    patches_of_rank,
    validate,
)

CPU = torch.device("cpu")
PATCHES, BINS = 3, 8


def config_of(batch: int = 4, conditional: bool = False, patches: int = PATCHES, **diffusion: Any) -> Config:
    config = make_config(conditional, train_batch_size=batch, validate_patches=patches)
    return config.model_copy(update={"diffusion": DiffusionConfig(**{"noise": "cosine"} | diffusion)})


def make_reference(
    count: int = PATCHES,
    conditional: bool = False,
    intensity: int | None = None,
    device: torch.device = CPU,
    share: Callable[[FixedPatches], FixedPatches | None] = lambda fixed: fixed,
) -> ValidationPatches:
    """Patches of random voxels or of one value; 0 ... 255 are the model values -1 ... 1."""
    voxels = np.random.default_rng(0).integers(0, 256, (count, 8, 16, 16)).astype("uint8")
    if intensity is not None:
        voxels[...] = intensity
    intensities = IntensityRanges((IntensityRange(0, 255),), (IntensityRange(0, 255),) if conditional else ())
    conditioner = Conditioner(None, intensities.conditions, device)
    fixed = FixedPatches(True, (0,) * count, ((0, 0, 0),) * count, voxels, 255 - voxels if conditional else None)
    held = share(fixed)
    assert held is not None
    return ValidationPatches(held, intensities, conditioner, device)


def spectrum() -> Spectrum:
    return Spectrum.of(make_reference().x_0(range(PATCHES))[:, 0])


def run(
    config: Config,
    denoisers: dict[str, Any],
    reference: ValidationPatches | None = None,
    stop: Callable[[], bool] = bool,
) -> ValidationResult | None:
    reference = reference or make_reference(conditional=config.has_condition)
    schedule = Schedule.from_config(config.diffusion, spectrum())
    return validate(config, reference, schedule, spectrum(), denoisers, stop)


def result_of(
    config: Config, denoisers: dict[str, Any], reference: ValidationPatches | None = None
) -> ValidationResult:
    result = run(config, denoisers, reference)
    assert result is not None
    return result


def half(x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
    """A network that predicts half of its input."""
    return x_t / 2


class Recorder:
    """Predicts half of x_t and records its inputs."""

    def __init__(self) -> None:
        self.x_t: list[Tensor] = []
        self.t: list[int] = []
        self.conditions: list[Condition] = []
        self.grad_enabled = False

    def __call__(self, x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        self.x_t += [x_t]
        self.t += t.tolist()
        self.conditions += [condition]
        self.grad_enabled |= torch.is_grad_enabled()
        return half(x_t, t, condition)


@pytest.mark.parametrize(
    "diffusion",
    [
        {"prediction": "v", "min_snr_gamma": 5.0},
        {"prediction": "eps", "min_snr_gamma": None},
        {"prediction": "x_0", "min_snr_gamma": 2.0},
        {"prediction": "v", "min_snr_gamma": None, "timesteps": 5, "sampler_steps": 2},
    ],
)
def test_validation_equals_the_loss_written_out_in_float64(diffusion: dict[str, Any]) -> None:
    config, reference = config_of(**diffusion), make_reference()
    schedule = Schedule.from_config(config.diffusion)
    timesteps = validation_timesteps(PATCHES, schedule.timesteps)
    expected = np.zeros(timesteps.shape)
    for (patch, bin_), t in np.ndenumerate(timesteps):
        x_0 = reference.x_0([patch])[0].double().numpy()
        number = patch * timesteps.shape[1] + bin_
        eps = sample_noise(0, [number], (1, 8, 16, 16), purpose=Purpose.VALIDATION)[0].double().numpy()
        alpha_bar = schedule.alpha_bar_64[t]
        alpha, sigma, snr = np.sqrt(alpha_bar), np.sqrt(1 - alpha_bar), alpha_bar / (1 - alpha_bar)
        prediction = (alpha * x_0 + sigma * eps) / 2
        target = {"v": alpha * eps - sigma * x_0, "eps": eps, "x_0": x_0}[config.diffusion.prediction]
        losses = (prediction - target) ** 2
        gamma = config.diffusion.min_snr_gamma
        per_snr = {"v": 1 / (snr + 1), "eps": 1 / snr, "x_0": 1.0}[config.diffusion.prediction]
        expected[patch, bin_] = losses.mean() * (1.0 if gamma is None else min(snr, gamma) * per_snr)
    result = result_of(config, {"ema": half})
    # 1e-4: the schedule's float32 tables; near t = 0 the signal-to-noise ratio carries the rounding of 1 - alpha_bar.
    np.testing.assert_allclose(result.weights["ema"].bins, expected.mean(axis=0), rtol=1e-4)
    assert result.weights["ema"].loss == pytest.approx(expected.mean(), rel=1e-4)
    assert len(result.weights["ema"].bins) == min(BINS, schedule.timesteps)


def test_every_patch_is_shown_once_in_every_bin_the_same_to_all_weights_and_to_runs_of_any_seed() -> None:
    raw, ema, other = Recorder(), Recorder(), Recorder()
    result_of(config_of(batch=5), {"raw": raw, "ema": ema})
    assert raw.t == validation_timesteps(PATCHES, 1000).ravel().tolist()
    assert [len(x_t) for x_t in raw.x_t] == [5, 5, 5, 5, 4], "no larger than in training"
    assert not raw.grad_enabled, "a graph would hold the activations of a backward pass"
    result_of(config_of(batch=5).model_copy(update={"seed": 7}), {"ema": other})
    for recorder in (ema, other):
        assert raw.t == recorder.t
        assert all(torch.equal(a, b) for a, b in zip(raw.x_t, recorder.x_t, strict=True))


def test_the_condition_is_always_shown() -> None:
    recorder = Recorder()
    config = config_of(conditional=True, condition_dropout=0.9)
    result_of(config, {"ema": recorder})
    for condition, x_t in zip(recorder.conditions, recorder.x_t, strict=True):
        assert condition is not None
        assert condition.shape[:2] == (len(x_t), 2)
        assert condition[:, 1].unique().tolist() == [1.0]
        assert condition[:, 0].std() > 0.1


def test_raw_and_averaged_weights_are_measured_each_by_itself() -> None:
    config = config_of()
    step = make_step(config)
    denoisers = {name: step.denoiser(name) for name in step.weight_names}
    before = result_of(config, denoisers)
    assert before.weights["raw"] == before.weights["ema"], "before the first step both are the same"
    train(step, config)
    after = result_of(config, denoisers)
    assert after.weights["raw"].loss != after.weights["ema"].loss
    assert after.weights["ema"].loss != before.weights["ema"].loss


def test_validation_leaves_weights_gradients_modes_and_generators_alone() -> None:
    config = config_of()
    step = make_step(config)
    train(step, config, steps=1)
    step.network.train()
    weights = {name: value.clone() for name, value in step.network.state_dict().items()}
    averages = {name: value.clone() for name, value in step.averages["ema"].weights.items()}
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    result_of(config, {name: step.denoiser(name) for name in step.weight_names})
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    assert all(torch.equal(value, weights[name]) for name, value in step.network.state_dict().items())
    assert all(torch.equal(value, averages[name]) for name, value in step.averages["ema"].weights.items())
    assert all(parameter.grad is None for parameter in step.network.parameters())
    assert step.network.training
    assert torch.is_grad_enabled()


def test_a_stop_between_two_batches_ends_it_without_a_result() -> None:
    recorder = Recorder()
    assert run(config_of(batch=5), {"ema": recorder}, stop=lambda: len(recorder.x_t) == 2) is None
    assert len(recorder.x_t) == 2


def test_out_of_memory_makes_all_figures_unknown_on_all_ranks_and_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """Wrong programs keep the figures of other batches or ranks, as if they were all, or leave the others waiting."""

    def short_of_memory(x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    config = config_of(batch=4)
    schedule, sums = Schedule.from_config(config.diffusion, spectrum()), Sums(2)

    def of_rank(rank: int) -> ValidationResult | None:
        ranks = Ranks(rank, 2)
        ranks.sum = sums.add  # type: ignore[method-assign]
        denoisers = {"ema": half, "raw": short_of_memory if rank else half}
        return validate(config, make_reference(), schedule, spectrum(), denoisers, bool, ranks)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(of_rank, range(2)))
    for result in results:
        assert result is not None
        assert all(math.isnan(of.loss) and math.isnan(of.relative_error) for of in result.weights.values())
    assert "no validation: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB)" in caplog.text
    assert "no validation: out of memory (on another rank)" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_do_not_make_the_host_wait_for_the_gpu() -> None:
    device, asked = torch.device("cuda"), 0
    config = config_of(batch=4)

    def stop() -> bool:
        """Called before each of 6 batches: waits are errors from the second on, as the first fills caches, to the last,
        behind which the result is waited for."""
        nonlocal asked
        asked += 1
        torch.cuda.set_sync_debug_mode("error" if 1 < asked < 6 else "default")
        return False

    schedule = Schedule.from_config(config.diffusion).to(device)
    reference, denoisers = make_reference(device=device), {"raw": half, "ema": half}
    try:
        assert validate(config, reference, schedule, spectrum(), denoisers, stop) is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert asked == 6


@pytest.mark.parametrize(("noise", "prediction"), [("spectral", "v"), ("cosine", "x_0")])
def test_the_stationary_filter_is_1_and_one_that_knows_the_answer_is_0(noise: str, prediction: str) -> None:
    """At every level: all count equally, whatever the weights of the loss."""
    config, reference = config_of(prediction=prediction, noise=noise), make_reference()
    schedule = Schedule.from_config(config.diffusion, spectrum())
    x_0 = reference.x_0(range(PATCHES))

    def alpha(t: Tensor) -> Tensor:
        return schedule.sqrt_alpha_bar[t].view(-1, 1, 1, 1, 1)

    def predicting(guess: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Prediction of a network whose estimate of x_0 is `guess`."""
        sigma = schedule.sqrt_one_minus_alpha_bar[t].view(-1, 1, 1, 1, 1)
        return schedule.target(
            config.diffusion.prediction, guess, (x_t - alpha(t) * schedule.standardized(guess)) / sigma, t
        )

    def wiener(x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        return predicting(schedule.wiener_x_0(spectrum(), x_t, t), x_t, t)

    def sure(x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        candidates = alpha(t)[:, None] * schedule.standardized(x_0)[None]  # [B, PATCHES, 1, Z, Y, X]
        nearest = (candidates - x_t[:, None]).square().flatten(2).sum(2).argmin(1)
        return predicting(x_0[nearest], x_t, t)

    result = result_of(config, {"ema": wiener, "raw": sure}, reference)
    np.testing.assert_allclose(result.weights["ema"].relative_bins, 1, rtol=0.02)
    assert result.relative_error == pytest.approx(1, rel=0.01)
    assert min(result.weights["raw"].relative_bins) < 1e-3


def test_the_headline_is_the_mean_over_sigma_0_3_to_80_or_over_all_if_none_is_there() -> None:
    of_bins = (0.25, 0.5, 0.125, 0.9)
    assert judged_error(of_bins, (0.2, 0.3, 80, 81)) == pytest.approx(0.25)
    assert judged_error((0.25, 4.0), (0.01, 0.1)) == pytest.approx(1.0)
    assert math.isnan(judged_error((0.25, math.inf), (1, 100)))


def test_the_judged_bins_of_a_spectral_schedule_are_named_by_the_sigma_at_their_middle() -> None:
    config = DiffusionConfig(sigma_min=0.01, sigma_max=100)
    exponents = np.arange(-2, 2, 0.5) + 0.25
    # The levels include both ends, their bins do not: half of 4 / 1000 decades.
    np.testing.assert_allclose(np.log10(bin_sigmas(Schedule.from_config(config))), exponents, atol=2e-3)


def test_a_ratio_to_a_filter_without_error_is_unknown() -> None:
    """Constant patches: the stationary Wiener filter makes no error."""
    some = Losses(0.5, (0.5, 0.5), (0.25, 4.0), 1.0)
    none = Losses(0.5, (0.5, 0.5), (math.inf, math.inf), math.nan)
    line = ValidationResult(2, (0, 500, 1000), (0.1, 1), {"raw": some, BEST_BY_WEIGHTS: none}).line(1, 2)
    assert line.endswith("relative_error unknown relative_bins unknown unknown")


class Sums:
    """Sums the contributions of the ranks, here threads."""

    def __init__(self, world: int) -> None:
        self.brought, self.all_here = list[Tensor](), threading.Barrier(world, timeout=60)

    def add(self, tensor: Tensor) -> None:
        self.brought.append(tensor.clone())
        self.all_here.wait()
        tensor.copy_(torch.stack(self.brought).sum(0))


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("stops", [False, True])
def test_ranks_share_a_validation_and_come_to_the_figures_of_one_or_stop_together(world: int, stops: bool) -> None:
    """24 pairs in batches of 4: six batches, so two of eight ranks have none.  If each rank validated alone, or rank 0
    sent its figures, the results would be the same; so each rank holds only its own patches."""
    config = config_of(batch=4, conditional=True)
    schedule, sums = Schedule.from_config(config.diffusion, spectrum()), Sums(world)
    shown = [Recorder() for _ in range(world)]

    def of_rank(rank: int) -> ValidationResult | None:
        share = partial(patches_of_rank, config, rank=rank, world=world)
        reference = make_reference(conditional=True, share=share if rank else lambda fixed: fixed)
        ranks = Ranks(rank, world)
        ranks.sum = sums.add  # type: ignore[method-assign]
        stop = partial(bool, stops and rank == 1)
        return validate(config, reference, schedule, spectrum(), {"ema": shown[rank]}, stop, ranks)

    with ThreadPoolExecutor(world) as pool:
        results = list(pool.map(of_rank, range(world)))
    if stops:
        assert results == [None] * world
    else:
        assert results == [result_of(config, {"ema": half})] * world
        assert sum(len(one.x_t) for one in shown) == 6
        assert max(len(one.x_t) for one in shown) == -(-6 // world)
