"""A volume whose codec aborts the process that reads it: a run says so, replaces the region and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import textured
from tests.support.poison import poison, run_armed, write_volume

WriteConfig = Callable[..., Path]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_volume(tmp_path / "sharded.zarr", textured((128, 128, 128)))


def config_of(tiny_config: WriteConfig, path: Path, **data: Any) -> Path:
    volumes = {"volumes": [{"path": str(path)}], **data}
    return tiny_config(data=volumes, training={"save_every": 1})


@pytest.mark.long
def test_a_run_with_readers_goes_on_and_says_what_killed_them(
    tiny_config: WriteConfig, sharded: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_config, sharded)
    assert run_armed("train", "--config", config, "training.max_steps=1", cwd=tmp_path).returncode == 0
    poison(sharded, (1, 1, 1))  # after the start has read patches in the trainer
    readers = ["training.workers=1", "training.max_steps=15"]
    done = run_armed("train", "--config", config, "--resume", *readers, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "was killed or died (Aborted, by its own account; SYSTEM_ERROR: Worker" in done.stderr
    assert f"while it decoded chunk [1, 1, 1] of volume {sharded}" in done.stderr
    assert "regions that touch them are replaced with others: chunk [1, 1, 1]: killed two readers" in done.stderr
    assert "RUST_BACKTRACE" not in done.stderr
    run = tmp_path / "runs" / "tiny"
    (death, *_) = [json.loads(line) for line in (run / "post_mortem.jsonl").read_text().splitlines()]
    assert death["cause"] == "signal"
    assert f"it crashed with Aborted, as its own note says, while it read {sharded}" in death["evidence"]
    quarantined = [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]
    assert {tuple(record["chunk"]) for record in quarantined} == {(1, 1, 1)}
    assert "damaged places in quarantine: 1; list them with `vesuvius quarantine tiny`" in done.stderr
