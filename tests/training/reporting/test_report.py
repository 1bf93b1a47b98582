"""Messages from the ranks to rank 0 before a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.fakes import run_context
from vesuvius.config.load import read_config
from vesuvius.errors import DataError
from vesuvius.runlog.records import read_records
from vesuvius.training.ranks.ranks import Ranks
from vesuvius.training.reporting.report import RankTelemetry


def damage(z: int) -> dict[str, Any]:
    box = [[z, 0, 0], [z + 8, 8, 8]]
    return {"volume": "v", "number": 0, "box": box, "chunk": [z // 8, 0, 0], "cause": "torn"}


def told(*records: dict[str, Any]) -> dict[str, Any]:
    return {"quarantined": list(records), "times": None}


def test_damage_counts_over_all_ranks_and_once_per_region(tiny_config: Callable[..., Path], tmp_path: Path) -> None:
    config = read_config(tiny_config(data={"max_quarantined": 3}, training={"ranks": 2}))
    run = replace(run_context(config, tmp_path), ranks=Ranks(0, 2))
    telemetry, nothing = RankTelemetry(run), told()
    telemetry.record([nothing, told(damage(0), damage(8))])
    telemetry.record([nothing, told(damage(8))])
    run.progress.quarantined += [damage(8), damage(16)]  # of this rank's readers, which do not know of the others'
    telemetry.record([nothing, told(damage(16))])
    assert len(read_records(run.directory.quarantine)) == 2
    with pytest.raises(DataError, match=r" 4 damaged chunks, .*data\.max_quarantined=3; the last: volume v"):
        telemetry.record([nothing, told(damage(24))])
    assert len(read_records(run.directory.quarantine)) == 3, "the last one, too"
