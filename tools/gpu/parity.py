"""Is a training step right in every precision?  The self-test and the parity of losses of `gpu_check.py`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from gpu.measure import Bench, Budget, Row, attempt, make_step, one_step, resident_patches, synchronize
from gpu.networks import SHIPPED, Spec, experiment
from torch import nn

from vesuvius.training.step.self_test import TOLERANCES, convolution_errors, network_convolutions
from vesuvius.training.step.step import AmpMode, lies_channels_last

AMPS: tuple[AmpMode, ...] = ("off", "bf16", "fp16")

PARITY_STEPS = 5
PARITY_LIMIT = 0.03  # bf16 has 8 bits of mantissa; losses of a few steps stay within a percent or so


def convolution_self_test(bench: Bench, spec: Spec, batch: int, amp: AmpMode) -> Row:
    """The test that a run in 16 bits begins with, of all convolutions, and the largest relative errors."""
    config = experiment(spec, bench.patch_zyx, batch, amp=amp, channels_last="auto")
    last, errors = lies_channels_last(config.training, bench.device), dict[str, float]()
    for convolution in network_convolutions(config, batch):
        for part, error in convolution_errors(convolution, bench.device, amp, last).items():
            errors[part] = float(np.maximum(error, errors.get(part, 0.0)))  # NaN stays
    ok = all(error <= TOLERANCES[amp] for error in errors.values())
    return {"amp": amp, "channels_last": last, "errors": errors, "ok": ok}


def parity(bench: Bench, spec: Spec, batch: int, budget: Budget) -> list[Row]:
    """Losses of a few optimizer steps in float32, bf16 and fp16: same weights, patches, noise and timesteps.

    Noise and optimizer are those of our configs, edm and Muon.  The float32 steps are without TF32.  Weights that start
    as zero get small random values, or the first losses would not see the network.
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


def _losses(bench: Bench, spec: Spec, batch: int, amp: AmpMode) -> list[float]:
    config = experiment(spec, bench.patch_zyx, batch, amp=amp, **SHIPPED)
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
