"""Whether ranks and resumes are of one experiment.  Whole runs: tests/runs/test_resume.py, test_drift.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import textured, write_array
from tests.support.tiny import tiny_sections
from vesuvius.config import Config, DataConfig, VolumeConfig
from vesuvius.errors import ConfigError
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.checkpoint.resume import _plan_changes, check_same_config


def test_a_rank_with_another_config_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    config = Config.model_validate_json(json.dumps(tiny_sections("tiny", tmp_path)))
    of_rank_0 = config.model_dump(mode="json")
    check_same_config(config, of_rank_0, 1)
    other = config.model_copy(update={"seed": 5, "training": config.training.model_copy(update={"lr": 0.5})})
    with pytest.raises(
        ConfigError, match=r"a different one on rank 1 than on rank 0: .*seed.*training\.lr: was 0\.001, is 0\.5"
    ):
        check_same_config(other, of_rank_0, 1)


def test_a_volume_that_has_grown_is_named_as_the_reason_that_a_plan_differs(tmp_path: Path) -> None:
    voxels, plans = textured((96, 64, 64)), []
    for chunks in (2, 2, 3):
        path = write_array(tmp_path / "v.zarr", np.where(np.arange(96) < 32 * chunks, voxels.T, 0).T, overwrite=True)
        config = DataConfig(
            volumes=(VolumeConfig(path=str(path)),), patch_size=(8, 16, 16), min_foreground=0.5, validation={"guard": 0}
        )
        plans.append(prepare_data(0, config).plan.describe())
    assert _plan_changes(plans[0], plans[1]) == []
    (line,) = [line for line in _plan_changes(plans[0], plans[2]) if "foreground" in line]
    assert re.fullmatch(r"plan\.volumes\[0\]\.foreground: was \S+, is \S+ \(.*other chunks are stored than .*\)", line)
