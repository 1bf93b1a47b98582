"""What a first config is made of: patch, network, batch and length follow from the volume and the machine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from vesuvius.config import ArrayConfig, Config, Triple
from vesuvius.config.load import parse_config
from vesuvius.errors import ConfigError
from vesuvius.runlog.units import GIB
from vesuvius.training.forecast import suggest as module
from vesuvius.training.forecast.first_config import suggestion_text
from vesuvius.training.forecast.machine import Machine
from vesuvius.training.forecast.memory_plan import plan_memory
from vesuvius.training.forecast.suggest import (
    FULL,
    HALF,
    LEAST_WIDTH_UM,
    PATCH,
    SMALL,
    TINY,
    NetworkSize,
    Suggestion,
    level_for,
    suggest,
)
from vesuvius.volume_tools.grey_statistics import GreyStatistics
from vesuvius.volume_tools.info import LevelFacts, Occupancy, VolumeFacts

BOX = Machine(12, 170 * GIB, 64 * GIB, 900 * GIB, "NVIDIA A100", 80 * GIB, "bf16", 80e12)
LAPTOP = Machine(2, 8 * GIB, 2 * GIB, 20 * GIB, None, None, "off", 40e9)
SCROLL: Triple = (14000, 8000, 8000)


def volume(
    shape: tuple[int, ...] = SCROLL, present: int | None = 100, total: int = 100, levels: int = 1, **changes: Any
) -> VolumeFacts:
    def level(n: int) -> LevelFacts:
        small = tuple(-(-size // 2**n) for size in shape)
        return LevelFacts(n, str(n), small, (128, 128, 128), None, "uint8", 0, None, None, None, None)

    spec = ArrayConfig(path="volumes/a b: c.zarr")
    known = Occupancy(present, total, "chunks", "listing" if present is not None else None)
    all_levels = tuple(map(level, range(levels)))
    facts = VolumeFacts(
        spec, None, None, 2, None, (0, 1, 2), all_levels, {}, all_levels[0], "blosc", known, None, PATCH, None, None
    )
    return replace(facts, **changes)


def step_bytes(config: Config) -> int:
    """1 GiB a million voxels and 100 bytes a weight, about."""
    size = {c.model.channels: c for c in (FULL, HALF, SMALL, TINY)}[config.model.channels]
    voxels = math.prod(config.data.patch_size) * config.training.train_batch_size
    return 100 * size.parameters + int(voxels * size.flops_per_voxel / 3e6 * 1000)


def suggested(facts: VolumeFacts, machine: Machine, remote: bool = False) -> tuple[Suggestion, Config]:
    """The suggestion, and its YAML as a config."""
    chosen = suggest("a.b", facts, remote, machine, step_bytes)
    assert parse_config(suggestion_text(facts, machine, chosen)) == chosen.config
    return chosen, chosen.config


def test_a_big_gpu_trains_the_full_network_on_full_patches() -> None:
    chosen, config = suggested(volume(), BOX)
    assert (chosen.network, config.data.patch_size, config.global_batch) == (FULL, PATCH, 8)
    assert config.training.workers == 6
    assert config.data.min_foreground == 0


def test_a_micro_batch_is_what_the_gpu_holds_and_accumulation_makes_up_for_it() -> None:
    sizes = {}
    for vram in (80, 40, 30):
        chosen, _ = suggested(volume(), replace(BOX, vram_bytes=vram * GIB))
        assert chosen.config.global_batch == 8
        room = 0.9 * vram * GIB
        micro = chosen.config.training.train_batch_size
        if chosen.network is FULL:
            need = [step_bytes(module._config(PATCH, FULL.model, n)) for n in (micro, 2 * micro)]
            assert need[0] <= room
            assert micro == 8 or need[1] > room
        sizes[vram] = micro
    assert sizes[80] > sizes[30] >= 1


@pytest.mark.parametrize(
    ("vram_gib", "flops_s", "network"), [(80, 80e12, FULL), (12, 80e12, HALF), (80, 10e12, HALF), (4, 5e12, SMALL)]
)
def test_a_small_or_slow_gpu_gets_a_smaller_network_on_full_patches(
    vram_gib: int, flops_s: float, network: NetworkSize
) -> None:
    chosen, _ = suggested(volume(), replace(BOX, vram_bytes=vram_gib * GIB, flops_s=flops_s))
    assert (chosen.network, chosen.config.data.patch_size) == (network, PATCH)
    assert chosen.step_s <= 4


@pytest.mark.parametrize("flops_s", [8e9, 40e9, 5e12])
def test_a_cpu_gets_a_small_network_whose_step_takes_two_seconds_at_most(flops_s: float) -> None:
    chosen, config = suggested(volume(), replace(LAPTOP, flops_s=flops_s))
    assert chosen.network.parameters < 7e6
    assert chosen.step_s <= 2
    assert math.prod(chosen.config.data.patch_size) >= 8 * 32 * 32
    assert config.training.workers == 1
    faster, _ = suggested(volume(), replace(LAPTOP, flops_s=2 * flops_s))
    assert math.prod(faster.config.data.patch_size) * faster.network.parameters >= math.prod(
        chosen.config.data.patch_size
    ) * (chosen.network.parameters), "a faster machine is given no less"


def test_the_slowest_machine_gets_the_smallest_choice_and_an_honest_time() -> None:
    chosen, _ = suggested(volume(), replace(LAPTOP, flops_s=1e8))
    assert chosen.network is TINY
    assert chosen.step_s > 20
    assert chosen.minutes == round(chosen.config.horizon_steps * chosen.step_s / 0.9 / 60) > 30


@pytest.mark.parametrize("machine", [BOX, LAPTOP, replace(LAPTOP, flops_s=7e10)])
def test_a_first_run_takes_about_half_an_hour(machine: Machine) -> None:
    chosen, config = suggested(volume(), machine)
    assert config.horizon_steps == chosen.config.horizon_steps
    assert 0.8 * 1800 <= chosen.config.horizon_steps * chosen.step_s <= 1800
    assert 27 <= chosen.minutes <= 33
    assert config.training.warmup_steps < chosen.config.horizon_steps / 5
    assert (config.training.validate_every, config.training.preview_every) == (
        config.training.steps_per_epoch,
        2 * config.training.steps_per_epoch,
    )
    assert (config.training.optimizer, config.training.lr_schedule, config.training.amp) == (
        "muon",
        "inverse_sqrt",
        "auto",
    )


@pytest.mark.parametrize(
    ("shape", "patch", "held_out"),
    [
        ((256, 256, 256), PATCH, True),
        ((200, 256, 256), (48, 96, 96), True),  # 72x136x136 would leave no room for validation
        ((64, 64, 64), (16, 48, 48), True),
        ((24, 40, 50), (8, 32, 32), True),
        ((8, 8, 8), (8, 8, 8), False),
        ((20, 16, 20), (16, 16, 16), False),
        ((1, 300, 300), (1, 96, 96), True),
        ((5, 64, 64), (5, 16, 16), True),
    ],
)
def test_a_small_or_thin_volume_gets_a_patch_that_fits(shape: Triple, patch: Triple, held_out: bool) -> None:
    chosen, config = suggested(volume(shape), BOX)
    assert config.model.size_problem(config.data.patch_size) is None
    assert all(p <= s for p, s in zip(chosen.config.data.patch_size, shape, strict=True))
    assert chosen.config.data.patch_size == patch
    assert (config.data.validation.fraction > 0) == held_out
    assert (config.training.validate_every > 0) == held_out


def test_a_volume_without_extent_in_the_plane_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 8 voxels in y and x; got \[100, 7, 100\]; choose a finer level"):
        suggested(volume((100, 7, 100)), BOX)


def test_axes_are_taken_by_their_names() -> None:
    chosen, _ = suggested(volume((64, 256, 3, 300), axes=("x", "y", "c", "z")), BOX)
    assert chosen.config.data.patch_size[1] <= 64


def test_patches_come_from_stored_chunks_where_many_are_missing() -> None:
    assert suggested(volume(present=96), BOX)[1].data.min_foreground == 0
    _, config = suggested(volume(present=40), BOX)
    assert (config.data.min_foreground, config.data.foreground.source) == (0.5, "chunks")


def test_where_stored_chunks_are_not_known_a_coarse_level_says_where_material_is() -> None:
    grey = GreyStatistics(8, 0, 20, 8, 1000, 0.1, 0.0, 255.0, 100.0, 30.0, (1.0, 100.0, 250.0))
    _, config = suggested(volume(present=None, levels=6, grey=grey), BOX, remote=True)
    assert (config.data.min_foreground, config.data.foreground.source) == (0.5, "level")
    assert config.data.foreground.level == 5, "the finest of at most 32 million voxels"
    chosen, config = suggested(volume(present=None, grey=grey), BOX, remote=True)
    assert config.data.min_foreground == 0
    assert "vesuvius volume occupancy" in suggestion_text(volume(present=None, grey=grey), BOX, chosen)
    assert suggested(volume(present=None), BOX, remote=True)[1].data.min_foreground == 0


def test_a_remote_volume_gets_a_cache_that_the_disk_can_hold_and_more_readers() -> None:
    _, config = suggested(volume(), BOX, remote=True)
    assert (config.data.store.cache_gib, config.data.store.cache_dir) == (50, "volumes/cache")
    _, small = suggested(volume(), replace(BOX, disk_bytes=20 * GIB), remote=True)
    assert small.data.store.cache_gib == 5
    assert config.training.workers > suggested(volume(), BOX)[1].training.workers
    assert suggested(volume(), BOX)[1].data.store.cache_dir is None


def pyramid(um: float | None, shape: Triple = SCROLL, levels: int = 6) -> VolumeFacts:
    """A volume of voxels of `um` micrometers, in levels that halve; None = the metadata give no unit."""
    facts = volume(shape, levels=levels)

    def sized(level: LevelFacts) -> LevelFacts:
        return replace(level, voxel_size_um=None if um is None else (um * 2**level.level,) * 3)

    return replace(facts, levels=tuple(map(sized, facts.levels)), chosen=sized(facts.chosen))


@pytest.mark.parametrize("um", [2.4, 20.0])
@pytest.mark.parametrize("machine", [BOX, replace(LAPTOP, flops_s=4e9)])
def test_the_level_is_the_finest_whose_patch_shows_enough_of_a_sheet(um: float, machine: Machine) -> None:
    """At 2.4 micrometers a laptop's patch of 32 voxels is 77 wide, a quarter of what shows a sheet."""
    facts = pyramid(um)
    level, finest_um = level_for(facts, False, machine, step_bytes)
    widths = [
        suggest("a", replace(facts, chosen=each), False, machine, step_bytes).width_um or 0.0 for each in facts.levels
    ]
    assert finest_um == widths[0]
    assert widths[level] >= LEAST_WIDTH_UM
    assert all(width < LEAST_WIDTH_UM for width in widths[:level])
    chosen = suggest("a", replace(facts, chosen=facts.levels[level]), False, machine, step_bytes)
    said = suggestion_text(replace(facts, chosen=facts.levels[level]), machine, chosen, finest_um)
    assert f"{widths[level] / 1000:.2g} mm wide" in said
    assert ("at the finest level only" in said) == (level > 0)


