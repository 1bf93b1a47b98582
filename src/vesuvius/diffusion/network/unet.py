"""The network: (x_t and condition, t) -> prediction; a 3D U-Net that works mostly at half resolution.

Full-resolution activations dominate the memory, so only one narrow residual block at each end works on them.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from vesuvius.config import ModelConfig, Triple
from vesuvius.diffusion.network import layers
from vesuvius.diffusion.network.regions import call_eager
from vesuvius.diffusion.randomness import Purpose, torch_generator
from vesuvius.errors import ConfigError

INT32_LIMIT = 2**31
Rows = Mapping[nn.Module, Tensor]  # of `project_timestep`
_SEEDS = {"patch_embed": "stem_in", "upsample": "stem_out"}  # names that seed weights: a seed keeps its weights


def largest_activation_elements(config: ModelConfig, batch: int, size_zyx: Triple, in_channels: int = 1) -> int:
    """Return the number of elements of the largest tensor in a forward pass.  Pure."""
    voxels = batch * math.prod(size_zyx)
    largest = voxels * max(in_channels, config.full_res_channels)
    voxels //= math.prod(config.stem_stride)
    for level, channels in enumerate(config.channels):
        if level > 0:
            voxels //= math.prod(config.level_strides_zyx[level - 1])
        has_attention = config.attention_heads and level == len(config.channels) - 1
        largest = max(largest, (3 if has_attention else 2) * channels * voxels)  # q, k, v; concatenated skips
    return largest


@dataclass(frozen=True)
class Context:
    """The window around a patch that a network sees."""

    factor: int  # length of the window in patches
    channels: int  # of the window


@dataclass(frozen=True)
class Execution:
    """How a network is computed; affects neither its weights nor, except for rounding, its results."""

    recompute_norm: bool = True  # recompute norm and SiLU in the backward pass instead of keeping their outputs
    # levels whose blocks are recomputed in the backward pass; 0 = full resolution, 1 = the first of
    # `ModelConfig.channels`, and so on
    checkpoint_levels: tuple[int, ...] = ()
    call: Callable[..., Tensor] = call_eager  # calls a block; or a `CompiledRegions`

    def run(
        self,
        level: int,
        block: nn.Module,
        rows: Rows,
        *parts: Tensor,
        entry: nn.Module | None = None,
        added: bool = False,
    ) -> Tensor:
        """Apply a residual block of a level to parts that are concatenated by channel or, with `added`, summed.

        The first part passes through `entry`, if given, which brings it to the level.
        """

        def apply(*parts: Tensor) -> Any:
            return self.call(_with_entry, block, entry, added, rows[block], self.recompute_norm, *parts)

        return layers.recomputed(apply, *parts) if level in self.checkpoint_levels else apply(*parts)


def _with_entry(
    block: nn.Module, entry: nn.Module | None, added: bool, rows: Tensor, recompute: bool, first: Tensor, *more: Tensor
) -> Tensor:
    """Return the output of a block; compiled as one region, so that the operations before the norm fuse with it."""
    bias: Tensor | None = None
    if type(entry) is nn.Conv3d and torch.compiler.is_compiling():
        h, bias = F.conv3d(first, entry.weight, padding=1), entry.bias
    else:
        h = first if entry is None else entry(first)
    if more:
        h = h + more[0] if added else torch.cat((h, *more), dim=1)
    out: Tensor = block(h, rows, recompute, bias)
    return out


class Trunk(nn.Module):
    """All levels after the stem: [B, channels[0], ...] in and out.

    Down: `blocks_per_level` residual blocks per level and a strided convolution between levels.  Middle: block,
    attention, block.  Up: `blocks_per_level + 1` blocks per level, each with one skip (Ho et al. 2020).  Upsampling by
    depth-to-space keeps only the coarse input for the backward pass.
    """

    def __init__(self, config: ModelConfig, embedding: int, execution: Execution) -> None:
        super().__init__()
        self.per_level, self.strides_zyx, self.execution = config.blocks_per_level, config.level_strides_zyx, execution
        heads, c = config.attention_heads, config.channels[0]
        self.down_blocks, self.downsamples = nn.ModuleList(), nn.ModuleList()
        self.up_blocks, self.upsamples = nn.ModuleList(), nn.ModuleList()
        skips = [c]
        for level, level_channels in enumerate(config.channels):
            if level > 0:
                self.downsamples.append(_downsampling(c, self.strides_zyx[level - 1]))
                skips.append(c)
            for _ in range(self.per_level):
                self.down_blocks.append(layers.ResidualBlock(c, level_channels, embedding))
                c = level_channels
                skips.append(c)
        self.middle_1 = layers.ResidualBlock(c, c, embedding)
        self.attention = layers.Attention(c, heads) if heads else nn.Identity()
        self.middle_2 = layers.ResidualBlock(c, c, embedding)
        for level in reversed(range(len(config.channels))):
            for _ in range(self.per_level + 1):
                self.up_blocks.append(layers.ResidualBlock(c + skips.pop(), config.channels[level], embedding))
                c = config.channels[level]
            if level > 0:
                finer, stride = config.channels[level - 1], self.strides_zyx[level - 1]
                self.upsamples.append(layers.Upsample(c, finer, stride))
                c = finer

    def forward(self, h: Tensor, rows: Rows) -> Tensor:
        """[B, channels[0], Z, Y, X] -> [B, channels[0], Z, Y, X]."""
        levels, run = len(self.strides_zyx) + 1, self.execution.run
        down_blocks, up_blocks = iter(self.down_blocks), iter(self.up_blocks)
        skips = [h]
        for level in range(levels):
            if level > 0:
                h = self.downsamples[level - 1](h)
                skips.append(h)
            for _ in range(self.per_level):
                h = run(level + 1, next(down_blocks), rows, h)
                skips.append(h)
        h = run(levels, self.middle_1, rows, h)
        h = run(levels, self.middle_2, rows, self.attention(h))
        for level in reversed(range(levels)):
            entry = self.upsamples[-level - 1] if level < levels - 1 else None
            for _ in range(self.per_level + 1):
                h, entry = run(level + 1, next(up_blocks), rows, h, skips.pop(), entry=entry), None
        return h


def _downsampling(channels: int, stride_zyx: Triple) -> nn.Conv3d:
    """Return a convolution that divides (z, y, x) by the stride; its odd kernel covers every voxel."""
    z, y, x = (max(3, stride + 1 - stride % 2) for stride in stride_zyx)
    return nn.Conv3d(channels, channels, (z, y, x), stride_zyx, (z // 2, y // 2, x // 2))


class ContextEncoder(nn.Module):
    """The window around a patch, `factor` times as long as it -> features of the patch on the trunk's grid.

    Convolutions at the resolutions of the trunk, each cut to the patch by linear interpolation; their sum adds nothing
    at first.
    """

    def __init__(self, config: ModelConfig, in_channels: int, factor: int) -> None:
        super().__init__()
        c, self.factor = config.channels[0], factor
        self.embed = nn.Conv3d(in_channels, c, config.stem_stride, config.stem_stride)
        self.norms = nn.ModuleList(layers.NormSiLU(c) for _ in config.channels)
        self.convs = nn.ModuleList(nn.Conv3d(c, c, 3, padding=1) for _ in config.channels)
        self.downsamples = nn.ModuleList(_downsampling(c, stride) for stride in config.level_strides_zyx)
        self.outs = nn.ModuleList(layers.ZeroConv3d(c, c, 1) for _ in config.channels)

    def forward(self, window: Tensor, recompute: bool) -> Tensor:
        """[B, in_channels, Z, Y, X] -> [B, channels[0], z, y, x] after the strides of the stem."""
        h = self.embed(window)
        size_zyx, total = h.shape[2:], torch.zeros((), device=h.device)
        for level, (norm, conv, out) in enumerate(zip(self.norms, self.convs, self.outs, strict=True)):
            if level > 0:
                h = self.downsamples[level - 1](h)
            h = h + norm(h, conv, recompute)
            total = total + _center(out(h), self.factor, size_zyx)
        return total


def _center(h: Tensor, factor: int, size_zyx: Sequence[int]) -> Tensor:
    """Interpolate the center of a window [B, C, ...], a `factor`th of it along each axis, to another size.

    Products with constant matrices, because the backward pass of torch's `grid_sample` is not deterministic.
    """
    for axis, size in enumerate(size_zyx, start=2):
        count = h.shape[axis]
        places = ((torch.arange(size, device=h.device) + 0.5) / size - 0.5) * count / factor + (count - 1) / 2
        weights = (1 - (places[:, None] - torch.arange(count, device=h.device)).abs()).clamp_min(0)
        weights = weights / weights.sum(1, keepdim=True)  # beyond the last voxel
        h = (h.movedim(axis, -1) @ weights.T.to(h.dtype)).movedim(-1, axis)
    return h


class UNet(nn.Module):
    """The U-Net of `config`; `build_unet` creates one with reproducible weights.

    A convolution of boxes of `stem_stride` voxels leads to the trunk, depth-to-space back.  With `full_res_channels`,
    the output of the first full-resolution block is added to that of the trunk: concatenating would cost too much
    memory.
    `in_channels` is 1 for x_t, or 2 for `estimate.split_signal_noise`, plus the channels of the condition.  With
    `context`, the last channels of these are a window around the patch.
    """

    def __init__(
        self,
        config: ModelConfig,
        in_channels: int = 1,
        execution: Execution = Execution(),
        context: Context | None = None,
    ) -> None:
        super().__init__()
        self.config, self.in_channels, self.execution = config, in_channels, execution
        # the window, and the presence flag and level of noise before it
        self.context = ContextEncoder(config, context.channels + 2, context.factor) if context else None
        self._window_channels = context.channels if context else 0
        in_channels -= self._window_channels
        full, first = config.full_res_channels, config.channels[0]
        stem_voxels = math.prod(config.stem_stride)
        self.embed = layers.TimestepEmbedding(4 * first)
        if (config.patch_embed_kernel or (1 if full else 3)) == 1:
            self.patch_embed = nn.Conv3d(full or in_channels, first, config.stem_stride, config.stem_stride)
        else:
            self.patch_embed = nn.Conv3d((full or in_channels) * stem_voxels, first, 3, padding=1)
        self.trunk = Trunk(config, 4 * first, execution)
        if full:
            self.full_in = nn.Conv3d(in_channels, full, 3, padding=1)
            self.full_down = layers.ResidualBlock(full, full, 4 * first)
            self.upsample = layers.Upsample(first, full, config.stem_stride)
            self.full_up = layers.ResidualBlock(full, full, 4 * first)
        self.norm_out, self.identity = layers.NormSiLU(full or first), nn.Identity()
        self.conv_out = layers.ZeroConv3d(full or first, 1 if full else stem_voxels, 3, padding=1)
        trunk = self.trunk
        blocks: list[Any] = [*trunk.down_blocks, trunk.middle_1, trunk.middle_2, *trunk.up_blocks]
        self._blocks = [self.full_down, *blocks, self.full_up] if full else blocks  # in the order in which they run

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Return the prediction: float32 [B, 1, Z, Y, X].

        `x` is x_t and the condition's channels, [B, in_channels, Z, Y, X], `t` int64 or float32 [B].  Raises as
        `check_size`.
        """
        batch, channels, z, y, x_size = x.shape
        assert channels == self.in_channels, x.shape
        assert t.shape == (batch,), (t.shape, x.shape)
        self.check_size(batch, (z, y, x_size))
        around = None
        if self.context:
            window = self._in_memory_format_of_weights(x[:, -self._window_channels - 2 :])
            around, x = self.context(window, self.execution.recompute_norm), x[:, : -self._window_channels]
        x = self._in_memory_format_of_weights(x)
        rows = layers.project_timestep(self._blocks, self.embed(t), as_one=self.execution.call is not call_eager)
        stride, full, run = self.config.stem_stride, self.config.full_res_channels, self.execution.run
        fine = run(0, self.full_down, rows, x, entry=self.full_in) if full else x
        boxes = fine if self.patch_embed.stride == stride else layers.space_to_depth(fine, stride)
        h = self.patch_embed(boxes)
        h = self.trunk(h if around is None else h + around, rows)
        if full:
            h = run(0, self.full_up, rows, h, fine, entry=self.upsample, added=True)
        out = layers.recomputed(self._head, h) if self.execution.recompute_norm else self._head(h)
        return (out if full else layers.depth_to_space(out, stride)).float()

    def _head(self, h: Tensor) -> Tensor:
        # Compiled, a convolution to one channel would ask for a contiguous input, and cuDNN copies it back.
        out: Tensor = self.conv_out(self.execution.call(self.norm_out, h, self.identity, False))
        return out

    def _in_memory_format_of_weights(self, x: Tensor) -> Tensor:
        """Return `x` in the memory format of the weights, which the layers preserve.

        A tensor of one channel has both formats; its strides decide which one convolutions use.
        """
        if layers.memory_format_of(self.conv_out.weight) != torch.channels_last_3d:
            return x
        return layers.with_channels_last_strides(x.contiguous(memory_format=torch.channels_last_3d))

    def check_size(self, batch: int, size_zyx: Triple) -> None:
        """Raise ConfigError if the strides do not divide the size, or a tensor would reach 2^31 elements."""
        if problem := self.config.size_problem(size_zyx):
            raise ConfigError(problem)
        elements = largest_activation_elements(self.config, batch, size_zyx, self.in_channels)
        if elements >= INT32_LIMIT:
            raise ConfigError(
                f"A micro-batch of {batch} x {list(size_zyx)} has a tensor of {elements} elements, but kernels with "
                "32-bit indices support fewer than 2^31; lower training.train_batch_size or data.patch_size"
            )


