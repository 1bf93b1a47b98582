"""Whether ranks and resumes are of one experiment.  Whole runs: tests/runs/test_resume.py, test_drift.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny import tiny_sections
from vesuvius.config import Config
from vesuvius.errors import ConfigError
from vesuvius.training.checkpoint.resume import check_same_config


def test_a_rank_with_another_config_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    config = Config.model_validate_json(json.dumps(tiny_sections("tiny", tmp_path)))
    of_rank_0 = config.model_dump(mode="json")
    check_same_config(config, of_rank_0, 1)
    other = config.model_copy(update={"seed": 5, "training": config.training.model_copy(update={"lr": 0.5})})
    with pytest.raises(
        ConfigError, match=r"a different one on rank 1 than on rank 0: .*seed.*training\.lr: was 0\.001, is 0\.5"
    ):
        check_same_config(other, of_rank_0, 1)
