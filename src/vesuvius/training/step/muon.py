"""Muon for kernels, AdamW for all other weights: the optimizer behind `training.optimizer: muon`.

AdamW scales each number of a gradient by itself.  Muon takes a kernel for the matrix that it is, output channels by
inputs, and steps by the momentum with all its singular values made about 1: directions that rarely come up in the
gradient are learned as fast as others.  It keeps one moment of a kernel instead of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_MOMENTUM = 0.95
_ITERATIONS, _COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


class Muon(torch.optim.AdamW):
    """Fused AdamW whose groups with `orthogonal: True` step by `orthogonalized` momentum (Nesterov's).

    Such a step is scaled to the size of AdamW's: one learning rate and one weight decay serve both.  Where the flag
    `found_inf` is set, a step changes nothing.  Sources: Jordan et al. 2024; Liu et al. 2025 for the scale.
    """

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update.  Takes no closure: kernels would step before it."""
        assert closure is None
        groups = self.param_groups
        with _full_float32():
            for group in groups:
                if group["orthogonal"]:
                    self._step_orthogonally(group)
        self.param_groups = [group for group in groups if not group["orthogonal"]]  # AdamW steps all that it sees
        try:
            super().step()
        finally:
            self.param_groups = groups

    @torch.no_grad()
    def _step_orthogonally(self, group: dict[str, Any]) -> None:
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for kernel in group["params"]:
            if kernel.grad is None:
                continue
            state = self.state[kernel]
            if not state:
                state["momentum"] = torch.zeros_like(kernel)
                state["step"] = torch.zeros((), device=kernel.device)  # AdamW looks for it where a state is loaded
            momentum = state["momentum"]
            applied = torch.ones((), device=kernel.device) if found_inf is None else 1 - found_inf
            gradient = torch.where(applied > 0, kernel.grad, 0.0)  # of NaN no multiple is 0
            state["step"] += applied
            momentum.lerp_(gradient, (1 - _MOMENTUM) * applied)
            direction = orthogonalized(gradient.lerp(momentum, _MOMENTUM).flatten(1))
            size = applied * group["lr"]
            kernel.mul_(1 - size * group["weight_decay"])
            kernel.sub_(direction.reshape(kernel.shape) * (0.2 * math.sqrt(max(direction.shape)) * size))


@contextmanager
def _full_float32() -> Iterator[None]:
    """Matrix products without TF32, whose 10 bits would lose the small singular values in the square."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def orthogonalized(matrix: Tensor) -> Tensor:
    """U p(S) V^T of the matrix U S V^T, where p brings singular values above 0.0016 of the norm to 0.68 ... 1.2.

    p is a quintic (Jordan et al. 2024) applied five times.  Each time is a product with a polynomial of the square
    matrix of the shorter side, so only that is iterated: of a 128 x 3456 kernel in about a quarter of the time.  It
    wants all of float32, as the square holds the squares of the singular values.  Pure.

    Args:
        matrix: float32 [M, N].
    """
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalized(matrix.T).T
    a, b, c = _COEFFICIENTS
    matrix = matrix / (matrix.norm() + _LEAST_NORM)
    square = matrix @ matrix.T
    product = torch.eye(len(matrix), device=matrix.device, dtype=matrix.dtype)
    for _ in range(_ITERATIONS):
        factor = b * square + c * square @ square
        factor.diagonal().add_(a)
        product = factor @ product
        square = factor @ square @ factor
    return product @ matrix
