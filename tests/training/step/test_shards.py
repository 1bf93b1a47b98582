"""Sharded weights (FSDP2): the same step as that of one rank, and nothing gathered where nothing is computed."""

from __future__ import annotations

import functools
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
    step.load_state_dict(torch.load(Path(f"before {config.training.optimizer}.pt"), weights_only=True))
    train(step, config, ranks.rank, WORLD, patches(config.global_batch))
    return plain(step.state_dict())


def plain(state: Any) -> Any:
    """A state with whole tensors, as a checkpoint has."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return shards.whole(state).detach().clone() if isinstance(state, torch.Tensor) else state


def flat(state: Any) -> list[torch.Tensor]:
    tensors = [*state["model"].values(), *state["averages"]["ema"]["weights"].values()]
    moments = [value for values in state["optimizer"]["state"].values() for value in values.values()]
    return [shards.whole(tensor).detach().clone() for tensor in [*tensors, *moments]]


def on_one_of_two(tasks: dict[str, dict[str, Any]]) -> None:
    """What each rank does, one after the other: functions here by name, each with a step of these settings."""
    with open_ranks("cpu", 60, make_config(**settings()).global_batch) as ranks:
        torch.set_num_threads(1)
        for task, changes in tasks.items():
            config = make_config(**settings(**changes))
            step = TrainStep(
                config, build_network(config, CPU), make_step(make_config()).schedule, CPU,
                part_of(config, ranks.rank, WORLD), ranks,
            )  # fmt: skip
            torch.save(globals()[task.split()[0]](step, config, ranks), f"{task}.{ranks.rank}.pt")


def trained(step: TrainStep, config: Any, ranks: Any) -> Any:
    figures = train(step, config, ranks.rank, WORLD, patches(config.global_batch))
    held = sum(shards.own_part(weight).numel() for weight in step.network.parameters())
    return {"figures": figures, "state": flat(step.state_dict()), "held": held}


def overflowed(step: TrainStep, config: Any, ranks: Any) -> Any:
    """Gradients that are infinite in weights of which rank 1 has the part."""
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=1)
    unscale = step.scaler.unscale_

    def of_rank_1(optimizer: Any) -> None:
        if ranks.rank == 1:
            for weight in step.network.parameters():
                shards.own_part(weight.grad).fill_(torch.inf)
        unscale(optimizer)

    step.scaler.unscale_ = of_rank_1  # type: ignore[method-assign]
    figures = train(step, config, ranks.rank, WORLD, patches(config.global_batch))
    return {"figures": figures, "scale": step.scaler.get_scale()}


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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "reduce_scatter_single", counted)
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


def run(tmp_path: Path, tasks: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """Both ranks' results of each task."""
    code = f"from tests.training.step.test_shards import *\non_one_of_two({tasks!r})"
    with started_ranks(Path("none"), tmp_path, WORLD, program=("-c", code)) as ranks:
        assert ends_of(ranks, 120) == [0] * WORLD, output_of(tmp_path, WORLD)
    return {
        task: [torch.load(tmp_path / f"{task}.{rank}.pt", weights_only=True) for rank in range(WORLD)] for task in tasks
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of all tasks, which share two processes."""
    folder = tmp_path_factory.mktemp("shards")
    torch.save(alone("adamw")[0], folder / "before adamw.pt")
    return run(
        folder,
        {
            "trained adamw": {},
            "trained muon": {"optimizer": "muon"},
            "handed_over adamw": {},
            "overflowed": {"amp": "fp16"},
            "kept": {},
            "collectives": {},
            "denoised": {},  # the last: no rank can be called behind it
        },
    )


def one_rank_config(optimizer: str) -> Any:
    return make_config(**settings(optimizer=optimizer) | {"ranks": 1, "accumulate_steps": 4})


@functools.cache
def alone(optimizer: str) -> tuple[Any, list[tuple[float, float, bool]]]:
    """State and figures of one rank that has trained on the same samples."""
    config = one_rank_config(optimizer)
    step = make_step(config)
    figures = train(step, config, 0, 1, patches(config.global_batch))
    return plain(step.state_dict()), figures


def step_with(state: Any, optimizer: str) -> TrainStep:
    step = make_step(one_rank_config(optimizer))
    step.load_state_dict(plain(state))
    return step


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_ranks_with_half_of_the_weights_each_train_as_one_with_all(
    results: dict[str, list[Any]], optimizer: str
) -> None:
    both = results[f"trained {optimizer}"]
    state, figures = alone(optimizer)
    count = sum(weight.numel() for weight in state["model"].values())
    assert sum(result["held"] for result in both) == count
    assert max(result["held"] for result in both) < 0.7 * count
    assert all(map(torch.equal, both[0]["state"], both[1]["state"]))
    for result in both:
        assert np.array(result["figures"]) == pytest.approx(np.array(figures), rel=1e-5)
    for sharded, whole in zip(both[0]["state"], flat(state), strict=True):
        # Adam divides by the root of a second moment, which makes much of the rounding of a gradient near 0.
        torch.testing.assert_close(sharded, whole, rtol=0, atol=2e-4)


def check_handed_over(after: Any, optimizer: str) -> None:
    """As long again, and one rank alone all the time."""
    again, undisturbed = step_with(after, optimizer), step_with(alone(optimizer)[0], optimizer)
    config, x_0 = one_rank_config(optimizer), patches(4)
    figures = train(again, config, 0, 1, x_0)
    train(undisturbed, config, 0, 1, x_0)
    assert np.array(figures) == pytest.approx(np.array(train(undisturbed, config, 0, 1, x_0)), rel=1e-5)
    for one, other in zip(flat(again.state_dict()), flat(undisturbed.state_dict()), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4)


def test_a_run_whose_weights_are_sharded_for_a_while_trains_as_one_that_never_was(
    results: dict[str, list[Any]],
) -> None:
    check_handed_over(results["handed_over adamw"][0], "adamw")


@pytest.mark.long
def test_the_same_with_muon(tmp_path: Path) -> None:
    torch.save(alone("muon")[0], tmp_path / "before muon.pt")
    check_handed_over(run(tmp_path, {"handed_over muon": {"optimizer": "muon"}})["handed_over muon"][0], "muon")


def test_an_overflow_in_the_part_of_one_rank_is_one_for_all(results: dict[str, list[Any]]) -> None:
    one, other = results["overflowed"]
    assert one == other
    assert not any(applied for _, _, applied in one["figures"])
    assert one["scale"] == 2.0**14 / 2**STEPS


def test_lean_norm_keeps_no_gathered_kernel_between_forward_and_backward_pass(results: dict[str, list[Any]]) -> None:
    for kept_bytes, kernels in results["kept"]:
        assert kept_bytes == [0] * kernels


def test_gradients_travel_in_the_last_micro_batch_alone(results: dict[str, list[Any]]) -> None:
    for first, last in results["collectives"]:
        assert first == 0
        assert last > 5  # one a block


def test_rank_0_validates_with_the_weights_of_all(results: dict[str, list[Any]]) -> None:
    step = step_with(alone("adamw")[0], "adamw")
    expected = step.denoiser("ema")(patches(1), torch.tensor([300])).flatten().tolist()
    assert np.array(results["denoised"][0]) == pytest.approx(np.array(expected), abs=1e-3)


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
