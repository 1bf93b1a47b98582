"""First configs: patch, level, preset and readers follow from volume and machine."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from vesuvius.commands import first_config as module
from vesuvius.commands.first_config import LEAST_WIDTH_UM, PRESETS, choose_level, fit_patch
from vesuvius.config import ArrayConfig, Config, DataConfig, TrainingConfig, Triple, VolumeConfig
from vesuvius.config.load import parse_config
from vesuvius.errors import ConfigError
from vesuvius.runlog.units import GIB
from vesuvius.training.forecast import plan as forecast_plan
from vesuvius.volume_tools.info import IntensityStats, LevelFacts, Occupancy, VolumeFacts

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FULL: Triple = (72, 136, 136)
SCROLL: Triple = (14000, 8000, 8000)


def volume(
    shape: tuple[int, ...] = SCROLL, present: int | None = 100, levels: int = 1, um: float | None = None, **changes: Any
) -> VolumeFacts:
    """A volume of 100 chunks with halving levels and voxels of `um` micrometers."""

    def level(n: int) -> LevelFacts:
        size_um = None if um is None else (um * 2**n,) * 3
        small = tuple(-(-size // 2**n) for size in shape)
        return LevelFacts(n, str(n), small, (128, 128, 128), None, "uint8", 0, None, None, None, size_um)

    spec = ArrayConfig(path="volumes/a b: c.zarr")
    known = Occupancy(present, 100, "chunks", "listing" if present is not None else None)
    all_levels = tuple(map(level, range(levels)))
    facts = VolumeFacts(spec, None, None, 2, None, (0, 1, 2), all_levels, {}, {}, all_levels[0], "blosc", known, None)
    return replace(facts, **changes)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with given memory and speed, on which a step takes 1 GiB per million voxels with 128 channels."""
    found = SimpleNamespace(gib=80.0, flops_s=80e12)

    def plan(config: Config, amp: str) -> SimpleNamespace:
        training, channels = config.training, config.model.channels[0]
        patches, voxels = training.train_batch_size, math.prod(config.data.patch_size)
        size = int(GIB * patches * voxels / 1e6 * channels / 128)
        flops = 5e12 * training.accumulate_steps * patches * voxels / math.prod(FULL) * (channels / 128) ** 2
        return SimpleNamespace(vram_bytes=size, ram_bytes=size, flops_per_step=3 * flops)

    def step_range_s(flops: float, device: torch.device, amp: str) -> tuple[float, float]:
        return flops / found.flops_s, flops / found.flops_s

    monkeypatch.setattr(forecast_plan, "plan_memory", plan)
    monkeypatch.setattr(module, "step_range_s", step_range_s)
    monkeypatch.setattr(module, "device_memory_bytes", lambda config, device: int(found.gib * GIB))
    limit = SimpleNamespace(total_bytes=found.gib * GIB)
    monkeypatch.setattr(module, "ram_limit", lambda configured: limit)
    return found


@pytest.mark.parametrize(
    ("gib", "flops_s", "number", "micro"), [(80, 80e12, 0, 8), (7, 80e12, 0, 4), (80, 20e12, 1, 8), (0.01, 1e9, 2, 1)]
)
def test_a_gpu_gets_the_largest_preset_that_fits_and_is_fast_enough(
    machine: SimpleNamespace, gib: float, flops_s: float, number: int, micro: int
) -> None:
    machine.gib, machine.flops_s = gib, flops_s
    preset, batch, step_s = module._choose_preset(SCROLL, GPU)
    assert (preset, batch) == (PRESETS["gpu"][number], micro)
    assert step_s <= 4 or number == 2


def test_a_cpu_gets_a_preset_whose_step_takes_two_seconds_and_a_run_of_half_an_hour(machine: SimpleNamespace) -> None:
    found = []
    for flops_s in (1e12, 60e9, 1e8):
        machine.flops_s = flops_s
        preset, micro, step_s = module._choose_preset(SCROLL, CPU)
        training = module._training(preset, micro, step_s, True, False, CPU)
        steps = training.epochs * training.steps_per_epoch
        assert steps == 80 or 0.8 * 1800 <= steps * step_s <= 1800 or steps == 20_000
        assert training.warmup_steps < steps / 5
        found.append(PRESETS["cpu"].index(preset))
    assert found == sorted(found) == [0, 1, 2], "the slowest machine gets the smallest"


