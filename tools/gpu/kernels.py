"""Each family of kernels of a training step by itself, for `gpu_check.py`: convolutions, norms, elementwise, copies.

Milliseconds are medians by the device's events, of some repeats behind two to warm up; GB/s counts each tensor of the
size of x that has to be read or written once, so that what a kernel does beyond that shows as a lower figure.
"""

from __future__ import annotations

import math
import statistics
import timeit
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from gpu.measure import Bench, Budget, Row, attempt, synchronize
from gpu.networks import Spec, build, experiment
from torch.utils._python_dispatch import TorchDispatchMode

from vesuvius.diffusion.network import norm_silu
from vesuvius.diffusion.network.layers import depth_to_space
from vesuvius.runlog.units import format_sizes

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last_3d}
MAIN_CONVOLUTIONS = 8
REPEATS = 7
WARM_UP = 2  # the first of them compiles, or lets cuDNN try


@dataclass(frozen=True)
class Convolution:
    """One shape of convolution of a network, as in torch."""

    channels_in: int
    channels_out: int
    kernel_zyx: tuple[int, ...]
    stride_zyx: tuple[int, ...]
    padding_zyx: tuple[int, ...]
    size_zyx: tuple[int, ...]  # voxels of its input

    @property
    def flops(self) -> int:
        """Floating-point operations of one forward pass of one patch; a multiply-add is 2."""
        voxels = math.prod(
            (n + 2 * p - k) // s + 1
            for n, p, k, s in zip(self.size_zyx, self.padding_zyx, self.kernel_zyx, self.stride_zyx, strict=True)
        )
        return 2 * voxels * math.prod(self.kernel_zyx) * self.channels_in * self.channels_out


