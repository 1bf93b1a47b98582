"""The optimizer step: accumulation, precision, schedules, sets of weights, and rejected updates."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.gpu import GPU, needs_gpu, no_waiting, sleep
from vesuvius.accelerator import new_event, synchronize
from vesuvius.config import Config
from vesuvius.diffusion.estimate import predict
from vesuvius.diffusion.network.layers import memory_format_of
from vesuvius.diffusion.network.regions import CompiledRegions, call_eager
from vesuvius.diffusion.network.unet import build_unet
from vesuvius.diffusion.randomness import condition_mask, sample_noise
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.checkpoint.start import check_initial_weights, restore
from vesuvius.training.checkpoint.trained import CheckpointInfo
from vesuvius.training.ranks.ranks import SINGLE, Ranks
from vesuvius.training.step.optimizer import GradientSync, make_optimizer
from vesuvius.training.step.self_test import check_kernels
from vesuvius.training.step.setup import build_network, configure_kernels, execution, is_compiled, uses_channels_last
from vesuvius.training.step.step import PendingOutcome, StepOutcome, TrainStep, learning_rate

CPU = torch.device("cpu")


def make_config(conditional: bool = False, condition_dropout: float = 0.1, **training: Any) -> Config:
    settings = {"steps_per_epoch": 100, "warmup_steps": 10, "lr": 1e-3, "ema_decay": 0.9} | training
    volume: dict[str, Any] = {"path": "v"} | ({"condition": {"path": "c"}} if conditional else {})
    return Config.model_validate(
        {
            "name": "t",
            "data": {"volumes": (volume,), "patch_size": (8, 16, 16)},
            "diffusion": {"condition_dropout": condition_dropout},
            "training": settings,
            "model": {
                "channels": (8, 16),
                "blocks_per_level": 1,
                "stem_stride": (1, 2, 2),
                "full_res_channels": 4,
                "attention_heads": 2,
            },
        }
    )


@pytest.mark.long
def test_ddp_splits_no_compiled_block() -> None:
    """torch's DDPOptimizer does, at the bounds of buckets of a MiB, which the kernels of these blocks exceed."""
    config = make_config(train_batch_size=1)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"channels": (8, 160), "full_res_channels": 0})}
    )

    def count(ranks: Ranks) -> int:
        graphs = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        computed = replace(execution(config.training), call=CompiledRegions(backend))
        network = build_unet(config.model, 0, 1, CPU, computed)
        step = GradientSync(network, 1, ranks)
        step.forward(torch.zeros(1, 1, 8, 16, 16), torch.zeros(1)).sum().backward()
        return len(graphs)

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert count(Ranks(world=2)) == count(SINGLE) > 0
    finally:
        torch.distributed.destroy_process_group()


def make_step(config: Config) -> TrainStep:
    return TrainStep(config, build_network(config, CPU), Schedule.from_config(config.diffusion), CPU)


def train(step: TrainStep, config: Config, steps: int = 5, scale: float = 1.0) -> list[float]:
    """Some optimizer steps on fixed patches.  Returns their losses."""
    batch, losses = config.global_batch, []
    x_0 = torch.tanh(torch.randn(batch, 1, 8, 16, 16, generator=torch.Generator().manual_seed(1))) * scale
    for number in range(steps):
        t = (np.arange(batch) * 997 + number * 131) % 1000
        indices = np.arange(batch) + number * batch
        for part in np.split(np.arange(batch), config.training.accumulate_steps):
            shown = x_0[part].repeat(1, 2, 1, 1, 1) if config.has_condition else None
            step.accumulate(x_0[part], indices[part], t[part], shown)
        losses.append(step.apply(config.training.lr).read().loss)
    return losses


def good_step(step: TrainStep) -> StepOutcome:
    """An optimizer step on four constant patches."""
    step.accumulate(torch.zeros(4, 1, 8, 16, 16), np.arange(4), np.arange(4))
    return step.apply(1e-3).read()


