"""Model FLOPs utilisation: the operations that a step's mathematics needs, against what the GPU could do at most."""

from __future__ import annotations

import logging
import re

import torch

from vesuvius.config import Config
from vesuvius.errors import one_line
from vesuvius.training.forecast.memory_plan import plan_memory
from vesuvius.training.ranks.part import Part
from vesuvius.training.step.step import AmpMode, resolve_amp

log = logging.getLogger(__name__)

# Dense TFLOP/s at boost clock: fp16 on tensor cores with float32 sums, as torch asks for; bf16 and tf32 likewise, None
# = no such units; fp32 without tensor cores.  From NVIDIA's data sheets and architecture white papers, those "with
# sparsity" halved.  Whole names, as CUDA has them: a laptop's, a MIG slice of one or the A10G have other peaks.
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


def peak_flops_s(name: str, amp: AmpMode, tf32: bool) -> float | None:
    """Dense peak of a GPU, by the name that CUDA has for it; None where it is not in the table.  Pure.

    `tf32`: whether float32 convolutions may use tensor cores.
    """
    peaks = next((peaks for pattern, peaks in _PEAKS.items() if re.fullmatch(pattern, name)), None)
    if peaks is None:
        return None
    fp16, bf16, with_tf32, fp32 = peaks
    peak = {"fp16": fp16, "bf16": bf16, "off": (with_tf32 if tf32 else None) or fp32}[amp]
    return None if peak is None else 1e12 * peak


def seconds_at_peak(config: Config, device: torch.device, part: Part) -> float | None:
    """How long a rank's part of a step would take at the device's peak; None where that is not known.

    What memory is saved with is no work of the model: blocks that are computed again count once, an optimizer's matrix
    products not at all.  Takes seconds where the step has not been traced before.
    """
    if device.type != "cuda":
        return None
    name, amp = torch.cuda.get_device_name(device), resolve_amp(config.training.amp, device)
    peak = peak_flops_s(name, amp, torch.backends.cudnn.allow_tf32)
    if peak is None:
        log.info("no mfu_pct: the peak of %s in amp %s is unknown", name, amp)
        return None
    try:
        model = config.with_training(checkpoint_levels=(), optimizer="adamw", accumulate_steps=1)
        per_sample = plan_memory(model, amp=amp).flops_per_step / config.training.train_batch_size
        return per_sample * part.global_batch / part.world / peak
    except Exception as error:  # a figure must not end a run
        log.warning("no mfu_pct: a step could not be traced: %s", one_line(error))
        return None
