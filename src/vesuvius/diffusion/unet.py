"""The network: (x_t, t) -> prediction of v, a 3D U-Net that does most of its work at half resolution.

Activations at full resolution are what fills memory, so a space-to-depth stem brings the volume to the first level
and only one narrow residual block at each end sees every voxel.  Forward has no randomness.
"""

from __future__ import annotations

import math
import zlib
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from vesuvius.config import ModelConfig, Triple
from vesuvius.diffusion.randomness import Purpose, torch_generator
from vesuvius.errors import ConfigError

FREQUENCIES = 64
LONGEST_PERIOD = 10_000.0
NORM_EPS = 1e-5
MIN_CHANNELS_PER_GROUP = 4
INT32_LIMIT = 2**31


def check_torch_version(version: str = torch.__version__) -> None:
    """Raise ConfigError for torch 2.9.x, whose Conv3d is slow, takes far more memory and was seen to be wrong."""
    if version.split(".")[:2] == ["2", "9"]:
        raise ConfigError(
            f"torch 2.9 has a broken Conv3d and is refused; got torch {version}; install torch 2.10 or newer"
        )


def group_count(channels: int, norm_groups: int) -> int:
    """Return the largest divisor of `channels` that is at most `norm_groups` and leaves 4 channels or more a group.

    A group of one channel would be instance normalisation, which erases each channel's mean and with it the
    brightness of the patch.
    """
    most = max(1, min(norm_groups, channels // MIN_CHANNELS_PER_GROUP))
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


def space_to_depth(x: Tensor, stride_zyx: Triple) -> Tensor:
    """Move each stride-sized box of voxels into channels: [B, C, Z, Y, X] -> [B, C sz sy sx, Z/sz, Y/sy, X/sx]."""
    b, c, z, y, x_size = x.shape
    sz, sy, sx = stride_zyx
    boxes = x.reshape(b, c, z // sz, sz, y // sy, sy, x_size // sx, sx)
    return boxes.permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(b, c * sz * sy * sx, z // sz, y // sy, x_size // sx)


def depth_to_space(x: Tensor, stride_zyx: Triple) -> Tensor:
    """Undo `space_to_depth`: [B, C sz sy sx, Z, Y, X] -> [B, C, Z sz, Y sy, X sx]."""
    b, channels, z, y, x_size = x.shape
    sz, sy, sx = stride_zyx
    c = channels // (sz * sy * sx)
    boxes = x.reshape(b, c, sz, sy, sx, z, y, x_size)
    return boxes.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(b, c, z * sz, y * sy, x_size * sx)


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


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    """GroupNorm in the dtype of `x`; torch keeps its statistics in float32.

    Left to autocast, CUDA would store float32 copies of both input and output for the backward pass.
    """
    with _no_autocast(x.device):
        return F.group_norm(x, groups, weight.to(x.dtype), bias.to(x.dtype), NORM_EPS)


class ZeroConv3d(nn.Conv3d):
    """A convolution that starts as zero, so that the branch it ends adds nothing at first."""

    def reset_parameters(self) -> None:
        """Set weight and bias to 0."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class NormSiLU(nn.Module):
    """GroupNorm with learned weight and bias, then SiLU."""

    def __init__(self, channels: int, norm_groups: int) -> None:
        super().__init__()
        self.groups = group_count(channels, norm_groups)
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, Z, Y, X] -> same shape and dtype."""
        return F.silu(_group_norm(x, self.groups, self.weight, self.bias))


class AdaptiveNormSiLU(nn.Module):
    """GroupNorm whose scale and shift come from the timestep (AdaGN, Dhariwal & Nichol 2021), then SiLU."""

    def __init__(self, channels: int, embedding: int, norm_groups: int) -> None:
        super().__init__()
        self.groups = group_count(channels, norm_groups)
        self.project = nn.Linear(embedding, 2 * channels)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """[B, C, Z, Y, X] and [B, embedding] -> same shape and dtype as `x`."""
        b, c, *size_zyx = x.shape
        scale, shift = self.project(embedding).chunk(2, dim=1)
        # With the batch folded into the channels, scale and shift are GroupNorm's own weight and bias: written as
        # norm(x) * (1 + scale) + shift, the backward pass would keep one more tensor of this size.
        folded = x.reshape(1, b * c, *size_zyx)
        return F.silu(_group_norm(folded, b * self.groups, (1 + scale).flatten(), shift.flatten()).reshape(x.shape))


class ResidualBlock(nn.Module):
    """x + conv(SiLU(AdaGN(conv(SiLU(norm(x))), t))), the second convolution starting as zero."""

    def __init__(self, channels_in: int, channels_out: int, embedding: int, norm_groups: int) -> None:
        super().__init__()
        self.norm_1 = NormSiLU(channels_in, norm_groups)
        self.conv_1 = nn.Conv3d(channels_in, channels_out, 3, padding=1)
        self.norm_2 = AdaptiveNormSiLU(channels_out, embedding, norm_groups)
        self.conv_2 = ZeroConv3d(channels_out, channels_out, 3, padding=1)
        self.skip = nn.Identity() if channels_in == channels_out else nn.Conv3d(channels_in, channels_out, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """[B, channels_in, Z, Y, X] and [B, embedding] -> [B, channels_out, Z, Y, X]."""
        h = self.conv_1(self.norm_1(x))
        out: Tensor = self.skip(x) + self.conv_2(self.norm_2(h, embedding))
        return out


class Attention(nn.Module):
    """x + self-attention over all voxels, the output projection starting as zero."""

    def __init__(self, channels: int, heads: int, norm_groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(group_count(channels, norm_groups), channels, NORM_EPS)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = ZeroConv3d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, Z, Y, X] -> same shape."""
        b, c, *size_zyx = x.shape
        qkv: Tensor = self.qkv(self.norm(x).flatten(2).transpose(1, 2))
        q, k, v = qkv.reshape(b, -1, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(attended.transpose(2, 3).reshape(b, c, *size_zyx))
        return x + out


class TimestepEmbedding(nn.Module):
    """Sines and cosines of t (Vaswani et al. 2017) and a two-layer perceptron, in float32 whatever the autocast."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(2 * FREQUENCIES, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        """int64 [B] -> float32 [B, width]."""
        with _no_autocast(t.device):
            exponents = torch.arange(FREQUENCIES, dtype=torch.float32, device=t.device) / FREQUENCIES
            angles = t.float()[:, None] * torch.exp(-math.log(LONGEST_PERIOD) * exponents)
            waves = torch.cat([angles.cos(), angles.sin()], dim=1)
            return F.silu(self.linear_2(F.silu(self.linear_1(waves))))


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
        size_zyx, divisor = (z, y, x_size), self.config.divisor_zyx
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
