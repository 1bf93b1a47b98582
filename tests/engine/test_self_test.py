"""The start-up test of Conv3d passes what rounds and refuses what is wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from vesuvius.engine.self_test import check_convolution
from vesuvius.engine.step import AmpMode
from vesuvius.errors import ConfigError

CPU = torch.device("cpu")
MODES = pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])


@MODES
def test_this_machine_convolves_rightly(amp: AmpMode) -> None:
    before = torch.get_rng_state()
    check_convolution(CPU, amp)
    assert torch.equal(torch.get_rng_state(), before)


def _one_plane_lost(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    keep = torch.ones(x.shape[2]).index_fill(0, torch.tensor([x.shape[2] - 1]), 0.0).view(1, 1, -1, 1, 1)
    return F.conv3d(x, kernel, bias, padding=1) * keep


def _mirrored(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    return F.conv3d(x, kernel.flip(2), bias, padding=1)


def _wrong_gradient(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    right = F.conv3d(x, kernel, bias, padding=1)
    return right.detach() + 1.02 * (right - right.detach())


def _nan(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    return F.conv3d(x, kernel, bias, padding=1) * float("nan")


@MODES
@pytest.mark.parametrize(
    ("convolve", "part"),
    [(_one_plane_lost, "output"), (_mirrored, "output"), (_wrong_gradient, "input gradient"), (_nan, "output")],
)
def test_a_wrong_convolution_is_refused_with_the_remedy(amp: AmpMode, convolve: object, part: str) -> None:
    with pytest.raises(ConfigError, match=rf"in its {part} .* amp {amp}\); set training\.amp=off or use"):
        check_convolution(CPU, amp, convolve)  # type: ignore[arg-type]
