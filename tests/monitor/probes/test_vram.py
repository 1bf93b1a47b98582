"""GPU memory from a fake allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.gpu import GPU as REAL
from tests.support.gpu import needs_gpu
from vesuvius.experiments.tune.worker import vram_bytes
from vesuvius.monitor.probes import vram
from vesuvius.monitor.probes.gpus import VramUse
from vesuvius.monitor.probes.vram import _PEAKS, read_vram, used_share
from vesuvius.training.forecast.memory_plan import CONTEXT_BYTES

GIB = 2**30
PEAK = "allocated_bytes.all.peak"
GPU = torch.device("cuda")


def fake_cuda(monkeypatch: pytest.MonkeyPatch, peaks: list[int], initialized: bool = True) -> None:
    """A device with 10 GiB; `peaks` of allocated memory, a reset apart, each with 2 GiB more reserved."""

    def memory_stats(device: torch.device | None = None) -> dict[str, int]:
        if not peaks:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        parts = {"allocated_bytes.all.current": 2 * GIB, PEAK: peaks[0], "reserved_bytes.all.peak": 2 * GIB + peaks[0]}
        return parts | {"reserved_bytes.all.current": 6 * GIB, "num_alloc_retries": 3, "num_ooms": 1}

    monkeypatch.setattr(vram, "choose_device", lambda: GPU)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (3 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.pop(0))


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vesuvius.monitor.probes.vram._ended", dict.fromkeys(_PEAKS, 0))


def test_vram_figures_are_read_and_the_peak_is_that_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, [5 * GIB, 2 * GIB, GIB])
    first = VramUse(2 * GIB, 6 * GIB, 5 * GIB, 3 * GIB, 10 * GIB, retries=3, failures=1)
    assert [read_vram(GPU, new_window) for new_window in (False, True, True, False)] == [
        first,
        first,
        replace(first, peak_bytes=2 * GIB),
        first,  # of the process
    ]


def test_the_peak_of_the_process_outlives_the_windows_of_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of 10 GiB, 7 were reserved and 5 allocated before a window ended, and less since."""
    fake_cuda(monkeypatch, [5 * GIB, 2 * GIB])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: 1.0)
    for _ in range(2):
        assert used_share() == 5 / 9, "of what is free or its own"
        assert vram_bytes(GPU) == 7 * GIB + CONTEXT_BYTES, "plus at most this much of CUDA's own 1 GiB"
        read_vram(GPU)


def test_vram_of_an_unused_or_failed_gpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, [GIB], initialized=False)
    assert read_vram(GPU) is None
    fake_cuda(monkeypatch, [])
    assert read_vram(GPU) is None


@needs_gpu
def test_a_tensor_on_a_gpu_is_counted_and_its_peak_reset() -> None:
    kept = torch.zeros(2**20, device=REAL)
    read_vram(REAL)
    torch.zeros(2**26, device=REAL)
    first, second = read_vram(REAL), read_vram(REAL)
    assert first is not None
    assert second is not None
    assert first.peak_bytes >= first.allocated_bytes + 2**28
    assert second.peak_bytes < first.peak_bytes
    assert kept.nbytes <= second.allocated_bytes <= second.reserved_bytes <= second.total_bytes - second.free_bytes