def bad_step(step: TrainStep) -> StepOutcome:
    """The same with a NaN voxel in the third patch."""
    x_0 = torch.zeros(4, 1, 8, 16, 16)
    x_0[2, 0, 3, 3, 3] = math.nan
    step.accumulate(x_0, np.arange(4), np.arange(4))
    return step.apply(1e-3).read()


def weights(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in step.network.named_parameters()}


def test_accumulation_equals_one_large_batch() -> None:
    large = make_config(train_batch_size=4, accumulate_steps=1, extra_ema_decays=(0.3, 0.99))
    small = make_config(train_batch_size=2, accumulate_steps=2, extra_ema_decays=(0.3, 0.99))
    one, many = make_step(large), make_step(small)
    # The same sums in another order: float32 rounding, passed through 3 steps of AdamW.
    np.testing.assert_allclose(train(one, large, steps=3), train(many, small, steps=3), rtol=1e-5)
    for name, weight in weights(one).items():
        torch.testing.assert_close(weight, weights(many)[name], rtol=1e-4, atol=1e-5)
        for key, average in one.averages.items():
            torch.testing.assert_close(average.weights[name], many.averages[key].weights[name], rtol=1e-4, atol=1e-5)
    for step in (one, many):
        assert [float(average.updates) for average in step.averages.values()] == [3, 3, 3]


def test_a_dropped_condition_has_no_influence_and_a_kept_one_has() -> None:
    config = make_config(train_batch_size=4, conditional=True, condition_dropout=0.5)
    # The first layers of a fresh network have no gradient yet: its branches end in zeros.
    step = make_step(config)
    train(step, config, steps=3)
    x_0, t = torch.tanh(sample_noise(1, range(4), (1, 8, 16, 16))), np.array([100, 300, 500, 700])
    kept = condition_mask(config.seed, range(4), 0.5)
    assert kept.any(), "the seed draws both"
    assert not kept.all(), "the seed draws both"

    def loss(channels: torch.Tensor) -> float:
        step.accumulate(x_0, np.arange(4), t, channels)
        return step.apply(0.0).read().loss

    shown = torch.ones(4, 2, 8, 16, 16)
    other = shown.clone()
    other[~kept] = -3.0
    assert loss(other) == loss(shown)
    other[kept] = -3.0
    assert loss(other) != loss(shown)


@pytest.mark.parametrize("name", ["raw", "ema_0.2"])
def test_a_denoiser_predicts_with_the_weights_of_its_name_and_the_condition(name: str) -> None:
    config = make_config(train_batch_size=2, conditional=True, extra_ema_decays=(0.2,))
    step = make_step(config)
    train(step, config, steps=5)
    x_t, t = sample_noise(2, range(2), (1, 8, 16, 16)), torch.tensor([400, 400])
    condition = torch.ones(2, 2, 8, 16, 16)
    assert step.weight_names == ("raw", "ema", "ema_0.2")
    predictions = {key: step.denoiser(key)(x_t, t, condition) for key in step.weight_names}
    prediction = predictions.pop(name)
    assert not prediction.requires_grad
    assert not torch.equal(prediction, step.denoiser(name)(x_t, t, torch.zeros_like(condition)))
    assert all(not torch.equal(prediction, other) for other in predictions.values()), "each has weights of its own"
    if name != "raw":
        step.network.load_state_dict(step.averages[name].weights)
    schedule = Schedule.from_config(config.diffusion)
    torch.testing.assert_close(predict(step.network, schedule, x_t, t, condition), prediction, rtol=0, atol=0)


