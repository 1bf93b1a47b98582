"""Count the cost of a training step on a GPU, without one: operations, bytes that kernels move, launches, a roofline.

    python tools/bench/step_cost.py --config configs/exp001_full.yaml [--batch 8] [--compiled] [key.path=value ...]

One micro-batch (noising, forward, backward) and one update (clipping, optimizer, averages) run on fake tensors
(`training/forecast/memory_plan.py`) in a GPU's dtype and memory order.  Every ATen operation counts as a kernel that
reads its inputs and writes its outputs once; views are free; a convolution's bias is a separate kernel, as in cuDNN.  A
kernel's own copies, such as cuDNN's of another memory order, are not seen.  A CPU's fake tensors: attention and
autocast of norms differ on CUDA.

--compiled: the blocks (`training.compile`) count as the kernels that inductor's scheduler makes of them for a GPU, with
the bytes that it estimates for each (`cuda_kernels.py`); takes a minute.  The rest of the step counts as above.

The roofline gives each kernel the larger of operations over the peak and bytes over the bandwidth, from data sheets:
the least that a step takes; MFU is the share of that time in which the peak would do its convolutions and products.
No kernel reaches its peak: two more lines estimate with the shares of each class of kernels in `efficiencies.py`.

--assemble sm_80,sm_90: instead, those kernels go through Triton and ptxas to the machine code of these GPUs, in every
configuration that inductor would measure (`triton_kernels.py`); fails if one does not compile or fit, or all spill.

--host measures the time of Python and torch's dispatch: the CPU time of the same step with a network of equal depth and
minimal width, on patches of 8x8x8.  Above a third of the least device time, a GPU may have to wait for it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from cuda_kernels import CARDS, Kernel, Sources, backend, order_of_cudnn
from efficiencies import ESTIMATES, estimated_seconds, kernel_class
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vesuvius.config.load import read_config
from vesuvius.diffusion.network.regions import CompiledRegions
from vesuvius.diffusion.schedule import Schedule
from vesuvius.training.forecast.memory_plan import FLOPS, traced_step
from vesuvius.training.step.setup import build_network
from vesuvius.training.step.step import TrainStep

# Dense bf16 operations a second, and bytes a second of the memory, from NVIDIA's data sheets.
GPUS = {"A100-80": (312e12, 2.04e12), "H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12)}
_KINDS = {
    "convolution": ("convolution", "convolution_backward"),
    "product": ("mm", "bmm", "addmm", "baddbmm", "_scaled_dot_product_"),
    "norm": ("native_group_norm", "native_layer_norm", "var_mean", "_fused_rms_norm"),
    "cast": ("_to_copy", "to"),
    "copy": ("copy_", "clone", "contiguous", "cat", "stack", "_foreach_copy_", "constant_pad_nd"),
    "add": ("add", "add_", "sub", "sum", "mean"),
    "fill": ("zeros", "zeros_like", "zero_", "fill_", "full", "ones_like", "full_like", "_foreach_zero_"),
}
_NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view")
_HOST_STEPS = 12
# Limits of one launch of torch's multi-tensor kernels (MultiTensorApply.cuh): tensors, by the number of lists; chunks.
_MOST_TENSORS, _MOST_CHUNKS, _CHUNK = (110, 64, 48, 36, 30), 320, 65536
_SYNCS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero")


@dataclass
class Cost:
    """Cost of the kernels of one kind."""

    kernels: int = 0
    moved_bytes: int = 0
    flops: int = 0


class Costs(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Counts every operation while it is entered, by kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds: defaultdict[str, Cost] = defaultdict(Cost)
        self.syncs = 0
        self._work: list[tuple[int, int, str]] = []  # operations, bytes and class of each kernel
        self._fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name, of_flops = func._overloadpacket.__name__, FLOPS.get(func._overloadpacket)
        if self._fused and not of_flops:
            return out
        self.syncs += name in _SYNCS
        read = _tensors((args, kwargs))
        written = _tensors(out) or (_tensors(args[:1]) if func._schema.is_mutable else [])  # foreach returns nothing
        if written and not func.is_view and name not in _NO_KERNEL:
            kind = next((kind for kind, names in _KINDS.items() if _is_one_of(name, names)), "pointwise")
            flops = of_flops(*args, **kwargs, out_val=out) if of_flops else 0
            moved_bytes = sum(t.nbytes for t in (*read, *written))
            if name == "convolution_backward":
                self._add_gradients(args, out, flops)
            else:
                of = kernel_class(name, args) if flops else ""
                self._add(kind, moved_bytes, flops, _launches(name, args), of)
            if self._fused:  # if biases are among the kernels
                return out
            if name == "convolution" and args[2] is not None:
                self._add("bias", 2 * out.nbytes)
            if name == "convolution_backward" and args[-1][2]:
                self._add("bias", args[0].nbytes)
        return out

    def launch(self, graph: Any, arguments: Sequence[Any], kernels: Iterable[Kernel]) -> Any:
        """Count these kernels of a graph, and run its convolutions and products."""
        for kernel in kernels:
            self._add(kernel.kind, kernel.moved_bytes)
        self._fused = True
        try:
            with self:
                return graph(*arguments)
        finally:
            self._fused = False

    def _add_gradients(self, args: Any, out: Any, flops: int) -> None:
        """A convolution's backward pass: a kernel for the input's gradient, one for the weight's."""
        grad, x, weight = args[:3]
        wanted = [(out[0], weight, "input"), (out[1], x, "weight")]
        wanted = [each for each, is_wanted in zip(wanted, args[-1][:2], strict=True) if is_wanted]
        for written, read, gradient in wanted:
            of = kernel_class("convolution_backward", args, gradient)
            self._add("convolution", grad.nbytes + read.nbytes + written.nbytes, flops // len(wanted), of=of)

    def _add(self, kind: str, moved_bytes: int, flops: int = 0, launches: int = 1, of: str = "") -> None:
        cost = self.kinds[kind]
        cost.kernels += launches
        cost.moved_bytes += moved_bytes
        cost.flops += flops
        self._work.append((flops, moved_bytes, of))

    @property
    def kernels(self) -> int:
        return sum(cost.kernels for cost in self.kinds.values())

    @property
    def flops(self) -> int:
        return sum(cost.flops for cost in self.kinds.values())

    @property
    def other_bytes(self) -> int:
        """Bytes moved by all kernels except convolutions and products."""
        return sum(cost.moved_bytes for kind, cost in self.kinds.items() if kind not in ("convolution", "product"))

    def seconds(self, gpu: str) -> float:
        """Least seconds by the data sheet."""
        peak, bandwidth = GPUS[gpu]
        return sum(max(flops / peak, moved_bytes / bandwidth) for flops, moved_bytes, _ in self._work)

    def estimated_seconds(self, gpu: str, how: str) -> float:
        """Seconds with the shares of `efficiencies.py`, "pessimistic" or "optimistic"."""
        return sum(estimated_seconds(*work, gpu, *GPUS[gpu], how) for work in self._work)


def _launches(name: str, args: Any) -> int:
    """Number of kernels that an operation launches, if known."""
    if not name.startswith(("_foreach_", "_fused_")):
        return 1
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor)]
    chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in lists[0])
    return max(-(-len(lists[0]) // _MOST_TENSORS[len(lists) - 1]), -(-chunks // _MOST_CHUNKS))


def _is_one_of(name: str, names: Iterable[str]) -> bool:
    return any(name == each or (each.endswith("_") and each != name and name.startswith(each)) for each in names)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def count(
    path: Path, overrides: list[str], batch: int | None, compiled: bool = False, sources: Sources | None = None
) -> tuple[Costs, Costs, int, int]:
    """Costs of a micro-batch and of an update, the patches of the former, and the micro-batches of a step."""
    config = read_config(path, overrides)
    batch = batch or config.training.micro_batch
    traced, micro_batch, update = traced_step(config, None), Costs(), Costs()
    with _on_gpu(), traced.entered() as step:
        with micro_batch, _compiled(step.network, micro_batch, sources) if compiled else nullcontext():
            traced.accumulate(batch)
        with update:
            step.apply(config.training.lr)
    return micro_batch, update, batch, config.global_batch // batch


def count_evaluation(
    path: Path, overrides: list[str], batch: int, compiled: bool = False, sources: Sources | None = None
) -> Costs:
    """Costs of one prediction for a batch, without gradients: what a sampler repeats."""
    config = read_config(path, overrides)
    traced, costs = traced_step(config, None), Costs()
    with _on_gpu(), traced.entered() as step:
        x_t = torch.empty(batch, 1, *config.data.patch_size)
        condition = torch.empty(batch, config.condition_channels, *x_t.shape[2:]) if config.has_condition else None
        denoise, t = step.denoiser("raw"), torch.zeros(batch, dtype=torch.int64)
        with costs, _compiled(step.network, costs, sources) if compiled else nullcontext():
            denoise(x_t, t, condition)
    return costs


@contextmanager
def _on_gpu() -> Iterator[None]:
    """Context in which a CPU's fake tensors take a GPU's path."""
    # Gradients are clipped by multi-tensor kernels on a GPU; on a CPU torch has none.
    foreach = patch("torch.nn.utils.clip_grad._has_foreach_support", lambda tensors, device: True)
    order = patch("torch._C._conv_determine_backend_memory_format", order_of_cudnn)
    with foreach, order:
        yield


@contextmanager
def _compiled(network: nn.Module, costs: Costs, sources: Sources | None) -> Iterator[None]:
    """Context in which the blocks of a network on fake tensors are compiled regions."""
    regions = CompiledRegions(backend(costs.launch, sources))

    def call(block: nn.Module, *arguments: Any) -> Tensor:
        with _disable_current_modes():  # torch does not compile within a mode
            return regions(block, *arguments)

    before = {module: module.execution for module in network.modules() if hasattr(module, "execution")}
    torch.compiler.reset()
    try:
        for module, execution in before.items():
            module.execution = replace(execution, call=call)
        yield
        assert not regions.failure, regions.failure
    finally:
        for module, execution in before.items():
            module.execution = execution
        torch.compiler.reset()


def host_seconds(path: Path, overrides: list[str]) -> tuple[float, float]:
    """CPU seconds of one thread for a micro-batch and for an update, medians."""
    config = read_config(path, overrides)
    model, amp = config.model, config.training.amp
    thin = {"channels": (model.attention_heads,) * len(model.channels), "full_res_channels": 2}
    config = config.model_copy(
        update={
            "model": model.model_copy(update=thin),
            "data": config.data.model_copy(update={"patch_size": (8, 8, 8)}),
            "training": config.training.model_copy(update={"amp": "bf16" if amp == "auto" else amp, "compile": False}),
        }
    )
    device = torch.device("cpu")
    step = TrainStep(config, build_network(config, device), Schedule.from_config(config.diffusion), device)
    channels, x_0 = config.condition_channels, torch.zeros(1, 1, 8, 8, 8)
    condition = torch.zeros(1, channels, 8, 8, 8) if channels else None
    times = []
    for _ in range(_HOST_STEPS):
        began = time.thread_time()
        step.accumulate(x_0, np.arange(1), np.zeros(1, np.int64), condition)
        between = time.thread_time()
        step.apply(config.training.lr)
        times.append((between - began, time.thread_time() - between))
    micro_batch_s, update_s = (statistics.median(of_one) for of_one in zip(*times, strict=True))
    return micro_batch_s, update_s


def assemble(path: Path, overrides: list[str], batch: int | None, inference: bool, archs: Sequence[str]) -> int:
    """Compile the kernels of the compiled blocks, and print what each takes of a card; return the exit status."""
    from triton_kernels import assembled, spilling, table

    sources: Sources = {arch: {} for arch in archs}
    if inference:
        count_evaluation(path, overrides, batch or 1, True, sources)
    else:
        count(path, overrides, batch, True, sources)
    kernels = {arch: assembled(written, arch) for arch, written in sources.items()}
    for arch, of_arch in kernels.items():
        print(f"\n{arch}\n\n{table(of_arch)}")
    return int(any(map(spilling, kernels.values())))


def print_kinds(what: str, costs: Costs) -> None:
    """Print a table of the kernels by kind."""
    print(f"\n| {what} | kernels | GB moved | TFLOP |\n| --- | --- | --- | --- |")
    for kind, cost in sorted(costs.kinds.items(), key=lambda item: -item[1].moved_bytes):
        print(f"| {kind} | {cost.kernels} | {cost.moved_bytes / 1e9:.3g} | {cost.flops / 1e12:.3g} |")
    print(f"| all | {costs.kernels} | - | {costs.flops / 1e12:.3g} |")


def main() -> None:
    """Print two tables and a line for each GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--batch", type=int, help="patches of a micro-batch (default: the config's)")
    parser.add_argument("--compiled", action="store_true", help="count compiled blocks")
    parser.add_argument("--inference", action="store_true", help="count one prediction instead of a step")
    parser.add_argument("--assemble", metavar="ARCH,...", help=f"compile the kernels, only: {', '.join(CARDS)}")
    parser.add_argument("--host", action="store_true", help="also measure the host's time, eagerly")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    torch.set_num_threads(1)
    how = "compiled" if args.compiled else "eager"
    if args.assemble:
        sys.exit(assemble(args.config, args.overrides, args.batch, args.inference, args.assemble.split(",")))
    if args.inference:
        batch = args.batch or 1
        costs = count_evaluation(args.config, args.overrides, batch, args.compiled)
        print_kinds(f"a prediction for {batch}, {how}", costs)
        print(f"\nbytes without convolutions and products: {costs.other_bytes / batch / 1e9:.3g} GB a patch")
        for gpu in GPUS:
            estimates = (f"{how} {1e3 * costs.estimated_seconds(gpu, how):.1f} ms" for how in ESTIMATES)
            print(f"{gpu}: at least {1e3 * costs.seconds(gpu):.1f} ms; {', '.join(estimates)}")
        return
    micro_batch, update, batch, pieces = count(args.config, args.overrides, args.batch, args.compiled)
    print_kinds(f"a micro-batch of {batch}, {how}", micro_batch)
    print_kinds("an update", update)
    print(f"\nbytes without convolutions and products: {micro_batch.other_bytes / batch / 1e9:.3g} GB a patch")
    print(f"host synchronizations: {pieces * micro_batch.syncs + update.syncs} a step")
    flops, host_s = pieces * micro_batch.flops, None
    if args.host:
        micro_batch_s, update_s = host_seconds(args.config, args.overrides)
        host_s = pieces * micro_batch_s + update_s
        print(f"host: {1e3 * micro_batch_s:.1f} ms a micro-batch, {1e3 * update_s:.1f} ms an update")
    for gpu, (peak, _) in GPUS.items():
        least_s = pieces * micro_batch.seconds(gpu) + update.seconds(gpu)
        share = "" if host_s is None else f"; the host takes {host_s / least_s:.0%} of it"
        rate = f"MFU at most {flops / peak / least_s:.0%}"
        print(f"{gpu}: at least {1e3 * least_s:.0f} ms a step of {pieces} x {batch}, {rate}{share}")
        for how in ESTIMATES:
            estimate_s = pieces * micro_batch.estimated_seconds(gpu, how) + update.estimated_seconds(gpu, how)
            print(f"  {how}: {1e3 * estimate_s:.0f} ms, MFU {flops / peak / estimate_s:.0%}")


if __name__ == "__main__":
    main()
