"""Blocks of the network as compiled regions (`training.compile`), in seconds; the whole graph would take minutes.

torch keeps what it compiled by code and shapes, so blocks that are equal, in equal order of memory, compile once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vesuvius.errors import one_line

log = logging.getLogger(__name__)

# Different blocks of a network, again for each micro-batch that it is cut to out of memory.  torch's own limit of 8 is
# below the default network's 15.
_MOST_VARIANTS = 256


def call_eager(block: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Call a block, or a function of one."""
    out: Tensor = block(*arguments)
    return out


class CompiledRegions:
    """Calls blocks compiled if a gradient is needed, and eagerly otherwise: sampling and validation have other shapes.

    If compilation fails, it warns once and continues eagerly.

    The norms that `recompute_norm` computes again are computed again here too: torch's checkpoint marks them for the
    partitioner, which keeps their input alone.

    Args:
        backend: of `torch.compile`.

    Attributes:
        failure: Why blocks are no longer compiled; '' as long as they are.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        import torch._dynamo.config
        import torch._functorch.config
        import torch._inductor.config

        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
        # Backward passes compile with their forward pass, where a failure leaves no half of a gradient behind.
        torch._functorch.config.force_non_lazy_backward_lowering = True
        # Inductor takes channels last for the best order of 2D convolutions and contiguous for that of all others,
        # whose inputs and weights it then copies.  Without, it keeps the order that they have.
        torch._inductor.config.layout_optimization = False
        self._failures = torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit
        self._compiled: Any = torch.compile(call_eager, backend=backend, fullgraph=True, dynamic=False)
        self.failure = ""

    def __call__(self, block: Callable[..., Tensor], *arguments: Any) -> Tensor:
        if not self.failure and torch.is_grad_enabled():
            try:
                out: Tensor = self._compiled(block, *arguments)
                return out
            except self._failures as error:
                self._compiled, self.failure = None, one_line(error, 300)
                log.warning(
                    "torch.compile failed: %s; training goes on without it, in slower steps; training.compile=false "
                    "does not try it",
                    self.failure,
                )
        return call_eager(block, *arguments)
