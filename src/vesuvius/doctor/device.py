"""Checks of the GPU and of torch on it."""

from __future__ import annotations

import torch

from vesuvius.config import Config
from vesuvius.diffusion.network.unet import check_torch_version
from vesuvius.doctor.check import Finding
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.training.step.self_test import cudnn_problem
from vesuvius.training.step.step import resolve_amp


def look_at_torch(version: str = torch.__version__) -> Finding:
    """The version, and what it was built for."""
    check_torch_version(version)
    return Finding("ok", f"torch {version}, CUDA {torch.version.cuda or 'none: built for CPUs'}")


def look_at_gpus(config: Config | None) -> Finding:
    """GPUs as NVML sees them, whether torch can use one, and whether 16-bit convolutions run on cuDNN."""
    if not torch.cuda.is_available():
        with Gpus(within_s=5.0) as gpus:
            seen = ", ".join(use.name for use in gpus.sample())
        if not seen:
            return Finding("ok", "none: training computes on the CPU (for a GPU, docker run needs --gpus all)")
        built = "a torch without CUDA" if torch.version.cuda is None else "a torch that cannot use it"
        remedy = "install a torch whose CUDA the driver supports (`nvidia-smi` names it), or a newer driver"
        return Finding("fail", f"{seen}, but {built}", remedy)
    device = torch.device("cuda")
    amp = resolve_amp("auto" if config is None else config.training.amp, device)
    if problem := cudnn_problem(device, amp, config is not None and config.training.channels_last):
        value, _, remedy = problem.rpartition("; ")
        return Finding("fail", value, remedy)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return Finding("ok", f"{', '.join(names)}, cuDNN {cudnn}, amp {amp}")
