"""Rows of `gpu_check.py` that ask whether a device computes what it should, and how fast its kernels are.

What is allowed is derived, not chosen: a rounding of known size changes the result of another computation, and the
device may be off by `SLACK` times as much.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.efficiencies import kernel_class
from gpu.measure import Bench, Row, RowError, compare, judged, planned_peak
from numpy.typing import NDArray
from torch import Tensor, nn

from vesuvius.accelerator import synchronize
from vesuvius.config.load import read_config
from vesuvius.diffusion.estimate import split_signal_noise
from vesuvius.errors import ConfigError
from vesuvius.monitor.probes.vram import is_gpu_memory_error
from vesuvius.training.step.muon import Muon
from vesuvius.training.step.self_test import Convolution, check_kernels, network_convolutions
from vesuvius.training.step.setup import build_meta_network

Losses = NDArray[np.float64]

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SLACK = 4.0  # the lengths of two Gaussian vectors of eight, the patches of a step, differ by more in 1 of 10,000 cases
FLOAT32 = 2.0**-24  # largest relative error of one rounding
# No axis of an activation is shorter than 4: oneDNN's bf16 is wrong for depth 2 on some CPUs.
DEMO = ("data.patch_size=[16,16,16]", "model.channels=[32,64]", "training.compile=false")
TINY = ("data.patch_size=[8,8,8]", "model.channels=[8]", "model.full_res_channels=4")
DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"off": 2.0**-11, "bf16": 2.0**-9, "fp16": 2.0**-12}  # "off" is TF32 on a GPU
WINDOW_S, MOST_CALLS = 0.02, 100
CURVE_S = 60.0  # of a curve in 16 bits on the CPU: many have no unit for them, and take seconds a step


def demo(bench: Bench, device: torch.device, *overrides: str) -> Bench:
    """configs/demo.yaml within the time of a row; in a rehearsal a smaller one."""
    keys = (*DEMO, *(() if bench.on_gpu else TINY), *overrides)
    found = Bench(device, read_config(ROOT / "configs" / "demo.yaml", keys))
    found.row_end_s = bench.row_end_s
    return found


def demo_losses(bench: Bench, device: torch.device, steps: int, *overrides: str, exact: bool = True) -> Losses:
    """Losses [steps, patches] of demo steps, fewer if a CPU takes longer than CURVE_S in 16 bits.

    Unless `exact`, the initial weights are off by the rounding of the longest sum of n products in a convolution or
    its gradients, relative to each: 2^-24 sqrt(n).
    """
    own = demo(bench, device, *overrides)
    step, generator, losses = own.step(own.config), torch.Generator().manual_seed(1), []
    end_s = time.monotonic() + (CURVE_S if device == CPU and own.amp != "off" else math.inf)
    if not exact:
        convolutions = network_convolutions(own.config, own.patches)
        sums = [math.prod(c.input_shape) // c.input_shape[1] for c in convolutions]  # of a weight gradient
        off = FLOAT32 * math.sqrt(max(*sums, *(math.prod(c.weight_shape[1:]) for c in convolutions)))
        for weight in step.network.parameters():
            weight.data *= 1 + off * torch.randn(weight.shape, generator=generator).to(device)
    for number in range(steps):
        outcome = own.one(step, own.config, number)
        synchronize(device)
        losses.append(outcome.read().losses)
        if time.monotonic() > end_s:
            break
    return np.array(losses)


def curve(bench: Bench, amp: str, steps: int) -> Row:
    """Losses of demo steps on the device in float32 ("off") or 16 bits, against the CPU's float32.

    All randomness is drawn on the CPU, so they differ by rounding, which grows as training amplifies it: as it does on
    the CPU if the initial weights are off by rounding, or if it computes in bf16 too.
    """
    if amp == "fp16":
        raise RowError("skipped", "in fp16 it depends on rounding which of the first steps overflow")
    # A GPU multiplies Muon's kernels in TF32, so float32 is AdamW's.
    keys = ("training.optimizer=adamw" if amp == "off" else f"training.optimizer={bench.config.training.optimizer}",)
    rounded = (*keys, f"training.amp={amp}")
    if amp != "off":
        own = demo(bench, CPU, *rounded)
        try:
            check_kernels(own.config, own.patches, CPU, "bf16")
        except ConfigError as error:  # there are CPUs with wrong kernels
            raise RowError("skipped", f"the CPU cannot be the measure: {error}") from None
    near = demo_losses(bench, CPU, steps, *rounded, exact=amp != "off")
    steps = len(near)
    truth = demo_losses(bench, CPU, steps, *keys, "training.amp=off")
    order = "auto" if bench.on_gpu else "true"  # so that a rehearsal compares something
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = demo_losses(bench, bench.device, steps, *rounded, f"training.channels_last={order}")
    return judge_curve(found, truth, near)


def judge_curve(found: Losses, truth: Losses, near: Losses) -> Row:
    """Compare curves [steps, patches]: the losses of a step may be off by SLACK times what `near` was off by so far.

    Raises RowError.
    """
    ours, cpu = (np.linalg.norm(each - truth, axis=1) / np.linalg.norm(truth, axis=1) for each in (found, near))
    band = SLACK * np.maximum.accumulate(np.maximum(cpu, FLOAT32))
    used = [judged(f"losses of step {n + 1}", float(ours[n]), float(band[n]))["used"] for n in range(len(ours))]
    return {"steps": len(ours), "off": float(ours.max()), "used": max(used)}


def convolutions(bench: Bench, channels_last: bool) -> Row:
    """The test with which a run starts: each convolution in 16 bits.  Raises ConfigError: one is wrong."""
    if bench.amp == "off":
        raise RowError("skipped", "the config computes in float32")
    config = bench.config.with_training(channels_last=channels_last)
    check_kernels(config, min(bench.patches, 2), bench.device, bench.amp, poll=bench.check_time)
    return {}


def muon(bench: Bench) -> Row:
    """One update of a kernel of each shape against float64, by the published iteration on whole matrices.

    The rows of a gradient differ in length by a factor of 100, so that small singular values count.  A GPU multiplies
    by kernels in TF32: allowed is SLACK times what rounding the gradient to TF32's 10 bits changes.
    """
    generator, worst = torch.Generator().manual_seed(0), {"off": 0.0, "used": 0.0}
    shapes = {tuple(w.shape) for w in build_meta_network(bench.config).parameters() if w.ndim == 5 and len(w) > 1}
    for shape in sorted(shapes):
        bench.check_time()
        gradient = torch.randn(shape, generator=generator) * torch.logspace(0, -2, shape[0]).view(-1, 1, 1, 1, 1)
        tf32 = ((gradient.view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)
        both = torch.stack([gradient, tf32]).to(bench.device).double().flatten(2)
        exact, rounded = (_orthogonalized(each).view(shape).cpu() for each in both)
        ours, off = (
            float((each - exact).norm() / exact.norm()) for each in (_updated(gradient, bench.device), rounded)
        )
        found = judged(f"the update of a kernel {shape}", ours, SLACK * off)
        worst = {key: max(value, found[key]) for key, value in worst.items()}
    return worst | {"shapes": len(shapes)}


def _updated(gradient: Tensor, device: torch.device) -> Tensor:
    """Difference that the first step subtracts from a kernel, at learning rate 1."""
    kernel = nn.Parameter(torch.zeros(gradient.shape, device=device))
    kernel.grad = gradient.to(device)
    Muon([{"params": [kernel], "weight_decay": 0.0, "orthogonal": True}], lr=1.0, fused=True).step()
    return -kernel.detach().cpu()


def _orthogonalized(matrix: Tensor) -> Tensor:
    """Jordan et al. 2024, scaled as in Liu et al. 2025."""
    if len(matrix) > matrix.shape[1]:
        return _orthogonalized(matrix.T).T
    x = matrix / matrix.norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x * 0.2 * math.sqrt(x.shape[1])


def scaler(bench: Bench) -> Row:
    """In fp16, a step with an infinite gradient halves the scale and changes nothing else; the next one is applied."""
    own = demo(bench, bench.device, "training.amp=fp16")
    step = own.step(own.config)

    def applied(number: int) -> bool:
        outcome = own.one(step, own.config, number)
        synchronize(own.device)
        return outcome.read().applied

    overflows = next((number for number in range(20) if applied(number)), None)
    if overflows is None:
        raise RowError("wrong", "20 steps overflow fp16")
    weights = [*step.network.parameters(), *step.averages["ema"].weights.values()]
    before, scale = [weight.detach().clone() for weight in weights], step.scaler.get_scale()
    hook = next(step.network.parameters()).register_hook(lambda gradient: gradient * math.inf)
    skipped = not applied(20)
    hook.remove()
    changed = sum(not torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))
    factor, goes_on = step.scaler.get_scale() / scale, applied(21)
    found = {"skipped": skipped, "weights changed": changed, "scale times": factor, "next step applied": goes_on}
    if [*found.values()] != [True, 0, 0.5, True]:
        raise RowError("wrong", f"an infinite gradient: {found}; expected True, 0, 0.5 and True")
    return {"scale": scale, "overflows": overflows}


def out_of_memory(bench: Bench, total_bytes: int) -> Row:
    """Micro-batches of two run out of memory; the step is repeated with one patch at a time, and equals one without.

    Memory is capped between their peaks by the memory plan; in a rehearsal a hook runs out.
    """
    if bench.patches % 2:
        raise RowError("skipped", f"an effective batch of {bench.patches} cannot be halved")
    one, two = (bench.config.with_training(compile=False).with_micro_batch(size) for size in (1, 2))
    cap = (planned_peak(one) + planned_peak(two)) // 2
    undisturbed, step = bench.judged_steps(bench.step(one), one), bench.step(one)

    def run_out(_: object, given: tuple[Tensor, ...]) -> None:
        if len(given[0]) > 1:
            raise torch.OutOfMemoryError("rehearsed")

    if not bench.on_gpu:
        step.network.register_forward_pre_hook(run_out)
    bench.limit_memory(cap / max(total_bytes, cap))  # until the end of the row
    try:
        bench.one(step, two, 0)
    except Exception as error:
        if not is_gpu_memory_error(error):
            raise
    else:
        raise RowError("wrong", f"two patches fit into {cap} bytes, midway between the plans of one and of two")
    step.drop()
    bench.limit_memory(cap / max(total_bytes, cap))
    return compare(bench.judged_steps(step, one), undisturbed) | {"cap_bytes": cap}


def fft(bench: Bench) -> Row:
    """The split of noisy patches by their spectrum against float64: an FFT of n voxels adds log2(n) roundings."""
    if bench.schedule.spectrum is None:
        raise RowError("skipped", "diffusion.noise is not spectral")
    x_0 = bench.x_0[:2].cpu()
    noisy = 0.8 * x_0 + 0.6 * torch.randn(x_0.shape, generator=torch.Generator().manual_seed(2))

    def split(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        factors = (torch.full((len(x_0), 1, 1, 1, 1), value, dtype=dtype, device=device) for value in (0.8, 0.6))
        channels, v, _ = split_signal_noise(bench.schedule.to(device), noisy.to(device, dtype), *factors)
        return torch.cat([channels, v], dim=1).cpu().double()

    exact = split(CPU, torch.float64)
    off = float((split(bench.device) - exact).norm() / exact.norm())
    return judged("the spectral split", off, SLACK * FLOAT32 * math.log2(noisy[0].numel()))


def seconds_of(bench: Bench, call: Callable[[], Any]) -> float:
    """Seconds of a call, queued back to back."""
    seconds = 0.0
    for window_s in (0.0, 0.0, WINDOW_S) if bench.on_gpu else (0.0,):  # in the first cuDNN tries its kernels
        bench.check_time()
        calls = min(math.ceil(window_s / seconds), MOST_CALLS) if window_s else 1
        synchronize(bench.device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(bench.device)
        seconds = (time.perf_counter() - began) / calls
    return seconds


def convolution_speeds(bench: Bench, channels_last: bool) -> Row:
    """TFLOP/s of the forward pass and both gradients of each distinct convolution of the config's micro-batch.

    The roofline is the larger of operations over the data sheet's peak and bytes over a copy's bandwidth, each tensor
    read or written once.
    """
    torch.backends.cudnn.benchmark = True
    order = torch.channels_last_3d if channels_last else torch.contiguous_format
    source = torch.zeros(2 ** (28 if bench.on_gpu else 20), dtype=torch.uint8, device=bench.device)
    copied = torch.empty_like(source)
    bytes_s = 2 * source.nbytes / seconds_of(bench, lambda: copied.copy_(source))

    def filled(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPES[bench.amp], device=bench.device).contiguous(memory_format=order)

    def measured(convolution: Convolution) -> list[Row]:
        x, weight = filled(*convolution.input_shape), filled(*convolution.weight_shape)
        options = (convolution.stride, convolution.padding, (1, 1, 1), False, (0, 0, 0), 1)

        ahead, back = torch.ops.aten.convolution, torch.ops.aten.convolution_backward
        gradient = filled(*ahead(x, weight, None, *options).shape)
        calls = {
            "": lambda: ahead(x, weight, None, *options),
            "input": lambda: back(gradient, x, weight, None, *options, (True, False, False)),
            "weight": lambda: back(gradient, x, weight, None, *options, (False, True, False)),
        }
        flops, moved = 2 * gradient.numel() * weight[0].numel(), x.nbytes + weight.nbytes + gradient.nbytes
        least_s = max(flops / (bench.peak_flops_s or math.inf), moved / bytes_s)
        row = {"convolution": str(convolution), "flops": flops, "least_s": least_s}
        kinds = {part: kernel_class("convolution", (x, weight, None, convolution.stride), part) for part in calls}
        return [
            row
            | {
                "class": kinds[part],
                "pass": f"{part} gradient" if part else "forward",
                "seconds": seconds_of(bench, call),
            }
            for part, call in calls.items()
        ]

    distinct = network_convolutions(bench.config, bench.config.training.micro_batch)
    kernels = [row for convolution in distinct for row in measured(convolution)]
    return {"bytes_s": bytes_s, "kernels": kernels, "classes": classes_of(kernels, bench.peak_flops_s)}


def classes_of(kernels: list[Row], peak_flops_s: float | None) -> list[Row]:
    """By class of `bench/efficiencies.py` and pass: TFLOP/s, shares of the peak and of the roofline.  Pure."""
    groups: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel["class"], kernel["pass"]].append(kernel)
    rows = []
    for (name, part), alike in groups.items():
        flops, seconds, least_s = (sum(kernel[key] for kernel in alike) for key in ("flops", "seconds", "least_s"))
        shares = {"of_peak": flops / seconds / peak_flops_s, "of_roofline": least_s / seconds} if peak_flops_s else {}
        rows.append({"class": name, "pass": part, "kernels": len(alike), "tflops": flops / seconds / 1e12} | shares)
    return rows


def sampling(bench: Bench) -> Row:
    """Evaluations of the network a second without gradients, eager and compiled, each compared with float32.

    Allowed is SLACK times one rounding of each convolution.
    """
    batch, allowed = min(bench.config.training.micro_batch, 4), SLACK * ROUNDING[bench.amp]
    allowed *= math.sqrt(len(network_convolutions(bench.config, 1)))
    given = (bench.x_0[:batch], torch.full((batch,), 500, device=bench.device))
    given += () if bench.condition is None else (bench.condition[:batch],)

    def evaluation(**keys: Any) -> Callable[[], Tensor]:
        denoise = bench.step(bench.config.with_training(**keys)).denoiser("raw")
        return lambda: denoise(*given).float()

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        exact = evaluation(amp="off", compile=False, channels_last=False)()
    torch.backends.cudnn.benchmark = True
    row: Row = {"batch": batch}
    for how in ("eager", "compiled"):
        torch._dynamo.utils.counters.clear()
        evaluate = evaluation(compile=how == "compiled")
        off = float((evaluate() - exact).norm() / exact.norm())
        if how == "compiled" and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            raise RowError("not compiled", "evaluations are not compiled; the child's log says why")
        row |= judged(f"{how} evaluations", off, allowed) | {f"{how} a second": batch / seconds_of(bench, evaluate)}
    return row