@pytest.mark.parametrize("amp", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_autocast_trains_close_to_float32(amp: str) -> None:
    config = make_config(train_batch_size=4, amp=amp)
    reduced, full = make_step(config), make_step(make_config(train_batch_size=4, amp="off"))
    assert reduced.amp == amp
    # bf16 has 8 bits of mantissa; losses of a few steps stay within a percent or so
    np.testing.assert_allclose(train(reduced, config), train(full, config), rtol=0.03)
    assert all(p.dtype == torch.float32 for p in reduced.network.parameters())


@pytest.mark.parametrize("amp", ["off", pytest.param("fp16", marks=pytest.mark.long)])
def test_a_nonfinite_step_changes_no_weight_no_moment_and_no_average(amp: str) -> None:
    config = make_config(train_batch_size=4, amp=amp, extra_ema_decays=(0.5,), optimizer="muon")
    step = make_step(config)
    train(step, config, steps=2)
    before = copy.deepcopy(step.state_dict())
    result = bad_step(step)
    assert not result.finite
    assert not result.applied
    assert not result.overflowed, "a NaN loss is not the scaler's business"
    assert [math.isfinite(loss) for loss in result.losses] == [True, True, False, True]
    after = step.state_dict()
    for key in ("model", "averages"):
        torch.testing.assert_close(after[key], before[key], rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer"]["state"], before["optimizer"]["state"], rtol=0, atol=0)
    assert math.isfinite(train(step, config, steps=1)[0]), "and the next step is clean"


def test_a_non_finite_gradient_with_a_finite_loss_is_not_applied() -> None:
    step = make_step(make_config(train_batch_size=4))
    good_step(step)
    before = weights(step)
    hook = next(step.network.parameters()).register_hook(lambda gradient: gradient + math.inf)
    result = good_step(step)
    hook.remove()
    assert math.isfinite(result.loss)
    assert not result.finite
    assert not result.applied
    assert result.nonfinite_in_a_row == 1
    for name, weight in weights(step).items():
        assert torch.equal(weight, before[name])


def test_after_the_last_bad_step_nothing_is_applied_however_late_the_host_reads() -> None:
    # On a GPU the host reads a step or more late, and has launched others by then.
    config = make_config(train_batch_size=4, max_nonfinite=2)
    step = make_step(config)
    outcomes = [bad_step(step), good_step(step), bad_step(step)]
    before = copy.deepcopy(step.state_dict())
    outcomes += [bad_step(step), good_step(step), good_step(step)]
    assert [outcome.applied for outcome in outcomes] == [False, True, False, False, False, False]
    assert [outcome.finite for outcome in outcomes] == [False, True, False, False, True, True]
    assert [outcome.nonfinite_in_a_row for outcome in outcomes] == [1, 0, 1, 2, 2, 2]
    after = step.state_dict() | {"nonfinite_in_a_row": before["nonfinite_in_a_row"]}
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_an_fp16_overflow_neither_counts_as_bad_nor_resets_the_count() -> None:
    config = make_config(train_batch_size=4, amp="fp16", max_nonfinite=2)
    model = config.model.model_copy(update={"channels": (8,), "full_res_channels": 0})  # a CPU has no kernels for fp16
    step = make_step(config.model_copy(update={"model": model}))
    outcomes = [good_step(step), bad_step(step)]
    step.scaler.update(2.0**40)  # gradients of this scale exceed fp16
    before = weights(step)
    outcomes.append(good_step(step))
    assert step.scaler.get_scale() == 2.0**39, "skipped, and the scale is halved"
    assert all(torch.equal(weight, before[name]) for name, weight in weights(step).items())
    step.scaler.update(1024.0)
    outcomes += [bad_step(step), good_step(step)]
    assert [outcome.overflowed for outcome in outcomes] == [False, False, True, False, False]
    assert [outcome.nonfinite_in_a_row for outcome in outcomes] == [0, 1, 1, 2, 2]
    assert [outcome.applied for outcome in outcomes] == [True, False, False, False, False]


@pytest.mark.parametrize("split", [(4, 1), (2, 2)])
def test_sample_losses_are_in_the_order_of_the_global_batch(split: tuple[int, int]) -> None:
    config = make_config(train_batch_size=split[0], accumulate_steps=split[1])
    step = make_step(config)
    x_0 = torch.arange(4.0).view(4, 1, 1, 1, 1).expand(4, 1, 8, 16, 16)
    for part in np.split(np.arange(4), split[1]):
        step.accumulate(x_0[part], part, np.full(len(part), 500))
    outcome = step.apply(0.0).read()
    # A fresh network predicts 0, so the loss of v grows with the patch's value.
    assert list(outcome.losses) == sorted(set(outcome.losses))
    assert len(outcome.losses) == 4
    assert outcome.loss == pytest.approx(np.mean(outcome.losses), rel=1e-6)  # float32 sums


def test_the_gradient_norm_is_reported_before_clipping() -> None:
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


def test_the_learning_rate_warms_up_and_reaches_zero_at_the_horizon() -> None:
    config = make_config(lr=1.0, warmup_steps=10, steps_per_epoch=50, epochs=2).training
    assert learning_rate(0, config) == 0.1
    assert learning_rate(9, config) == 1.0
    assert learning_rate(10, config) == 1.0
    assert learning_rate(55, config) == pytest.approx(0.5)
    assert learning_rate(100, config) == pytest.approx(0.0)
    constant = config.model_copy(update={"lr_schedule": "constant"})
    assert learning_rate(99, constant) == 1.0


@pytest.mark.parametrize("warmup", [0, 10])
def test_the_inverse_square_root_halves_the_rate_over_four_times_the_steps(warmup: int) -> None:
    config = make_config(lr=1.0, warmup_steps=warmup, lr_schedule="inverse_sqrt").training
    peak = max(warmup, 1)
    assert learning_rate(peak - 1, config) == 1.0, "it meets the end of the warm-up"
    assert learning_rate(4 * peak - 1, config) == pytest.approx(0.5)
    assert learning_rate(100 * peak - 1, config) == pytest.approx(0.1), "also beyond the horizon"


@pytest.mark.long
def test_a_saved_and_loaded_step_continues_bit_by_bit() -> None:
    config = make_config(train_batch_size=4, accumulate_steps=2, extra_ema_decays=(0.5,), optimizer="muon")
    straight, first = make_step(config), make_step(config)
    train(straight, config, steps=3)
    train(first, config, steps=3)
    second = make_step(config.model_copy(update={"seed": 5}))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second._config = config
    assert train(straight, config) == train(second, config)
    torch.testing.assert_close(second.state_dict(), straight.state_dict(), rtol=0, atol=0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_loaded_step_uses_the_weight_decay_of_its_own_config(optimizer: str) -> None:
    """With all moments, and only for decayed weights; other programs would train differently after a raised decay."""
    before, now = (make_config(train_batch_size=4, optimizer=optimizer, weight_decay=decay) for decay in (0.01, 0.5))
    raised, loaded = make_step(before), make_step(now)
    train(raised, before, steps=3)
    loaded.load_state_dict(copy.deepcopy(raised.state_dict()))
    for group in raised.optimizer.param_groups:
        group["weight_decay"] *= 50
    assert train(raised, before, steps=2) == train(loaded, now, steps=2)
    torch.testing.assert_close(weights(loaded), weights(raised), rtol=0, atol=0)


def test_weights_of_another_network_are_refused_with_their_names() -> None:
    step = make_step(make_config())
    given = dict(step.averages["ema"].weights)
    names = list(given)
    del given[names[0]]
    given["other"] = torch.zeros(1)
    given[names[1]] = torch.zeros(3)
    with pytest.raises(
        ConfigError, match=r"init_from do not fit the network: .* missing, other unexpected, .* \(3,\) instead of \("
    ):
        check_initial_weights(step.network, given)
    with pytest.raises(
        ConfigError, match=rf"and {len(names) - 3} more; copy model.* condition, its classes and context"
    ):
        check_initial_weights(step.network, {})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_excludes_biases_and_norms(optimizer: str) -> None:
    config = make_config(optimizer=optimizer)
    network = build_network(config, CPU)
    *decayed, spared = make_optimizer(network, config.training).param_groups
    assert [group["weight_decay"] for group in decayed] == [0.01] * len(decayed)
    assert spared["weight_decay"] == 0.0
    found = [p for group in decayed for p in group["params"]]
    assert all(p.ndim > 1 for p in found)
    assert all(p.ndim <= 1 for p in spared["params"])
    assert len(found) + len(spared["params"]) == len(list(network.parameters()))
    if optimizer == "muon":  # it takes the kernels but for the one with a single output
        kernels = {n for n, p in network.named_parameters() if p.ndim == 5 and n != "conv_out.weight"}
        assert {id(p) for p in decayed[0]["params"]} == {id(network.get_parameter(name)) for name in kernels}


@pytest.mark.long  # compiling takes a minute
def test_a_compiled_network_trains_alike() -> None:
    config = make_config(train_batch_size=2, compile=True)
    # Compiled kernels add in another order: float32 rounding.
    np.testing.assert_allclose(
        train(make_step(config), config, steps=2),
        train(make_step(make_config(train_batch_size=2)), config, steps=2),
        rtol=1e-4,
    )


@pytest.mark.long
def test_blocks_compiled_for_one_set_of_weights_serve_all() -> None:
    """Else a validation compiles the network again for each average."""
    counter, config = CompileCounterWithBackend("eager"), make_config(train_batch_size=2)
    compiled, eager = (
        TrainStep(
            config,
            build_unet(config.model, 0, config.input_channels, CPU, replace(execution(config.training), call=call)),
            Schedule.from_config(config.diffusion),
            CPU,
        )
        for call in (CompiledRegions(counter), call_eager)
    )
    x_t, t, counts = torch.randn(2, 1, *config.data.patch_size), torch.tensor([3, 500]), set()
    for weights_of in ("ema", "raw", "ema"):
        assert torch.equal(compiled.denoiser(weights_of)(x_t, t), eager.denoiser(weights_of)(x_t, t))
        counts.add(counter.frame_count)
    assert len(counts) == 1
    assert counts != {0}


@pytest.mark.long
def test_scratch_gradients_are_not_compiled() -> None:
    """A replay registers hooks that sync with the device on every layer, which cannot be compiled."""

    def refuses(*_: Any) -> Any:
        raise OSError("no C compiler")

    config, regions = make_config(train_batch_size=2, compile=True), CompiledRegions(refuses)
    computed = replace(execution(config.training), call=regions)
    network = build_unet(config.model, 0, config.input_channels, CPU, computed)
    step = TrainStep(config, network, Schedule.from_config(config.diffusion), CPU)
    x_0, t = torch.zeros(2, 1, *config.data.patch_size), np.array([10, 500])
    with step.scratch_gradients():
        step.accumulate(x_0, np.arange(2), t)
        assert not regions.failure
        assert all(weight.grad is not None for weight in network.parameters())
    step.accumulate(x_0, np.arange(2), t)
    assert regions.failure


@pytest.mark.parametrize(("asked", "deterministic"), list(itertools.product([True, False], repeat=2)))
def test_cudnn_times_its_kernels_if_asked_and_unless_deterministic(
    asked: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda wanted: None)
    with torch.backends.cudnn.flags():
        configure_kernels(
            torch.device("cuda"), make_config(cudnn_benchmark=asked, deterministic=deterministic).training
        )
        assert torch.backends.cudnn.benchmark == (asked and not deterministic)


@pytest.mark.parametrize(
    ("device", "wanted", "deterministic", "compiled"),
    [
        ("cuda", "auto", False, True),
        ("cuda", "auto", True, False),
        ("cuda", False, False, False),
        ("cpu", "auto", False, False),
        ("cpu", True, False, True),
    ],
)
def test_auto_compiles_only_on_a_gpu(device: str, wanted: bool | str, deterministic: bool, compiled: bool) -> None:
    config = make_config(compile=wanted, deterministic=deterministic)
    assert is_compiled(config.training, torch.device(device)) == compiled
    if device == "cpu":
        assert isinstance(build_network(config, CPU).execution.call, CompiledRegions) == compiled


@pytest.mark.parametrize(
    ("device", "amp", "wanted", "last"),
    [
        ("cuda", "auto", "auto", True),
        ("cuda", "off", "auto", False),
        ("cuda", "off", True, True),
        ("cuda", "bf16", False, False),
        ("cpu", "bf16", "auto", False),
        ("cpu", "auto", True, True),
    ],
)
def test_auto_uses_channels_last_only_on_a_gpu_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, device: str, amp: str, wanted: bool | str, last: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    config = make_config(amp=amp, channels_last=wanted)
    assert uses_channels_last(config.training, torch.device(device)) == last
    if device == "cpu":
        weight = build_network(config, CPU).get_parameter("patch_embed.weight")
        assert memory_format_of(weight) == (torch.channels_last_3d if last else torch.contiguous_format)


@pytest.mark.long
def test_a_run_may_switch_to_channels_last() -> None:
    configs = [make_config(train_batch_size=2, channels_last=last) for last in (True, False)]
    first = make_step(configs[0])
    train(first, configs[0], steps=2)
    second = make_step(configs[1])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(second, configs[1], steps=2)
    train(first, configs[0], steps=2)  # on the same patches as `second`
    for name, weight in weights(first).items():
        # The same sums in another order: float32 rounding, passed through AdamW.
        torch.testing.assert_close(weights(second)[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@needs_gpu
@pytest.mark.parametrize(
    ("amp", "optimizer"),
    [
        ("fp16", "muon"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("bf16", "adamw"), ("fp16", "adamw"))),
    ],
)
def test_a_step_on_a_gpu_never_blocks_the_host(amp: str, optimizer: str) -> None:
    config = make_config(train_batch_size=2, accumulate_steps=2, amp=amp, optimizer=optimizer)
    step = TrainStep(config, build_network(config, GPU), Schedule.from_config(config.diffusion), GPU)
    x_0 = torch.zeros(2, 1, 8, 16, 16, device=GPU)

    def one() -> None:
        for part in range(2):
            step.accumulate(x_0, np.arange(2) + 2 * part, np.array([10, 500]))
        results.append(step.apply(1e-3))

    results: list[PendingOutcome] = []
    one()  # the first step makes the optimizer's state and cuDNN's choices
    with no_waiting():
        one()
    assert all(result.read().finite for result in results)


def test_a_resume_uses_the_same_number_of_threads_unless_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = torch.get_num_threads()
    stored: Any = {**Progress().state_dict(), "torch_threads": 3}
    step: Any = SimpleNamespace(load_state_dict=lambda state: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    try:
        for before, expected in (("2", 3), (None, 2)):
            torch.set_num_threads(2)
            state = stored | {"omp_num_threads": before}
            facts: Any = None
            restore(CheckpointInfo(Path("c"), 0, make_config(), facts, state), step, CPU)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(found)


@needs_gpu
def test_on_a_gpu_the_outcome_of_a_step_is_read_without_waiting_for_later_work() -> None:
    x = torch.ones(3, device=GPU)
    sleep(0.1)
    loss, flag = x.sum(), torch.ones((), device=GPU)
    outcome = PendingOutcome([loss, 2 * loss, flag, flag, 0 * flag, 0 * flag], [x])
    end = new_event(GPU)
    end.record()
    x.zero_()
    sleep(1.0)
    end.synchronize()
    assert outcome.read() == StepOutcome(3.0, (1.0, 1.0, 1.0), 6.0, True, True, False, 0)
    assert not torch.accelerator.current_stream(GPU).query(), "the later work goes on"
    synchronize(GPU)
    assert torch.accelerator.current_stream(GPU).query()


@needs_gpu
def test_the_self_test_accepts_the_convolutions_of_a_gpu() -> None:
    check_kernels(make_config(amp="bf16"), 1, GPU, "bf16")
