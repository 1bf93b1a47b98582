"""Each test's runs are in its own directory; a run of two steps is trained once and copied."""

from __future__ import annotations

import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import yaml

from tests.support.runs import WriteConfig, vesuvius_train
from tests.support.tiny import tiny_sections


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def _two_steps(tmp_path_factory: pytest.TempPathFactory, written_volume: Path) -> Path:
    folder = tmp_path_factory.mktemp("two_steps")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_sections("tiny", written_volume)))
    with chdir(folder):
        assert vesuvius_train(folder / "tiny.yaml", "training.max_steps=2", "training.save_every=1") == 0
    return folder / "runs"


@pytest.fixture
def trained(_two_steps: Path, tmp_path: Path, tiny_config: WriteConfig) -> Path:
    """Config of the run `tiny`, which has made two steps here, with a checkpoint of each."""
    shutil.copytree(_two_steps, tmp_path / "runs", symlinks=True)
    return tiny_config()
