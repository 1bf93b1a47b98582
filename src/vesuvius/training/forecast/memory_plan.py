"""GPU memory and floating-point operations of a training step, planned without a GPU, and its MFU.

One real step (`TrainStep`: noising, network, loss, backward pass, clipping, AdamW, EMA) runs on fake tensors, which
have a shape and a dtype but no memory, while `Footprint` watches.  The plan therefore follows the code.

The fake tensors are CPU tensors: without CUDA torch refuses fake CUDA tensors, and on meta tensors attention would form
the full score matrix.  CUDA differs in one respect: autocast computes the norm before attention in float32, which
counts as bf16 here.  In addition to the step, `TrainingFeed` holds 5 bytes per voxel that are not planned.
"""

import logging
import re
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vesuvius.accelerator import choose_device, properties
from vesuvius.config import ConditionConfig, Config, DataConfig, TrainingConfig, VolumeConfig
from vesuvius.diffusion.network.unet import INT32_LIMIT, UNet, largest_activation_elements
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import one_line
from vesuvius.runlog.units import GIB
from vesuvius.training.ranks.share import RankShare
from vesuvius.training.step import setup
from vesuvius.training.step.step import TrainStep

log = logging.getLogger(__name__)

CONTEXT_BYTES = int(0.6 * GIB)  # CUDA context, cuDNN and cuBLAS handles, kernels; assumed
LARGEST_PLANNED_BATCH = 1024  # larger answers are useless
# Fragmentation of the CPU allocator: 1.3 to 1.6 times the planned bytes were observed.
_CPU_FRAGMENTATION = 0.5
# Holes in the caching allocator's segments: 0 to 5 % of peak and workspace on simulated cards (docs/performance.md).
_FRAGMENTATION = 0.05
# Keys of `training` and `data` that determine memory and operations of a step, as they are.
_STEP_KEYS = ("checkpoint_levels", "deterministic", "optimizer")
_DATA_KEYS = ("patch_size", "condition_classes", "augment")

