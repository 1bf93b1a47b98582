"""A power cut behind a save loses nothing of it: whatever a checkpoint holds is on the disk before its name is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from vesuvius.training.checkpoint.save import RetentionPolicy, save_checkpoint


def test_every_file_is_flushed_before_the_checkpoint_gets_its_name_and_the_name_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        done.append(("flushed", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        done.append(("renamed", path.stat().st_ino))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    weights = {"conv.weight": torch.ones(1000)}
    averages = {"ema": {"weights": weights, "updates": torch.ones(())}}
    state = {"step": 1, "model": weights, "averages": averages}
    checkpoint = save_checkpoint(tmp_path / "checkpoints", 1, state, "name: tiny\n", RetentionPolicy(3))
    named = done.index(("renamed", checkpoint.stat().st_ino))
    files = [path for path in checkpoint.iterdir() if path.is_file()]
    assert len(files) >= 3
    for path in [*files, checkpoint]:
        assert ("flushed", path.stat().st_ino) in done[:named], path.name
    assert ("flushed", checkpoint.parent.stat().st_ino) in done[named:], "the name itself"
