"""The start-up test of Conv3d passes what rounds and refuses what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiny import tiny_sections
from vesuvius.commands.cli import main
from vesuvius.config.load import parse_config, read_config
from vesuvius.errors import ConfigError
from vesuvius.training.step.network import build_network
from vesuvius.training.step.self_test import (
    TOLERANCES,
    USUAL,
    Convolution,
    check_convolution,
    check_kernels,
    convolution_errors,
    cudnn_problem,
    network_convolutions,
)
from vesuvius.training.step.step import AmpMode

CPU = torch.device("cpu")
MODES = pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])


@MODES
def test_this_machine_convolves_rightly(amp: AmpMode) -> None:
    before = torch.get_rng_state()
    check_convolution(USUAL, CPU, amp, convolve=partial(F.conv3d))  # the tests' own: what others found is not taken
    assert torch.equal(torch.get_rng_state(), before)


def _one_plane_lost(x: Tensor, *given: Tensor, **how: Any) -> Tensor:
    keep = torch.ones(x.shape[2]).index_fill(0, torch.tensor([x.shape[2] - 1]), 0.0).view(1, 1, -1, 1, 1)
    return F.conv3d(x, *given, **how) * keep


def _mirrored(x: Tensor, kernel: Tensor, bias: Tensor, **how: Any) -> Tensor:
    return F.conv3d(x, kernel.flip(2), bias, **how)


def _wrong_gradient(*given: Tensor, **how: Any) -> Tensor:
    right = F.conv3d(*given, **how)
    return right.detach() + 1.02 * (right - right.detach())


def _nan(*given: Tensor, **how: Any) -> Tensor:
    return F.conv3d(*given, **how) * float("nan")


@MODES
@pytest.mark.parametrize(
    ("convolve", "part"),
    [(_one_plane_lost, "output"), (_mirrored, "output"), (_wrong_gradient, "input gradient"), (_nan, "output")],
)
def test_a_wrong_convolution_is_refused_with_the_remedy(amp: AmpMode, convolve: object, part: str) -> None:
    remedy = "install a different torch" if amp == "off" else r"set training\.amp=off or"
    with pytest.raises(ConfigError, match=rf"wrong .*: {part} off by .* amp {amp}\); {remedy}"):
        check_convolution(USUAL, CPU, amp, convolve=convolve)  # type: ignore[arg-type]


class Recorded(TorchDispatchMode):
    """Shapes of input and weight, stride and padding of the convolutions that are run, and of those of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: set[Any] = set()
        self.backward: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func.name():
            case "aten::convolution":
                self.forward.add((*map(_shape, args[:2]), *map(tuple, args[3:5])))
            case "aten::convolution_backward":
                self.backward.add((*map(_shape, args[1:3]), *map(tuple, args[4:6])))
        return func(*args, **(kwargs or {}))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


@pytest.mark.parametrize(
    ("model", "data", "training"),
    [
        ({}, {}, {}),
        ({"full_res_channels": 4}, {"patch_size": [4, 32, 32]}, {"train_batch_size": 3}),
        ({"strides": [[1, 2, 2]]}, {}, {"channels_last": True, "recompute_norm": False}),
        ({"attention_heads": 0}, {"condition_classes": 3}, {"checkpoint_levels": [1]}),
    ],
)
def test_the_convolutions_listed_are_those_of_a_step(
    model: dict[str, Any], data: dict[str, Any], training: dict[str, Any]
) -> None:
    sections = tiny_sections("tiny", Path("v.zarr"))
    if "condition_classes" in data:
        sections["data"]["volumes"][0]["condition"] = {"path": "labels.zarr"}
    for name, changes in (("model", model), ("data", data), ("training", training)):
        sections[name] = sections[name] | changes
    config = parse_config(yaml.safe_dump(sections))
    network = build_network(config, CPU)
    batch = config.training.train_batch_size
    x = torch.randn(batch, config.input_channels, *config.data.patch_size)
    with Recorded() as recorded:
        network(x, torch.rand(batch)).sum().backward()
    listed = {(c.input_shape, c.weight_shape, c.stride, c.padding) for c in network_convolutions(config, batch)}
    assert listed == recorded.forward == recorded.backward


