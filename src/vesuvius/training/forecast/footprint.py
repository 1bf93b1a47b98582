"""Watches a training step: the bytes that are alive, the bytes kept for backward, the floating-point operations.

Knows nothing of the step.  On real tensors these are measurements; under torch's FakeTensorMode, where tensors have a
shape and no memory, the same figures are predictions (`memory_plan.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten

# torch counts attention in CUDA's kernels only; the CPU's has the same first arguments and the same products.
_FLOPS: dict[Any, Callable[..., int]] = flop_registry | {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}
_NO_BACKWARD_PASS = -1


class Footprint(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Follows every operation while it is entered, those of the backward pass and of custom functions among them.

    Memory counts from the operation that made it until the last tensor, view or graph that holds it is gone; views of
    one storage count once.  What a kernel allocates for itself is not seen.

    Attributes:
        live_bytes: of all storages that were made since entering and are still held.
        history: `live_bytes` at `restart` and after each allocation since.
        flops: floating-point operations of matrix products and convolutions since `restart`; a multiply-add is 2.
        convolution_bytes: input and output of each convolution since `restart`.
        saved_bytes: kept for the backward pass by what ran under `saving` since `restart`, without parameters and
            their casts.
        saved_cast_bytes: kept there in casts of parameters to another dtype.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._cast_from: dict[int, int] = {}
        self.restart()

    def restart(self) -> None:
        """Count from here on; what is alive stays."""
        self.history, self.flops = [self.live_bytes], 0
        self.saved_bytes, self.saved_cast_bytes = 0, 0
        self.convolution_bytes: list[int] = []

    @contextmanager
    def saving(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Count what autograd keeps of the forward pass that runs here, each storage once.

        A backward pass may run here too: what checkpointed blocks save again in it does not count.
        """
        parameter_keys = {_key(parameter) for parameter in parameters}
        seen = set(parameter_keys)

        def pack(tensor: Tensor) -> Tensor:
            key = _key(tensor)
            if torch._C._current_graph_task_id() == _NO_BACKWARD_PASS and key not in seen:
                seen.add(key)
                if self._cast_from.get(key) in parameter_keys:
                    self.saved_cast_bytes += tensor.untyped_storage().nbytes()
                else:
                    self.saved_bytes += tensor.untyped_storage().nbytes()
            return tensor.detach()  # the tensor itself would hold the graph that holds it

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:  # two of three calls, by each look at where a fake tensor lies
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._follow(leaf)
        match func._overloadpacket:
            case _aten._to_copy:
                self._cast_from[_key(out)] = _key(args[0])
            case _aten.convolution:
                self.convolution_bytes.append(args[0].nbytes + out.nbytes)
        if count := _FLOPS.get(func._overloadpacket):
            self.flops += count(*args, **kwargs, out_val=out)
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._live:
            return
        storage_bytes = storage.nbytes()

        def freed(_: object) -> None:
            del self._live[key]
            self._cast_from.pop(key, None)
            self.live_bytes -= storage_bytes

        # A storage keeps one Python object for as long as anything in C++ holds it: its end is the memory's end.
        self._live[key] = weakref.ref(storage, freed)
        self.live_bytes += storage_bytes
        self.history.append(self.live_bytes)


def _key(tensor: Tensor) -> int:
    """What is equal for tensors that share memory, fake ones too, whose data pointers are all 0."""
    key: int = tensor.untyped_storage()._cdata
    return key
