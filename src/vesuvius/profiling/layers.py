"""One step layer by layer: time of the forward pass, operations, and bytes kept for the backward pass."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from vesuvius.diffusion.network.unet import Trunk
from vesuvius.training.step.device import synchronize


@dataclass(frozen=True)
class Layer:
    """A block of the network; of all micro-batches of a step."""

    name: str
    kind: str
    parameters: int
    # seconds, with a wait for the device at both ends, so that layers add up to more than an undisturbed pass
    forward_s: float
    flops: int  # of the forward pass; a multiply-add is 2.  Kernels of our own are not counted.
    saved_bytes: int  # kept for the backward pass, by the first block that does


def blocks(network: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a network by name; lists and the trunk are taken apart, so that none is within another."""
    found: dict[str, nn.Module] = {}
    for name, child in network.named_children():
        if isinstance(child, nn.ModuleList | Trunk):
            found |= {f"{name}.{inner}": module for inner, module in blocks(child).items()}
        elif not isinstance(child, nn.Identity):
            found[name] = child
    return found


class _Kept:
    """A tensor that is kept for the backward pass, while it is: what is freed may be followed by another one there."""

    def __init__(self, tensor: Tensor, keepers: Counter[int]) -> None:
        self.tensor = tensor.detach()  # else an output would keep itself
        self._place, self._keepers = tensor.untyped_storage().data_ptr(), keepers
        keepers[self._place] += 1

    def __del__(self) -> None:
        self._keepers[self._place] -= 1


class LayerWatch:
    """Watches a network while it is entered; it costs time.  Not for a compiled one.

    Enter it before a step and leave it after that.  A block that is computed again in the backward pass
    (`checkpoint_levels`) counts once.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self._network, self._device = network, device
        self._modules = blocks(network)
        self._seconds: dict[str, float] = defaultdict(float)
        self._saved: dict[str, int] = defaultdict(int)
        self._keepers: Counter[int] = Counter()  # of each storage, by its address
        self._counted: dict[str, int] = defaultdict(int)
        self._forward = False
        self._inside: tuple[str, float, int] | None = None
        self._flops = FlopCounterMode(display=False)
        self._held = ExitStack()

    def __enter__(self) -> LayerWatch:
        weights = (*self._network.parameters(), *self._network.buffers())
        self._keepers.update(tensor.untyped_storage().data_ptr() for tensor in weights)
        self._hook(self._network, lambda: setattr(self, "_forward", True), lambda: setattr(self, "_forward", False))
        for name, module in self._modules.items():
            self._hook(module, partial(self._begin, name), partial(self._end, name))
        self._held.enter_context(saved_tensors_hooks(self._pack, lambda kept: kept.tensor))
        self._held.enter_context(self._flops)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _hook(self, module: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._held.callback(module.register_forward_pre_hook(lambda *_: before()).remove)
        self._held.callback(module.register_forward_hook(lambda *_: after(), always_call=True).remove)

    def layers(self) -> list[Layer]:
        """Those that ran, in that order."""
        return [
            Layer(
                name,
                type(self._modules[name]).__name__,
                sum(parameter.numel() for parameter in self._modules[name].parameters()),
                seconds,
                self._counted[name],
                self._saved[name],
            )
            for name, seconds in self._seconds.items()
        ]

    def _begin(self, name: str) -> None:
        if self._forward:
            synchronize(self._device)
            self._inside = name, time.perf_counter(), self._flops.get_total_flops()

    def _end(self, name: str) -> None:
        if self._inside is not None and self._inside[0] == name:
            synchronize(self._device)
            _, began, flops = self._inside
            self._seconds[name] += time.perf_counter() - began
            self._counted[name] += self._flops.get_total_flops() - flops
        self._inside = None

    def _pack(self, tensor: Tensor) -> _Kept:
        """Count a storage once while it is kept, for the innermost module that keeps it."""
        storage = tensor.untyped_storage()
        if self._inside is not None and not self._keepers[storage.data_ptr()]:
            self._saved[self._inside[0]] += storage.nbytes()
        return _Kept(tensor, self._keepers)
