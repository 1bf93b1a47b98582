"""Model FLOPs utilisation: known peaks by full name, and the operations of the model itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.forecast.test_gpu_memory import small
from vesuvius.config import Config
from vesuvius.training.forecast import memory_plan as mfu
from vesuvius.training.forecast.start_log import convolution_flops_s
from vesuvius.training.ranks.share import rank_share


@pytest.mark.parametrize(
    ("name", "amp", "tf32", "tflops"),
    [
        ("NVIDIA H200", "bf16", True, 989.5),
        ("NVIDIA A100 80GB PCIe", "off", False, 19.5),
        ("NVIDIA GeForce RTX 3090", "bf16", True, 71),  # with float32 sums: half of what is advertised
        ("Tesla V100-SXM2-32GB", "off", True, 15.7),  # has no TF32
    ],
)
def test_known_peaks(name: str, amp: mfu.AmpMode, tf32: bool, tflops: float) -> None:
    assert mfu.peak_flops_s(name, amp, tf32) == tflops * 1e12


@pytest.mark.parametrize(
    ("name", "amp"),
    [
        ("NVIDIA A10G", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("Tesla T4", "bf16"),  # computes it without units for it
        ("AMD Instinct MI300X", "bf16"),
    ],
)
def test_a_similar_gpu_name_has_no_peak(name: str, amp: mfu.AmpMode) -> None:
    assert mfu.peak_flops_s(name, amp, True) is None


@pytest.fixture(autouse=True)
def _planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 10 TFLOP, 5 more with recomputed blocks and 3 with Muon: tracing one takes seconds."""

    def plan(config: Config, amp: str) -> Any:
        assert amp == "bf16"
        training = config.training
        flops = 10e12 + 5e12 * bool(training.checkpoint_levels) + 3e12 * (training.optimizer == "muon")
        return SimpleNamespace(flops_per_step=flops * training.accumulate_steps)

    monkeypatch.setattr(mfu, "plan_memory", plan)


def test_mfu_is_the_share_of_the_peak_and_absent_if_the_peak_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, gpu = small("training.amp=bf16", "training.accumulate_steps=2"), torch.device("cuda")
    monkeypatch.setattr(mfu, "properties", lambda device: SimpleNamespace(name="NVIDIA A100-SXM4-40GB"))
    assert mfu.seconds_at_peak(config, torch.device("cpu"), rank_share(config, 0, 1)) is None
    assert mfu.seconds_at_peak(config, gpu, rank_share(config, 0, 1)) == pytest.approx(20 / 312)
    no_model = ("training.checkpoint_levels=[0, 1]", "training.optimizer=muon")  # no work of the model
    lean = small("training.amp=bf16", *no_model)
    assert mfu.seconds_at_peak(lean, gpu, rank_share(lean, 0, 1)) == pytest.approx(10 / 312)
    monkeypatch.setattr(mfu, "properties", lambda device: SimpleNamespace(name="NVIDIA X1"))
    assert mfu.seconds_at_peak(config, gpu, rank_share(config, 0, 1)) is None


def test_an_untraceable_step_costs_the_mfu_but_not_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(config: Config, amp: str) -> Any:
        raise NotImplementedError("an operator without a fake")

    monkeypatch.setattr(mfu, "plan_memory", failing)
    monkeypatch.setattr(mfu, "properties", lambda device: SimpleNamespace(name="NVIDIA A100-SXM4-40GB"))
    assert mfu.seconds_at_peak(small("training.amp=bf16"), torch.device("cuda"), rank_share(small(), 0, 1)) is None
    assert "an operator without a fake" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("channels_last", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_convolution_is_timed_in_the_layout_and_dtype_of_the_run_and_more_than_once(channels_last: bool) -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.name() == "aten::convolution":
                layouts = [each.is_contiguous(memory_format=torch.channels_last_3d) for each in args[:2]]
                seen.append((all(layouts), args[0].dtype))
            return func(*args, **(kwargs or {}))

    with Recorded():
        assert convolution_flops_s(torch.device("cpu"), "bf16", channels_last) > 0
    assert set(seen) == {(channels_last, torch.bfloat16)}
    assert len(seen) >= 4
