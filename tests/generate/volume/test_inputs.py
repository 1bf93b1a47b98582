"""Input volumes must be aligned with each other, and labels as in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.volumes.test_alignment import RAW, volume_of
from vesuvius.config import ArrayConfig, DataConfig, ValidationConfig, VolumeConfig
from vesuvius.errors import ConfigError, DataError
from vesuvius.generate.volume.inputs import InputConfig, Inputs, TrainingCondition
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.checkpoint.trained import DataFacts, trained_volumes
from vesuvius.volumes.box import Box, box_at, is_inside

CONFIG = DataConfig(volumes=(VolumeConfig(path="scan"),))


def spec(path: Path) -> ArrayConfig:
    return ArrayConfig(path=str(path))


@pytest.mark.parametrize(("corner", "raises"), [(0, None), (1, None), (40, ConfigError), (400, DataError)])
def test_a_mask_at_another_position_is_refused(tmp_path: Path, corner: int, raises: Any) -> None:
    volume_of(tmp_path / "scan", RAW, 4, 0)
    volume_of(tmp_path / "mask", RAW, 4, (corner, 0, 0))
    given = InputConfig(inpaint=spec(tmp_path / "scan"), mask=spec(tmp_path / "mask"))
    if raises is None:
        with Inputs(given, CONFIG) as inputs:
            assert inputs.shape_zyx == RAW
    else:
        with pytest.raises(raises, match=r"mask .*are not aligned|Cannot align .*mask"):
            Inputs(given, CONFIG)


@pytest.mark.parametrize("fraction", [0.0, 0.35])
def test_samples_get_labels_at_their_position_held_out_ones_if_there_are_any(tmp_path: Path, fraction: float) -> None:
    labels, patch = textured((20, 32, 32)), (8, 16, 16)
    volume_of(tmp_path / "scan", RAW, 4, 0)
    volume_of(tmp_path / "labels", labels.shape, 6, (40, 60, 80))
    for name, voxels in (("scan", textured(RAW)), ("labels", labels)):
        zarr.open_array(str(tmp_path / name / "0"), mode="r+")[:] = voxels
    config = DataConfig(
        volumes=(VolumeConfig(path=str(tmp_path / "scan"), condition=spec(tmp_path / "labels")),),
        patch_size=patch,
        validation=ValidationConfig(fraction=fraction, gap=0),
    )
    data = prepare_data(0, config)
    facts = DataFacts(trained_volumes(data), data.intensity_ranges(config), None)  # type: ignore[arg-type]
    drawn = {seed: starts_of(config, facts, seed) for seed in (0, 1)}
    with TrainingCondition(config, facts, 0, 0) as conditions:
        shown = conditions.patches(range(8))
    box: Box = data.splits[0].validation or data.splits[0].train
    for start, patch_shown in zip(drawn[0], shown, strict=False):
        assert is_inside(box_at(start, patch), box[1])
        assert all(lo >= first for lo, first in zip(start, box[0], strict=True))
        np.testing.assert_array_equal(patch_shown, data.read_patch(0, box_at(start, patch), 1))
    last = [stop - size for stop, size in zip(box[1], patch, strict=True)]
    for axis in range(3):
        assert {box[0][axis], last[axis]} <= {start[axis] for start in drawn[0]}, "from end to end"
    assert drawn[0] == starts_of(config, facts, 0) != drawn[1]


def starts_of(config: DataConfig, facts: DataFacts, seed: int) -> list[tuple[int, int, int]]:
    with TrainingCondition(config, facts, 0, seed) as conditions:
        return [conditions.start_zyx(number) for number in range(300)]


def test_instances_that_are_not_ids_are_refused_or_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Floats and negative ids are refused; a scan as ids gets a warning, once; ids of sheets and of all voxels none."""
    classes = np.zeros((8, 8, 8), np.uint8)
    classes[:, 4:] = 1
    sheets, config = classes.astype(np.int16) * 7, CONFIG.model_copy(update={"condition_classes": 2})
    scan = np.arange(512, dtype=np.uint16).reshape(8, 8, 8) % 250
    condition = write_array(tmp_path / "classes.zarr", classes)
    box = box_at((0, 0, 0), (8, 8, 8))
    for name, ids in {
        "sheets": sheets,
        "dense": sheets + 1,
        "scan": scan,
        "below": -sheets,
        "float": sheets / 2,
    }.items():
        given = InputConfig(condition=spec(condition), instances=spec(write_array(tmp_path / f"{name}.zarr", ids)))
        caplog.clear()
        if name == "float":
            with pytest.raises(ConfigError, match="is float64, not ids; give integers"):
                Inputs(given, config)
            continue
        with Inputs(given, config) as inputs:
            if name == "below":
                with pytest.raises(DataError, match="has the negative id -7; number instances from 1"):
                    inputs.read("instances", box)
                continue
            for _ in range(2):
                np.testing.assert_array_equal(inputs.read("instances", box), ids)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == (name == "scan")
        assert all(text.startswith("255 of 256 voxels of class 0 in") for text in said)
