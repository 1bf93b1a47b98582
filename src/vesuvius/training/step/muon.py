"""Muon: orthogonalized-momentum updates of all kernels at once, shared by the ranks.

A kernel is a matrix X = U S V^T of output channels by inputs.  Its update is U p(S) V^T, where p maps singular values
above 0.0016 of the norm to 0.68 ... 1.2: a quintic (Jordan et al. 2024) applied five times.  Each application
multiplies by a polynomial of X X^T, so only this square of the shorter side is iterated, to P with P X = U p(S) V^T.
This takes about a quarter of the operations for a 128 x 3456 kernel, and ranks exchange only P.

Kernel launches dominate the cost (57 kernels in the full model), so kernels of equal shape are stacked in one shared
buffer, and their squares are stacked with all others of the same side.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from vesuvius.training.ranks.ranks import SINGLE, Ranks

_MOMENTUM = 0.95
_ITERATIONS, _COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7
_PADDING = 0.02  # pad small squares to the next larger side if that adds at most this share of the work


class Muon(torch.optim.AdamW):
    """Fused AdamW whose groups with `orthogonal: True` step by orthogonalized Nesterov momentum.

    The update is scaled to the size of AdamW's, so one learning rate and one weight decay serve both.  A step with the
    flag `found_inf` set changes nothing.  `ranks`, with equal gradients and weights, share the iteration.  Sources:
    Jordan et al. 2024; Liu et al. 2025 for the scale.
    """

    def __init__(self, groups: list[dict[str, Any]], ranks: Ranks = SINGLE, **options: Any) -> None:
        super().__init__(groups, **options)
        self._ranks = ranks
        self._stacks: dict[int, _Stacks] = {}  # by group index

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update once.  Takes no closure, because kernels would step before it runs.  Raises RankError."""
        assert closure is None
        groups = self.param_groups
        try:
            for index, group in enumerate(groups):
                if group["orthogonal"] and group["params"]:
                    self._step_orthogonally(index, group)
            self.param_groups = [group for group in groups if not group["orthogonal"]]  # AdamW steps these
            super().step()
        finally:
            self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._stacks.clear()

    @torch.no_grad()
    def _step_orthogonally(self, index: int, group: dict[str, Any]) -> None:
        if index not in self._stacks:
            self._stacks[index] = _Stacks(group["params"], self.state)
        stacks, found_inf = self._stacks[index], getattr(self, "found_inf", None)
        kernels, momentum = stacks.kernels, stacks.momentum
        applied = torch.ones((), device=momentum.device) if found_inf is None else 1 - found_inf
        matrices = torch.empty_like(momentum)
        torch._foreach_copy_(stacks.parts(matrices), [kernel.grad for kernel in kernels])  # type: ignore[misc]
        torch.where(applied > 0, matrices, momentum, out=matrices)  # keeps the momentum; multiplying NaN by 0 would not
        momentum.lerp_(matrices, 1 - _MOMENTUM)
        matrices.lerp_(momentum, _MOMENTUM)
        norms = torch.stack(torch._foreach_norm(stacks.parts(matrices))) + _LEAST_NORM
        size = applied * group["lr"]
        directions = self._orthogonalized(stacks, matrices, norms, stacks.scales * size / norms)
        stacks.steps.add_(applied)
        torch._foreach_mul_(kernels, 1 - size * group["weight_decay"])
        torch._foreach_sub_(kernels, stacks.parts(directions))

    def _orthogonalized(self, stacks: "_Stacks", matrices: Tensor, norms: Tensor, scales: Tensor) -> Tensor:
        """U p(S) V^T of all matrices times `scales`, which include 1 / norm; rank r of W iterates every Wth.

        On a GPU the two products with X use TF32: as fast as bf16 with its casts, at an eighth of its rounding error.
        The iteration needs full float32: a square holds squared singular values, and rounding errors of small ones grow
        twelvefold per iteration.
        """
        rank, world, squared_norms = self._ranks.rank, self._ranks.world, norms.square()[:, None, None]
        directions = torch.empty_like(matrices)
        sources, targets = stacks.by_shape(matrices), stacks.by_shape(directions)
        before, coarse = torch.get_float32_matmul_precision(), "high" if matrices.is_cuda else "highest"
        first = 0
        try:
            for side, shapes in stacks.sides:
                xs, outs = sources[shapes], targets[shapes]
                sizes = [len(x) for x in xs]
                kernels, count = slice(first, first + sum(sizes)), sum(sizes)
                first += count
                squares = matrices.new_zeros(len(range(rank, count, world)), side, side)
                torch.set_float32_matmul_precision(coarse)
                _write_squares(xs, squares, rank, world)
                torch.set_float32_matmul_precision("highest")
                factors = polynomial_of(squares.div_(squared_norms[kernels][rank::world]))
                if world > 1:
                    mine, factors = factors, factors.new_zeros(count, side, side)
                    factors[rank::world] = mine
                    self._ranks.sum(factors)  # exact: the other ranks add zeros
                torch.set_float32_matmul_precision(coarse)
                scaled = torch.split(factors * scales[kernels, None, None], sizes)
                for x, out, factor in zip(xs, outs, scaled, strict=True):
                    factor = factor[:, : min(x.shape[1:]), : min(x.shape[1:])]
                    torch.bmm(*((factor, x) if x.shape[1] <= x.shape[2] else (x, factor)), out=out)
        finally:
            torch.set_float32_matmul_precision(before)
        return directions


