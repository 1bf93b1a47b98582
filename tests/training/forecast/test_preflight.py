"""Settings that are allowed and seldom meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import tiny_sections
from vesuvius.config import Config
from vesuvius.training.forecast.preflight import doubts


@pytest.mark.parametrize(
    ("workers", "address", "doubted"), [(64, None, True), (8, None, False), (64, "10.0.0.1:6379", False)]
)
def test_more_readers_than_processors_can_serve_are_doubted(workers: int, address: str | None, doubted: bool) -> None:
    sections = tiny_sections("tiny", Path("v.zarr"))
    sections["training"] |= {"workers": workers}
    sections["cluster"] = {"address": address}
    config = Config.model_validate_json(json.dumps(sections))
    found = [line for line in doubts(config, cores=2.0) if "readers share 2 processors" in line]
    assert len(found) == doubted
    assert not doubted or "set training.workers=2, or at most 8 for a store" in found[0]