def _lost_where_flat(part: str) -> Callable[..., Tensor]:
    """Right but for inputs of two planes, where one gradient is lost, as oneDNN's was."""

    def convolve(x: Tensor, kernel: Tensor, bias: Tensor, **how: Any) -> Tensor:
        lost = 0 * (x.sum() + kernel.sum() + bias.sum())  # in the graph, with a gradient of 0
        if x.shape[2] == 2:
            kernel = kernel.detach() if part == "weight gradient" else kernel
            bias = bias.detach() if part == "bias gradient" else bias
            x = x.detach() if part == "input gradient" else x
        return F.conv3d(x, kernel, bias, **how) + lost

    return convolve


DEEP = Convolution((1, 8, 4, 8, 8), (8, 8, 3, 3, 3), (1, 1, 1), (1, 1, 1))
FLAT = Convolution((1, 8, 2, 8, 8), (16, 8, 3, 3, 3), (1, 2, 2), (1, 1, 1))


@pytest.mark.parametrize("part", ["input gradient", "weight gradient", "bias gradient"])
def test_a_gradient_that_is_wrong_for_one_shape_is_refused_with_the_shape(part: str) -> None:
    convolve = _lost_where_flat(part)
    assert max(convolution_errors(DEEP, CPU, "fp16", convolve=convolve).values()) < TOLERANCES["fp16"]
    said = rf"Conv3d to 16 channels, kernel 3x3x3, of an input of 1x8x2x8x8 is wrong .*: {part} off by 1 of its norm"
    with pytest.raises(ConfigError, match=said):
        check_convolution(FLAT, CPU, "fp16", convolve=convolve)
    check_convolution(FLAT, CPU, "fp16", backward=False, convolve=convolve)  # sampling has no gradients


def test_a_run_starts_in_bf16_only_if_the_convolutions_of_its_network_are_right(
    tiny_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two planes at the lowest level: wrong with torch 2.13 on processors with avx512_bf16."""
    monkeypatch.chdir(tmp_path)
    path = tiny_config(training={"amp": "bf16", "max_steps": 1}, data={"patch_size": [4, 16, 16]})
    wrong = False
    for c in network_convolutions(read_config(path), 2):
        x, grads = torch.randn(c.input_shape), []
        kernel = torch.randn(c.weight_shape).requires_grad_()
        for amp in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                out = F.conv3d(x, kernel, None, c.stride, c.padding)
            grads.append(torch.autograd.grad(out, kernel, torch.ones_like(out))[0])
        wrong |= not float((grads[1] - grads[0]).norm() / grads[0].norm()) < 0.1
    code = main(["train", "--config", str(path)])
    if wrong:
        assert code == 2
        assert "set training.amp=off" in capfd.readouterr().err
    else:
        assert code == 0


@pytest.mark.parametrize(
    ("device", "amp", "channels_last", "version", "refused"),
    [
        ("cuda", "bf16", False, 90800, True),
        ("cuda", "fp16", False, 91400, True),
        ("cuda", "bf16", True, 91002, False),
        ("cuda", "off", False, 91002, False),
        ("cpu", "bf16", False, 91002, False),
        ("cuda", "bf16", False, 90799, False),
        ("cuda", "bf16", False, 91500, False),
        ("cuda", "bf16", False, None, False),
    ],
)
def test_a_cudnn_without_16_bit_conv3d_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, device: str, amp: AmpMode, channels_last: bool, version: int | None, refused: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)  # None: torch without cuDNN
    problem = cudnn_problem(torch.device(device), amp, channels_last)
    assert bool(problem) == refused
    if refused:
        assert version is not None
        assert f"got cuDNN 9.{version // 100 % 100}, " in problem
        assert problem.endswith("set training.channels_last=true or install cuDNN 9.15 or newer")
        config = parse_config(yaml.safe_dump(tiny_sections("tiny", Path("v.zarr"))))
        with pytest.raises(ConfigError, match="must run on cuDNN"):
            check_kernels(config, 2, torch.device(device), amp)
