"""Shares of the data sheet that kernels reach, by class: what `step_cost.py` estimates a step's time with.

We have measured none of them: a share has a published measurement next to it, or is assumed, and each has a pessimistic
and an optimistic value.  `tools/gpu_check.py` measures the convolutions on a card, and its table replaces these.
"""

from __future__ import annotations

from typing import Any

_H200 = "0.29 forward on H200, a small one (github.com/tile-ai/TileOPs/issues/1998); A100 assumed"
ESTIMATES = {"pessimistic": 4e-6, "optimistic": 2e-6}  # seconds that any kernel takes, with its launch; assumed
# Shares of the peak of bf16 on A100 and on H100, each pessimistic and optimistic, and where they come from.  Narrow
# layers fill tiles badly; a weight gradient sums over all voxels, in parts that are added afterwards.
PEAK = {
    "3x3x3, 256 channels and more": ((0.45, 0.65), (0.29, 0.50), _H200),
    "3x3x3, 256 channels and more, weight gradient": ((0.35, 0.55), (0.20, 0.40), "assumed"),
    "3x3x3, 128 channels": ((0.40, 0.60), (0.25, 0.45), _H200),
    "3x3x3, 128 channels, weight gradient": ((0.30, 0.50), (0.17, 0.35), "assumed"),
    "3x3x3, 64 channels": ((0.28, 0.45), (0.15, 0.30), "assumed"),
    "3x3x3, 64 channels, weight gradient": ((0.15, 0.35), (0.08, 0.22), "assumed"),
    "strided": ((0.25, 0.45), (0.15, 0.30), "assumed"),
    "strided, input gradient": ((0.06, 0.30), (0.03, 0.20), "assumed; not in cuDNN 8.1's guide to 3D convolutions"),
    "few channels": ((0.03, 0.08), (0.02, 0.05), "assumed; 1, 2 and 3 channels fill an eighth of a tile at most"),
    "1x1x1": ((0.50, 0.70), (0.35, 0.60), "assumed, as matrix products"),
    "attention": ((0.35, 0.55), (0.30, 0.50), "assumed, heads of 64"),
    "bf16 product": ((0.50, 0.75), (0.40, 0.70), "assumed"),
    "TF32 product": ((0.25, 0.40), (0.20, 0.35), "assumed; its peak is 0.5"),
    "float32 product": ((0.04, 0.055), (0.04, 0.06), "assumed; its peak is 0.0625 and 0.068"),
}
BANDWIDTH = ((0.75, 0.90), (0.70, 0.88))  # of every kernel's bytes; assumed


def kernel_class(name: str, args: Any, gradient: str = "") -> str:
    """Class of a convolution or product, a key of `PEAK`; `gradient` is "", "input" or "weight"."""
    if name.startswith("_scaled_dot_product"):
        return "attention"
    if "convolution" not in name:
        if args[-1].dtype.itemsize < 4:
            return "bf16 product"
        return "float32 product" if name == "baddbmm" else "TF32 product"  # of Muon
    weight, stride = (args[1], args[3]) if name == "convolution" else (args[2], args[4])
    channels, kernel = min(weight.shape[:2]), weight.shape[2:]
    if channels < 8:
        return "few channels"
    if max(stride) > 1:
        return "strided, input gradient" if gradient == "input" else "strided"
    if max(kernel) == 1:
        return "1x1x1"
    width = "64 channels" if channels < 128 else "128 channels" if channels < 256 else "256 channels and more"
    return f"3x3x3, {width}" + (", weight gradient" if gradient == "weight" else "")


def estimated_seconds(
    flops: int, moved_bytes: int, kernel: str, gpu: str, peak: float, bandwidth: float, how: str
) -> float:
    """Seconds of a kernel: "pessimistic" or "optimistic".  `kernel` is its class, or "" if it only moves bytes."""
    card, index = int(not gpu.startswith("A100")), list(ESTIMATES).index(how)
    compute_s = flops / (peak * PEAK[kernel][card][index]) if kernel else 0.0
    return max(compute_s, moved_bytes / (bandwidth * BANDWIDTH[card][index]), ESTIMATES[how])
