"""Every start is equally likely, batches are mixed, volumes come by weight, and nothing else has an effect."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.layouts import LAYOUTS, Layout, chi_square_p, data_config, patch_fraction, plan_of, planned
from vesuvius.config import AugmentConfig, DataConfig, Triple, VolumeConfig
from vesuvius.errors import ConfigError
from vesuvius.plan.make_plan import make_plan
from vesuvius.plan.order import _dealt
from vesuvius.plan.plan import Plan, differences
from vesuvius.stream.start.prepare import amplified_reads
from vesuvius.volumes.occupancy import ForegroundMap

SMALL = Layout((96, 128, 128), (8, 16, 16), (32, 32, 32), options={"patches_per_region": 4})
# 9 x 11 x 13 starts in cells of 4 x 8 x 4: ragged at all ends.
TINY = Layout((12, 18, 18), (4, 8, 6), (4, 8, 4), options={"regions_in_flight": 8, "patches_per_region": 6})
APART = 1000  # samples, more than a region or a pass lasts


def starts_of(plan: Plan, count: int, step: int = 1) -> Any:
    return np.array([plan.sample(step * n).start_zyx for n in range(count)])


def counts_per_start(plan: Plan, layout: Layout, count: int) -> Any:
    """How often each start was drawn, by samples so far apart that they are independent."""
    shape = [size - patch + 1 for size, patch in zip(layout.shape, layout.patch, strict=True)]
    numbers = np.ravel_multi_index(tuple(starts_of(plan, count, APART).T), shape)
    return np.bincount(numbers, minlength=math.prod(shape))


DRAWS = pytest.mark.parametrize(
    ("seed", "draws"),
    [(0, 5_000)] + [pytest.param(seed, 1_000_000, marks=pytest.mark.long) for seed in range(5)],
)


@DRAWS
def test_every_start_is_equally_likely(seed: int, draws: int) -> None:
    plan = plan_of(TINY, seed)
    assert plan.volumes[0].num_visits_per_pass > 8, "several cells, border cells among them"
    counts = counts_per_start(plan, TINY, draws)
    assert chi_square_p(counts, np.full(counts.shape, draws / counts.size)) > 0.01


def cylinder(shape: Triple, cell: Triple) -> ForegroundMap:
    """A cylinder along z of half the width, cut at an angle."""
    z, y, x = np.meshgrid(*[np.arange(-(-s // c)) * c for s, c in zip(shape, cell, strict=True)], indexing="ij")
    inside = (y - shape[1] / 2) ** 2 + (x - shape[2] / 2 - z / 4) ** 2 < (shape[1] / 3) ** 2
    return ForegroundMap(np.where(inside, 255, 40 * (x % 3 == 0)).astype(np.uint8), cell, shape)


@pytest.mark.long
@DRAWS
def test_every_qualifying_start_is_equally_likely_with_a_foreground_map(seed: int, draws: int) -> None:
    foreground = cylinder(TINY.shape, (2, 3, 3))
    layout = TINY._replace(options=TINY.options | {"min_foreground": 0.5})
    plan = plan_of(layout, seed, foreground=foreground)
    counts = counts_per_start(plan, layout, draws)
    shape = [size - patch + 1 for size, patch in zip(layout.shape, layout.patch, strict=True)]
    qualifies = np.array([patch_fraction(foreground, s, layout.patch) >= 0.5 for s in np.ndindex(*shape)])
    assert 0.1 < qualifies.mean() < 0.7
    assert not counts[~qualifies].any()
    assert chi_square_p(counts[qualifies], np.full(qualifies.sum(), draws / qualifies.sum())) > 0.01


@pytest.mark.sample(2)
@pytest.mark.parametrize("regions", [None, 24])
def test_positions_a_batch_apart_are_nearly_uncorrelated(regions: int | None) -> None:
    """24 is the least that the plan chooses.  Over seeds: one run sees few regions in so short a time."""
    pairs, layout = [], LAYOUTS["u8"]._replace(options={"regions_in_flight": regions})
    for seed in range(30):
        plan = make_plan(seed, data_config(layout.patch, **layout.options), [planned(layout)])
        middle = plan.regions_in_flight * 20
        for first in range(middle, middle + plan.regions_in_flight, 8):
            batch = [plan.sample(index) for index in range(first, first + 16)]
            pairs += [(a.start_zyx, b.start_zyx) for a, b in zip(batch[:8], batch[8:], strict=True)]
            assert len({sample.region for sample in batch[:8]}) >= 7, "almost always 8 regions"
    before, after = np.array(pairs).swapaxes(0, 1)
    for axis in range(3):
        assert abs(np.corrcoef(before[:, axis], after[:, axis])[0, 1]) < 0.2


def test_region_size_follows_from_memory_and_patches_per_region_from_it() -> None:
    plan = plan_of(LAYOUTS["u8"])
    assert (plan.regions_in_flight, plan.patches_per_region, plan.regions_per_task) == (32, 103, 4), "41 cells"
    for name in ("u8", "u8 with a split", "u8 160^3", "u16, little memory", "f32 144^3", "4096^3, 64^3", "ragged"):
        plan = plan_of(LAYOUTS[name])
        assert plan.read_amplification(0) <= 1.0, name
    amplification = []
    for gib in (0.5, 1.0, 2.0, 4.0):
        plan = plan_of(LAYOUTS["the largest scroll"]._replace(options={"stream_gib": gib}))
        held = plan.regions_in_flight * plan.region_voxels_max
        assert held <= gib * 2**30
        assert plan.regions_in_flight == (32 if gib < 2 else 64)
        amplification.append(plan.read_amplification(0))
    assert amplification == sorted(amplification, reverse=True)
    assert amplification[0] > 1.5 * amplification[-1]


def test_regions_in_flight_are_configurable_and_fewer_if_regions_are_large() -> None:
    assert plan_of(LAYOUTS["u8"]._replace(options={"regions_in_flight": 16})).regions_in_flight == 16
    options: dict[str, Any] = {"stream_gib": 1.0}
    large = plan_of(Layout((1000, 1000, 1000), (192, 192, 192), (128, 128, 128), "float32", options))
    assert large.regions_in_flight == 24
    assert min(large.volumes[0].cells.largest_zyx) >= 192 // 8, "no patch comes as often as that"


def test_each_cell_is_visited_about_once_per_pass_in_a_new_order() -> None:
    plan = plan_of(SMALL)
    count = plan.volumes[0].num_visits_per_pass
    orders = [[plan.visit(p * count + n).region for n in range(count)] for p in range(3)]
    for order in orders:
        assert len(set(order)) > 0.85 * count  # a border cell may come in place of another
    assert len({tuple(order) for order in orders}) == 3


def test_patches_of_a_visit_are_spread_over_its_cell() -> None:
    """Uniform draws leave a quarter of the cell's length without a start in 1 of 30 visits of 26; a lattice in none."""
    plan = plan_of(LAYOUTS["u8"])
    for slot in range(100, 120):
        visit = plan.visit(slot)
        starts = np.array([plan.sample_of(visit, index).start_zyx for index in plan.mixing.samples_of(slot)])
        assert len(starts) == plan.patches_per_region
        for axis in range(3):
            lo, hi = visit.cell[0][axis], visit.cell[1][axis]
            gaps = np.diff([lo, *sorted(starts[:, axis]), hi])
            assert starts[:, axis].min() >= lo
            assert starts[:, axis].max() < hi
            assert gaps.max() <= max(0.25 * (hi - lo), 2)


