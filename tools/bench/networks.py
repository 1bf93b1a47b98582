"""The networks that `model.py` compares, and the count of their parameters and saved bytes.

ours: `UNet`.  plain: the same without stem and full-resolution block, all its levels at full width from the first voxel
on.  monai: `DiffusionModelUNet(use_flash_attention=True)`.  diffusers:
`UNet3DConditionModel`, which is made for video: its convolutions are 1x3x3 and 3x1x1, it halves only y and x, and its
text input is one token of zeros.

The widths of peers are chosen for an equal number of parameters (`matched`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from vesuvius.config import Config, ModelConfig, Triple
from vesuvius.diffusion.network.unet import UNet
from vesuvius.training.step.setup import build_meta_network, build_network, execution

LARGEST_DEVIATION = 0.03  # relative difference of parameters that counts as equal
LAST_LEVEL_RANGE = 0.12  # share by which the last level may leave the proportions of the widths
ANY_PATCH = ModelConfig(channels=(4,), stem_stride=(1, 1, 1), full_res_channels=0, attention_heads=0)


@dataclass(frozen=True)
class Spec:
    """A network as plain data."""

    name: str  # name in the table
    kind: Literal["vesuvius", "monai", "diffusers"]
    channels: tuple[int, ...]  # width of each level, finest first
    # further fields of `ModelConfig`, or arguments of the peer's constructor
    architecture: dict[str, Any] = field(default_factory=dict)
    switches: dict[str, Any] = field(default_factory=dict)  # of `TrainingConfig`; peers: `channels_last` and `compile`
    steps: tuple[int, int] = (4, 4)  # the first width is a multiple of the first number, the last width of the second

    def with_channels(self, channels: tuple[int, ...]) -> Spec:
        """A copy with other widths; a full-resolution block of ours stays half as wide as the first level."""
        architecture = dict(self.architecture)
        if architecture.get("full_res_channels"):
            architecture["full_res_channels"] = channels[0] // 2
        return dataclasses.replace(self, channels=channels, architecture=architecture)

    def with_switches(self, name: str, **switches: Any) -> Spec:
        """A copy under another name, computed differently."""
        return dataclasses.replace(self, name=name, switches=self.switches | switches)


DEFAULT_MODEL = ModelConfig()
FULL_PATCH = (72, 136, 136)
FULL_OURS = Spec(
    "ours",
    "vesuvius",
    DEFAULT_MODEL.channels,
    {"full_res_channels": DEFAULT_MODEL.full_res_channels, "attention_heads": DEFAULT_MODEL.attention_heads},
)
FULL_PLAIN = Spec(
    "plain",
    "vesuvius",
    (64, 128, 256, 512),
    {"stem_stride": (1, 1, 1), "full_res_channels": 0, "attention_heads": DEFAULT_MODEL.attention_heads},
    steps=(8, 8),
)
MONAI_BLOCKS = {"num_head_channels": 32, "norm_num_groups": 32}  # both divide the widths
FULL_MONAI_BLOCKS = {"num_head_channels": 16, "norm_num_groups": 16}  # finer, for equal parameters within 3 %
# With 4 levels, attention sees 9x17x17 voxels of the default patch, as in ours; with 3, 18x34x34.
FULL_MONAI = {
    levels: Spec(
        f"monai, {levels} levels", "monai", channels, {"num_res_blocks": 2, **FULL_MONAI_BLOCKS}, steps=(32, 16)
    )
    for levels, channels in ((4, (64, 128, 256, 512)), (3, (128, 256, 512)))
}


# ---- building


def experiment(spec: Spec, patch_zyx: Triple, batch: int = 1, **training: Any) -> Config:
    """The config of a run of this network.  Peers get one that fits every patch.

    With cosine noise the network sees one channel, as the peers do.
    """
    model = ModelConfig(channels=spec.channels, **spec.architecture) if spec.kind == "vesuvius" else ANY_PATCH
    return Config.model_validate(
        {
            "name": "compare",
            "data": {
                "volumes": ({"path": "none"},),
                "patch_size": patch_zyx,
                "augment": {"rot90": patch_zyx[1] == patch_zyx[2]},
            },
            "training": {
                "train_batch_size": batch,
                "channels_last": False,
                "compile": False,
                **spec.switches,
                **training,
            },
            "diffusion": {"noise": "cosine"},
            "model": model,
        }
    )


def build(spec: Spec, config: Config, device: torch.device) -> nn.Module:
    """The network, called with x [B, 1, Z, Y, X] and t [B].  Raises ImportError if the peer is not installed.

    On the meta device it has no memory for its weights.
    """
    if spec.kind == "vesuvius":
        return build_meta_network(config) if device.type == "meta" else build_network(config, device)
    with device:
        network = Monai(spec) if spec.kind == "monai" else Diffusers(spec)
    if config.training.channels_last:
        network = network.to(memory_format=torch.channels_last_3d)
    return torch.compile(network, dynamic=False) if config.training.compile else network


class Monai(nn.Module):
    """MONAI's diffusion U-Net with attention at its lowest level."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        from monai.networks.nets import DiffusionModelUNet

        levels = len(spec.channels)
        self.network = DiffusionModelUNet(
            spatial_dims=3,
            in_channels=1,
            out_channels=1,
            channels=spec.channels,
            attention_levels=(False,) * (levels - 1) + (True,),
            use_flash_attention=True,
            **spec.architecture,
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = self.network(x, t)
        return out.float()


class Diffusers(nn.Module):
    """diffusers' video U-Net with attention at its lowest level (and, fixed, over z at the first)."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        from diffusers import UNet3DConditionModel

        convolutions = len(spec.channels) - 1
        self.network = UNet3DConditionModel(
            in_channels=1,
            out_channels=1,
            block_out_channels=spec.channels,
            down_block_types=("DownBlock3D",) * convolutions + ("CrossAttnDownBlock3D",),
            up_block_types=("CrossAttnUpBlock3D",) + ("UpBlock3D",) * convolutions,
            **spec.architecture,
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        text = x.new_zeros(len(x), 1, self.network.config.cross_attention_dim)
        out: Tensor = self.network(x, t, text).sample
        return out.float()


# ---- equal parameters


def count_parameters(spec: Spec) -> int:
    """Trainable weights, without memory for them."""
    network = build(spec, experiment(spec, (64, 64, 64)), torch.device("meta"))
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def matched(spec: Spec, parameters: int) -> Spec:
    """The spec with the widths that come nearest to `parameters`.

    The proportions stay, except that the last level may deviate by up to 12 %: of the widths within 3 %, those nearest
    to the proportions are taken, or, if there are none, those nearest in parameters.
    """
    first_step, last_step = spec.steps
    proportion = [width / spec.channels[0] for width in spec.channels]
    # Almost all weights grow with the square of the width.
    guess = spec.channels[0] * math.sqrt(parameters / count_parameters(spec)) / first_step
    found: list[tuple[float, float, Spec]] = []
    for first in {max(1, math.floor(guess) + offset) * first_step for offset in (-1, 0, 1, 2)}:
        inner = [round(first * factor) for factor in proportion[:-1]]
        ideal = first * proportion[-1]
        lowest, highest = ideal * (1 - LAST_LEVEL_RANGE), ideal * (1 + LAST_LEVEL_RANGE)
        for last in range(math.ceil(lowest / last_step) * last_step, math.floor(highest) + 1, last_step):
            candidate = spec.with_channels((*inner, last))
            deviation = abs(count_parameters(candidate) / parameters - 1)
            found.append((max(deviation, LARGEST_DEVIATION), abs(last / ideal - 1) + deviation, candidate))
    return min(found, key=lambda entry: entry[:2])[2]


# ---- counting


def saved_bytes(network: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps between `forward` and its backward pass.

    Each storage counts once, however many views of it are kept; parameters do not count, inputs do.
    """
    parameters = {p.untyped_storage()._cdata for p in network.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out  # until here the graph kept every storage, so that no address was used twice
    return sum(kept.values())


def saved_bytes_without_memory(spec: Spec, patch_zyx: Triple, amp: Literal["off", "bf16"], batch: int = 1) -> int:
    """The saved bytes of a micro-batch, traced with tensors that have shapes only, for the kernels of the CPU.

    CUDA's autocast computes GroupNorm in float32, the CPU's in bfloat16: a network that leaves its norms to
    autocast (MONAI's) keeps more on a GPU than this returns.
    """
    config = experiment(spec, patch_zyx)
    with FakeTensorMode():
        if spec.kind == "vesuvius":  # its own initial weights have values, which these tensors do not have
            network: nn.Module = UNet(config.model, execution=execution(config.training))
        else:
            network = build(spec, config, torch.device("cpu"))
        x, t = torch.empty(batch, 1, *patch_zyx), torch.zeros(batch, dtype=torch.int64)
        autocast = torch.autocast("cpu", torch.bfloat16) if amp == "bf16" else nullcontext()

        def forward() -> Tensor:
            with autocast:
                out: Tensor = network(x, t)
            return F.mse_loss(out, torch.empty_like(x))

        return saved_bytes(network, forward)
