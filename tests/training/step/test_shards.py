"""Sharded weights (FSDP2): the same step as that of one rank, and nothing gathered where nothing is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.rank_runs import ends_of, output_of, started_ranks
from tests.training.step.test_step import CPU, make_config, make_step
from vesuvius.diffusion.condition import NO_CONDITION
from vesuvius.diffusion.preconditioning import predict
from vesuvius.errors import ConfigError
from vesuvius.training.ranks.join import open_ranks
from vesuvius.training.ranks.part import part_of
from vesuvius.training.step import shards
from vesuvius.training.step.network import build_network, lay_out_network
from vesuvius.training.step.step import TrainStep

WORLD, STEPS = 2, 3


def settings(**changes: Any) -> dict[str, Any]:
    plain = {"train_batch_size": 1, "accumulate_steps": 2, "ranks": WORLD, "sharding": "fsdp", "ema_decay": 0.5}
    return plain | changes


def patches(count: int) -> torch.Tensor:
    return torch.tanh(torch.randn(count, 1, 8, 16, 16, generator=torch.Generator().manual_seed(1)))


def train(step: TrainStep, config: Any, rank: int, world: int, x_0: torch.Tensor) -> list[tuple[float, float, bool]]:
    """Some steps on fixed patches: loss, gradient norm and whether they were applied."""
    part, figures = part_of(config, rank, world), []
    for number in range(STEPS):
        groups = np.split(part.places, part.accumulate_steps)
        for micro, places in enumerate(groups):
            t = (places * 97 + number * 131) % 1000
            step.accumulate(x_0[places], places + number * 100, t, last=micro == len(groups) - 1)
        outcome = step.apply(1e-2).read()
        figures.append((outcome.loss, outcome.grad_norm, outcome.applied))
    return figures


def handed_over(step: TrainStep, config: Any, ranks: Any) -> Any:
    """Goes on from a state that was not sharded, and leaves one that is not."""
    step.load_state_dict(torch.load(Path("before.pt"), weights_only=True))
    train(step, config, ranks.rank, WORLD, patches(config.global_batch))
    state = plain(step.state_dict())
    if ranks.is_main:
        torch.save(state, Path("after.pt"))


def plain(state: Any) -> Any:
    """A state with whole tensors, as a checkpoint has."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return shards.whole(state).detach().clone() if isinstance(state, torch.Tensor) else state


def flat(state: Any) -> list[list[float]]:
    tensors = [*state["model"].values(), *state["averages"]["ema"]["weights"].values()]
    moments = [value for values in state["optimizer"]["state"].values() for value in values.values()]
    return [shards.whole(tensor).flatten().tolist() for tensor in [*tensors, *moments]]


def on_one_of_two(task: str, training: dict[str, Any], out: Path) -> None:
    """What each rank does; `task` is the name of a function here."""
    config = make_config(**training)
    with open_ranks("cpu", 60, config.global_batch) as ranks:
        torch.set_num_threads(1)
        step = TrainStep(
            config, build_network(config, CPU), make_step(make_config()).schedule, CPU,
            part_of(config, ranks.rank, WORLD), ranks,
        )  # fmt: skip
        (out / f"{ranks.rank}.json").write_text(json.dumps(globals()[task](step, config, ranks)))


def trained(step: TrainStep, config: Any, ranks: Any) -> Any:
    figures = train(step, config, ranks.rank, WORLD, patches(config.global_batch))
    held = sum(shards.own_part(weight).numel() for weight in step.network.parameters())
    return {"figures": figures, "state": flat(step.state_dict()), "held": held}


def overflowed(step: TrainStep, config: Any, ranks: Any) -> Any:
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1)
    x_0 = patches(config.global_batch)
    x_0[1] *= 1e4  # of rank 1 alone
    return {"figures": train(step, config, ranks.rank, WORLD, x_0), "scale": step.scaler.get_scale()}


def kept(step: TrainStep, config: Any, ranks: Any) -> Any:
    """Bytes that each kernel behind a norm takes between forward and backward pass, of those that autograd keeps.

    Autocast keeps copies of other kernels, in bfloat16.
    """
    lean = [weight for name, weight in step.network.named_parameters() if "conv_" in name and weight.ndim == 5]
    shapes = {weight.shape for weight in lean}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        out = predict(step.network, step.schedule, patches(1), torch.tensor([7]), NO_CONDITION)
    kernels = [
        tensor.untyped_storage().nbytes()
        for tensor in saved
        if tensor.shape in shapes and tensor.dtype == torch.float32
    ]
    out.sum().backward()
    return kernels, len(lean)


def collectives(step: TrainStep, config: Any, ranks: Any) -> Any:
    """How many sums of gradients each micro-batch began."""
    begun: list[int] = []
    plain = dist.reduce_scatter_single

    def counted(*arguments: Any, **named: Any) -> Any:
        begun[-1] += 1
        return plain(*arguments, **named)

    dist.reduce_scatter_single = counted
    for micro in range(2):
        begun.append(0)
        step.accumulate(patches(1), np.array([micro]), np.array([5]), last=micro == 1)
    step.apply(1e-2)
    return begun


