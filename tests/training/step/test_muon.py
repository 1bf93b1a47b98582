"""Muon: its steps are orthogonal, as torch's own are, and one that is not to be applied leaves all as it was."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vesuvius.training.step.optimizer import Muon, orthogonalized

LR, DECAY = 0.02, 0.1


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("shape", [(16, 200), (200, 16), (32, 32), (1, 40)])
def test_singular_values_become_about_1_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    """Values from 1 down to 0.01: a step that only scaled the momentum would keep their ratio."""
    rows, columns = shape
    rank = min(shape)
    left, _ = torch.linalg.qr(torch.randn(rows, rank, generator=generator()))
    right, _ = torch.linalg.qr(torch.randn(columns, rank, generator=generator()))
    values = torch.logspace(0, -2, rank)
    found = orthogonalized(7 * left @ torch.diag(values) @ right.T)
    inside = left.T @ found @ right
    assert torch.allclose(inside, torch.diag(inside.diagonal()), atol=2e-3)
    assert torch.allclose(found, left @ inside @ right.T, atol=2e-3)
    assert inside.diagonal().min() > 0.65
    assert inside.diagonal().max() < 1.25


def test_steps_of_a_kernel_are_those_of_torchs_muon_on_its_matrix() -> None:
    """To a percent, as torch iterates in bf16.  Gradients change direction, or any momentum would do."""
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


def test_weights_without_orthogonal_steps_are_adamws() -> None:
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
