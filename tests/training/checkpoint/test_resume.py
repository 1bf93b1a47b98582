"""Reasons for differences between plans.  Whole runs: tests/runs/test_resume.py, test_drift.py."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from tests.conftest import textured, write_array
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.checkpoint.start import _plan_changes


def test_a_grown_volume_is_named_as_the_reason_for_a_different_plan(tmp_path: Path) -> None:
    voxels, plans = textured((96, 64, 64)), []
    for chunks in (2, 2, 3):
        path = write_array(tmp_path / "v.zarr", np.where(np.arange(96) < 32 * chunks, voxels.T, 0).T, overwrite=True)
        config = DataConfig(
            volumes=(VolumeConfig(path=str(path)),), patch_size=(8, 16, 16), min_foreground=0.5, validation={"gap": 0}
        )
        plans.append(prepare_data(0, config).plan.describe())
    assert _plan_changes(plans[0], plans[1]) == []
    (line,) = [line for line in _plan_changes(plans[0], plans[2]) if "foreground" in line]
    assert re.fullmatch(r"plan\.volumes\[0\]\.foreground: was \S+, is \S+ \(.*set of stored chunks.*\)", line)
