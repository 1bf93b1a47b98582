"""The table of samples: each row holds figures of one checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def test_the_error_in_the_table_is_that_of_the_judged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that continued after it was judged has later validations."""
    monkeypatch.setattr(sys, "path", [str(REPOSITORY / "tools" / "bench"), *sys.path])
    import sample_quality

    place = tmp_path / "runs_phantom_0"
    (place / "runs/run").mkdir(parents=True)
    (place / "judged_128").mkdir()
    errors = [{"kind": "validation", "step": step, "relative_error": 1 / step} for step in (2, 4, 8)]
    (place / "runs/run/metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in errors) + '{"kind')
    figures = {"auc": {"values": {}, "distance": 0.75}, "air": {"values": {"generated": 0.1, "held_out": None}}}
    evaluation = {"facts": {"step": "5"}, "figures": figures}
    (place / "judged_128/evaluation.json").write_text(json.dumps(evaluation))
    assert sample_quality.table(tmp_path)[2] == "| phantom_0 | 128 | 5 | 0.250 | 0.75 | 0.1 / ? |"
