"""The plan: every voxel is reached, no region repeats early, batches are mixed, the order depends on nothing else."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vesuvius.config import AugmentConfig, DataConfig, Triple, VolumeConfig
from vesuvius.plan.plan import Plan, PlanVolume, make_plan, plan_difference, plan_volume
from vesuvius.plan.split import split_volume


def data_config(patch: Triple = (8, 16, 16), k: int = 4, r: int = 4, **options: Any) -> DataConfig:
    turn = patch[1] == patch[2]
    options = {"augment": AugmentConfig(turn=turn)} | options
    return DataConfig(
        volumes=(VolumeConfig(path="v"),), patch_size=patch, patches_per_region=k, regions_per_task=r, **options
    )


def planned(
    shape: Triple, config: DataConfig, chunk: Triple = (32, 32, 32), name: str = "v", weight: float = 1.0
) -> PlanVolume:
    split = split_volume(name, shape, config.patch_size, config.validation)
    return plan_volume(name, split, shape, chunk, "uint8", weight, config)


def simple_plan(shape: Triple = (96, 128, 128), seed: int = 0, **options: Any) -> Plan:
    config = data_config(**options)
    return make_plan(seed, config, [planned(shape, config)])


shapes = st.tuples(*[st.integers(20, 300)] * 3)
patches = st.tuples(*[st.integers(1, 6)] * 3)
chunks = st.tuples(*[st.sampled_from([8, 16, 32, 64, 128])] * 3)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, patch=patches, chunk=chunks, r=st.integers(1, 8))
def test_regions_cover_the_training_box_and_each_holds_a_patch(
    shape: Triple, patch: Triple, chunk: Triple, r: int
) -> None:
    config = data_config(patch, r=r)
    volume = planned(shape, config, chunk)
    for intervals, lo, hi, size in zip(volume.intervals_zyx, *volume.train, patch, strict=True):
        covered = np.zeros(hi - lo, bool)
        for a, b in intervals:
            assert lo <= a
            assert b <= hi
            assert b - a >= size
            covered[a - lo : b - lo] = True
        assert covered.all()
        assert len(set(intervals)) == len(intervals)


def test_every_training_voxel_is_cut_sooner_or_later_and_no_other_voxel_ever_is() -> None:
    plan = simple_plan((40, 20, 20), patch=(8, 8, 8), k=8)
    (start, stop) = plan.volumes[0].train
    seen = np.zeros((40, 20, 20), bool)
    for i in range(40_000):
        z, y, x = plan.sample(i).start_zyx
        seen[z : z + 8, y : y + 8, x : x + 8] = True
    train = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
    assert seen[train].all()
    seen[train] = False
    assert not seen.any()


@settings(max_examples=40, deadline=None)
@given(shape=shapes, r=st.integers(1, 8), seed=st.integers(0, 5), passes=st.integers(0, 3))
def test_no_region_comes_again_before_all_have_been_seen(shape: Triple, r: int, seed: int, passes: int) -> None:
    plan = simple_plan(shape, seed, patch=(4, 4, 4), r=r)
    count = plan.volumes[0].region_count
    slots = range(passes * count, (passes + 1) * count)
    assert len({plan.region_of_slot(slot) for slot in slots}) == count


@settings(max_examples=40, deadline=None)
@given(shape=shapes, r=st.integers(1, 12), seed=st.integers(0, 3), first=st.integers(0, 5000))
def test_any_r_regions_in_a_row_differ_if_there_are_that_many(shape: Triple, r: int, seed: int, first: int) -> None:
    plan = simple_plan(shape, seed, patch=(4, 4, 4), r=r)
    in_a_row = {plan.region_of_slot(slot) for slot in range(first, first + r)}
    assert len(in_a_row) == min(r, plan.volumes[0].region_count)


def test_each_run_of_r_samples_holds_one_patch_of_each_region_of_its_task() -> None:
    plan = simple_plan(k=4, r=4)
    for task in range(5):
        regions = {plan.region_of_slot(slot) for slot in range(4 * task, 4 * task + 4)}
        for run in range(4):
            samples = [plan.sample(16 * task + 4 * run + place) for place in range(4)]
            assert {(s.volume, s.region) for s in samples} == regions


def test_passes_come_in_different_orders() -> None:
    plan = simple_plan()
    count = plan.volumes[0].region_count
    first, second = ([plan.region_of_slot(p * count + i) for i in range(count)] for p in range(2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_too_few_regions_repeat_within_a_run_and_the_plan_says_so() -> None:
    plan = simple_plan((16, 32, 32), patch=(16, 32, 32), r=8, validation={"fraction": 0.0})
    assert plan.volumes[0].region_count == 1
    assert plan.repeats_within_a_run
    assert not simple_plan().repeats_within_a_run


def test_regions_shrink_until_there_are_two_runs_of_them() -> None:
    config = data_config((8, 16, 16), r=8)
    volume = planned((96, 128, 128), config, chunk=(128, 128, 128))
    assert volume.region_count >= 16


def test_a_real_scroll_is_read_in_regions_of_two_chunks_with_amplification_below_one() -> None:
    config = data_config((72, 136, 136), k=16, r=8)
    volume = planned((14376, 7888, 8096), config, chunk=(128, 128, 128))
    plan = make_plan(0, config, [volume])
    assert volume.region(0) == ((0, 0, 0), (256, 256, 256))
    assert plan.read_amplification(0) < 1
    first_samples = {plan.sample(i).region for i in range(8)}
    assert len(first_samples) == 8


@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.floats(0.05, 20), min_size=2, max_size=5), seed=st.integers(0, 10))
def test_volumes_are_drawn_by_weight_and_each_still_without_repeats(weights: list[float], seed: int) -> None:
    config = data_config()
    volumes = [planned((96, 128, 128), config, name=str(i), weight=w) for i, w in enumerate(weights)]
    plan = make_plan(seed, config, volumes)
    drawn = [plan.region_of_slot(slot) for slot in range(1000)]
    for number, weight in enumerate(weights):
        own = [region for volume, region in drawn if volume == number]
        # Dealt out, not tossed: off by one per level of the deal at most, and by the unfinished block of 64.
        assert abs(len(own) - 1000 * weight / sum(weights)) <= 64
        head = own[: volumes[number].region_count]
        assert len(set(head)) == len(head)


def test_ranks_split_the_samples_and_each_reads_regions_of_its_own() -> None:
    plan = simple_plan(k=4, r=4)
    by_rank = [{plan.sample(i).region for i in range(rank, 16, 2)} for rank in range(2)]
    assert len(by_rank[0]) == len(by_rank[1]) == 2
    assert not by_rank[0] & by_rank[1]


def test_tasks_cut_a_range_at_task_borders() -> None:
    plan = simple_plan(k=4, r=4)
    assert [(t.first, t.stop) for t in plan.tasks(5, 40)] == [(5, 16), (16, 32), (32, 40)]
    assert [t.first for t in islice(plan.tasks(0, 2**62), 3)] == [0, 16, 32]


def test_the_seed_changes_the_order_and_symmetries_can_be_switched_off() -> None:
    starts = [[simple_plan(seed=seed).sample(i).start_zyx for i in range(20)] for seed in (0, 1)]
    assert starts[0] != starts[1]
    plain = simple_plan(augment=AugmentConfig(flip=False, turn=False))
    assert {(*plain.augmentation(i).flip_zyx, plain.augmentation(i).turns) for i in range(50)} == {
        (False, False, False, 0)
    }
    mixed = simple_plan()
    assert {mixed.augmentation(i).turns for i in range(50)} == {0, 1, 2, 3}
    assert [mixed.sample(i).start_zyx for i in range(20)] == [plain.sample(i).start_zyx for i in range(20)]


def test_the_sequence_is_pinned() -> None:
    """A change here silently changes every run that is resumed.

    Bump it only on purpose, and say so in the CHANGELOG.
    """
    plan = simple_plan()
    starts = [plan.sample(i).start_zyx for i in (0, 1, 2, 3, 100)]
    assert starts == [(52, 107, 78), (52, 65, 90), (30, 45, 69), (61, 33, 48), (54, 97, 74)]
    assert plan.hash == "ab36cf11f885ffcb"


def test_the_hash_follows_what_moves_samples_and_the_difference_is_shown() -> None:
    plan, other = simple_plan(), simple_plan(k=8)
    assert plan.hash == simple_plan().hash
    assert plan.hash != other.hash
    lines = plan_difference(plan.describe(), other.describe())
    assert "patches_per_region: was 4, is 8" in lines


@pytest.mark.parametrize("index", [0, 1, 10**6, 10**9])
def test_any_sample_is_found_directly(index: int) -> None:
    assert simple_plan().sample(index).index == index
