"""The ring between stream and device, without a device: buffers of ordinary memory, copies that are late."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import textured, write_array
from vesuvius.config import ArrayConfig, DataConfig, VolumeConfig
from vesuvius.errors import ConfigError
from vesuvius.loader.device import BatchRing
from vesuvius.stream.feeder import BUFFERS_IN_USE, Batch
from vesuvius.stream.options import StreamOptions, batches_ahead
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream

OPTIONS = StreamOptions(4, workers=0, prefetch_factor=2)


def allocate() -> list[Tensor]:
    """Patches of one dtype, conditions of another."""
    return [torch.zeros((4, 8, 16, 16), dtype=dtype) for dtype in (torch.uint8, torch.uint16)]


class LateCopy:
    """Takes its copy of a batch only when it is waited for, as a device that is far behind."""

    def __init__(self, slot: list[Tensor]) -> None:
        self._slot = slot
        self.values: list[Tensor] = []

    def synchronize(self) -> None:
        self.values = self.values or [part.clone() for part in self._slot]


@pytest.fixture
def job(tmp_path: Path, volume: Path) -> ReaderJob:
    condition = write_array(tmp_path / "condition.zarr", textured((96, 128, 128), seed=1, dtype="uint16"))
    spec = VolumeConfig(path=str(volume), condition=ArrayConfig(path=str(condition)))
    return prepare_data(0, DataConfig(volumes=(spec,), patch_size=(8, 16, 16), patches_per_region=4)).job


def expected_batches(job: ReaderJob, count: int) -> list[Batch]:
    with PatchStream(job, OPTIONS) as stream:
        return [next(stream) for _ in range(count)]


def one_batch(stream: PatchStream, ring: BatchRing) -> LateCopy:
    """As `DeviceFeed.next` does it."""
    ring.wait()
    batch = next(stream)
    slot = ring.take(batch.patches)
    assert batch.condition is not None
    assert np.shares_memory(batch.condition, slot[1].numpy())
    copy = LateCopy(slot)
    ring.set_copied(copy)
    return copy


def opened(job: ReaderJob, ring: BatchRing) -> PatchStream:
    return PatchStream(job, OPTIONS, buffers=ring.buffers, condition_buffers=ring.condition_buffers)


def test_resizing_the_ring_does_not_change_batches(job: ReaderJob) -> None:
    """Each copy is taken at the last moment that the ring grants it."""
    sizes = {3: 3, 4: 9, 11: 5, 12: 5, 20: 3}  # slots from that batch on
    ring, copies = BatchRing(allocate, BUFFERS_IN_USE + 2), []
    with opened(job, ring) as stream:
        for number in range(26):
            if number in sizes:
                ahead = sizes[number] - BUFFERS_IN_USE
                ring = ring.resized(stream, sizes[number], prefetch_factor=ahead)
                assert (len(ring), len(ring.buffers), len(ring.condition_buffers)) == (sizes[number],) * 3
                assert batches_ahead(stream.options) == ahead
                assert all(copy.values for copy in copies), "all copies are over before a buffer is used again"
            copies.append(one_batch(stream, ring))
    for copy in copies[-len(ring) :]:
        copy.synchronize()
    for copy, batch in zip(copies, expected_batches(job, 26), strict=True):
        assert batch.condition is not None
        np.testing.assert_array_equal(copy.values[0].numpy(), batch.patches)
        np.testing.assert_array_equal(copy.values[1].numpy(), batch.condition)


def test_a_failed_resize_leaves_stream_and_ring_unchanged(job: ReaderJob) -> None:
    left = 5

    def scarce() -> list[Tensor]:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("CUDA error:\n out of memory")
        return allocate()

    ring = BatchRing(scarce, 4)
    with opened(job, ring) as stream:
        copies = [one_batch(stream, ring) for _ in range(3)]
        before = stream.options
        with pytest.raises(ConfigError, match=r"for 6 prefetched batches instead of 4: CUDA error: "):
            ring.resized(stream, 6, prefetch_factor=4)
        with pytest.raises(ConfigError, match="are too small"):
            ring.resized(stream, 2, prefetch_factor=1)
        assert stream.options is before
        copies += [one_batch(stream, ring) for _ in range(4)]
    for copy in copies:
        copy.synchronize()
    for copy, batch in zip(copies[-2:], expected_batches(job, 7)[-2:], strict=True):
        np.testing.assert_array_equal(copy.values[0].numpy(), batch.patches)


def test_slot_bytes_equal_torchs_pinned_allocation() -> None:
    shape = (3, 8, 16, 16)  # 6 KiB and 12 KiB
    ring = BatchRing(lambda: [torch.zeros(shape, dtype=dtype) for dtype in (torch.uint8, torch.uint16)], 3)
    assert ring.slot_bytes == 8192 + 16384
    assert BatchRing(lambda: [torch.zeros((4, 8, 16, 16), dtype=torch.uint8)], 3).slot_bytes == 8192


def test_a_batch_in_another_ring_is_an_error(job: ReaderJob) -> None:
    ring, other = BatchRing(allocate, BUFFERS_IN_USE + 2), BatchRing(allocate, BUFFERS_IN_USE + 2)
    with opened(job, other) as stream, pytest.raises(KeyError):
        one_batch(stream, ring)
