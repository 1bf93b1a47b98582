"""The patches that are compared: real ones come from the places that are said to be theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.conftest import textured, write_array
from vesuvius.config import ArrayConfig, DataConfig, VolumeConfig
from vesuvius.generate.evaluate.patches import RealSource
from vesuvius.stream.start.prepare import GreyRange


def test_labels_of_a_coarser_condition_are_those_that_training_shows_beside_the_patch(tmp_path: Path) -> None:
    fine, coarse = textured((96, 128, 128)), textured((48, 64, 64), seed=1)
    scan, labels = write_array(tmp_path / "v.zarr", fine), write_array(tmp_path / "c.zarr", coarse)
    volume = VolumeConfig(path=str(scan), condition=ArrayConfig(path=str(labels)))
    source = RealSource(0, DataConfig(volumes=(volume,), patch_size=(8, 16, 16)), None, [GreyRange(0, 255)])
    starts = [(0, 0, 0), (71, 90, 111), (87, 112, 1)]
    shown = coarse.repeat(2, 0).repeat(2, 1).repeat(2, 2)
    expected = [shown[z : z + 8, y : y + 16, x : x + 16] for z, y, x in starts]
    np.testing.assert_array_equal(source.labels_at(0, starts), np.stack(expected))
