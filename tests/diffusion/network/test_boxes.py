"""Space-to-depth, and the weights next to it."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from vesuvius.diffusion.network.boxes import depth_to_space, space_to_depth

LAYOUTS = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=["czyx", "zyxc"])


@LAYOUTS
def test_space_to_depth_parity_with_pixel_unshuffle_and_inverts(layout: torch.memory_format) -> None:
    x = torch.arange(2 * 3 * 4 * 6 * 8).float().reshape(2, 3, 4, 6, 8).contiguous(memory_format=layout)
    flat = x.transpose(1, 2).flatten(0, 1)  # [B Z, C, Y, X]
    expected = F.pixel_unshuffle(flat, 2).unflatten(0, (2, 4)).transpose(1, 2)  # [B, C sy sx, Z, Y, X]
    expected = expected.unflatten(1, (3, 4)).transpose(1, 2).flatten(1, 2)
    assert torch.equal(space_to_depth(x, (1, 2, 2)), expected)
    for stride in [(1, 1, 1), (2, 2, 2), (4, 3, 2)]:
        moved = space_to_depth(x, stride)
        assert moved.is_contiguous(memory_format=layout)
        assert torch.equal(depth_to_space(moved, stride), x)