def test_patches_of_a_visit_differ_even_if_few_starts_qualify() -> None:
    """Blobs as large as a patch: far fewer than 1 of 64 starts of a cell qualify."""
    layout = Layout((128, 256, 256), (18, 34, 34), (32, 32, 32), options={"min_foreground": 0.9})
    fraction = np.zeros((16, 32, 32), np.uint8)
    for z, y, x in itertools.product((3, 10), (4, 20), (4, 20)):
        fraction[z : z + 3, y : y + 5, x : x + 5] = 255
    foreground = ForegroundMap(fraction, (8, 8, 8), layout.shape)
    plan = plan_of(layout, foreground=foreground)
    drawn = [(plan.mixing.slot_of(index), plan.sample(index).start_zyx) for index in range(64 * 40, 64 * 41)]
    assert all(patch_fraction(foreground, start, layout.patch) >= 0.9 for _, start in drawn)
    assert len(set(drawn)) > 0.8 * len(drawn)


def test_patches_lie_in_their_region_and_regions_in_the_training_box() -> None:
    for name, layout in LAYOUTS.items():
        plan = plan_of(layout)
        train = plan.volumes[0].train
        for index in range(0, 40_000, 997):
            sample = plan.sample(index)
            stop = [s + p for s, p in zip(sample.start_zyx, layout.patch, strict=True)]
            for axis in range(3):
                inner, outer = sample.region[0][axis], sample.region[1][axis]
                assert train[0][axis] <= inner <= sample.start_zyx[axis], name
                assert stop[axis] <= outer <= train[1][axis], name