def denoised(step: TrainStep, config: Any, ranks: Any) -> Any:
    """What rank 0 predicts with all of the averaged weights, and what each rank would with weights of its own."""
    train(step, config, ranks.rank, WORLD, patches(config.global_batch))
    ranks.on_call = lambda what: [shards.whole(weight) for weight in step.weights(what).values()]
    if ranks.rank:
        ranks.end_calls()
        return None
    found = step.denoiser("ema")(patches(1), torch.tensor([300])).flatten().tolist()
    ranks.end_calls()
    return found


def run(task: str, tmp_path: Path, **changes: Any) -> list[Any]:
    """Both ranks' results."""
    code = f"from tests.training.step.test_shards import *\non_one_of_two({task!r}, {settings(**changes)!r}, Path('.'))"
    with started_ranks(Path("none"), tmp_path, WORLD, program=("-c", code)) as ranks:
        assert ends_of(ranks, 120) == [0] * WORLD, output_of(tmp_path, WORLD)
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]


def one_rank_config(optimizer: str = "adamw", **changes: Any) -> Any:
    return make_config(**settings(optimizer=optimizer, **changes) | {"ranks": 1, "accumulate_steps": 4})


def alone(**changes: Any) -> tuple[TrainStep, Any]:
    """One rank that has trained on the same samples."""
    config = one_rank_config(**changes)
    step = make_step(config)
    return step, train(step, config, 0, 1, patches(config.global_batch))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_ranks_with_half_of_the_weights_each_train_as_one_with_all(tmp_path: Path, optimizer: str) -> None:
    results = run("trained", tmp_path, optimizer=optimizer)
    step, figures = alone(optimizer=optimizer)
    count = sum(weight.numel() for weight in step.network.parameters())
    assert sum(result["held"] for result in results) == count
    assert max(result["held"] for result in results) < 0.7 * count
    assert results[0]["state"] == results[1]["state"]
    for result in results:
        assert np.array(result["figures"]) == pytest.approx(np.array(figures), rel=1e-5)
    for sharded, whole in zip(results[0]["state"], flat(step.state_dict()), strict=True):
        # Adam divides by the root of a second moment, which makes much of the rounding of a gradient near 0.
        assert np.array(sharded) == pytest.approx(np.array(whole), abs=2e-4)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_a_run_whose_weights_are_sharded_for_a_while_trains_as_one_that_never_was(
    tmp_path: Path, optimizer: str
) -> None:
    step, _ = alone(optimizer=optimizer)
    torch.save(plain(step.state_dict()), tmp_path / "before.pt")
    run("handed_over", tmp_path, optimizer=optimizer)
    again, config = make_step(one := one_rank_config(optimizer)), one
    again.load_state_dict(torch.load(tmp_path / "after.pt", weights_only=True))
    x_0 = patches(config.global_batch)
    figures = train(again, config, 0, 1, x_0)
    undisturbed = [train(step, config, 0, 1, x_0) for _ in range(2)][-1]
    assert np.array(figures) == pytest.approx(np.array(undisturbed), rel=1e-5)
    for one_tensor, other in zip(flat(again.state_dict()), flat(step.state_dict()), strict=True):
        assert np.array(one_tensor) == pytest.approx(np.array(other), abs=2e-4)


def test_an_overflow_in_the_part_of_one_rank_is_one_for_all(tmp_path: Path) -> None:
    one, other = run("overflowed", tmp_path, amp="fp16")
    assert one == other
    assert not any(applied for _, _, applied in one["figures"][:1])
    assert one["scale"] < 2.0**14


def test_lean_norm_keeps_no_gathered_kernel_between_forward_and_backward_pass(tmp_path: Path) -> None:
    for kept_bytes, kernels in run("kept", tmp_path):
        assert kept_bytes == [0] * kernels


def test_gradients_travel_in_the_last_micro_batch_alone(tmp_path: Path) -> None:
    for first, last in run("collectives", tmp_path):
        assert first == 0
        assert last > 5  # one a block


def test_rank_0_validates_with_the_weights_of_all(tmp_path: Path) -> None:
    found = run("denoised", tmp_path)[0]
    step, _ = alone()
    expected = step.denoiser("ema")(patches(1), torch.tensor([300])).flatten().tolist()
    assert np.array(found) == pytest.approx(np.array(expected), abs=1e-3)


def test_what_is_gathered_at_a_time_is_two_blocks_and_what_is_outside_of_them() -> None:
    network = lay_out_network(make_config())
    sizes = [
        sum(weight.nbytes for weight in module.parameters())
        for module in network.modules()
        if shards.is_gathered_alone(module)
    ]
    total = sum(weight.nbytes for weight in network.parameters())
    assert shards.gathered_bytes(network) == total - sum(sizes) + sum(sorted(sizes)[-2:]) < total


@pytest.mark.parametrize("key", ["compile", "channels_last"])
def test_fsdp_refuses_what_it_does_not_go_with(key: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=f"training.sharding=fsdp goes without training.{key}"):
        make_config(**settings(**{key: True}))
