"""Tensors of which each rank holds a part (`training.sharding: fsdp`), and how whole ones come and go.

Every function takes plain tensors, too, and then does nothing, so that a step is written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from vesuvius.diffusion.network.layers import Attention, ResidualBlock


def shard(network: nn.Module, group: Any) -> None:
    """Leave each rank of a process group its part of the weights, by FSDP2; gradients are summed, not averaged.

    Weights are gathered for one block at a time, and for all that is outside of blocks.  The network is on its device,
    with the same weights on all ranks; group None = all ranks.
    """
    device = next(network.parameters()).device
    everybody: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(group or everybody, device.type)
    for module in [one for one in network.modules() if is_gathered_alone(one)]:
        fully_shard(module, mesh=mesh)
    fully_shard(network, mesh=mesh, reshard_after_forward=True)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def is_gathered_alone(module: nn.Module) -> bool:
    """Whether the weights of this module are gathered together, and apart from all others."""
    return isinstance(module, ResidualBlock | Attention)


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor.  Shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which each rank has a part.  All ranks must call it, for their tensors in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(like: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor, sharded as another one of its shape is.  Nothing is sent: each rank has all of it."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def joined_like(like: Tensor, part: Tensor) -> Tensor:
    """The whole tensor of the parts that the ranks have, which lie as those of another one.  As `whole`, for all."""
    if not isinstance(like, DTensor):
        return part
    sharded = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return sharded.full_tensor()


def sharded_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """A stored state of an optimizer, whose moments become sharded as its weights are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        number: {
            name: sharded_like(parameters[number], value) if value.shape == parameters[number].shape else value
            for name, value in values.items()
        }
        for number, values in state["state"].items()
    }
    return {**state, "state": moments}


def gathered_bytes(network: nn.Module) -> int:
    """The most that whole weights take at a time: the largest block, the next one, and what is outside of blocks."""
    alone = sorted((_bytes(one.parameters()) for one in network.modules() if is_gathered_alone(one)), reverse=True)
    return _bytes(network.parameters()) - sum(alone) + sum(alone[:2])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
