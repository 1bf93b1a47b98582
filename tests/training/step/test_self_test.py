"""The start-up test of Conv3d accepts rounding and rejects errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.runs import WriteConfig, vesuvius_train
from tests.support.tiny import tiny_sections
from vesuvius.config import Config
from vesuvius.config.load import parse_config
from vesuvius.errors import ConfigError
from vesuvius.training.forecast.memory_plan import Footprint, plan_memory
from vesuvius.training.ranks.ranks import SINGLE
from vesuvius.training.run import _check_kernels
from vesuvius.training.step import self_test
from vesuvius.training.step.self_test import check_kernels, cudnn_problem, network_convolutions
from vesuvius.training.step.setup import AmpMode, build_network

CPU = torch.device("cpu")
conv3d = F.conv3d


def tiny(**model: Any) -> Config:
    sections = tiny_sections("tiny", Path("v.zarr"))
    sections["model"] |= {"channels": [8, 16]} | model
    return parse_config(yaml.safe_dump(sections))


@pytest.mark.parametrize("channels_last", [False, True])
def test_fp16_convolutions_pass_here_and_the_global_generator_is_untouched(
    channels_last: bool,
) -> None:
    before = torch.get_rng_state()
    check_kernels(tiny().with_training(channels_last=channels_last), 2, CPU, "fp16")
    assert torch.equal(torch.get_rng_state(), before)


def in_16_bits(wrong: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A convolution that is wrong only under autocast."""
    return lambda *given, **how: (wrong if torch.is_autocast_enabled("cpu") else conv3d)(*given, **how)


def _one_plane_lost(x: Tensor, *given: Tensor, **how: Any) -> Tensor:
    out = conv3d(x, *given, **how)
    return torch.cat([out[:, :, :-1], 0 * out[:, :, -1:]], dim=2)


def _nan(*given: Tensor, **how: Any) -> Tensor:
    return conv3d(*given, **how) * float("nan")


@pytest.mark.parametrize(("wrong", "part"), [(_one_plane_lost, "output"), (_nan, "output")])
def test_a_wrong_convolution_is_refused_with_the_remedy(
    wrong: Callable[..., Tensor], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "conv3d", in_16_bits(wrong))
    said = rf"wrong .*: relative error of the {part} .* amp fp16\); set training\.amp=off or install a different torch"
    with pytest.raises(ConfigError, match=said):
        check_kernels(tiny(), 2, CPU, "fp16")
    check_kernels(tiny(), 2, CPU, "off")  # nothing is computed in 16 bits


class Recorded(TorchDispatchMode):
    """Input shape, weight shape, stride and padding of executed convolutions and their gradients."""

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
    ],
)
def test_the_convolutions_listed_are_those_of_a_step(
    model: dict[str, Any], data: dict[str, Any], training: dict[str, Any]
) -> None:
    sections = tiny_sections("tiny", Path("v.zarr"))
    sections["model"]["channels"] = [8, 16]
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


def test_a_run_tests_the_micro_batch_of_its_ranks() -> None:
    config = tiny().with_training(train_batch_size=4, accumulate_steps=1, amp="fp16")
    for world in (1, 2):
        with Recorded() as recorded:
            _check_kernels(config, replace(SINGLE, world=world))
        assert {shape[0] for shape, *_ in recorded.backward} == {4 // world, 1}, "float32: patch by patch"


@pytest.mark.parametrize("channels_last", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(6, marks=pytest.mark.long)])
def test_the_test_needs_less_memory_than_planned_and_than_the_step(batch: int, channels_last: bool) -> None:
    """A program that computes the float32 reference of all patches together, or plans the step alone, fails."""
    config = tiny(full_res_channels=8, channels=[16]).with_training(channels_last=channels_last, amp="bf16")
    plan = plan_memory(config, batch, "bf16")
    with Footprint() as footprint:
        check_kernels(config, batch, CPU, "bf16")
    assert max(footprint.history) < 0.5 * max(plan.live_bytes)
    weights = 8 * max(math.prod(each.weight_shape) * 4 for each in network_convolutions(config, batch))
    assert max(footprint.history) <= plan.self_test_bytes + weights, "a few copies of a kernel, as the step has"
    assert replace(plan, live_bytes=(1,)).peak_bytes == plan.self_test_bytes


@pytest.mark.long
def test_if_the_test_runs_out_of_memory_the_micro_batch_is_halved_or_the_run_ends_with_3(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small_gpu(x: Tensor, *given: Any, **how: Any) -> Tensor:
        if len(x) > 2 and type(x) is Tensor:  # the plan has fake tensors
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
        return conv3d(x, *given, **how)

    monkeypatch.chdir(tmp_path)
    config = tiny_config(training={"amp": "bf16", "max_steps": 1})
    with monkeypatch.context() as patch:
        patch.setattr(self_test.F, "conv3d", small_gpu)
        sizes = "training.train_batch_size=4", "training.accumulate_steps=1"
        assert vesuvius_train(config, *sizes) == 3
        assert "run it again with training.train_batch_size=2 training.accumulate_steps=2" in "".join(
            capsys.readouterr()
        )
        assert not Path("runs/tiny").exists()
        assert vesuvius_train(config, "training.train_batch_size=auto", "training.accumulate_steps=8") == 0
    said = "".join(capsys.readouterr())
    assert "testing kernels with micro-batch 8; trying 4" in said
    assert "testing kernels with micro-batch 4; trying 2" in said
    stored = yaml.safe_load(Path("runs/tiny/config.resolved.yaml").read_text())["training"]
    assert (stored["train_batch_size"], stored["accumulate_steps"]) == (2, 4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", ["input gradient", "weight gradient", "bias gradient"])
def test_a_gradient_that_is_wrong_for_one_shape_is_refused_with_the_shape(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like oneDNN's bug for inputs with few planes; sampling has no gradients."""

    def lost_where_flat(x: Tensor, kernel: Tensor, bias: Tensor, **how: Any) -> Tensor:
        lost = 0 * (x.sum() + kernel.sum() + bias.sum())  # in the graph, with a gradient of 0
        if x.shape[2] == 4:
            kernel = kernel.detach() if part == "weight gradient" else kernel
            bias = bias.detach() if part == "bias gradient" else bias
            x = x.detach() if part == "input gradient" else x
        return conv3d(x, kernel, bias, **how) + lost

    monkeypatch.setattr(F, "conv3d", in_16_bits(lost_where_flat))
    config = tiny(channels=[8, 8])
    assert 4 in {c.input_shape[2] for c in network_convolutions(config, 1)}
    said = rf"Conv3d with 8 output channels, kernel 3x3x3, input 1x\d+x4x.* is wrong .*: relative error of the {part} 1"
    with pytest.raises(ConfigError, match=said):
        check_kernels(config, 1, CPU, "fp16")
    check_kernels(config, 1, CPU, "fp16", backward=False)


@pytest.mark.parametrize(
    ("device", "amp", "channels_last", "version", "refused"),
    [
        ("cuda", "bf16", False, 90800, True),
        ("cuda", "bf16", True, 91002, False),
        ("cuda", "off", False, 91002, False),
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
        assert f"cuDNN 9.{version // 100 % 100}: " in problem
        assert problem.endswith("set training.channels_last=auto or install cuDNN 9.15 or newer")
        config = tiny().with_training(channels_last=False)
        with pytest.raises(ConfigError, match="would not run on cuDNN"):
            check_kernels(config, 2, torch.device(device), amp)
