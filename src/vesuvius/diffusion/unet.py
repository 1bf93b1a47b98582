"""The network: (x_t, t) -> prediction of v, a 3D U-Net that does most of its work at half resolution.

Activations at full resolution are what fills memory, so a space-to-depth stem brings the volume to the first level
and only one narrow residual block at each end sees every voxel.  Forward has no randomness.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from vesuvius.config import ModelConfig, Triple
from vesuvius.diffusion.layers import (
    Attention,
    NormSiLU,
    ResidualBlock,
    TimestepEmbedding,
    ZeroConv3d,
    depth_to_space,
    space_to_depth,
)
from vesuvius.diffusion.randomness import Purpose, torch_generator
from vesuvius.errors import ConfigError

INT32_LIMIT = 2**31


def check_torch_version(version: str = torch.__version__) -> None:
    """Raise ConfigError for torch 2.9.x, whose Conv3d is slow, takes far more memory and was seen to be wrong."""
    if version.split(".")[:2] == ["2", "9"]:
        raise ConfigError(
            f"torch 2.9 has a broken Conv3d and is refused; got torch {version}; install torch 2.10 or newer"
        )


def largest_activation_elements(
    config: ModelConfig, batch: int, size_zyx: Triple, in_channels: int = 1, out_channels: int = 1
) -> int:
    """Return the number of elements of the largest tensor that a forward pass makes.  Pure arithmetic."""
    voxels = batch * math.prod(size_zyx)
    largest = voxels * max(in_channels, out_channels, config.full_res_channels)
    for level, channels in enumerate(config.channels):
        widest = 2 * channels  # what comes up, concatenated with a skip
        if config.attention_heads and level == len(config.channels) - 1:
            widest = 3 * channels  # queries, keys and values
        largest = max(largest, widest * (voxels // (math.prod(config.stem_stride) * 8**level)))
    return largest


class Trunk(nn.Module):
    """All levels behind the stem: [B, channels[0], ...] in and out.

    Down: `blocks_per_level` residual blocks a level and a stride-2 convolution between levels.  Middle: block,
    attention, block.  Up: `blocks_per_level + 1` blocks a level, each fed with one skip: the stem, every block and
    every downsampling on the way down left one (Ho et al. 2020).  Upsampling is a 1x1x1 convolution and
    depth-to-space: it keeps its coarse input for the backward pass, where nearest-neighbour and convolution would keep
    the eight times larger upsampled one.
    """

    def __init__(self, config: ModelConfig, embedding: int) -> None:
        super().__init__()
        self.per_level, self.levels = config.blocks_per_level, len(config.channels)
        groups, heads, c = config.norm_groups, config.attention_heads, config.channels[0]
        self.down_blocks, self.downsamples = nn.ModuleList(), nn.ModuleList()
        self.up_blocks, self.upsamples = nn.ModuleList(), nn.ModuleList()
        skips = [c]
        for level, level_channels in enumerate(config.channels):
            if level > 0:
                self.downsamples.append(nn.Conv3d(c, c, 3, stride=2, padding=1))
                skips.append(c)
            for _ in range(self.per_level):
                self.down_blocks.append(ResidualBlock(c, level_channels, embedding, groups))
                c = level_channels
                skips.append(c)
        self.middle_1 = ResidualBlock(c, c, embedding, groups)
        self.attention = Attention(c, heads, groups) if heads else nn.Identity()
        self.middle_2 = ResidualBlock(c, c, embedding, groups)
        for level in reversed(range(self.levels)):
            for _ in range(self.per_level + 1):
                self.up_blocks.append(ResidualBlock(c + skips.pop(), config.channels[level], embedding, groups))
                c = config.channels[level]
            if level > 0:
                self.upsamples.append(nn.Conv3d(c, 8 * config.channels[level - 1], 1))
                c = config.channels[level - 1]

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        """[B, channels[0], Z, Y, X] and [B, embedding] -> [B, channels[0], Z, Y, X]."""
        down_blocks, up_blocks = iter(self.down_blocks), iter(self.up_blocks)
        skips = [h]
        for level in range(self.levels):
            if level > 0:
                h = self.downsamples[level - 1](h)
                skips.append(h)
            for _ in range(self.per_level):
                h = next(down_blocks)(h, embedding)
                skips.append(h)
        h = self.middle_2(self.attention(self.middle_1(h, embedding)), embedding)
        for level in range(self.levels):
            for _ in range(self.per_level + 1):
                h = next(up_blocks)(torch.cat([h, skips.pop()], dim=1), embedding)
            if level < self.levels - 1:
                h = depth_to_space(self.upsamples[level](h), (2, 2, 2))
        return h


class UNet(nn.Module):
    """The U-Net of `config`; `build_unet` makes one with reproducible weights.

    Space-to-depth by `stem_stride` leads to the trunk and depth-to-space back.  With `full_res_channels`, one residual
    block at each end works at full resolution; the first is added to what comes back, not concatenated, because the
    tensors there are the largest of all.
    """

    def __init__(self, config: ModelConfig, in_channels: int = 1, out_channels: int = 1) -> None:
        super().__init__()
        self.config, self.in_channels, self.out_channels = config, in_channels, out_channels
        groups, full, first = config.norm_groups, config.full_res_channels, config.channels[0]
        stem_voxels = math.prod(config.stem_stride)
        self.embed = TimestepEmbedding(4 * first)
        self.stem_in = nn.Conv3d((full or in_channels) * stem_voxels, first, 3, padding=1)
        self.trunk = Trunk(config, 4 * first)
        if full:
            self.full_in = nn.Conv3d(in_channels, full, 3, padding=1)
            self.full_down = ResidualBlock(full, full, 4 * first, groups)
            self.stem_out = nn.Conv3d(first, full * stem_voxels, 1)
            self.full_up = ResidualBlock(full, full, 4 * first, groups)
        self.norm_out = NormSiLU(full or first, groups)
        self.conv_out = ZeroConv3d(full or first, out_channels * (1 if full else stem_voxels), 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Predict v: x [B, in_channels, Z, Y, X] and t int64 [B] -> float32 [B, out_channels, Z, Y, X].

        Raises ConfigError when (Z, Y, X) is no multiple of `config.divisor_zyx`, or when the batch is so large that a
        tensor would reach 2^31 elements.
        """
        self._check_input(x, t)
        embedding = self.embed(t)
        stride = self.config.stem_stride
        if not self.config.full_res_channels:
            h = self.trunk(self.stem_in(space_to_depth(x, stride)), embedding)
            return depth_to_space(self.conv_out(self.norm_out(h)), stride).float()
        fine = self.full_down(self.full_in(x), embedding)
        h = self.trunk(self.stem_in(space_to_depth(fine, stride)), embedding)
        fine = self.full_up(fine + depth_to_space(self.stem_out(h), stride), embedding)
        out: Tensor = self.conv_out(self.norm_out(fine))
        return out.float()

    def _check_input(self, x: Tensor, t: Tensor) -> None:
        assert x.ndim == 5, x.shape
        assert x.shape[1] == self.in_channels, x.shape
        assert t.shape == x.shape[:1], (t.shape, x.shape)
        batch, _, z, y, x_size = x.shape
        self.check_size(batch, (z, y, x_size))

    def check_size(self, batch: int, size_zyx: Triple) -> None:
        """Raises ConfigError where the levels do not halve evenly, or a tensor inside would be too large to index."""
        divisor = self.config.divisor_zyx
        if any(size % d for size, d in zip(size_zyx, divisor, strict=True)):
            raise ConfigError(
                f"the input (z, y, x) must be a multiple of {list(divisor)} (model.stem_stride x 2 per further level); "
                f"got {list(size_zyx)}; change data.patch_size or model.channels"
            )
        elements = largest_activation_elements(self.config, batch, size_zyx, self.in_channels, self.out_channels)
        if elements >= INT32_LIMIT:
            raise ConfigError(
                f"no tensor may reach 2^31 = {INT32_LIMIT} elements, because kernels index with 32 bits; "
                f"got {elements} from {batch} x {list(size_zyx)}; lower training.train_batch_size or data.patch_size"
            )