_aten = torch.ops.aten
# torch counts attention only for CUDA kernels; the CPU kernel has the same first arguments and products.
FLOPS: dict[Any, Callable[..., int]] = flop_registry | {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


# Dense TFLOP/s at boost clock: fp16 on tensor cores with float32 accumulation, as torch uses; bf16 and tf32 likewise,
# None = not supported; fp32 without tensor cores.  From NVIDIA's data sheets and architecture white papers, figures
# "with sparsity" halved.  Full CUDA names: laptop variants, MIG slices and the A10G have other peaks.
_PEAKS: dict[str, tuple[float, float | None, float | None, float]] = {
    r"(NVIDIA )?A100-(SXM4|PCIE|PCIe)-[48]0GB|NVIDIA A100 80GB PCIe": (312, 312, 156, 19.5),
    r"NVIDIA B200": (2250, 2250, 1125, 75),
    r"NVIDIA H100 80GB HBM3|NVIDIA H200|NVIDIA GH200 480GB": (989.5, 989.5, 494.7, 66.9),
    r"NVIDIA H100 PCIe": (756, 756, 378, 51),
    r"NVIDIA H(100|200) NVL": (835.5, 835.5, 417.5, 60),
    r"NVIDIA L40S": (362, 362, 183, 91.6),
    r"NVIDIA L40": (181, 181, 90.5, 90.5),
    r"NVIDIA L4": (121, 121, 60, 30.3),
    r"(NVIDIA )?A10": (125, 125, 62.5, 31.2),
    r"(NVIDIA )?A40": (149.7, 149.7, 74.8, 37.4),
    r"(NVIDIA )?A30": (165, 165, 82, 10.3),
    r"(NVIDIA )?RTX A6000": (154.8, 154.8, 77.4, 38.7),
    r"(NVIDIA )?GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6),
    r"(NVIDIA )?GeForce RTX 3090": (71, 71, 35.6, 35.6),
    r"Tesla V100-SXM2-(16|32)GB": (125, None, None, 15.7),
    r"Tesla V100-PCIE-(16|32)GB": (112, None, None, 14),
    r"Tesla T4": (65, None, None, 8.1),
}


@dataclass(frozen=True)
class MemoryPlan:
    """Memory and operations of one rank's training step."""

    batch: int  # patches per micro-batch
    amp: setup.AmpMode  # planned autocast dtype
    # operations of an optimizer step, forward and backward, over all micro-batches; a multiply-add is 2; recomputed
    # blocks count again
    flops_per_step: int
    # live memory before a step and after each of its allocations, including weights, optimizer and averages
    live_bytes: tuple[int, ...]
    convolution_bytes: tuple[int, ...]  # input and output of each convolution

    @property
    def peak_bytes(self) -> int:
        """Maximum allocated during a step, or by the test of its convolutions before."""
        return max(*self.live_bytes, self.self_test_bytes)

    @property
    def self_test_bytes(self) -> int:
        """Bound on the memory to test the largest convolution (`step/self_test.py`): of all patches input, output,
        their gradients and a copy in 16 bits, of one patch the same in float32.
        """
        return 0 if self.amp == "off" else int(max(self.convolution_bytes, default=0) * (3 + 8 / self.batch))

    @property
    def workspace_bytes(self) -> int:
        """Memory to reorder input and output of the largest convolution, as oneDNN does (with it, float32 peaks agree
        to 0.1 %); cuDNN is assumed to.  If less is free, torch takes a kernel with a smaller one (`Conv_v8.cpp`).
        """
        return max(self.convolution_bytes, default=0)

    @property
    def vram_bytes(self) -> int:
        """Required GPU memory: peak, workspace, and a reserve for context and fragmentation."""
        return CONTEXT_BYTES + int((1 + _FRAGMENTATION) * (self.peak_bytes + self.workspace_bytes))

    @property
    def ram_bytes(self) -> int:
        return int((1 + _CPU_FRAGMENTATION) * (self.peak_bytes + self.workspace_bytes))


def plan_memory(config: Config, batch: int | None = None, amp: setup.AmpMode | None = None) -> MemoryPlan:
    """Trace one training step of `config`, as computed eagerly: seconds for a new network, but no memory and no GPU.

    Args:
        amp: None = that of this machine's GPU; without one, of a large GPU: `auto` is bf16, channels last.

    Raises ConfigError: a tensor would reach 2^31 elements.
    """
    batch = batch or config.training.micro_batch
    setup.build_meta_network(config).check_size(batch, config.data.patch_size)
    plan = traced_step(config, amp).plan(batch)
    return replace(plan, flops_per_step=plan.flops_per_step * config.training.accumulate_steps)


def largest_batch(config: Config, vram_bytes: int, amp: setup.AmpMode | None = None) -> int:
    """Largest micro-batch that fits `vram_bytes`, up to `LARGEST_PLANNED_BATCH`; 0 = not even one patch."""
    step = traced_step(config, amp)
    batches = range(1, min(max_indexable_batch(config), LARGEST_PLANNED_BATCH) + 1)
    return bisect_right(batches, vram_bytes, key=lambda batch: step.plan(batch).vram_bytes)


def max_indexable_batch(config: Config) -> int:
    """Largest micro-batch without a tensor of 2^31 elements."""
    elements = largest_activation_elements(config.model, 1, config.data.patch_size, config.input_channels)
    return (INT32_LIMIT - 1) // elements


def memory_saving_advice(config: Config) -> str:
    """How to reduce the memory of a single patch.  Pure."""
    norms = "" if config.training.recompute_norm else "set training.recompute_norm=true, "
    return f"{norms}add training.checkpoint_levels, or lower model.channels"


def traced_step(config: Config, amp: setup.AmpMode | None) -> "TracedStep":
    """Traced step for the settings that determine memory and operations, so that equal steps share a trace."""
    training, data, device = config.training, config.data, choose_device()
    planned_for = torch.device("cuda") if amp is None else device
    if amp is None:
        amp = "bf16" if training.amp == "auto" and device.type == "cpu" else setup.resolve_amp(training.amp, device)
    training = TrainingConfig(
        amp=amp,
        channels_last=setup.uses_channels_last(training.model_copy(update={"amp": amp}), planned_for),
        # DDP's gradient buckets stay allocated, like the gradients of accumulated micro-batches.
        accumulate_steps=min(training.accumulate_steps, 2) if training.ranks == 1 else 2,
        extra_ema_decays=tuple(0.1 / (n + 1) for n in range(len(training.extra_ema_decays))),  # as many
        recompute_norm=setup.execution(training).recompute_norm,
        **{key: getattr(training, key) for key in _STEP_KEYS},
    )
    volume = VolumeConfig(
        path="/any", condition=ConditionConfig(path="/any", context=data.context) if config.has_condition else None
    )
    data = DataConfig(volumes=(volume,), **{key: getattr(data, key) for key in _DATA_KEYS})
    return TracedStep(Config(name="any", data=data, training=training, diffusion=config.diffusion, model=config.model))


@lru_cache(maxsize=8)  # dry run, tune and init request the same step repeatedly
class TracedStep:
    """A step on fake tensors."""

    def __init__(self, config: Config) -> None:
        self._config = config
        # Schedule tables and timesteps are real tensors.
        self._fake, self._footprint = FakeTensorMode(allow_non_fake_inputs=True), Footprint()
        with self._fake, self._footprint:
            self._step = _step_with_state(config)
        self.trace = cache(self._trace)

    def plan(self, batch: int) -> MemoryPlan:
        """Plan of a micro-batch; every figure is linear in sizes above three, as the operations are the same."""
        if batch <= 3:
            return self.trace(batch)
        two, three = self.trace(2), self.trace(3)
        if len(two.live_bytes) != len(three.live_bytes):  # other operations
            return self.trace(batch)

        def at(of_two: int, of_three: int) -> int:
            return of_two + (batch - 2) * (of_three - of_two)

        return replace(
            two,
            batch=batch,
            flops_per_step=at(two.flops_per_step, three.flops_per_step),
            live_bytes=tuple(map(at, two.live_bytes, three.live_bytes)),
            convolution_bytes=tuple(map(at, two.convolution_bytes, three.convolution_bytes)),
        )

    def _trace(self, batch: int) -> MemoryPlan:
        """Plan of one micro-batch, counting its own operations only."""
        footprint = self._footprint
        with self.entered() as step:
            if self._config.training.accumulate_steps > 1:
                _give_gradients(step)  # of earlier micro-batches, live during the forward pass
            footprint.restart()
            self.accumulate(batch)
            # Without the update: Muon's products (below 3 % for a large model) occur once per step only.
            flops = footprint.flops
            step.apply(self._config.training.lr)
        return MemoryPlan(batch, step.amp, flops, tuple(footprint.history), tuple(footprint.convolution_bytes))

    @contextmanager
    def entered(self) -> Iterator[TrainStep]:
        """Context in which operations on the step are traced instead of computed."""
        with self._fake, self._footprint:
            yield self._step

    def accumulate(self, batch: int) -> None:
        """Noising, forward and backward pass of a batch as delivered by `TrainingFeed`; within `entered`."""
        patch_size, channels = self._config.data.patch_size, self._config.condition_channels
        condition = torch.empty(batch, channels, *patch_size) if channels else None
        x_0 = torch.empty(batch, 1, *patch_size)
        self._step.accumulate(x_0, np.arange(batch), np.zeros(batch, np.int64), condition)


class _FakeUNet(UNet):
    def to(self, *args: Any, **kwargs: Any) -> Self:  # torch moves weights by swapping, which fails for fake ones
        return self


def _step_with_state(config: Config) -> TrainStep:
    """A step after the first update: with moments, without gradients.  Call it under FakeTensorMode."""
    network = _FakeUNet(config.model, config.input_channels, setup.execution(config.training), setup.context_of(config))
    if config.training.channels_last:
        for weight in network.parameters():
            if weight.ndim == 5:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last_3d)
    step = TrainStep(config, network, Schedule.from_config(config.diffusion), torch.device("cpu"))
    step.scaler.scale(torch.zeros(()))  # the scaler creates its state at the first loss
    _give_gradients(step)
    step.apply(config.training.lr)
    return step


