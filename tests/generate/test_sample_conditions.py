"""Where the conditions of samples come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import textured, write_array
from vesuvius.config import DataConfig
from vesuvius.generate.volume.inputs import TrainingCondition
from vesuvius.stream.start.prepare import IntensityRange, IntensityRanges
from vesuvius.training.checkpoint.trained import DataFacts, TrainedVolume

PATCH = (8, 16, 16)


def data_config(condition: Path, **data: Any) -> DataConfig:
    volume = {"path": "gone.zarr", "condition": {"path": str(condition)}}
    return DataConfig.model_validate({"volumes": (volume,), "patch_size": PATCH} | data)


def facts(*intensities: IntensityRange) -> DataFacts:
    volume = TrainedVolume("gone.zarr", np.dtype(np.uint8), None)
    return DataFacts((volume,), IntensityRanges((), intensities), None)  # type: ignore[arg-type]


def test_positions_depend_on_seed_and_index_and_cover_the_box(tmp_path: Path) -> None:
    config = data_config(write_array(tmp_path / "c.zarr", textured((10, 18, 16))), validation={"fraction": 0.0})

    def places(seed: int) -> list[tuple[int, ...]]:
        with TrainingCondition(config, facts(IntensityRange(0.0, 200.0)), 0, seed) as conditions:
            return [conditions.start_zyx(number) for number in range(300)]

    assert set(places(5)) == {(z, y, 0) for z in (0, 1, 2) for y in (0, 1, 2)}
    assert places(5) == places(5) != places(6)


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_conditions_come_from_the_held_out_part_or_from_everywhere_without_one(tmp_path: Path, fraction: float) -> None:
    voxels = textured((32, 128, 32))
    config = data_config(write_array(tmp_path / "condition.zarr", voxels), validation={"fraction": fraction})
    with TrainingCondition(config, facts(IntensityRange(0.0, 200.0)), 0, 0) as conditions:
        starts = [conditions.start_zyx(number) for number in range(50)]
        read = conditions.patches(range(50))
    for (z, y, x), patch in zip(starts, read, strict=True):
        np.testing.assert_array_equal(patch, voxels[z : z + 8, y : y + 16, x : x + 16])
    first = min(y for _, y, _ in starts)
    assert first >= 96 if fraction else first < 96  # a quarter of 128 is held out at the end of y
