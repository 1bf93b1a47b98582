"""Is a training step right in every precision?  The self-test and the parity of losses of `gpu_check.py`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from gpu_measure import Bench, Budget, Row, attempt, make_step, one_step, resident_patches, synchronize
from model_systems import Spec, experiment
from torch import Tensor, nn

Amp = Literal["off", "bf16", "fp16"]
AMPS: tuple[Amp, ...] = ("off", "bf16", "fp16")

PARITY_STEPS = 5
PARITY_LIMIT = 0.03  # bf16 has 8 bits of mantissa; losses of a few steps stay within a percent or so
# bf16 rounds to 2^-9 = 0.2 % and sums of many products in float32 average that out; TF32 and fp16 are finer.
SELF_TEST_LIMIT = 0.01


def convolution_self_test(bench: Bench, amp: Amp) -> Row:
    """Forward and weight gradient of a Conv3d in the autocast dtype against float64 on the CPU; relative errors.

    Source of the worry: torch 2.9's Conv3d in bf16.
    """
    dtype = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 32, 9, 17, 17, generator=generator)
    weight = torch.randn(32, 32, 3, 3, 3, generator=generator) / math.sqrt(32 * 27)
    grad = torch.randn(2, 32, 9, 17, 17, generator=generator)

    def pair(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        kernel = weight.to(device, dtype).requires_grad_()
        out = F.conv3d(x.to(device, dtype), kernel, padding=1)
        out.backward(grad.to(device, dtype))
        assert kernel.grad is not None
        return [out.detach().cpu().double(), kernel.grad.cpu().double()]

    exact = pair(torch.device("cpu"), torch.float64)
    errors = [
        float((got - right).norm() / right.norm()) for got, right in zip(pair(bench.device, dtype), exact, strict=True)
    ]
    return {"amp": amp, "forward_error": errors[0], "gradient_error": errors[1], "ok": max(errors) < SELF_TEST_LIMIT}


def parity(bench: Bench, spec: Spec, batch: int, budget: Budget) -> list[Row]:
    """Losses of a few optimizer steps in float32, bf16 and fp16: same weights, patches, noise and timesteps.

    The float32 steps are without TF32.  Weights that start as zero get small random values, or the first losses would
    not see the network.
    """
    rows: list[Row] = []
    for amp in AMPS:
        row: Row = {"system": spec.name, "micro_batch": batch, "amp": amp}
        with _tensor_float_32(amp != "off"):
            rows.append(attempt(bench, budget, row, lambda amp=amp: {"losses": _losses(bench, spec, batch, amp)}))
    exact = rows[0].get("losses")
    for row in rows:
        if exact and "losses" in row:
            differences = [abs(got / right - 1) for got, right in zip(row["losses"], exact, strict=True)]
            row["largest_difference"] = max(differences)
        row["ok"] = row.get("largest_difference", math.inf) < PARITY_LIMIT
    return rows


def _losses(bench: Bench, spec: Spec, batch: int, amp: Amp) -> list[float]:
    config = experiment(spec, bench.patch_zyx, batch, amp=amp)
    step = make_step(bench, spec, config)
    _wake(step.network)
    x_0 = resident_patches(bench, batch)
    results = [one_step(step, config, x_0, number) for number in range(PARITY_STEPS)]
    synchronize(bench)
    return [result.read().loss for result in results]


@torch.no_grad()
def _wake(network: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for weight in network.parameters():
        if weight.ndim > 1 and not weight.any():
            values = torch.empty(weight.shape).normal_(std=0.5 * weight[0].numel() ** -0.5, generator=generator)
            weight.copy_(values)


@contextlib.contextmanager
def _tensor_float_32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed and before[0]
    torch.backends.cuda.matmul.allow_tf32 = allowed and before[1]
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
