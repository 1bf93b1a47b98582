"""Muon: orthogonal steps equal to torch's, and no change if a step is not applied."""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import fork_server
from vesuvius.config.load import read_config
from vesuvius.diffusion.network.unet import UNet
from vesuvius.training.ranks.ranks import SINGLE, Ranks
from vesuvius.training.step.muon import Muon, common_sides
from vesuvius.training.step.optimizer import make_optimizer
from vesuvius.training.step.setup import execution

LR, DECAY = 0.02, 0.1


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# Two of a shape, one taller than wide, and one whose square of 6 gets zeros up to 8.
SHAPES = [(16, 6, 3, 3, 3), (8, 2, 3, 3, 3), (16, 6, 3, 3, 3), (64, 32, 1, 1, 1), (32, 2, 3, 3, 3), (6, 40, 1, 1, 1)]


def drawn(number: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(number)
    return [torch.from_numpy(rng.standard_normal(shape)).float() * (1 + place) for place, shape in enumerate(SHAPES)]


def one_by_one(matrix: torch.Tensor) -> torch.Tensor:
    """Jordan et al. 2024, on the full matrix."""
    if matrix.shape[0] > matrix.shape[1]:
        return one_by_one(matrix.T).T
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def trained(steps: int, ranks: Ranks = SINGLE, last: bool = False) -> list[torch.Tensor]:
    order = torch.channels_last_3d if last else torch.contiguous_format
    kernels = [torch.nn.Parameter(values.contiguous(memory_format=order)) for values in drawn(0)]
    optimizer = Muon([{"params": kernels, "weight_decay": DECAY, "orthogonal": True}], ranks, lr=LR, fused=True)
    for number in range(steps):
        for kernel, gradient in zip(kernels, drawn(1 + number), strict=True):
            kernel.grad = gradient.contiguous(memory_format=order)
        optimizer.step()
        if number == 1:  # the momenta go on where they are loaded
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return [kernel.detach() for kernel in kernels]


@pytest.mark.parametrize("last", [False, True])
def test_stacked_kernels_step_like_separate_ones(last: bool) -> None:
    """A rounding error of 2^-24, times 485 for the smallest singular values: 3e-5."""
    momenta = [torch.zeros(shape) for shape in SHAPES]
    expected = drawn(0)
    for number in range(4):
        for kernel, momentum, gradient in zip(expected, momenta, drawn(1 + number), strict=True):
            momentum.lerp_(gradient, 0.05)
            direction = one_by_one(gradient.lerp(momentum, 0.95).flatten(1))
            kernel.mul_(1 - LR * DECAY).sub_(direction.view(kernel.shape) * 0.2 * math.sqrt(max(direction.shape)) * LR)
    for start, found, kernel in zip(drawn(0), trained(4, last=last), expected, strict=True):
        assert (found - kernel).norm() < 1e-4 * (kernel - start).norm(), tuple(kernel.shape)


def test_ranks_share_the_work_and_hold_the_same_weights(tmp_path: Path) -> None:
    """Each side has two kernels: the third rank has none."""
    world = 3
    processes = [
        fork_server.Popen([sys.executable, __file__, str(rank), str(world), str(tmp_path)]) for rank in range(world)
    ]
    assert [process.wait(240) for process in processes] == [0] * world
    alone, *of_ranks = (trained(3), *(torch.load(tmp_path / f"{rank}.pt") for rank in range(world)))
    for kernels in of_ranks:
        for kernel, first, expected in zip(kernels, of_ranks[0], alone, strict=True):
            assert torch.equal(kernel, first)
            torch.testing.assert_close(kernel, expected, rtol=1e-5, atol=1e-6)  # products of other sizes


def as_rank(rank: int, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    torch.save(trained(3, Ranks(rank, world)), directory / f"{rank}.pt")
    dist.destroy_process_group()


class Launches(TorchDispatchMode):
    """Counts computing operations, each of which launches at least one kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name() and func is not torch.ops.prim.device.default:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.long
def test_a_step_of_the_full_model_takes_at_most_150_launches() -> None:
    """Stepping each of the 57 kernels separately takes 3,600."""
    config = read_config(Path(__file__).parents[3] / "configs/exp001_full.yaml")
    with FakeTensorMode():
        network = UNet(config.model, config.input_channels, execution(config.training))
        for weight in network.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer = make_optimizer(network, config.training)
        optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        optimizer.step()
        with Launches() as launches:
            optimizer.step()
    assert launches.names.count("aten::bmm.out") == 48, "two for each of its 24 shapes"
    assert len(launches.names) <= 150, Counter(launches.names)


def test_small_squares_are_padded_to_larger_ones_if_cheap() -> None:
    assert common_sides([54, 64, 64, 128, 256, *[512] * 3]) == {54: 128, 64: 128, 128: 128, 256: 256, 512: 512}
    assert common_sides([16, 16, 32]) == {16: 16, 32: 32}


def test_kernel_steps_equal_torchs_muon_on_its_matrix() -> None:
    """To a percent, as torch iterates in bf16.  Gradients change direction, so that the momentum matters."""
    random = generator()
    start = torch.randn(16, 6, 3, 3, 3, generator=generator())
    kernel, matrix = start.clone().requires_grad_(), start.flatten(1).clone().requires_grad_()
    ours = Muon([{"params": [kernel], "weight_decay": DECAY, "orthogonal": True}], lr=LR, fused=True)
    theirs = torch.optim.Muon([matrix], lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for number in range(4):
        gradient = torch.randn(start.shape, generator=random) * (1 + number)
        kernel.grad, matrix.grad = gradient, gradient.flatten(1)
        ours.step()
        theirs.step()
    moved = (matrix - start.flatten(1)).detach()
    assert (kernel.flatten(1) - matrix).norm() < 0.013 * moved.norm()
    assert moved.norm() > 0.1 * math.sqrt(moved.numel()) * LR


def made(values: torch.Tensor) -> tuple[list[torch.nn.Parameter], Muon]:
    kernel, bias = torch.nn.Parameter(values.clone()), torch.nn.Parameter(torch.ones(5))
    groups = [
        {"params": [kernel], "weight_decay": DECAY, "orthogonal": True},
        {"params": [bias], "weight_decay": 0.0, "orthogonal": False},
    ]
    return [kernel, bias], Muon(groups, lr=LR, fused=True)


def give_gradients(parameters: list[torch.nn.Parameter], number: int) -> None:
    rng = np.random.default_rng(number)
    for parameter in parameters:
        parameter.grad = torch.from_numpy(rng.standard_normal(parameter.shape)).float()


def test_other_weights_step_like_adamw() -> None:
    (parameters, optimizer), alone = made(torch.zeros(8, 2, 3, 3, 3)), torch.nn.Parameter(torch.ones(5))
    adamw = torch.optim.AdamW([alone], lr=LR, weight_decay=0.0, fused=True)
    for number in range(3):
        give_gradients(parameters, number)
        assert parameters[1].grad is not None
        alone.grad = parameters[1].grad.clone()
        optimizer.step()
        adamw.step()
    assert torch.equal(parameters[1], alone)
    assert set(optimizer.state[parameters[0]]) == {"momentum", "step"}
    assert len(optimizer.param_groups) == 2


if __name__ == "__main__":
    as_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
