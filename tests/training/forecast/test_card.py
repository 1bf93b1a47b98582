"""`train_batch_size: auto` on simulated cards: all from the kernel test to a resume fits, and little more would."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.support.caching_allocator import MIB, CachingAllocator
from tests.support.sim_card import Life, least_capacity, record_life, replay
from tests.training.forecast.test_memory_plan import make_config
from vesuvius.config.load import read_config
from vesuvius.runlog.units import GIB
from vesuvius.training.forecast.memory_plan import CONTEXT_BYTES, plan_memory
from vesuvius.training.forecast.plan import VRAM_SHARE, fit_micro_batch

CONDITION = ("data.volumes=[{path: v, condition: {path: c}}]", "data.condition_classes=2")


def test_the_simulated_allocator_rounds_splits_merges_and_returns_segments_like_torchs() -> None:
    card = CachingAllocator(100 * MIB)
    small = [card.allocate(1), card.allocate(MIB)]
    assert (card.allocated, card.reserved) == (512 + MIB, 2 * MIB), "rounded to 512 B, from one segment"
    medium = [card.allocate(6 * MIB), card.allocate(9 * MIB)]
    assert card.reserved == 22 * MIB, "below 10 MiB from a segment of 20 MiB"
    large = card.allocate(11 * MIB + 1)
    assert card.reserved == 34 * MIB, "a segment of its own, rounded up to 2 MiB"
    other_stream = card.allocate(4 * MIB, stream=1)
    assert card.reserved == 54 * MIB, "5 MiB are free, but belong to another stream"
    card.free(medium[0])
    card.free(medium[1])
    assert card.allocate(19 * MIB + 1).size == 20 * MIB, "the merged segment, unsplit: less than 1 MiB would be left"
    assert (card.reserved, card.retries) == (54 * MIB, 0)
    card.free(large)
    assert card.allocate(58 * MIB).size == 58 * MIB, "the card is full until the free segment of 12 MiB is returned"
    assert (card.reserved, card.retries, card.peak_reserved) == (100 * MIB, 1, 100 * MIB)
    card.free(small[0])
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2"):
        card.allocate(2 * MIB)
    card.free(other_stream)
    card.empty_cache()
    assert card.reserved == 80 * MIB, "the small segment is partly used"


def test_a_run_fits_the_smallest_card_that_the_plan_allows_and_not_one_of_two_thirds() -> None:
    """Wrong plans leave out the kernel test, workspaces or fragmentation; timid ones double what they need."""
    training = {"amp": "bf16", "train_batch_size": "auto", "accumulate_steps": 2, "recompute_norm": True}
    config = make_config(training, {"channels": (32,), "full_res_channels": 0})
    config = config.model_copy(update={"data": config.data.model_copy(update={"patch_size": (64, 128, 128)})})
    card_bytes = int(plan_memory(config.with_micro_batch(2)).vram_bytes / VRAM_SHARE) + 1
    assert fit_micro_batch(config, card_bytes, gpu=True).config.training.train_batch_size == 2
    life = record_life(config, 2, resumes=False)
    assert set(replay(life, card_bytes - CONTEXT_BYTES).by_phase) >= {"kernel test", "step", "update", "validation"}
    with pytest.raises(torch.OutOfMemoryError, match="step: CUDA out of memory"):
        replay(life, (card_bytes - CONTEXT_BYTES) * 2 // 3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "compiled"),
    [
        ((), False),
        ((), True),
        (("training.optimizer=adamw",), True),
        (("training.checkpoint_levels=[0,1]",), True),
        (CONDITION, True),
    ],
    ids=["eager", "default", "adamw", "checkpoint_levels", "condition"],
)
def test_auto_runs_on_cards_of_16_to_80_gib_and_takes_the_largest_that_does(
    overrides: tuple[str, ...], compiled: bool
) -> None:
    """Prints a row of docs/performance.md for each card (pytest -s)."""
    config = read_config(REPOSITORY / "configs/exp001_full.yaml", ["training.amp=bf16", *overrides])
    config = config.with_training(recompute_norm=True)
    lives: dict[int, Life] = {}
    for gib in (16, 24, 40, 80):
        found = fit_micro_batch(config, gib * GIB, gpu=True)
        size, room = found.config.training.micro_batch, gib * GIB - CONTEXT_BYTES
        if size not in lives:
            lives[size] = record_life(config, size, compiled=compiled)
        used = replay(lives[size], room)  # raises
        least = (least_capacity(lives[size]) + CONTEXT_BYTES) / GIB
        planned, tensors = found.step.vram_bytes / GIB, used.allocated / GIB
        print(f"| {gib} | {size} | {planned:.1f} | {tensors:.1f} | {used.reserved / GIB:.1f} | {least:.1f} |")
        if size < 8:
            above = plan_memory(config.with_micro_batch(2 * size))
            assert above.peak_bytes > 0.75 * room, "twice as many would run with room to spare"
