"""Plans compared with real steps: the CPU allocator's record, a GPU's peak."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import REPOSITORY
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.diffusion.estimate import Condition
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError
from vesuvius.runlog.units import GIB
from vesuvius.training.forecast.memory_plan import Footprint, TracedStep, largest_batch, plan_memory, traced_step
from vesuvius.training.forecast.plan import checkpoint_sizes
from vesuvius.training.step.setup import AmpMode, build_meta_network, build_network, parameter_count
from vesuvius.training.step.step import TrainStep

CPU = torch.device("cpu")
EXP001 = REPOSITORY / "configs" / "exp001_full.yaml"


def make_config(
    training: dict[str, Any] | None = None, model: dict[str, Any] | None = None, condition: str | None = None
) -> Config:
    """A smaller default network, on patches small enough for a CPU.

    Another level costs half a second of CPU per plan; `TWO_LEVELS` are compared with real steps.
    """
    return Config.model_validate(
        {
            "name": "t",
            "data": {
                "volumes": ({"path": "v", "condition": {"path": condition} if condition else None},),
                "patch_size": (16, 32, 32),
            },
            "training": {"train_batch_size": 2, "warmup_steps": 0} | (training or {}),
            "model": {"channels": (16,), "full_res_channels": 16, "blocks_per_level": 1} | (model or {}),
        }
    )


NO_STEM = {"stem_stride": (1, 1, 1), "full_res_channels": 0}
DEFAULT = make_config()
SMALL = make_config(model={"full_res_channels": 0})  # a trace takes half as long
PLAIN = make_config({"recompute_norm": False, "checkpoint_levels": (0, 1)})
TWO_LEVELS: dict[str, Any] = {"channels": (16, 32)}
# Without kernels for bf16 oneDNN converts all to float32, in minutes and twice the memory.
needs_bf16_kernels = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a processor with kernels for bf16"
)


def a_batch(config: Config, device: torch.device = CPU) -> tuple[Tensor, Condition]:
    batch, size_zyx = config.training.train_batch_size, config.data.patch_size
    channels = config.condition_channels
    condition = torch.zeros(batch, channels, *size_zyx, device=device) if channels else None
    return torch.zeros(batch, 1, *size_zyx, device=device), condition


def allocated_bytes(record: profile) -> np.ndarray[Any, Any]:
    """Bytes in use after each allocator event, relative to the start of the record."""
    assert record.profiler is not None
    acts = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return np.cumsum([event.nbytes() for event in sorted(acts, key=lambda event: event.start_ns())])


def record_memory() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


@pytest.mark.parametrize(
    ("config", "amp"),
    [
        (make_config(model=TWO_LEVELS), "off"),
        pytest.param(PLAIN, "bf16", marks=[needs_bf16_kernels, pytest.mark.long]),
        pytest.param(PLAIN, "off", marks=pytest.mark.long),
        pytest.param(DEFAULT, "bf16", marks=[needs_bf16_kernels, pytest.mark.long]),
    ],
    ids=["two-levels-off", "plain-bf16", "plain-off", "default-bf16"],
)
def test_the_planned_peak_equals_that_of_a_real_step(config: Config, amp: AmpMode) -> None:
    config = config.with_training(amp=amp, train_batch_size=3)  # activations outweigh what is there all the time
    plan = plan_memory(config, amp=amp)
    step = TrainStep(config, build_network(config, CPU), Schedule.from_config(config.diffusion), CPU)

    def train() -> None:
        x_0, condition = a_batch(config)
        step.accumulate(x_0, np.arange(len(x_0)), np.zeros(len(x_0), np.int64), condition)
        del x_0, condition
        step.apply(1e-4)

    train()  # the optimizer makes its moments
    there_before = plan.live_bytes[0]
    with record_memory() as record:
        train()
    measured = there_before + allocated_bytes(record).max()
    # No kernel takes less than its tensors (1e-3: scalars).  oneDNN's take more: copies of input and output in another
    # order, which is what the workspace allows for, and for bf16 some float32 sums of gradients, hence 5 %.
    assert plan.peak_bytes * 0.999 <= measured <= (plan.peak_bytes + plan.workspace_bytes) * 1.05


@pytest.mark.parametrize(
    ("config", "amp"),
    [
        pytest.param(DEFAULT, "off", marks=pytest.mark.long),
        (PLAIN, "bf16"),
        pytest.param(make_config(model=NO_STEM), "bf16", marks=pytest.mark.long),
    ],
    ids=["default", "plain", "no_stem"],
)
def test_an_extrapolated_plan_equals_its_own_trace(config: Config, amp: AmpMode) -> None:
    step = traced_step(config, amp)
    assert step.plan(7) == step.trace(7)


@pytest.mark.long
def test_muon_keeps_one_moment_per_kernel_and_adds_no_flops_per_patch() -> None:
    configs = [make_config(training={"optimizer": name}) for name in ("adamw", "muon")]
    adamw, muon = (plan_memory(config, 2) for config in configs)
    for config, plan in zip(configs, (adamw, muon), strict=True):  # weights, moments and an average
        others = plan.live_bytes[0] - sum(checkpoint_sizes(config))
        assert 0 < others < 2**15, "a step count for each tensor, and the schedule's tables"
    kernels = [p for p in build_meta_network(DEFAULT).parameters() if p.ndim == 5 and len(p) > 1]
    # It also keeps the size of each kernel's step.
    assert adamw.live_bytes[0] - muon.live_bytes[0] == 4 * (sum(p.numel() for p in kernels) - len(kernels))
    assert adamw.flops_per_step == muon.flops_per_step


@pytest.mark.long
def test_flops_are_three_times_the_forward_pass_but_for_gradients_of_the_input() -> None:
    config = make_config(model={"attention_heads": 0})
    size_zyx = config.data.patch_size
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build_meta_network(config)(torch.empty(1, 2, *size_zyx), torch.zeros(1, dtype=torch.int64))
    first_convolution = 2 * 16 * 32 * 32 * 27 * 2 * 16  # 2 -> 16 channels at full resolution
    first_linear = 2 * 128 * 64  # 128 waves of t -> 4 x 16 numbers
    forward = counter.get_total_flops()
    assert plan_memory(config, 1).flops_per_step == 3 * forward - first_convolution - first_linear


def test_a_checkpointed_level_is_recomputed() -> None:
    once, again = (plan_memory(config, amp="bf16").flops_per_step for config in (DEFAULT, PLAIN))
    # The first convolution of each block runs a third time, the second, whose result nothing needs, does not.
    assert 1.1 * once < again < 4 / 3 * once


@pytest.mark.parametrize("fake", [False, True])
def test_attention_is_counted_without_a_matrix_of_scores(fake: bool) -> None:
    n, width = 1024, 16
    with FakeTensorMode() if fake else nullcontext(), Footprint() as footprint:
        q, k, v = (torch.empty(1, 1, n, width, requires_grad=True) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    # Forward QK' and PV; backward forms the scores again and four gradients.
    assert footprint.flops == (2 + 5) * 2 * n * n * width
    assert max(footprint.history) < n * n * 4, "the scores of all pairs would take 4 MiB"


@pytest.mark.long
def test_accumulated_gradients_live_through_the_forward_passes() -> None:
    one, four = (plan_memory(DEFAULT.with_training(accumulate_steps=n), 8) for n in (1, 4))
    assert four.flops_per_step == 4 * one.flops_per_step
    # At the peak, early in the backward pass, most gradients are not there yet unless an earlier micro-batch left them.
    weight_bytes = 4 * sum(p.numel() for p in build_meta_network(DEFAULT).parameters())
    assert 0.5 * weight_bytes < four.peak_bytes - one.peak_bytes <= weight_bytes


@pytest.mark.long
def test_settings_without_influence_share_a_trace() -> None:
    plan_memory(DEFAULT)
    misses = TracedStep.cache_info().misses
    plan_memory(DEFAULT.with_training(workers=7, prefetch_factor=5, lr=0.5, accumulate_steps=1))
    assert TracedStep.cache_info().misses == misses


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    vram_bytes = int(0.8 * GIB)
    batch = largest_batch(SMALL, vram_bytes)
    assert batch > 2
    assert plan_memory(SMALL, batch).vram_bytes <= vram_bytes < plan_memory(SMALL, batch + 1).vram_bytes
    assert largest_batch(SMALL, vram_bytes=GIB // 4) == 0, "not even the weights"
    assert largest_batch(SMALL, vram_bytes=80 * GIB) == 1024, "of no use beyond"


@pytest.mark.long
def test_a_plan_allocates_no_tensors_and_the_largest_batch_stays_below_32_bit_indexing() -> None:
    config = DEFAULT.model_copy(update={"data": DEFAULT.data.model_copy(update={"patch_size": (72, 136, 136)})})
    with record_memory() as record:
        plan = plan_memory(config)
    assert plan.peak_bytes > 2**29, "of which a real step would allocate most"
    assert allocated_bytes(record).max() < 2**20, "schedule tables, and no more"
    batch = largest_batch(config, vram_bytes=1000 * GIB)
    assert plan_memory(config, batch).vram_bytes < 900 * GIB, "memory is not the limit"
    with pytest.raises(ConfigError, match=r"2\^31"):
        plan_memory(config, batch + 1)


def test_gpu_plans_are_channels_last_and_cpu_plans_are_not() -> None:
    last, other = (SMALL.with_training(channels_last=last, amp="bf16") for last in (True, False))
    assert plan_memory(last) != plan_memory(other)
    assert plan_memory(SMALL) == plan_memory(last)
    assert plan_memory(SMALL.with_training(amp="off")) == plan_memory(other.with_training(amp="off"))
    assert plan_memory(SMALL, amp="bf16") == plan_memory(other), "its amp is given"


@pytest.mark.long  # plans are compared with real steps on small networks; tracing this one takes half a minute
def test_the_default_network_has_the_documented_cost_and_80_gib_hold_16_patches() -> None:
    config = read_config(EXP001, ["training.accumulate_steps=1"])
    plan = plan_memory(config, 16)
    # The documented figures, to the digits given there: 4.7 TFLOP forward, twice that backward.
    assert round(parameter_count(build_meta_network(config)) / 1e6) == 154
    assert round(plan.flops_per_step / 16 / 3e12, 1) == 4.7
    assert largest_batch(config, 80 * GIB) >= 16
    assert largest_batch(config.with_training(recompute_norm=False), 80 * GIB) >= 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize(
    "keys",
    [{}, {"recompute_norm": False}, {"checkpoint_levels": (0, 1)}, {"accumulate_steps": 2}],
    ids=["lean", "plain", "checkpointed", "accumulated"],
)
def test_the_planned_peak_equals_that_of_a_gpu(keys: dict[str, Any], amp: AmpMode, batch: int) -> None:
    # The plan is the eager step's, and to compile the full network takes a minute.
    fixed = {"train_batch_size": batch, "amp": amp, "accumulate_steps": 1, "compile": False}
    config = read_config(EXP001, []).with_training(**fixed | keys)
    plan, device = plan_memory(config, amp=amp), torch.device("cuda")
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if free_bytes < plan.vram_bytes:
        pytest.skip(f"needs {plan.vram_bytes / GIB:.1f} GiB of free GPU memory; {free_bytes / GIB:.1f} GiB are")
    measured = measured_peak_bytes(config, device)
    # The 15 %, of the tensors and the allowance for cuDNN: which kernels it takes, and with them their
    # workspaces, differs between GPUs.
    assert measured == pytest.approx(max(plan.live_bytes) + plan.workspace_bytes, rel=0.15)


def measured_peak_bytes(config: Config, device: torch.device) -> int:
    """Peak of CUDA's allocator in the third step, when kernels are chosen and moments exist."""
    before = torch.cuda.memory_allocated(device)
    step = TrainStep(config, build_network(config, device), Schedule.from_config(config.diffusion), device)
    batch, x_0 = config.training.train_batch_size, a_batch(config, device)[0]
    # Without cuDNN's trials: they fill whatever memory is free.
    with torch.backends.cudnn.flags(enabled=True, benchmark=False):
        for _ in range(3):
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            for _ in range(config.training.accumulate_steps):
                step.accumulate(x_0, np.arange(batch), np.zeros(batch, np.int64))
            step.apply(1e-4)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
