"""Checks of the GPU and of torch on it."""

from __future__ import annotations

import importlib

import torch

from vesuvius.config import Config
from vesuvius.diffusion.network.unet import check_torch_version
from vesuvius.doctor.check import Finding
from vesuvius.training.step.self_test import cudnn_problem
from vesuvius.training.step.step import resolve_amp


def look_at_torch(version: str = torch.__version__) -> Finding:
    """The version, and what it was built for."""
    check_torch_version(version)
    return Finding("ok", f"torch {version}, CUDA {torch.version.cuda or 'none: built for CPUs'}")


def look_at_gpus(config: Config | None) -> Finding:
    """GPUs and driver, as NVML sees them, whether torch can use one, and whether 16-bit convolutions run on cuDNN."""
    works = torch.cuda.is_available()
    seen, driver = seen_by_driver()
    if seen and not works:
        built = "a torch without CUDA" if torch.version.cuda is None else "a torch that cannot use it"
        remedy = f"install a torch whose CUDA the driver {driver} supports (see pytorch.org), or a newer driver"
        return Finding("fail", f"{', '.join(seen)}, driver {driver}, but {built}", remedy)
    if not works:
        return Finding("ok", "none: training computes on the CPU (for a GPU, docker run needs --gpus all)")
    device = torch.device("cuda")
    amp = resolve_amp("auto" if config is None else config.training.amp, device)
    if problem := cudnn_problem(device, amp, config is not None and config.training.channels_last):
        value, _, remedy = problem.rpartition("; ")
        return Finding("fail", value, remedy)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return Finding("ok", f"{', '.join(names)}, driver {driver or 'not known'}, cuDNN {cudnn}, amp {amp}")


def seen_by_driver() -> tuple[list[str], str]:
    """Names of the GPUs, and the driver's version; empty where NVML does not answer."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver, no GPU: each with an error of its own
        return [], ""
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [nvml.nvmlDeviceGetName(handle) for handle in handles], nvml.nvmlSystemGetDriverVersion()
    finally:
        nvml.nvmlShutdown()
