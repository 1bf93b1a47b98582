"""The network's parts against the formulas that they stand for."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import nn

from vesuvius.diffusion.network import layers

LAYOUTS = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=["czyx", "zyxc"])


def test_each_group_has_at_least_four_channels_or_all() -> None:
    assert [layers.group_count(channels) for channels in (32, 128, 256, 22, 3)] == [8, 32, 32, 2, 1]


@pytest.mark.parametrize("recompute", [False, True])
def test_adaptive_norm_parity_with_group_norm_then_scale_and_shift(recompute: bool) -> None:
    norm, conv = layers.AdaptiveNormSiLU(8, 5), nn.Conv3d(8, 3, 3, padding=1)
    generator = torch.Generator().manual_seed(6)
    x, embedding = torch.randn(3, 8, 2, 3, 4, generator=generator), torch.randn(3, 5, generator=generator)
    rows = norm.project(embedding)
    scale, shift = rows[:, :, None, None, None].chunk(2, dim=1)
    expected = conv(F.silu(nn.GroupNorm(2, 8, affine=False)(x) * (1 + scale) + shift))
    # 1e-5: the fused form multiplies mean and scale in another order.
    torch.testing.assert_close(norm(x, rows, conv, recompute), expected, rtol=1e-5, atol=1e-5)


@LAYOUTS
def test_adaptive_norm_takes_float32_weights_under_autocast(layout: torch.memory_format) -> None:
    """Scales of a hundredth: of 1 + scale, bf16 keeps one or two bits of them.  Channels last, compiled code alone
    does, and rounds once: eagerly it would cost passes in float32."""
    block, x = layers.ResidualBlock(8, 8, 5), torch.randn(3, 8, 2, 3, 4, generator=torch.Generator().manual_seed(6))
    norm, as_one = block.norm_2, layout == torch.channels_last_3d
    x = x.contiguous(memory_format=layout)
    embedding = 0.01 * torch.randn(3, 5, generator=torch.Generator().manual_seed(7))
    scale, shift = norm.project(embedding)[:, :, None, None, None].chunk(2, dim=1)
    expected, called = F.group_norm(x.bfloat16().float(), 2) * (1 + scale) + shift, norm
    if not as_one:
        expected = expected.bfloat16()
    else:
        called = torch.compile(norm, backend="eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = layers.project_timestep([block], embedding, as_one)[block]
        found = called(x.bfloat16(), rows, lambda y: y, False)
    assert found.dtype == torch.bfloat16
    assert (found != F.silu(expected).bfloat16()).float().mean() < 0.02, (
        "another order of sums, now and then rounded otherwise"
    )


def test_attention_parity_with_the_softmax_formula() -> None:
    attention = layers.Attention(8, 2)
    generator = torch.Generator().manual_seed(7)
    nn.init.normal_(attention.out.weight, std=0.3, generator=generator)
    x = torch.randn(2, 8, 2, 3, 2, generator=generator)
    tokens = attention.norm(x).flatten(2).transpose(1, 2)
    q, k, v = (part.reshape(2, 12, 2, 4) for part in attention.qkv(tokens).chunk(3, dim=2))
    weights = torch.softmax(torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(4), dim=-1)
    attended = torch.einsum("bhnm,bmhd->bhdn", weights, v).reshape(2, 8, 2, 3, 2)
    # 1e-5: SDPA sums in another order.
    torch.testing.assert_close(attention(x), x + attention.out(attended), rtol=1e-5, atol=1e-5)


def test_timestep_embedding_is_float32_under_autocast() -> None:
    embed, t = layers.TimestepEmbedding(16), torch.arange(1000)
    outside = embed(t)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = embed(t)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)


@LAYOUTS
def test_space_to_depth_parity_with_pixel_unshuffle_and_inverts(layout: torch.memory_format) -> None:
    x = torch.arange(2 * 3 * 4 * 6 * 8).float().reshape(2, 3, 4, 6, 8).contiguous(memory_format=layout)
    flat = x.transpose(1, 2).flatten(0, 1)  # [B Z, C, Y, X]
    expected = F.pixel_unshuffle(flat, 2).unflatten(0, (2, 4)).transpose(1, 2)  # [B, C sy sx, Z, Y, X]
    expected = expected.unflatten(1, (3, 4)).transpose(1, 2).flatten(1, 2)
    assert torch.equal(layers.space_to_depth(x, (1, 2, 2)), expected)
    for stride in [(1, 1, 1), (2, 2, 2), (4, 3, 2)]:
        moved = layers.space_to_depth(x, stride)
        assert moved.is_contiguous(memory_format=layout)
        assert torch.equal(layers.depth_to_space(moved, stride), x)
