"""The optimizer step: accumulation, precision, schedules, the moving average, and what is never applied."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from vesuvius.config import Config
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.unet import build_unet
from vesuvius.engine.step import StepResult, TrainStep, learning_rate, make_optimizer, resolve_amp

CPU = torch.device("cpu")


def make_config(**training: Any) -> Config:
    settings = {"steps_per_epoch": 100, "warmup_steps": 10, "lr": 1e-3, "ema_decay": 0.9} | training
    return Config.model_validate(
        {
            "name": "t",
            "data": {"volumes": ({"path": "v"},), "patch_size": (8, 16, 16)},
            "training": settings,
            "model": {
                "channels": (8, 16),
                "blocks_per_level": 1,
                "stem_stride": (1, 2, 2),
                "full_res_channels": 4,
                "attention_heads": 2,
                "norm_groups": 4,
            },
        }
    )


def make_step(config: Config) -> TrainStep:
    return TrainStep(config, build_unet(config.model, config.seed), Schedule.from_config(config.diffusion), CPU)


def train(step: TrainStep, config: Config, steps: int = 5, scale: float = 1.0) -> list[float]:
    """Some optimizer steps on fixed patches.  Returns their losses."""
    batch, losses = config.global_batch, []
    x_0 = torch.tanh(torch.randn(batch, 1, 8, 16, 16, generator=torch.Generator().manual_seed(1))) * scale
    for number in range(steps):
        t = (np.arange(batch) * 997 + number * 131) % 1000
        indices = np.arange(batch) + number * batch
        for part in np.split(np.arange(batch), config.training.accumulate_steps):
            step.accumulate(x_0[part], indices[part], t[part])
        losses.append(step.apply(config.training.lr).read().loss)
    return losses


def weights(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in step.network.named_parameters()}


@pytest.mark.parametrize("split", [(4, 2), (2, 4), (1, 8)])
def test_accumulation_equals_one_large_batch(split: tuple[int, int]) -> None:
    large = make_config(train_batch_size=8, accumulate_steps=1)
    small = make_config(train_batch_size=split[0], accumulate_steps=split[1])
    one, many = make_step(large), make_step(small)
    # The same sums in another order: float32 rounding, passed through 5 steps of AdamW.
    np.testing.assert_allclose(train(one, large), train(many, small), rtol=1e-5)
    for name, weight in weights(one).items():
        torch.testing.assert_close(weight, weights(many)[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.ema.weights[name], many.ema.weights[name], rtol=1e-4, atol=1e-5)
    assert one.ema.updates == many.ema.updates == 5


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_autocast_trains_close_to_float32(amp: str) -> None:
    config = make_config(train_batch_size=4, amp=amp)
    reduced, full = make_step(config), make_step(make_config(train_batch_size=4, amp="off"))
    assert reduced.amp == amp
    # bf16 has 8 bits of mantissa; losses of a few steps stay within a percent or so
    np.testing.assert_allclose(train(reduced, config), train(full, config), rtol=0.03)
    assert all(p.dtype == torch.float32 for p in reduced.network.parameters())


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_a_nonfinite_step_changes_no_weight_no_moment_and_no_average(amp: str) -> None:
    config = make_config(train_batch_size=4, amp=amp)
    step = make_step(config)
    train(step, config, steps=2)
    before = copy.deepcopy(step.state_dict())
    x_0 = torch.zeros(4, 1, 8, 16, 16)
    x_0[2, 0, 3, 3, 3] = math.nan
    step.accumulate(x_0, np.arange(4), np.arange(4))
    result = step.apply(1e-3).read()
    assert not result.finite
    assert not result.overflowed, "a NaN loss is not the scaler's business"
    after = step.state_dict()
    for key in ("model", "ema"):
        torch.testing.assert_close(after[key], before[key], rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer"]["state"], before["optimizer"]["state"], rtol=0, atol=0)
    assert math.isfinite(train(step, config, steps=1)[0]), "and the next step is clean"


def test_an_fp16_overflow_is_skipped_counted_and_lowers_the_scale() -> None:
    config = make_config(train_batch_size=4, amp="fp16")
    step = make_step(config)
    train(step, config, steps=1)
    step.scaler.update(2.0**40)  # gradients of this scale exceed fp16
    before = weights(step)
    x_0 = torch.ones(4, 1, 8, 16, 16)
    step.accumulate(x_0, np.arange(4), np.arange(4))
    result = step.apply(1e-3).read()
    assert result.overflowed
    assert not result.finite
    assert step.scaler.get_scale() == 2.0**39
    for name, weight in weights(step).items():
        assert torch.equal(weight, before[name])


def test_the_gradient_is_clipped_to_the_norm_and_reported_before() -> None:
    config = make_config(train_batch_size=4, clip_norm=1e-3, weight_decay=0.0)
    step = make_step(config)
    x_0 = torch.ones(4, 1, 8, 16, 16)
    step.accumulate(x_0, np.arange(4), np.array([10, 300, 600, 900]))
    step.optimizer = torch.optim.SGD(step.network.parameters(), lr=1.0, fused=True)  # moves by the gradient itself
    before = weights(step)
    result = step.apply(1.0).read()
    moved = torch.sqrt(sum(((p - before[n]) ** 2).sum() for n, p in weights(step).items()))  # type: ignore[arg-type]
    assert result.grad_norm > 1e-3
    torch.testing.assert_close(moved, torch.tensor(1e-3), rtol=1e-3, atol=0)


def test_the_learning_rate_warms_up_in_steps_and_falls_to_zero_at_the_horizon() -> None:
    config = make_config(lr=1.0, warmup_steps=10, steps_per_epoch=50, epochs=2).training
    assert learning_rate(0, config) == 0.1
    assert learning_rate(9, config) == 1.0
    assert learning_rate(10, config) == 1.0
    assert learning_rate(55, config) == pytest.approx(0.5)
    assert learning_rate(100, config) == pytest.approx(0.0)
    constant = config.model_copy(update={"lr_schedule": "constant"})
    assert learning_rate(99, constant) == 1.0


def test_max_steps_does_not_move_the_schedule() -> None:
    config = make_config(lr=1.0).training
    assert learning_rate(50, config.model_copy(update={"max_steps": 60})) == learning_rate(50, config)


def test_the_average_follows_its_recurrence_with_warm_up() -> None:
    config = make_config(train_batch_size=2, ema_decay=0.5)
    step = make_step(config)
    expected = weights(step)
    for n in range(4):
        train(step, config, steps=1)
        decay = min(0.5, (1 + n) / (10 + n))
        expected = {name: decay * expected[name] + (1 - decay) * p for name, p in weights(step).items()}
    for name, weight in expected.items():
        torch.testing.assert_close(step.ema.weights[name], weight, rtol=1e-5, atol=1e-7)  # rounding of lerp


def test_a_saved_and_loaded_step_goes_on_bit_by_bit() -> None:
    config = make_config(train_batch_size=4, accumulate_steps=2)
    straight, first = make_step(config), make_step(config)
    train(straight, config, steps=3)
    train(first, config, steps=3)
    second = make_step(config.model_copy(update={"seed": 5}))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second._config = config
    assert train(straight, config) == train(second, config)
    for name, weight in weights(straight).items():
        assert torch.equal(weight, weights(second)[name])


def test_weight_decay_spares_biases_and_norms() -> None:
    config = make_config()
    network = build_unet(config.model, 0)
    decayed, spared = make_optimizer(network, config.training).param_groups
    assert decayed["weight_decay"] == 0.01
    assert spared["weight_decay"] == 0.0
    assert all(p.ndim > 1 for p in decayed["params"])
    assert all(p.ndim <= 1 for p in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(list(network.parameters()))


def test_auto_precision_is_off_on_a_cpu() -> None:
    assert resolve_amp("auto", CPU) == "off"
    assert resolve_amp("bf16", CPU) == "bf16"


@pytest.mark.long  # compiling takes a minute
def test_a_compiled_network_trains_alike() -> None:
    config = make_config(train_batch_size=2, compile=True)
    # Compiled kernels add in another order: float32 rounding.
    np.testing.assert_allclose(
        train(make_step(config), config, steps=2),
        train(make_step(make_config(train_batch_size=2)), config, steps=2),
        rtol=1e-4,
    )


def test_a_run_may_turn_to_fp16_and_back() -> None:
    plain, half = make_config(train_batch_size=2), make_config(train_batch_size=2, amp="fp16")
    first = make_step(plain)
    train(first, plain, steps=2)
    second = make_step(half)
    second.load_state_dict(first.state_dict())
    train(second, half, steps=2)
    third = make_step(plain)
    third.load_state_dict(second.state_dict())
    assert math.isfinite(train(third, plain, steps=1)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_a_step_on_a_gpu_makes_the_host_wait_for_nothing(amp: str) -> None:
    config = make_config(train_batch_size=2, accumulate_steps=2, amp=amp)
    device = torch.device("cuda")
    step = TrainStep(config, build_unet(config.model, 0, device=device), Schedule.from_config(config.diffusion), device)
    x_0 = torch.zeros(2, 1, 8, 16, 16, device=device)

    def one() -> None:
        for part in range(2):
            step.accumulate(x_0, np.arange(2) + 2 * part, np.array([10, 500]))
        results.append(step.apply(1e-3))

    results: list[StepResult] = []
    one()  # the first step makes the optimizer's state and cuDNN's choices
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(result.read().finite for result in results)