@pytest.mark.parametrize(
    ("shape", "patch", "held_out"),
    [
        ((256, 256, 256), FULL, True),
        ((200, 256, 256), (48, 96, 96), True),  # 72x136x136 would leave no room for validation
        ((64, 64, 64), (16, 48, 48), True),
        ((24, 40, 50), (8, 32, 32), True),
        ((8, 8, 8), (8, 8, 8), False),
        ((20, 16, 20), (16, 16, 16), False),
        ((1, 300, 300), (1, 96, 96), True),
    ],
)
def test_a_small_or_thin_volume_gets_a_patch_that_fits_it_and_the_network(
    shape: Triple, patch: Triple, held_out: bool
) -> None:
    assert fit_patch(shape, FULL) == (patch, held_out)
    assert module._model(PRESETS["gpu"][0], patch).size_problem(patch) is None


def test_a_volume_too_small_in_y_and_x_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[100, 7, 100\] is too small: y and x need at least 8 voxels"):
        fit_patch((100, 7, 100), FULL)
    assert module.shape_zyx(volume((64, 256, 3, 300), zyx=(3, 1, 0))) == (300, 256, 64)


def test_without_known_occupancy_a_coarse_level_is_the_foreground_mask() -> None:
    intensity = IntensityStats(8, 0, 20, 8, 1000, 0.1, 0.0, 255.0, 100.0, 30.0, (1.0, 100.0, 250.0))
    config = module._data(volume(present=None, levels=6, intensity=intensity), FULL, True)
    assert config.min_foreground == 0.5
    assert config.foreground.level == 5, "the finest of at most 32 million voxels"
    for unknown in (volume(present=None, intensity=intensity), volume(present=None)):
        assert module._data(unknown, FULL, True).min_foreground == 0


def test_a_volume_too_sparse_for_half_filled_patches_is_sampled_everywhere(
    machine: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    array = zarr.create_array(str(tmp_path / "v.zarr"), shape=(32, 64, 64), chunks=(8, 8, 8), dtype="u1")
    for corner in itertools.product(range(0, 32, 16), range(0, 64, 16), range(0, 64, 16)):
        array[tuple(slice(start, start + 8) for start in corner)] = np.arange(512).reshape(8, 8, 8) % 200 + 1
    monkeypatch.setattr(module, "_fits", lambda config, data: True)
    text, _ = module.first_config("x", ArrayConfig(path=str(tmp_path / "v.zarr")))
    assert parse_config(text).data.min_foreground == 0
    assert "keeping data.min_foreground at 0: " in caplog.text


@pytest.mark.parametrize("um", [2.4, 20.0])
@pytest.mark.parametrize("wanted", [FULL, (16, 32, 32)])
def test_the_finest_level_whose_patch_shows_enough_of_a_sheet_is_chosen(um: float, wanted: Triple) -> None:
    """At 2.4 micrometers a patch of 32 voxels is 77 wide, a quarter of what shows a sheet."""
    level = choose_level(volume(levels=6, um=um), wanted)
    assert wanted[1] * um * 2**level >= LEAST_WIDTH_UM
    assert level == 0 or wanted[1] * um * 2 ** (level - 1) < LEAST_WIDTH_UM
    assert choose_level(volume(levels=6, um=0.01), wanted) == 0, "electron microscopy"


@pytest.mark.parametrize(
    ("cores", "remote", "kept", "small", "workers"),
    [
        (2, False, False, False, 0),
        (2, True, False, False, 6),  # they wait for the store
        (8, False, False, False, 6),
        (8, False, True, True, 0),
        (8, False, True, False, 6),
        (8, False, False, True, 6),  # it is read again and again
    ],
)
def test_readers_are_used_if_they_are_faster_than_threads(
    cores: int, remote: bool, kept: bool, small: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda pid: cores)
    monkeypatch.setattr(module, "plan_resident", lambda config, data: (int(kept), ""))
    monkeypatch.setattr(module, "_fits", lambda config, data: config.training.workers <= 6)
    data = DataConfig(volumes=(VolumeConfig(path="any"),))
    config = Config(name="any", data=data, training=TrainingConfig(workers=8))
    found: Any = SimpleNamespace(plan=SimpleNamespace(is_small=small))
    assert module._workers(config, found, remote) == workers
