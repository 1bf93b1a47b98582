"""When the GPU's memory runs out: what held it, and the overrides with which the run continues as it was."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from vesuvius.config import Config
from vesuvius.errors import GpuMemoryError, one_line
from vesuvius.monitor.probes.vram import Vram, VramUse
from vesuvius.runlog.units import size_text
from vesuvius.training.forecast.memory_plan import CONTEXT_BYTES, largest_batch, leaner, plan_memory
from vesuvius.training.step.step import resolve_amp

# cuBLAS and cuDNN, and torch for pinned memory, report the same without torch's own class.
_OTHER_NAMES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
# What cuDNN says where it has no kernel, or none whose workspace fits; the first is torch's own text.
_NO_KERNEL = ("unable to find an engine", "CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_STATUS_INTERNAL_ERROR")
_NEARLY_FULL = 0.6  # a workspace is at most some tensors of a convolution
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def used_share() -> float:
    """The most that tensors took at once of the GPU memory that this process may have; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    may_take = min(torch.cuda.get_per_process_memory_fraction() * total, free + torch.cuda.memory_reserved())
    return torch.cuda.max_memory_allocated() / max(may_take, 1)


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


def gpu_memory_error(
    config: Config, device: torch.device, error: BaseException, saved_step: int | None, vram: Vram | None = None
) -> GpuMemoryError:
    """The error to end a run with: what failed, value and remedy in its first line, who held the memory below.

    Takes seconds, because the memory plan is asked.  Raises nothing.  `saved_step` is of the checkpoint that holds all
    finished steps, None where none could be saved.
    """
    use = (vram or Vram(device)).read(new_window=False)
    what_to_do = remedy(config, device, use)
    wanted = re.search(r"Tried to allocate [\d.]+ \w+", str(error))  # the rest of torch's text is in the table
    first = (
        f"A step with train_batch_size {config.training.train_batch_size} does not fit the GPU: out of memory "
        f"({wanted[0] if wanted else one_line(error)}); {what_to_do}"
    )
    held = "unknown, no GPU reports it"
    if use is not None:
        held = (
            f"{size_text(use.allocated_bytes)} in tensors ({size_text(use.peak_bytes)} at the peak), torch held "
            f"{size_text(use.reserved_bytes)}, CUDA itself and other processes {size_text(use.foreign_bytes)}, "
            f"{size_text(use.free_bytes)} of {size_text(use.total_bytes)} are free"
        )
    saved = "none could be saved now; --resume continues from the last one"
    if saved_step is not None:
        saved = f"step {saved_step} is saved, and nothing is lost"
    return GpuMemoryError(f"{first}\nmemory: {held}\ncheckpoint: {saved}", what_to_do)


def remedy(config: Config, device: torch.device, use: VramUse | None) -> str:
    """The overrides with which to go on: the largest smaller micro-batch that divides the global batch, and fits by
    the memory plan beside the other processes on the GPU; the next smaller one where that is not known.

    Raises nothing.
    """
    training, total, why = config.training, config.global_batch, ""
    most = training.train_batch_size - 1
    try:
        assert use is not None, "the GPU's memory cannot be read"
        # The plan's reserve holds CUDA's own share of what is not torch's.
        usable_bytes = use.total_bytes - max(use.foreign_bytes - CONTEXT_BYTES, 0)
        amp = resolve_amp(training.amp, device)
        need_bytes = plan_memory(config, amp=amp).vram_bytes
        # A smaller batch accumulates: earlier gradients then live beside the activations.
        accumulating = config.with_training(accumulate_steps=max(training.accumulate_steps, 2))
        most = min(largest_batch(accumulating, usable_bytes, amp), most)
    except Exception as problem:  # the error on its way out must not be hidden by that of its explanation
        why = f"what would fit is unknown ({one_line(problem)}); "
    else:
        why = f"the memory plan needs {size_text(need_bytes)} of {size_text(usable_bytes)}: "
        if need_bytes <= usable_bytes:
            why += f"fragments, validation or another process took the rest; with {_EXPANDABLE} it may fit; "
    batch = next((size for size in range(most, 0, -1) if total % size == 0), None)
    if batch is None:
        return why + leaner(config)
    overrides = f"training.train_batch_size={batch} training.accumulate_steps={total // batch}"
    return f"{why}continue with --resume {overrides}, which keeps the effective batch"
