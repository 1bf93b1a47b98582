"""Training batches: their host copy and their noise."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.loader.test_device import CPU, on_each_device, textured_feed
from vesuvius.diffusion.randomness import sample_noise
from vesuvius.loader.device import DeviceFeed
from vesuvius.monitor.clock import StepClock
from vesuvius.stream.options import batches_ahead
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.training.step.feed import Conditioner, TrainingFeed


@on_each_device
def test_the_batch_kept_for_diagnosis_holds_its_voxels_after_later_batches(
    tmp_path: Path, device: torch.device
) -> None:
    voxels, data, _ = textured_feed(tmp_path, device)
    feed, clock = TrainingFeed(voxels, Conditioner(None, [], device)), StepClock()
    with feed.open():
        kept = [feed.next(clock).stored for _ in range(3 + 2 * (2 + batches_ahead(voxels.options)))]
    for batch in kept:
        for index, patch in zip(batch.indices, batch.patches, strict=True):
            start = data.plan.sample(int(index)).start_zyx
            stop = (start[0] + 8, start[1] + 16, start[2] + 16)
            np.testing.assert_array_equal(patch, data.volumes[0].read((start, stop)))


@on_each_device
def test_noise_depends_only_on_the_sample_index(tmp_path: Path, device: torch.device) -> None:
    _, data, options = textured_feed(tmp_path, device)
    for rank, world, first in [(0, 1, 0), (1, 2, 0), (2, 3, 30)]:
        job = replace(data.job, rank=rank, world_size=world)
        voxels = DeviceFeed(device, options, job, [IntensityRange(0, 1000)])
        feed = TrainingFeed(voxels, Conditioner(None, [], device))
        with feed.open(first=first, stop=first + 5 * world):
            for batches in range(3):
                if batches == 1:
                    voxels.stream.reconfigure(prefetch_factor=3)
                batch = feed.next(StepClock())
                assert batch.indices[0] == first + rank + 2 * world * batches
                assert torch.equal(batch.eps, sample_noise(0, batch.indices, (1, 8, 16, 16), device))
                assert torch.equal(feed.to_device(batch.stored).eps, batch.eps)
            assert len(batch.eps) == 1


def test_noise_is_prefetched_and_its_errors_reach_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without prefetching the second batch is never drawn; waiting for its own draw would deadlock."""
    begun, goes_on, drawn = [threading.Event() for _ in range(3)], threading.Event(), iter(range(3))

    def slow(*arguments: Any, **named: Any) -> torch.Tensor:
        begun[number := next(drawn)].set()
        if number == 1:
            assert goes_on.wait(60)
        if number == 2:
            raise MemoryError("no memory for noise")
        return sample_noise(*arguments, **named)

    monkeypatch.setattr("vesuvius.training.step.feed.sample_noise", slow)
    feed = TrainingFeed(textured_feed(tmp_path, CPU)[0], Conditioner(None, [], CPU))
    with feed.open():
        feed.next(StepClock())
        assert begun[1].wait(60), "the trainer has the first batch, and asks for nothing"
        goes_on.set()
        feed.next(StepClock())
        with pytest.raises(MemoryError, match="for noise"):
            feed.next(StepClock())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("noise")]