@settings(max_examples=3, deadline=None)
@given(weights=st.lists(st.floats(0.05, 20), min_size=2, max_size=5), seed=st.integers(0, 10))
def test_volumes_are_drawn_by_weight(weights: list[float], seed: int) -> None:
    volumes = [planned(SMALL, name=str(i), weight=w) for i, w in enumerate(weights)]
    plan = make_plan(seed, data_config(**SMALL.options), volumes)
    drawn = [plan.visit(slot).volume for slot in range(1000)]
    for number, weight in enumerate(weights):
        # Dealt out, not tossed: off by one per level of the deal at most, and by the unfinished block of 64.
        assert abs(drawn.count(number) - 1000 * weight / sum(weights)) <= 64
    for index in range(0, 5000, 37):
        sample, instead = plan.sample(index), plan.sample(index, attempt=3)
        assert (instead.volume, instead.augmentation) == (sample.volume, sample.augmentation), (
            "also where it is replaced"
        )


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.floats(1e-9, 1) | st.integers(1, 10**9).map(float), min_size=2, max_size=8),
    unit=st.sampled_from([5e-324, 1e-310, 1e-17, 1.0, 1e290, 1e299]),
    slots=st.integers(1, 10**9),
)
def test_volumes_are_dealt_in_exact_proportion_to_any_weights(parts: list[float], unit: float, slots: int) -> None:
    """Against fractions.  Also where a sum of weights overflows, or a difference of them leaves nothing."""
    weights = tuple(part * unit or unit for part in parts)
    total, whole = sum(map(Fraction, weights)), slots // 64 * 64
    dealt = _dealt(3, weights, whole)
    assert sum(dealt) == whole
    for count, weight in zip(dealt, weights, strict=True):
        assert abs(count - whole * Fraction(weight) / total) < len(weights)


@pytest.mark.parametrize(
    ("weights", "right"),
    [
        ((1, 1e-17), None),
        ((1, 1e-17, 1e-17), None),
        ((1e300, 1), None),
        ((1, 5e-324), None),
        ((5e-324, 1e-323, 5e-324), [250, 500, 250]),
        ((1, 999), [1, 999]),
    ],
)
def test_weights_are_honored_or_refused(weights: tuple[float, ...], right: list[int] | None) -> None:
    specs = tuple(VolumeConfig(path=f"v{n}", weight=weight) for n, weight in enumerate(weights))
    if right is None:
        with pytest.raises(ConfigError, match=r"volumes\[1\]\.weight \S+ gives \S+ less than one region"):
            DataConfig(volumes=specs)
        return
    assert DataConfig(volumes=specs).volumes == specs
    volumes = [planned(SMALL, name=spec.path, weight=spec.weight) for spec in specs]
    plan = make_plan(0, data_config(**SMALL.options), volumes)
    drawn = Counter(plan.visit(slot).volume for slot in range(8000))
    assert [round(drawn[number] / 8) for number in range(len(specs))] == right


