"""Blocks of the network as compiled regions (`training.compile`): seconds instead of minutes for the full graph.

torch caches compiled code by source and shapes, so equal blocks with equal memory formats compile once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vesuvius.errors import one_line

log = logging.getLogger(__name__)

# Distinct blocks of a network, times the micro-batch sizes tried after running out of memory.  torch's limit of 8 is
# below the 15 blocks of the default network.
_MOST_VARIANTS = 256


def call_eager(block: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return block(*arguments)


class CompiledRegions:
    """Runs blocks compiled if a gradient is needed, else eagerly: sampling and validation have other shapes.

    If compilation fails, warns once and continues eagerly.  `recompute_norm` has the same effect as in eager mode:
    torch's checkpoint tells the partitioner to keep only the input of each norm.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        import torch._dynamo.config
        import torch._functorch.config
        import torch._inductor.config

        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
        # DDP would split blocks at the bounds of its buckets, for an overlap that the order of the blocks gives anyway.
        torch._dynamo.config.optimize_ddp = False
        # Compile backward passes together with their forward pass: a failure then leaves no partial gradients.
        torch._functorch.config.force_non_lazy_backward_lowering = True
        # Layout optimization makes inductor copy inputs and weights of 3D convolutions to contiguous order.
        torch._inductor.config.layout_optimization = False
        self._failures = torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit
        self._compiled: Any = torch.compile(call_eager, backend=backend, fullgraph=True, dynamic=False)
        self.failure = ""  # why blocks are no longer compiled

    def __call__(self, block: Callable[..., Tensor], *arguments: Any) -> Tensor:
        if not self.failure and torch.is_grad_enabled():
            try:
                out: Tensor = self._compiled(block, *arguments)
                return out
            except self._failures as error:
                self._compiled, self.failure = None, one_line(error, 300)
                log.warning(
                    "torch.compile failed: %s; training continues without it, with slower steps; set "
                    "training.compile=false to skip the attempt",
                    self.failure,
                )
        return call_eager(block, *arguments)
