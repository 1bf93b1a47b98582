"""The device of the tests that need a GPU: CUDA or, in a process with SIM_GPU=1, the stand-in (sim_device.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support import sim_device

GPU = torch.accelerator.current_accelerator(check_available=True) or torch.device("cuda")
GPU_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU, or SIM_GPU=1"),
]


def needs_gpu(test: Callable[..., Any]) -> Callable[..., Any]:
    for mark in GPU_MARKS:
        test = mark(test)
    return test


def sleep(seconds: float) -> None:
    """Queue work that takes about as long on the current stream."""
    if GPU.type == "sim":
        sim_device.sleep(seconds)
    else:
        torch.cuda._sleep(int(seconds * 1.7e9))  # cycles


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where the host would wait for the device; synchronize before and after."""
    torch.accelerator.synchronize()
    forbid = sim_device.forbid_waiting if GPU.type == "sim" else _forbid_on_cuda
    forbid(True)
    try:
        yield
    finally:
        forbid(False)
    torch.accelerator.synchronize()


def _forbid_on_cuda(is_forbidden: bool) -> None:
    torch.cuda.set_sync_debug_mode("error" if is_forbidden else "default")