def test_where_no_level_shows_enough_the_widest_is_taken_and_where_no_size_is_known_none_is_chosen() -> None:
    slow = replace(LAPTOP, flops_s=4e9)
    assert level_for(pyramid(0.5, levels=2), False, slow, step_bytes)[0] == 1
    assert level_for(pyramid(2.4, (64, 64, 64), levels=5), False, slow, step_bytes)[0] <= 3, (
        "coarser ones have no patch"
    )
    assert level_for(pyramid(None), False, slow, step_bytes) == (0, None)
    assert level_for(volume(levels=3), False, slow, step_bytes) == (0, None), "a bare array"
    chosen, _ = suggested(pyramid(None), slow)
    assert "a patch: voxel size unknown" in suggestion_text(pyramid(None), slow, chosen)


@pytest.mark.parametrize(("facts", "machine"), [(volume(), BOX), (volume(present=40), LAPTOP)])
def test_the_text_has_25_to_45_lines_with_reasons(facts: VolumeFacts, machine: Machine) -> None:
    chosen, _ = suggested(facts, machine)
    lines = suggestion_text(facts, machine, chosen).splitlines()
    assert 25 <= len(lines) <= 50
    assert all(len(line) <= 140 for line in lines)
    assert sum("#" in line for line in lines) >= 12


@pytest.mark.parametrize(
    "network",
    [*(pytest.param(big, marks=pytest.mark.long) for big in (FULL, HALF)), SMALL, TINY],
    ids=lambda network: str(network.model.channels),
)
def test_figures_of_the_networks_are_those_of_the_memory_plan(network: NetworkSize) -> None:
    config = module._config((16, 32, 32), network.model, 1)
    plan = plan_memory(config, amp="off")
    assert plan.weight_bytes == 4 * network.parameters
    per_voxel = plan.flops_per_step / config.training.accumulate_steps / (16 * 32 * 32)
    assert per_voxel == pytest.approx(network.flops_per_voxel, rel=0.05), "attention grows with the patch, a little"
