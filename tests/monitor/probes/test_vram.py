"""GPU memory from a fake allocator."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vesuvius.experiments.tune.worker import vram_bytes
from vesuvius.monitor.probes.vram import _PEAKS, Vram, VramUse, used_share
from vesuvius.training.forecast.memory_plan import CONTEXT_BYTES

GIB = 2**30
PEAK = "allocated_bytes.all.peak"


def fake_cuda(peaks: list[int], initialized: bool = True) -> SimpleNamespace:
    """The parts of `torch.cuda` that are read, for device 1 with 10 GiB; `peaks` since the last reset."""

    def memory_stats(device: int) -> dict[str, int]:
        if not peaks:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        parts = {"allocated_bytes.all.current": 2 * GIB, PEAK: peaks[0]}
        return parts | {"reserved_bytes.all.current": 6 * GIB, "num_alloc_retries": 3, "num_ooms": 1}

    return SimpleNamespace(
        is_initialized=lambda: initialized,
        memory_stats=memory_stats,
        mem_get_info={1: (GIB, 10 * GIB)}.__getitem__,
        reset_peak_memory_stats=lambda device: peaks.pop(0),
    )


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vesuvius.monitor.probes.vram._ended", dict.fromkeys(_PEAKS, 0))


def test_vram_figures_are_read_and_the_peak_is_that_of_the_window() -> None:
    vram = Vram(1, fake_cuda([5 * GIB, 2 * GIB, GIB]))
    first = VramUse(2 * GIB, 6 * GIB, 5 * GIB, GIB, 10 * GIB, retries=3, failures=1)
    assert [vram.read(new_window) for new_window in (False, True, True, False)] == [
        first,
        first,
        replace(first, peak_bytes=2 * GIB),
        first,  # of the process
    ]


def test_the_peak_of_the_process_outlives_the_windows_of_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of 10 GiB, 7 were reserved and 5 allocated before a window ended, and less since."""
    cuda, device = fake_cuda([5 * GIB, 2 * GIB]), torch.device("cuda")
    stats = cuda.memory_stats
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (3 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 6 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: 1.0)
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats",
        lambda device=None: stats(device) | {"reserved_bytes.all.peak": 2 * GIB + stats(device)[PEAK]},
    )
    cuda.memory_stats = torch.cuda.memory_stats
    for _ in range(2):
        assert used_share() == 5 / 9, "of what is free or its own"
        assert vram_bytes(device) == 7 * GIB + CONTEXT_BYTES, "plus at most this much of CUDA's own 1 GiB"
        Vram(1, cuda).read()


def test_vram_of_an_unused_or_failed_gpu_is_none() -> None:
    assert Vram(1, fake_cuda([GIB], initialized=False)).read() is None
    assert Vram(1, fake_cuda([])).read() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_on_a_gpu_is_counted_and_its_peak_reset() -> None:
    vram = Vram(torch.device("cuda"))
    kept = torch.zeros(2**20, device="cuda")
    vram.read()
    torch.zeros(2**26, device="cuda")
    first, second = vram.read(), vram.read()
    assert first is not None
    assert second is not None
    assert first.peak_bytes >= first.allocated_bytes + 2**28
    assert second.peak_bytes < first.peak_bytes
    assert kept.nbytes <= second.allocated_bytes <= second.reserved_bytes <= second.total_bytes - second.free_bytes