def build_unet(
    config: ModelConfig,
    seed: int,
    in_channels: int = 1,
    device: torch.device | str = "cpu",
    execution: Execution = Execution(),
    context: Context | None = None,
) -> UNet:
    """Create a U-Net whose initial weights depend on `seed` only, on every device; float32, in training mode.

    Weights are normal with variance 1/fan_in, biases 0, norms 1 and 0, and the last convolution of each branch 0.  Each
    tensor follows from (seed, its name), so a new module does not change the others.
    """
    with torch.device("meta"):  # torch's default initialization would use the global generator
        model = UNet(config, in_channels, execution, context)
    model.to_empty(device=device)
    for prefix, module in model.named_modules():
        _initialize(module, prefix, seed, math.prod(config.stem_stride))
    return model


@torch.no_grad()
def _initialize(module: nn.Module, prefix: str, seed: int, stem_voxels: int) -> None:
    match module:
        case layers.ZeroConv3d():
            module.reset_parameters()
        case nn.Conv3d() | nn.Linear():
            assert module.bias is not None
            weight, name = torch.empty(module.weight.shape), f"{_SEEDS.get(prefix, prefix)}.weight"
            generator = torch_generator(seed, Purpose.WEIGHTS, zlib.crc32(name.encode()))
            weight.normal_(std=math.prod(weight.shape[1:]) ** -0.5, generator=generator)
            if isinstance(module, layers.Upsample):
                weight = layers.box_first(weight, 0, math.prod(module.box_zyx))
            elif prefix == "patch_embed" and module.stride == (1, 1, 1):
                weight = layers.box_first(weight, 1, stem_voxels)
            module.weight.copy_(weight)
            module.bias.zero_()
        case layers.NormSiLU() | nn.GroupNorm():
            assert module.weight is not None
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        case _:
            assert not list(module.parameters(recurse=False)), f"no initial weights defined for {prefix}"
