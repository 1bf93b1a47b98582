"""Reads the trainer's GPU memory from torch's allocator, and the free memory of the device."""

import torch

from vesuvius.accelerator import choose_device, memory_info, properties
from vesuvius.monitor.probes.gpus import VramUse

# cuBLAS, cuDNN, and torch for pinned memory, report it without torch's own exception class.
_OTHER_NAMES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
# Reported if cuDNN has no kernel, or none whose workspace fits; the first text is torch's.
_NO_KERNEL = ("unable to find an engine", "CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_STATUS_INTERNAL_ERROR")
_NEARLY_FULL = 0.6  # a workspace is at most some tensors of a convolution

_PEAKS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak")
_ended = dict.fromkeys(_PEAKS, 0)  # of all past windows in this process, which uses one GPU


def process_peaks(device: torch.device) -> tuple[int, int]:
    """Return the peaks of allocated and reserved bytes since this process began; the monitor resets the allocator's."""
    stats = torch.get_device_module(device).memory_stats(device)  # first: a window that ends meanwhile is in `_ended`
    allocated, reserved = (max(_ended[name], stats.get(name, 0)) for name in _PEAKS)
    return allocated, reserved


def read_vram(device: torch.device, new_window: bool = True) -> VramUse | None:
    """Read the current use of a GPU, with the peak of the window that ends here; without `new_window`, with the peak of
    the process, and the window goes on.  Thread-safe; does not synchronize.

    None on a CPU, if this process does not use the GPU yet (initialising CUDA takes 0.5 GiB), or if the GPU has failed.
    """
    if device.type == "cpu" or not (torch_device := torch.get_device_module(device)).is_initialized():
        return None
    try:
        # The driver first: if it hangs, this call releases the GIL; the allocator's calls do not.
        free_bytes, total_bytes = memory_info(device)
        stats = torch_device.memory_stats(device)
        peak_bytes = stats.get(_PEAKS[0], 0)
        if new_window:
            _ended.update({name: max(most, stats.get(name, 0)) for name, most in _ended.items()})
            torch_device.reset_peak_memory_stats(device)
        else:
            peak_bytes, _ = process_peaks(device)
    except Exception:  # the GPU has failed, which training reports, or its driver lacks the query
        return None
    return VramUse(
        allocated_bytes=stats.get("allocated_bytes.all.current", 0),
        reserved_bytes=stats.get("reserved_bytes.all.current", 0),
        peak_bytes=peak_bytes,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        retries=stats.get("num_alloc_retries", 0),
        failures=stats.get("num_ooms", 0),
    )


def gpu_uuid(device: torch.device) -> str | None:
    """Return a GPU's UUID without NVML's prefix (GPU-, or MIG- for a partition); None if torch cannot tell."""
    try:
        return str(properties(device).uuid) if device.type != "cpu" else None
    except Exception:
        return None


def used_share() -> float:
    """Return the peak of allocated memory as a share of the memory this process may use; 0 without a working GPU."""
    device = choose_device()
    if (use := read_vram(device, new_window=False)) is None:
        return 0.0
    # Not all accelerators have it, and an error here would hide the one because of which this is asked.
    fraction: float = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", lambda: 1.0)()
    return use.peak_bytes / max(min(fraction * use.total_bytes, use.free_bytes + use.reserved_bytes), 1)


def is_gpu_memory_error(error: BaseException) -> bool:
    """Whether an error of torch, cuBLAS or cuDNN means that the GPU ran out of memory.

    If no kernel's workspace fits, cuDNN reports that it has no kernel.  A kernel may also really be missing, so that
    counts only if most of the memory was in use.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if any(text in str(error) for text in _NO_KERNEL):
        return used_share() >= _NEARLY_FULL
    return any(name in str(error) for name in _OTHER_NAMES)
