"""`model.*`: the network."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import Field

from vesuvius.config.section import NonNegativeInt, PositiveInt, Section, SizeZYX, Triple


class ModelConfig(Section):
    """The 3D U-Net, from tiny to the recipe."""

    channels: tuple[PositiveInt, ...] = Field(
        (128, 256, 512), min_length=1, description="channels of each level, finest first"
    )
    strides: tuple[SizeZYX, ...] | None = Field(
        None,
        description="downsampling factors (z, y, x), an entry from each level to the next; null = [2, 2, 2] throughout",
    )
    blocks_per_level: PositiveInt = Field(2, description="residual blocks per encoder level; one more in the decoder")
    stem_stride: SizeZYX = Field((2, 2, 2), description="space-to-depth factor (z, y, x) of the stem; [1,1,1] = none")
    full_res_channels: NonNegativeInt = Field(
        64, description="channels of the full-resolution block at each end; 0 = none"
    )
    attention_heads: NonNegativeInt = Field(8, description="heads of self-attention at the lowest level; 0 = none")

    @property
    def level_strides_zyx(self) -> tuple[Triple, ...]:
        """Downsampling factors from each level to the next."""
        return ((2, 2, 2),) * (len(self.channels) - 1) if self.strides is None else self.strides

    @property
    def divisor_zyx(self) -> Triple:
        """What each patch size must be a multiple of, so that every level divides evenly."""
        z, y, x = (math.prod(factors) for factors in zip(self.stem_stride, *self.level_strides_zyx, strict=True))
        return z, y, x

    def size_problem(self, size_zyx: Triple) -> str | None:
        """Why a patch of this size does not fit, with the nearest sizes that do; None where it fits."""
        divisor = self.divisor_zyx
        if not any(size % d for size, d in zip(size_zyx, divisor, strict=True)):
            return None
        below = [max(size // d, 1) * d for size, d in zip(size_zyx, divisor, strict=True)]
        above = [-(-size // d) * d for size, d in zip(size_zyx, divisor, strict=True)]
        nearest = " and ".join(dict.fromkeys(map(str, (below, above))))
        thin = [axis for axis, size, d in zip("zyx", size_zyx, divisor, strict=True) if size < d]
        keep = f"; or set model.stem_stride and model.strides to 1 along {', '.join(thin)}" if thin else ""
        return (
            f"data.patch_size must be a multiple of {list(divisor)} (model.stem_stride times model.strides); "
            f"got {list(size_zyx)}; nearest that fit: {nearest}{keep}"
        )

    def contradictions(self) -> Iterator[str]:
        if self.strides is not None and len(self.strides) != len(self.channels) - 1:
            yield (
                f"strides must have one entry fewer than channels; got {len(self.strides)} for {len(self.channels)} "
                "levels; change model.strides"
            )
        if self.attention_heads and self.channels[-1] % self.attention_heads:
            yield (
                f"the last of channels must be a multiple of attention_heads; got {self.channels[-1]} and "
                f"{self.attention_heads}; change model.attention_heads"
            )