def build_unet(
    config: ModelConfig, seed: int, in_channels: int = 1, out_channels: int = 1, device: torch.device | str = "cpu"
) -> UNet:
    """Make a U-Net whose initial weights follow from `seed` alone, on every device; float32, in training mode.

    Weights are normal with variance 1/fan_in, biases 0, norms 1 and 0, and the last convolution of each branch 0.
    Each tensor's numbers follow from (seed, its name): adding a module leaves those of the others as they were.
    Touches no global generator.  Raises ConfigError for torch 2.9.
    """
    check_torch_version()
    with torch.device("meta"):  # torch's own initialisation would draw from the global generator
        model = UNet(config, in_channels, out_channels)
    model.to_empty(device=device)
    for prefix, module in model.named_modules():
        _initialise(module, prefix, seed)
    return model


@torch.no_grad()
def _initialise(module: nn.Module, prefix: str, seed: int) -> None:
    match module:
        case ZeroConv3d():
            module.reset_parameters()
        case nn.Conv3d() | nn.Linear():
            assert module.bias is not None
            weight = torch.empty(module.weight.shape)
            generator = torch_generator(seed, Purpose.WEIGHTS, zlib.crc32(f"{prefix}.weight".encode()))
            weight.normal_(std=math.prod(weight.shape[1:]) ** -0.5, generator=generator)
            module.weight.copy_(weight)
            module.bias.zero_()
        case NormSiLU() | nn.GroupNorm():
            assert module.weight is not None
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        case _:
            assert not list(module.parameters(recurse=False)), f"no initial weights defined for {prefix}"