class _Convolutions(TorchDispatchMode):
    """Counts the convolutions of a forward pass by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Convolution] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            x, weight, _, stride, padding = args[:5]
            shape = (tuple(weight.shape[2:]), tuple(stride), tuple(padding), tuple(x.shape[2:]))
            self.found[Convolution(weight.shape[1], weight.shape[0], *shape)] += 1
        return func(*args, **(kwargs or {}))


def main_convolutions(bench: Bench, spec: Spec) -> list[tuple[Convolution, int, float]]:
    """Those with most operations in a forward pass of one patch, how often each is there, and its share of them all."""
    network = build(spec, experiment(spec, bench.patch_zyx, 1), torch.device("meta"))
    x, t = torch.empty(1, 1, *bench.patch_zyx, device="meta"), torch.zeros(1, dtype=torch.int64, device="meta")
    with _Convolutions() as convolutions, torch.no_grad():
        network(x, t)
    total = sum(shape.flops * count for shape, count in convolutions.found.items())
    ranked = sorted(convolutions.found.items(), key=lambda item: -item[0].flops * item[1])
    return [(shape, count, shape.flops * count / total) for shape, count in ranked[:MAIN_CONVOLUTIONS]]


def convolution_row(bench: Bench, shape: Convolution, batch: int, layout: str, budget: Budget) -> Row:
    """Milliseconds and TFLOP/s of one convolution in bf16, forward and backward."""
    row: Row = {
        "convolution": f"{shape.channels_in} -> {shape.channels_out}, {format_sizes(shape.kernel_zyx)}",
        "stride": shape.stride_zyx,
        "size": shape.size_zyx,
        "micro_batch": batch,
        "layout": layout,
    }

    def measure() -> Row:
        x, weight = (
            torch.randn(size, device=bench.device).bfloat16().contiguous(memory_format=LAYOUTS[layout])
            for size in (
                (batch, shape.channels_in, *shape.size_zyx),
                (shape.channels_out, shape.channels_in, *shape.kernel_zyx),
            )
        )
        steps = (list(shape.stride_zyx), list(shape.padding_zyx))
        out = F.conv3d(x, weight, None, *steps)
        one = [1, 1, 1]

        def backward() -> None:
            torch.ops.aten.convolution_backward(
                out, x, weight, None, *steps, one, False, [0, 0, 0], 1, [True, True, False]
            )

        forward_s = seconds(bench, lambda: F.conv3d(x, weight, None, *steps))
        backward_s = seconds(bench, backward)
        tflop = batch * shape.flops / 1e12
        row = {"forward_ms": 1e3 * forward_s, "forward_tflops": tflop / forward_s}
        row |= {"backward_ms": 1e3 * backward_s, "backward_tflops": 2 * tflop / backward_s}
        peak = bench.peak_tflops[0] if bench.peak_tflops else None
        return row | {"mfu": None if peak is None else 3 * tflop / (forward_s + backward_s) / peak}

    return attempt(bench, budget, row, measure)


def family_rows(bench: Bench, channels: int, size_zyx: tuple[int, ...], batch: int, budget: Budget) -> list[Row]:
    """Milliseconds and GB/s of norms, elementwise kernels and copies on [batch, channels, *size_zyx] in bf16."""
    return [
        attempt(
            bench,
            budget,
            {"kernel": name, "channels": channels, "size": size_zyx, "micro_batch": batch, "layout": layout},
            lambda name=name, layout=layout: _family(bench, name, channels, size_zyx, batch, layout),
        )
        for layout in LAYOUTS
        for name in FAMILIES
    ]


# What is run on the tensors `t`, and how many tensors of the size of x it must read and write.
FAMILIES: dict[str, tuple[int, Callable[[Any], object]]] = {
    "moments of groups (torch's var_mean)": (
        1,
        lambda t: torch.var_mean(t.x.unflatten(1, (t.groups, -1)), (2, 3, 4, 5), correction=0),
    ),
    "norm and SiLU, ours": (3, lambda t: norm_silu.forward(t.x, t.weight, t.bias, t.groups)),
    "norm and SiLU, torch's": (5, lambda t: F.silu(F.group_norm(t.x, t.groups, *t.half))),
    "norm and SiLU again": (2, lambda t: norm_silu.again(t.x, t.weight, t.bias, t.mean, t.rstd)),
    "norm and SiLU backward": (5, lambda t: norm_silu.backward(t.y, None, t.x, t.weight, t.bias, t.mean, t.rstd)),
    "add": (3, lambda t: t.x + t.y),
    "SiLU": (2, lambda t: F.silu(t.x)),
    "copy": (2, lambda t: t.x.clone()),
    "copy to the other layout": (2, lambda t: t.x.contiguous(memory_format=t.other)),
    "depth to space": (2, lambda t: depth_to_space(t.x, (1, 2, 2) if t.x.shape[1] % 8 else (2, 2, 2))),
}


def _family(bench: Bench, name: str, channels: int, size_zyx: tuple[int, ...], batch: int, layout: str) -> Row:
    order = LAYOUTS[layout]
    t = SimpleNamespace(groups=max(channels // 4, 1) if channels < 64 else 16)
    t.other = next(format for format in LAYOUTS.values() if format != order)
    t.x = torch.randn(batch, channels, *size_zyx, device=bench.device).bfloat16().contiguous(memory_format=order)
    t.weight, t.bias = torch.ones(channels, device=bench.device), torch.zeros(channels, device=bench.device)
    t.half = t.weight.bfloat16(), t.bias.bfloat16()
    t.y, _, t.mean, t.rstd = norm_silu.forward(t.x, t.weight, t.bias, t.groups)
    tensors, run = FAMILIES[name]
    took_s = seconds(bench, lambda: run(t))
    return {"ms": 1e3 * took_s, "gb_s": tensors * t.x.nbytes / took_s / 1e9}


def seconds(bench: Bench, run: Callable[[], object]) -> float:
    """Median seconds of a call, by the device's events on a GPU."""
    for _ in range(WARM_UP):
        run()
    synchronize(bench)
    if not bench.on_gpu:
        return statistics.median(timeit.repeat(run, number=1, repeat=REPEATS))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    synchronize(bench)
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3
