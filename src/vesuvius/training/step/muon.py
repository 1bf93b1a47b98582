"""Muon: kernels step by orthogonalized momentum, all of them at once and shared by the ranks.

A kernel is the matrix X that it is, output channels by inputs, or U S V^T.  Its step is U p(S) V^T, where p brings
singular values above 0.0016 of the norm to 0.68 ... 1.2: a quintic (Jordan et al. 2024) applied five times.  Each time
is a product with a polynomial of X X^T, so only that square of the shorter side is iterated, to P with
P X = U p(S) V^T: of a 128 x 3456 kernel in about a quarter of the operations, and between ranks only P travels.

What costs time is launches, of 57 kernels in the full model.  So kernels of equal shape are a stack in one buffer of
all, and their squares a stack with all of the same side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vesuvius.training.ranks.ranks import SINGLE, Ranks

_MOMENTUM = 0.95
_ITERATIONS, _COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7
_PADDING = 0.02  # small squares join those of the next larger side where that adds at most this share of all work


class Muon(torch.optim.AdamW):
    """Fused AdamW whose groups with `orthogonal: True` step by orthogonalized momentum (Nesterov's).

    Such a step is scaled to the size of AdamW's: one learning rate and one weight decay serve both.  Where the flag
    `found_inf` is set, a step changes nothing.  Sources: Jordan et al. 2024; Liu et al. 2025 for the scale.

    Args:
        ranks: they share the iteration; gradients and weights are the same on all.
    """

    def __init__(self, groups: list[dict[str, Any]], ranks: Ranks = SINGLE, **options: Any) -> None:
        super().__init__(groups, **options)
        self._ranks = ranks
        self._stacks: dict[int, _Stacks] = {}  # by the number of their group

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update.  Takes no closure: kernels would step before it.  Raises RankError."""
        assert closure is None
        groups = self.param_groups
        try:
            for number, group in enumerate(groups):
                if group["orthogonal"] and group["params"]:
                    self._step_orthogonally(number, group)
            self.param_groups = [group for group in groups if not group["orthogonal"]]  # AdamW steps all that it sees
            super().step()
        finally:
            self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._stacks.clear()

    @torch.no_grad()
    def _step_orthogonally(self, number: int, group: dict[str, Any]) -> None:
        if number not in self._stacks:
            self._stacks[number] = _Stacks(group["params"], self.state)
        stacks, found_inf = self._stacks[number], getattr(self, "found_inf", None)
        kernels, momentum = stacks.kernels, stacks.momentum
        applied = torch.ones((), device=momentum.device) if found_inf is None else 1 - found_inf
        matrices = torch.empty_like(momentum)
        torch._foreach_copy_(stacks.parts(matrices), [kernel.grad for kernel in kernels])  # type: ignore[misc]
        torch.where(applied > 0, matrices, momentum, out=matrices)  # which then stays as it is; of NaN no multiple is 0
        momentum.lerp_(matrices, 1 - _MOMENTUM)
        matrices.lerp_(momentum, _MOMENTUM)
        norms = torch.stack(torch._foreach_norm(stacks.parts(matrices))) + _LEAST_NORM
        size = applied * group["lr"]
        directions = self._orthogonalized(stacks.by_side, matrices, norms, stacks.scales * size / norms)
        stacks.steps.add_(applied)
        torch._foreach_mul_(kernels, 1 - size * group["weight_decay"])
        torch._foreach_sub_(kernels, stacks.parts(directions))

    def _orthogonalized(self, sides: Sequence[_Side], matrices: Tensor, norms: Tensor, scales: Tensor) -> Tensor:
        """U p(S) V^T of all matrices times `scales`, of which each has been divided by its norm; each rank iterates a
        part of them.

        On a GPU the two products with X take TF32: as quick as bf16 with its casts, and an eighth of its rounding.  The
        iteration wants all of float32: a square holds the squares of singular values, and what rounding does to small
        ones grows twelvefold each time.
        """
        directions, squared_norms, ranks = torch.empty_like(matrices), norms.square()[:, None, None], self._ranks
        before, coarse = torch.get_float32_matmul_precision(), "high" if matrices.is_cuda else "highest"
        try:
            for part in sides:
                each = -(-part.size // ranks.world)
                own = range(min(ranks.rank * each, part.size), min((ranks.rank + 1) * each, part.size))
                squares = matrices.new_zeros(each, part.side, part.side)
                torch.set_float32_matmul_precision(coarse)
                _write_squares(part, own, matrices, squares)
                torch.set_float32_matmul_precision("highest")
                squares[: len(own)].div_(squared_norms[part.first + own.start : part.first + own.stop])
                factors = polynomial_of(squares)
                if ranks.world > 1:
                    mine, factors = factors, factors.new_zeros(ranks.world * each, part.side, part.side)
                    factors[ranks.rank * each : (ranks.rank + 1) * each] = mine
                    work: dist.Work = dist.all_reduce(factors, async_op=True)  # exact: all others add zeros
                    ranks.wait_for(work)
                factors = factors[: part.size] * scales[part.first : part.first + part.size, None, None]
                torch.set_float32_matmul_precision(coarse)
                _write_products(part, factors, matrices, directions)
        finally:
            torch.set_float32_matmul_precision(before)
        return directions


class _Shape(NamedTuple):
    """Kernels of equal shape, which lie one after another in a buffer of all."""

    first: int  # place of the first element
    size: int  # how many
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:
        """[size, rows, columns], a view."""
        return flat[self.first : self.first + self.size * self.rows * self.columns].view(self[1:])


class _Side(NamedTuple):
    """Kernels whose squares are iterated together, with zeros up to a common side."""

    side: int
    first: int  # number of the first kernel
    shapes: list[_Shape]

    @property
    def size(self) -> int:
        """How many."""
        return sum(shape.size for shape in self.shapes)


class _Stacks:
    """Kernels in the order of the sides and shapes of their matrices, and one buffer with the momenta of all.

    A kernel's part of a buffer is in its own memory order, so columns of a channels-last one come in another order than
    those of a contiguous one.
    """

    def __init__(self, kernels: Sequence[Tensor], state: Mapping[Any, dict[str, Any]]) -> None:
        sides = common_sides([_short(kernel) for kernel in kernels])
        key = {kernel: (sides[_short(kernel)], len(kernel), kernel[0].numel()) for kernel in kernels}
        self.kernels = sorted(kernels, key=key.__getitem__)
        self.momentum = self.kernels[0].new_zeros(sum(kernel.numel() for kernel in kernels))
        self.steps = self.momentum.new_zeros(len(kernels))  # AdamW looks for them where a state is loaded
        buffers = zip(self.parts(self.momentum), self.steps.unbind(), strict=True)
        for kernel, (momentum, step) in zip(self.kernels, buffers, strict=True):
            if of_kernel := state[kernel]:
                momentum.copy_(of_kernel["momentum"])
                step.copy_(of_kernel["step"])
            of_kernel |= {"momentum": momentum, "step": step}
        longest = [max(len(kernel), kernel[0].numel()) for kernel in self.kernels]
        self.scales = torch.tensor([0.2 * math.sqrt(side) for side in longest], device=self.momentum.device)
        self.by_side: list[_Side] = []
        first, place = 0, 0
        for side, of_side in groupby(self.kernels, lambda kernel: key[kernel][0]):
            self.by_side.append(_Side(side, first, []))
            for (_, rows, columns), alike in groupby(of_side, key.__getitem__):
                shape = _Shape(place, len(list(alike)), rows, columns)
                self.by_side[-1].shapes.append(shape)
                first, place = first + shape.size, place + shape.size * rows * columns

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Views of a buffer, each with the shape and memory order of its kernel."""
        sizes = [kernel.numel() for kernel in self.kernels]
        return [
            part.as_strided(kernel.shape, kernel.stride())
            for part, kernel in zip(torch.split(flat, sizes), self.kernels, strict=True)
        ]


def _short(kernel: Tensor) -> int:
    return min(len(kernel), kernel[0].numel())


def common_sides(sides: Sequence[int]) -> dict[int, int]:
    """The side up to which a square of each side gets zeros, which change nothing.  Pure."""
    found, joined, work = {}, [], sum(side**3 for side in sides)
    distinct = sorted(set(sides))
    for side, larger in zip(distinct, [*distinct[1:], math.inf], strict=True):
        joined.append(side)
        if sum(sides.count(one) for one in joined) * larger**3 > _PADDING * work:
            found.update(dict.fromkeys(joined, side))
            joined = []
    return found


def _write_squares(part: _Side, own: range, matrices: Tensor, squares: Tensor) -> None:
    """Write X X^T, of the shorter side, of the matrices with these numbers in `part`."""
    number = 0
    for shape in part.shapes:
        low, high = max(own.start - number, 0), min(own.stop - number, shape.size)
        if low < high:
            x = shape.of(matrices)[low:high]
            x = x if shape.rows <= shape.columns else x.mT
            place, side = number + low - own.start, x.shape[1]
            torch.bmm(x, x.mT, out=squares[place : place + high - low, :side, :side])
        number += shape.size


def _write_products(part: _Side, factors: Tensor, matrices: Tensor, products: Tensor) -> None:
    """Write factor times matrix, on the shorter side, for all of `part`."""
    number = 0
    for shape in part.shapes:
        x, out = shape.of(matrices), shape.of(products)
        side = min(shape.rows, shape.columns)
        factor = factors[number : number + shape.size, :side, :side]
        torch.bmm(*((factor, x) if shape.rows <= shape.columns else (x, factor)), out=out)
        number += shape.size


def polynomial_of(squares: Tensor) -> Tensor:
    """P of matrices X of norm 1 from X X^T: P X is X with singular values of about 1.  Pure.

    Args:
        squares: float32 [K, M, M].
    """
    a, b, c = _COEFFICIENTS
    product = torch.empty(0)
    for iteration in range(_ITERATIONS):
        # The factor is a I + step; I apart spares a launch.
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
