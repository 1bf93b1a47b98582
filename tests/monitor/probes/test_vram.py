"""What the allocator tells of a GPU's memory, told by a fake one: there is no GPU here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from vesuvius.monitor.probes.vram import Vram, VramUse

GIB = 2**30


@dataclass
class FakeCuda:
    """As much of `torch.cuda` as is read: an allocator with a peak that can be reset, on a device of 10 GiB."""

    allocated: int = 2 * GIB
    peak: int = 5 * GIB
    initialized: bool = True
    broken: bool = False
    asked: list[object] = field(default_factory=list)

    def is_initialized(self) -> bool:
        return self.initialized

    def memory_stats(self, device: object) -> dict[str, int]:
        self.asked.append(device)
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": 6 * GIB,
            "num_alloc_retries": 3,
            "num_ooms": 1,
        }

    def mem_get_info(self, device: object) -> tuple[int, int]:
        self.asked.append(device)
        return GIB, 10 * GIB

    def reset_peak_memory_stats(self, device: object) -> None:
        self.asked.append(device)
        self.peak = self.allocated


def test_each_figure_is_where_it_belongs() -> None:
    cuda = FakeCuda()
    assert Vram(1, cuda).read() == VramUse(2 * GIB, 6 * GIB, 5 * GIB, GIB, 10 * GIB, retries=3, failures=1)
    assert set(cuda.asked) == {1}, "the device that was asked for, not the current one"


def test_the_peak_is_that_since_the_window_before() -> None:
    cuda = FakeCuda()
    vram = Vram(0, cuda)
    peaks = []
    for new_window in (False, True, True):
        use = vram.read(new_window)
        assert use is not None
        peaks.append(use.peak_bytes)
    assert peaks == [5 * GIB, 5 * GIB, 2 * GIB]


def test_reading_does_not_begin_the_use_of_a_gpu() -> None:
    cuda = FakeCuda(initialized=False)
    assert Vram(torch.device("cuda"), cuda).read() is None
    assert not cuda.asked


def test_a_gpu_that_has_failed_is_not_known_and_raises_nothing() -> None:
    assert Vram(0, FakeCuda(broken=True)).read() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_on_a_gpu_is_seen_and_its_peak_forgotten() -> None:
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