class _Stacks:
    """Kernels sorted by side and shape of their matrices, and one buffer with all momenta, in the kernels' layout."""

    def __init__(self, kernels: Sequence[Tensor], state: Mapping[Any, dict[str, Any]]) -> None:
        padded = common_sides([_short(kernel) for kernel in kernels])
        key = {kernel: (padded[_short(kernel)], len(kernel), kernel[0].numel()) for kernel in kernels}
        self.kernels = sorted(kernels, key=key.__getitem__)
        self.momentum = self.kernels[0].new_zeros(sum(kernel.numel() for kernel in kernels))
        self.steps = self.momentum.new_zeros(len(kernels))  # AdamW expects them in a loaded state
        buffers = zip(self.parts(self.momentum), self.steps.unbind(), strict=True)
        for kernel, (momentum, step) in zip(self.kernels, buffers, strict=True):
            if of_kernel := state[kernel]:
                momentum.copy_(of_kernel["momentum"])
                step.copy_(of_kernel["step"])
            of_kernel |= {"momentum": momentum, "step": step}
        longest = [max(len(kernel), kernel[0].numel()) for kernel in self.kernels]
        self.scales = torch.tensor([0.2 * math.sqrt(side) for side in longest], device=self.momentum.device)
        shapes = [(shape, len(list(alike))) for shape, alike in groupby(self.kernels, key.__getitem__)]
        self._shapes = [(count, rows, columns) for (_, rows, columns), count in shapes]
        sides = [side for (side, _, _), _ in shapes]
        # Each side to which squares are padded, and the shapes that have it.
        self.sides = [(side, slice(sides.index(side), bisect_right(sides, side))) for side in dict.fromkeys(sides)]

    def by_shape(self, flat: Tensor) -> list[Tensor]:
        """Views of a buffer: the matrices of each shape, [kernels, rows, columns]."""
        parts = torch.split(flat, [math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Views of a buffer, each with the shape and memory layout of its kernel."""
        sizes = [kernel.numel() for kernel in self.kernels]
        return [
            part.as_strided(kernel.shape, kernel.stride())
            for part, kernel in zip(torch.split(flat, sizes), self.kernels, strict=True)
        ]


def _short(kernel: Tensor) -> int:
    return min(len(kernel), kernel[0].numel())


def common_sides(sides: Sequence[int]) -> dict[int, int]:
    """Side to which the square of each side is zero-padded, which does not change the result.  Pure."""
    padded, joined, work = {}, [], sum(side**3 for side in sides)
    distinct = sorted(set(sides))
    for side, larger in zip(distinct, [*distinct[1:], math.inf], strict=True):
        joined.append(side)
        if sum(sides.count(one) for one in joined) * larger**3 > _PADDING * work:
            padded.update(dict.fromkeys(joined, side))
            joined = []
    return padded


def _write_squares(stacks: Sequence[Tensor], squares: Tensor, rank: int, world: int) -> None:
    """Write X X^T, of the shorter side, of each `world`th of these matrices from the `rank`th on."""
    first = written = 0
    for stack in stacks:
        x = stack[(rank - first) % world :: world]
        x = x if x.shape[1] <= x.shape[2] else x.mT
        side = x.shape[1]
        torch.bmm(x, x.mT, out=squares[written : written + len(x), :side, :side])
        first, written = first + len(stack), written + len(x)


def polynomial_of(squares: Tensor) -> Tensor:
    """P of matrices X of norm 1, given X X^T, float32 [K, M, M]: P X is X with singular values close to 1.  Pure."""
    a, b, c = _COEFFICIENTS
    product = torch.empty(0)
    for iteration in range(_ITERATIONS):
        # The factor is a I + step; leaving I out saves a launch.
        step = torch.baddbmm(squares, squares, squares, beta=b, alpha=c)
        if iteration == 0:
            product = step.clone()
            product.diagonal(dim1=1, dim2=2).add_(a)
        else:
            product = torch.baddbmm(product, step, product, beta=a)
        if iteration < _ITERATIONS - 1:
            for _ in range(2):
                squares = torch.baddbmm(squares, step, squares, beta=a)
    return product
