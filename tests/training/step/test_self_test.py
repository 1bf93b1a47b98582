"""The start-up test of Conv3d passes what rounds and refuses what is wrong."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from vesuvius.errors import ConfigError
from vesuvius.training.step.self_test import (
    TOLERANCES,
    check_convolution,
    check_cudnn,
    check_norm,
    cudnn_problem,
    norm_errors,
)
from vesuvius.training.step.step import AmpMode

CPU = torch.device("cpu")
MODES = pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])


@MODES
def test_this_machine_convolves_rightly(amp: AmpMode) -> None:
    before = torch.get_rng_state()
    check_convolution(CPU, amp, partial(F.conv3d, padding=1))  # the tests' own: what others have found is not taken
    assert torch.equal(torch.get_rng_state(), before)


@MODES
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("lean", [False, True])
def test_this_machine_normalises_rightly_in_either_form_and_order(
    amp: AmpMode, channels_last: bool, lean: bool
) -> None:
    before = torch.get_rng_state()
    errors = norm_errors(CPU, amp, channels_last, lean)
    check_norm(CPU, amp, channels_last, errors)
    assert torch.equal(torch.get_rng_state(), before)
    # Rounding is there, so it is compared with float64 in the dtype that was asked for.
    assert min(errors.values()) > (1e-8 if amp == "off" else 1e-5)


@pytest.mark.parametrize("name", ["output", "input gradient", "scale gradient", "shift gradient"])
def test_a_wrong_norm_is_refused_with_the_remedy(name: str) -> None:
    for error in (2 * TOLERANCES["bf16"], float("nan")):
        with pytest.raises(ConfigError, match=rf"in their {name} .* amp bf16\); set training\.amp=off or use"):
            check_norm(CPU, "bf16", True, {"other": 0.0, name: error})


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


@pytest.mark.parametrize("version", [90800, 91002, 91400])
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_a_cudnn_without_16_bit_conv3d_is_refused_with_the_remedy(amp: AmpMode, version: int) -> None:
    said = rf"got cuDNN 9\.{version // 100 % 100}, .* set training\.channels_last=true or install cuDNN 9\.15"
    with pytest.raises(ConfigError, match=said):
        check_cudnn(torch.device("cuda"), amp, channels_last=False, version=version)


@pytest.mark.parametrize(
    ("device", "amp", "channels_last", "version"),
    [
        ("cuda", "bf16", True, 91002),
        ("cuda", "off", False, 91002),
        ("cpu", "bf16", False, 91002),
        ("cuda", "bf16", False, 90799),
        ("cuda", "bf16", False, 91500),
    ],
    ids=["channels_last", "float32", "cpu", "older", "newer"],
)
def test_cudnn_is_not_to_blame_elsewhere(device: str, amp: AmpMode, channels_last: bool, version: int) -> None:
    assert cudnn_problem(torch.device(device), amp, channels_last, version) == ""


def test_the_version_is_that_of_the_cudnn_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert "cuDNN 9.10" in cudnn_problem(torch.device("cuda"), "bf16", False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)  # torch without cuDNN
    assert cudnn_problem(torch.device("cuda"), "bf16", False) == ""