@pytest.mark.parametrize("world", [1, 3, 8, 32, 100])
@pytest.mark.parametrize(
    "options", [{}, {"regions_in_flight": 24}, {"regions_in_flight": 5}, {"patches_per_region": 1}]
)
def test_a_rank_reads_only_the_regions_of_its_samples_and_each_once(world: int, options: dict[str, Any]) -> None:
    """Against the samples themselves, from the middle of a round to the middle of another."""
    plan, first, stop = plan_of(SMALL._replace(options=SMALL.options | options)), 50, 1203
    needed = {(index % world, plan.mixing.slot_of(index)) for index in range(first, stop)}
    read = []
    for rank in range(world):
        tasks = list(plan.tasks(first, stop, rank, world))
        slots = [slot for task in tasks for slot in task]
        assert slots == sorted(slots), "in the order of the plan"
        assert all(len({slot // plan.regions_per_task for slot in task}) == 1 for task in tasks)
        read += [(rank, slot) for slot in slots]
    assert len(read) == len(set(read)), "none twice"
    assert set(read) == needed


@pytest.mark.parametrize("name", ["4096^3, 64^3", "the largest scroll", "large, float32", "large, uint16, 192^3"])
def test_up_to_64_ranks_read_each_region_once_by_default(name: str) -> None:
    """Counted from the tasks of each rank; together they deliver each sample once."""
    large = {
        "large, float32": Layout((4096, 4096, 4096), (72, 136, 136), (128, 128, 128), "float32"),
        "large, uint16, 192^3": Layout((4096, 4096, 4096), (192, 192, 192), (128, 128, 128), "uint16"),
    }
    plan, first, stop = plan_of((LAYOUTS | large)[name]), 6400, 6400 + 4 * 64
    slots = {plan.mixing.slot_of(index) for index in range(first, stop)}
    for world in (1, 2, 4, 8, 16, 32, 64):
        reads, samples = Counter[int](), Counter[int]()
        for rank in range(world):
            own = [slot for task in plan.tasks(first, stop, rank, world) for slot in task]
            reads.update(own)
            samples.update(i for i in range(first + rank, stop, world) if plan.mixing.slot_of(i) in own)
        assert reads == dict.fromkeys(slots, 1), world
        assert samples == dict.fromkeys(range(first, stop), 1), world
        assert plan.reads_per_region(world) == 1


@pytest.mark.parametrize(("world", "gib"), [(3, 2.0), (7, 2.0), (48, 2.0), (128, 2.0), (64, 1.0)])
def test_the_settings_named_for_other_numbers_of_ranks_read_regions_once_that_are_as_large(
    world: int, gib: float
) -> None:
    layout = LAYOUTS["the largest scroll"]
    plan = plan_of(layout._replace(options={"stream_gib": gib}))
    (line,) = amplified_reads(plan, world)
    assert f"by {plan.reads_per_region(world)} of {world} ranks" in line
    named = {key: json.loads(value) for key, value in re.findall(r"data\.(\w+)=([\d.]+)", line)}
    other = plan_of(layout._replace(options=named))
    assert other.volumes[0].cells == plan.volumes[0].cells
    assert amplified_reads(other, world) == []


@pytest.mark.parametrize(("world", "reads"), [(1, 1), (3, 3), (8, 1), (24, 3), (48, 3), (64, 1), (128, 2), (65, 26)])
def test_reads_per_region_and_regions_held_equal_a_count_over_slots(world: int, reads: int) -> None:
    """What `--dry-run`, the log and the memory plan say, with K = 26 and M = 64."""
    plan = plan_of(LAYOUTS["u8"]._replace(options={"patches_per_region": 26, "regions_in_flight": 64}))
    first, stop = 100 * 64, 152 * 64
    needed = {(index % world, plan.mixing.slot_of(index)) for index in range(first, stop)}
    inner = {slot for slot in range(400) if {*plan.mixing.samples_of(slot)} <= {*range(first, stop)}}
    by_slot = Counter(slot for _, slot in needed)
    assert {by_slot[slot] for slot in inner if slot in by_slot} == {reads}
    assert plan.reads_per_region(world) == reads
    assert plan.read_amplification(0, world) == plan.read_amplification(0) * reads
    window = range(plan.mixing.first_slot(120), plan.mixing.first_slot(120) + 64)
    held = max(Counter(rank for rank, slot in needed if slot in window).values())
    assert held <= plan.regions_held(world) == 64 // math.gcd(64, world)


def test_tasks_do_not_depend_on_where_a_stream_starts() -> None:
    plan = plan_of(SMALL)
    whole = set(plan.tasks(0, 4000))
    later = list(plan.tasks(1003, 4000))
    cut = [slots for slots in later if slots not in whole]
    assert len(cut) <= 64 // 8, "only those whose regions are in flight at the start"
    assert len(later) > 90
    assert next(plan.tasks(0, 2**62)) == tuple(range(8)), "an endless stream begins at once"


def test_the_seed_changes_the_order_and_augmentation_can_be_disabled() -> None:
    assert starts_of(plan_of(SMALL, 0), 20).tolist() != starts_of(plan_of(SMALL, 1), 20).tolist()
    plain = plan_of(SMALL._replace(options=SMALL.options | {"augment": AugmentConfig(flip=False, rot90=False)}))
    done = [plain.sample(i).augmentation for i in range(50)]
    assert {(*augmentation.flip_zyx, augmentation.num_rot90) for augmentation in done} == {(False, False, False, 0)}
    mixed = plan_of(SMALL)
    assert {mixed.sample(i).augmentation.num_rot90 for i in range(50)} == {0, 1, 2, 3}
    assert starts_of(mixed, 20).tolist() == starts_of(plain, 20).tolist()


def test_the_plan_reports_cells_that_repeat() -> None:
    plan = plan_of(LAYOUTS["hardly larger than a patch"]._replace(shape=(73, 137, 138)))
    assert plan.repeats_cells
    assert len({plan.sample(i).start_zyx for i in range(400)}) == 2 * 2 * 3
    assert not plan_of(SMALL).repeats_cells


def test_the_sample_sequence_is_pinned() -> None:
    """A change here silently changes every run that is resumed.

    Bump it only on purpose, and say so in the CHANGELOG.
    """
    plan = plan_of(SMALL)
    starts = [plan.sample(i).start_zyx for i in (0, 1, 2, 3, 100)]
    assert starts == [(64, 14, 73), (11, 96, 18), (8, 94, 91), (33, 80, 105), (36, 53, 56)]
    assert plan.hash == "ea2f9c4f353569cb"


def test_the_hash_changes_only_if_samples_do_and_differences_are_listed() -> None:
    plan, other = plan_of(SMALL), plan_of(SMALL._replace(options={"patches_per_region": 8}))
    assert plan.hash == plan_of(SMALL).hash
    assert plan.hash != other.hash
    assert "patches_per_region: was 4, is 8" in differences(plan.describe(), other.describe())
    how_it_is_read = replace(plan, regions_per_task=3)
    assert how_it_is_read.hash == plan.hash, "tasks are how it is read, not what"


@pytest.mark.parametrize("index", [0, 1, 10**6, 10**9, 10**15])
def test_samples_are_computed_by_random_access(index: int) -> None:
    for layout in (SMALL, LAYOUTS["the largest scroll"]):
        assert plan_of(layout).sample(index).index == index
