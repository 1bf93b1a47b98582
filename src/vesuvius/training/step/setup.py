"""Device, kernels, autocast dtype and network of a step."""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import nn

from vesuvius.config import Config, TrainingConfig
from vesuvius.diffusion.network.regions import CompiledRegions
from vesuvius.diffusion.network.unet import Context, Execution, UNet, build_unet

AmpMode = Literal["off", "bf16", "fp16"]


def configure_kernels(device: torch.device, config: TrainingConfig) -> None:
    """Set which GPU kernels torch may choose.  Call it before anything runs on the device."""
    if device.type != "cuda":
        return
    torch.backends.cudnn.benchmark = config.cudnn_benchmark and not config.deterministic
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
        torch.use_deterministic_algorithms(True)


def parameter_count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def execution(config: TrainingConfig) -> Execution:
    """How the network is computed; `recompute_norm: auto`, if no plan has replaced it, recomputes."""
    return Execution(config.recompute_norm is not False, config.checkpoint_levels)


def build_network(config: Config, device: torch.device) -> UNet:
    """The network with the initial weights of `config.seed`, on `device`."""
    computed = execution(config.training)
    if is_compiled(config.training, device):
        computed = replace(computed, call=CompiledRegions())
    network = build_unet(config.model, config.seed, config.input_channels, device, computed, context_of(config))
    if uses_channels_last(config.training, device):
        network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # torch declares channels_last only
    return network


def build_meta_network(config: Config) -> UNet:
    """The network without memory for its weights (on the meta device), shared by all callers: do not change it."""
    return _meta_network(config.model, config.input_channels, execution(config.training), context_of(config))


@lru_cache(maxsize=4)  # a start and a dry run ask for it several times
def _meta_network(*arguments: Any) -> UNet:
    with torch.device("meta"):
        return UNet(*arguments)


def context_of(config: Config) -> Context | None:
    """Return the window around a patch that the network sees."""
    factor = config.data.context
    return Context(factor, len(config.data.class_values or (0,))) if factor else None


def resolve_amp(amp: Literal["auto", "off", "bf16", "fp16"], device: torch.device) -> AmpMode:
    """The autocast dtype for a device: auto = bf16 on Ampere and newer, fp16 on older GPUs, off on a CPU."""
    if amp != "auto":
        return amp
    if device.type != "cuda":
        return "off"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def uses_channels_last(config: TrainingConfig, device: torch.device) -> bool:
    """Whether weights and activations are channels last: auto = if 16-bit cuDNN kernels, which need it, are used."""
    if config.channels_last != "auto":
        return config.channels_last
    return device.type == "cuda" and resolve_amp(config.amp, device) != "off"


def is_compiled(config: TrainingConfig, device: torch.device) -> bool:
    """Whether blocks are compiled: auto = on a GPU, unless deterministic (compiled kernels are chosen by timing)."""
    if config.compile != "auto":
        return config.compile
    return device.type == "cuda" and not config.deterministic


def autocast(device: torch.device, amp: AmpMode) -> AbstractContextManager[Any]:
    """Autocast context for the network and nothing else."""
    if amp == "off":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if amp == "bf16" else torch.float16)
