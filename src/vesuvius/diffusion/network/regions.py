"""Blocks of the network as compiled regions (`training.compile`): seconds instead of minutes for the full graph.

torch caches compiled code by source and shapes, so equal blocks with equal memory formats compile once.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vesuvius.errors import one_line

log = logging.getLogger(__name__)

# Distinct blocks of a network, times the sizes of micro-batches tried after running out of memory, or of batches in
# validations, previews and samples.  torch's limit of 8 is below the 15 blocks of the default network.
_MOST_VARIANTS = 256


def call_eager(block: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return block(*arguments)


def _call_inference(block: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return block(*arguments)


def _set_torch_up() -> None:
    """Change settings of torch, which newer versions keep for each thread."""
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


class CompiledRegions:
    """Runs blocks compiled: those of training steps, and with other code those without gradients.

    If compilation fails, warns once and continues eagerly; training stays compiled if only inference fails.
    `recompute_norm` has the same effect as in eager mode: torch's checkpoint tells the partitioner to keep only the
    input of each norm.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        _set_torch_up()
        self._failures = torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit
        # torch counts variants by function: shapes of inference must not use up those of training.
        self._compiled: dict[bool, Any] = {
            gradients: torch.compile(call, backend=backend, fullgraph=True, dynamic=False)
            for gradients, call in ((True, call_eager), (False, _call_inference))
        }
        self.failure = ""  # why blocks of training steps are no longer compiled

    def __call__(self, block: Callable[..., Tensor], *arguments: Any) -> Tensor:
        gradients = torch.is_grad_enabled()
        if compiled := self._compiled.get(gradients):
            if torch._dynamo.config.recompile_limit < _MOST_VARIANTS:
                _set_torch_up()
            try:
                out: Tensor = compiled(block, *arguments)
                return out
            except self._failures as error:
                reason, what = one_line(error, 300), "inference continues without it, slower"
                is_first = self._compiled.pop(gradients, None)  # of several threads
                if gradients:
                    self._compiled, self.failure = {}, reason
                    what = "training continues without it, slower; set training.compile=false to skip the attempt"
                if is_first:
                    log.warning("torch.compile failed: %s; %s", reason, what)
        return call_eager(block, *arguments)
