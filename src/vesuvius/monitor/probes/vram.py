"""The trainer's own memory on its GPU, as torch's allocator tells it, and what the device has left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# cuBLAS and cuDNN, and torch for pinned memory, report the same without torch's own class.
_OTHER_NAMES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
# What cuDNN says where it has no kernel, or none whose workspace fits; the first is torch's own text.
_NO_KERNEL = ("unable to find an engine", "CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_STATUS_INTERNAL_ERROR")
_NEARLY_FULL = 0.6  # a workspace is at most some tensors of a convolution


@dataclass(frozen=True)
class VramUse:
    """One GPU, as this process sees it."""

    allocated_bytes: int  # in tensors
    reserved_bytes: int  # what torch holds for tensors, used or not
    peak_bytes: int  # the most that was allocated in this window, or in the life of the process: see `Vram.read`
    # free_bytes, total_bytes: of the device, with all processes on it
    free_bytes: int
    total_bytes: int
    retries: int  # allocations that worked only once torch had given its unused memory back, which waits for the device
    failures: int  # allocations that did not work at all

    @property
    def foreign_bytes(self) -> int:
        """What is in use and is not torch's: CUDA itself, its libraries, and other processes."""
        return max(self.total_bytes - self.free_bytes - self.reserved_bytes, 0)


_ALLOCATED_PEAK, _RESERVED_PEAK = "allocated_bytes.all.peak", "reserved_bytes.all.peak"


@dataclass
class Peaks:
    """The most at once, each by itself."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0

    def take(self, stats: Mapping[str, int]) -> None:
        """Take in what the allocator tells."""
        self.allocated_bytes = max(self.allocated_bytes, stats.get(_ALLOCATED_PEAK, 0))
        self.reserved_bytes = max(self.reserved_bytes, stats.get(_RESERVED_PEAK, 0))


_ended = Peaks()  # of all windows that have ended in this process, which uses one GPU


def process_peaks(device: Any = None, cuda: Any = torch.cuda) -> Peaks:
    """Peaks since this process began.  The allocator's own are those since the monitor last read it."""
    peaks = Peaks()
    peaks.take(cuda.memory_stats(device))  # first: a window that ends meanwhile is in the other
    return Peaks(max(peaks.allocated_bytes, _ended.allocated_bytes), max(peaks.reserved_bytes, _ended.reserved_bytes))


class Vram:
    """Reads the memory of one GPU, a `torch.device` or an index.  May be used from any thread; waits for no kernel.

    Args:
        cuda: the module `torch.cuda`, or what stands for it in a test.
    """

    def __init__(self, device: Any, cuda: Any = torch.cuda) -> None:
        self._on_gpu = getattr(device, "type", "cuda") == "cuda"
        self._device = device
        self._cuda = cuda

    def read(self, new_window: bool = True) -> VramUse | None:
        """What is in use now, with the peak since the window before, and a new one begins; the peak of the process, and
        no window begins, without `new_window`.

        None on a CPU, where this process has not begun to use the GPU (reading would begin it, for 0.5 GiB), and where
        the GPU does not answer any more.
        """
        if not self._on_gpu or not self._cuda.is_initialized():
            return None
        try:
            # The driver first: where it hangs, this call lets other threads run, and the allocator's calls do not.
            free_bytes, total_bytes = self._cuda.mem_get_info(self._device)
            stats = self._cuda.memory_stats(self._device)
            peak_bytes = stats.get(_ALLOCATED_PEAK, 0)
            if new_window:
                _ended.take(stats)
                self._cuda.reset_peak_memory_stats(self._device)
            else:
                peak_bytes = process_peaks(self._device, self._cuda).allocated_bytes
        except RuntimeError:  # of a GPU that has failed; the training meets it too, and says so
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


def gpu_uuid(device: Any) -> str | None:
    """The uuid of a `torch.device`, whatever CUDA_VISIBLE_DEVICES hides, without the kind that NVML writes before it
    (GPU-, or MIG- for a part of one); None on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def used_share() -> float:
    """The most that tensors took at once of the GPU memory that this process may have; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    may_take = min(torch.cuda.get_per_process_memory_fraction() * total, free + torch.cuda.memory_reserved())
    return process_peaks().allocated_bytes / max(may_take, 1)


def is_gpu_memory_error(error: BaseException, share: Callable[[], float] = used_share) -> bool:
    """Whether an error says that a GPU has no memory left, whichever library found out.

    Where each of its kernels wants more workspace than is left, cuDNN says that it has no kernel.  One may be missing
    indeed, so that counts only where `share`, of the memory in use, was large.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if any(text in str(error) for text in _NO_KERNEL):
        return share() >= _NEARLY_FULL
    return any(name in str(error) for name in _OTHER_NAMES)
