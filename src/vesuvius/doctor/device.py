"""Checks of the GPU and of torch on it."""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from vesuvius.config import Config
from vesuvius.diffusion.network.unet import check_torch_version
from vesuvius.doctor.check import Finding
from vesuvius.errors import ConfigError
from vesuvius.runlog.units import size_text
from vesuvius.training.step.self_test import (
    TOLERANCES,
    USUAL,
    Convolve,
    check_kernels,
    convolution_errors,
    cudnn_problem,
)
from vesuvius.training.step.step import AmpMode, choose_device, resolve_amp


def look_at_torch(version: str = torch.__version__) -> Finding:
    """The version, and what it was built for."""
    check_torch_version(version)
    return Finding("ok", f"torch {version}, CUDA {torch.version.cuda or 'none: built for CPUs'}")


def look_at_gpus() -> Finding:
    """GPUs and driver, as NVML sees them, and whether torch can use one."""
    works = torch.cuda.is_available()
    seen, driver = seen_by_driver()
    if seen and not works:
        built = "a torch without CUDA" if torch.version.cuda is None else "a torch that cannot use it"
        remedy = f"install a torch whose CUDA the driver {driver} supports (see pytorch.org), or a newer driver"
        return Finding("fail", f"{', '.join(seen)}, driver {driver}, but {built}", remedy)
    if not works:
        return Finding("ok", "none: training computes on the CPU (for a GPU, docker run needs --gpus all)")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("ok", f"{', '.join(names)}, driver {driver or 'not known'}")


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


def look_at_cudnn(config: Config | None) -> Finding:
    """Whether 16-bit 3D convolutions run on cuDNN."""
    device = choose_device()
    if device.type != "cuda":
        return Finding("ok", "not needed on a CPU")
    amp = _amp(config, device)
    problem = cudnn_problem(device, amp, config is not None and config.training.channels_last)
    if problem:
        value, _, remedy = problem.rpartition("; ")
        return Finding("fail", value, remedy)
    return Finding("ok", f"cuDNN {torch.backends.cudnn.version()}, amp {amp}")  # type: ignore[no-untyped-call]


def look_at_kernels(config: Config | None, convolve: Convolve | None = None) -> Finding:
    """Conv3d, forward and backward, in the dtype of the config, against float64 on the CPU.

    Of a config also the convolutions of its network, against float32.
    """
    device = choose_device()
    amp = _amp(config, device)
    errors = convolution_errors(USUAL, device, amp, convolve=convolve or F.conv3d)
    if config is not None:
        try:
            check_kernels(config, config.training.train_batch_size, device, amp)
        except ConfigError as error:
            value, _, remedy = str(error).rpartition("; ")
            return Finding("fail", value, remedy)
    name, worst = max(errors.items(), key=lambda item: item[1] if item[1] == item[1] else float("inf"))
    value = f"largest relative error {worst:.1e} ({name}), allowed {TOLERANCES[amp]:g}, amp {amp} on {device}"
    if not worst <= TOLERANCES[amp]:
        return Finding("fail", value, "set training.amp=off, or install a different torch")
    if device.type == "cuda" and amp == "fp16":
        return Finding("warn", value, "this GPU has no bf16: fp16 with loss scaling is used")
    return Finding("ok", value)


def look_at_vram(need_bytes: int) -> Finding:
    """The memory plan of a config against the GPU's memory."""
    free, total = torch.cuda.mem_get_info()
    value = f"{size_text(need_bytes)} planned, {size_text(free)} free of {size_text(total)}"
    if need_bytes > total:
        return Finding("fail", value, "lower training.train_batch_size and raise training.accumulate_steps")
    if need_bytes > free:
        return Finding("warn", value, "another process holds GPU memory: see nvidia-smi")
    return Finding("ok", value)


def _amp(config: Config | None, device: torch.device) -> AmpMode:
    return resolve_amp("auto" if config is None else config.training.amp, device)
