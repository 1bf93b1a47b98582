"""The accelerators of this machine: any device type of torch other than "cpu".

All types take the same way.  Other modules name "cuda" only for what CUDA alone has, such as NCCL, cuDNN and TF32.
"""

from typing import Any

import torch


def choose_device(local_rank: int = 0) -> torch.device:
    """The accelerator of this rank if there is one, otherwise the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, local_rank % torch.accelerator.device_count()) if local_rank else found


def device_names() -> list[str]:
    return [properties(torch.device(choose_device().type, i)).name for i in range(torch.accelerator.device_count())]


def properties(device: torch.device) -> Any:
    """`name`, `total_memory` in bytes, and on CUDA `uuid`."""
    return torch.get_device_module(device).get_device_properties(device)


def memory_info(device: torch.device) -> tuple[int, int]:
    """Free and total bytes, as the driver reports them."""
    info: tuple[int, int] = torch.get_device_module(device).mem_get_info(device)
    return info


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator; does nothing on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def empty_cache() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def new_event(device: torch.device, timing: bool = False) -> torch.Event:
    if device.type == "cuda":  # a host that waits for torch's generic event spins
        return torch.cuda.Event(enable_timing=timing, blocking=True)  # type: ignore[no-untyped-call]
    return torch.Event(device, enable_timing=timing)
