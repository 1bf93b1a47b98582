"""`training.train_batch_size: auto`: the largest divisor of the effective batch that fits the memory plan."""

from __future__ import annotations

import pytest
import torch

from tests.training.forecast.test_gpu_memory import small
from vesuvius.config import Config
from vesuvius.runlog.units import GIB
from vesuvius.training.forecast import plan
from vesuvius.training.forecast.memory_plan import CONTEXT_BYTES, plan_memory
from vesuvius.training.forecast.plan import VRAM_SHARE, device_memory_bytes, fit_micro_batch, resolve_micro_batch

SMALLER = "model.full_res_channels=0"
AUTO = ("training.train_batch_size=auto", "training.accumulate_steps=12", "training.amp=bf16", SMALLER)
TWO = (*AUTO, "training.accumulate_steps=2", "training.recompute_norm=true")  # each plan takes a second


def needs(config: Config, size: int) -> int:
    """GPU memory of a step of twelve patches in micro-batches of `size`, by the plan of an explicit config."""
    cut = (f"training.train_batch_size={size}", f"training.accumulate_steps={12 // size}", SMALLER)
    return plan_memory(small(*cut, "training.amp=bf16", f"training.ranks={config.training.ranks}")).vram_bytes


@pytest.mark.long
def test_the_choice_is_the_largest_divisor_that_fits_and_keeps_the_effective_batch() -> None:
    """Wrong programs choose the largest number that fits (five does not divide twelve) or the next power of two, change
    the size of the step, or plan without the gradients of earlier micro-batches."""
    config = small(*AUTO)
    chosen = []
    for room_for in (12, 5, 1):
        size = max(size for size in (12, 6, 4, 3, 2, 1) if size <= room_for)
        room = int(needs(config, size) / VRAM_SHARE) + 2
        found = fit_micro_batch(config, room, gpu=True)
        chosen.append(found.config.training.train_batch_size)
        assert (found.config.global_batch, found.fits) == (12, True)
        assert found.step.vram_bytes == needs(config, size)
        below = fit_micro_batch(config, int((needs(config, size) - 2) / VRAM_SHARE), gpu=True)
        assert (below.config.training.micro_batch < size) if size > 1 else not below.fits
    assert chosen == [12, 4, 1]


def test_if_nothing_fits_one_patch_is_tried_with_a_note() -> None:
    found = fit_micro_batch(small(*TWO), 2**20, gpu=True)
    assert found.config.training.train_batch_size == 1
    assert "micro-batch 1 x 2: " in found.line
    assert "too little for even one patch" in found.line


def test_several_ranks_keep_their_gradients_and_share_the_effective_batch() -> None:
    config = small(*TWO, "training.ranks=4")
    found = fit_micro_batch(config, GIB, gpu=True)
    assert (found.config.training.train_batch_size, found.config.global_batch) == (2, 8)
    alone = fit_micro_batch(small(*TWO), GIB, gpu=True)
    assert found.step.vram_bytes > alone.step.vram_bytes
    assert found.step.vram_bytes == plan_memory(found.config).vram_bytes, "as the plan of an explicit micro-batch says"
    assert found.step.flops_per_step == alone.step.flops_per_step


def test_norms_are_stored_if_the_step_of_the_same_micro_batch_fits_with_them() -> None:
    """Wrong programs make the micro-batch smaller for it, ignore an explicit value, or apply it on a CPU."""
    explicit = ("training.train_batch_size=2", "training.accumulate_steps=2", "training.amp=bf16", SMALLER)
    config = small(*explicit)
    bytes_of = {
        recompute: plan_memory(config.with_training(recompute_norm=recompute)).vram_bytes for recompute in (True, False)
    }
    assert bytes_of[False] > bytes_of[True]
    for needed, recompute in ((bytes_of[False], False), (bytes_of[True], True), (2**20, True)):
        room = int(needed / VRAM_SHARE) + 2
        found, (line,) = resolve_micro_batch(config, room, gpu=True)
        assert found == config.with_training(recompute_norm=recompute)
        assert ("with norms stored" in line) != recompute
        assert ("too little" in line) == (room < bytes_of[True])
        for asked in (True, False):
            given = config.with_training(recompute_norm=asked)
            assert resolve_micro_batch(given, room, gpu=True) == (given, [])
    room = int(bytes_of[False] / VRAM_SHARE) + 2
    auto = small(*AUTO, "training.accumulate_steps=4")
    assert resolve_micro_batch(auto, room, gpu=True)[0].training.train_batch_size == (
        resolve_micro_batch(auto.with_training(recompute_norm=True), room, gpu=True)[0].training.train_batch_size
    )
    assert resolve_micro_batch(config, room, gpu=False) == (config, [])


def test_memory_of_other_programs_is_excluded_and_an_explicit_micro_batch_is_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    assert device_memory_bytes(small(), torch.device("cuda")) == 32 * GIB + CONTEXT_BYTES
    monkeypatch.setattr(plan, "fit_micro_batch", None)
    config = small("training.train_batch_size=3", "training.accumulate_steps=4")
    assert resolve_micro_batch(config) == (config, [])