def _give_gradients(step: TrainStep) -> None:
    for weight in step.network.parameters():
        weight.grad = torch.zeros_like(weight)


class Footprint(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Tracks every operation while entered, including backward passes and custom functions.

    Memory counts until the last tensor, view or graph holding it is gone; views share a storage and count once.
    Kernel-internal allocations are invisible.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0  # of all storages made since entering that are still held
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.restart()

    def restart(self) -> None:
        self.history = [self.live_bytes]  # now and after each allocation from now on
        self.flops = 0  # of matrix products and convolutions; a multiply-add is 2
        self.convolution_bytes = list[int]()  # input and output of each convolution

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two thirds of all calls: every device query of a fake tensor
            return args[0].fake_device
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is _aten.native_group_norm_backward.default:  # its fake result has the dtype of the weights
            out = out[0].to(args[1].dtype), *out[1:]
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._follow(leaf)
        if func._overloadpacket is _aten.convolution:
            self.convolution_bytes.append(args[0].nbytes + out.nbytes)
        if count := FLOPS.get(func._overloadpacket):
            self.flops += count(*args, **kwargs, out_val=out)
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key: int = storage._cdata  # equal for tensors that share memory, unlike the data pointers of fake ones (0)
        if key in self._live:
            return
        storage_bytes = storage.nbytes()

        def freed(_: object) -> None:
            del self._live[key]
            self.live_bytes -= storage_bytes

        # A storage keeps one Python object while anything in C++ holds it, so its end is the memory's end.
        self._live[key] = weakref.ref(storage, freed)
        self.live_bytes += storage_bytes
        self.history.append(self.live_bytes)


def peak_flops_s(name: str, amp: setup.AmpMode, tf32: bool) -> float | None:
    """Dense peak of a GPU by its CUDA name; None if unknown.  `tf32`: float32 convolutions may use tensor cores."""
    peaks = next((peaks for pattern, peaks in _PEAKS.items() if re.fullmatch(pattern, name)), None)
    if peaks is None:
        return None
    fp16, bf16, with_tf32, fp32 = peaks
    peak = {"fp16": fp16, "bf16": bf16, "off": (with_tf32 if tf32 else None) or fp32}[amp]
    return None if peak is None else 1e12 * peak


def seconds_at_peak(config: Config, device: torch.device, share: RankShare) -> float | None:
    """Duration of a rank's share of a step at the device's peak; None if the peak is unknown.

    Only the model's own work counts: recomputed blocks count once, the optimizer's matrix products not at all.
    """
    if device.type == "cpu":
        return None
    name, amp = properties(device).name, setup.resolve_amp(config.training.amp, device)
    peak = peak_flops_s(name, amp, torch.backends.cudnn.allow_tf32)
    if peak is None:
        log.info("mfu_pct is not reported: the peak of %s with amp %s is unknown", name, amp)
        return None
    try:
        model = config.with_training(checkpoint_levels=(), optimizer="adamw", accumulate_steps=1)
        per_sample = plan_memory(model, amp=amp).flops_per_step / config.training.micro_batch
        return per_sample * share.global_batch / share.world / peak
    except Exception as error:  # a figure must not end a run
        log.warning("mfu_pct is not reported: a step could not be traced: %s", one_line(error))
        return None
