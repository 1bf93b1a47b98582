"""Each test's runs are in its own directory; a run of two steps is trained once and copied."""

from __future__ import annotations

import shutil
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.conftest import textured
from tests.support.runs import WriteConfig, train_in, vesuvius_train, write_config
from tests.support.tiny import tiny_sections
from tests.training.step.test_conditioning import write_group


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def two_steps(tmp_path_factory: pytest.TempPathFactory, written_volume: Path) -> Path:
    folder = tmp_path_factory.mktemp("two_steps")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_sections("tiny", written_volume)))
    with chdir(folder):
        assert vesuvius_train(folder / "tiny.yaml", "training.max_steps=2", "training.save_every=1") == 0
    return folder / "runs"


@pytest.fixture
def trained(two_steps: Path, tmp_path: Path, tiny_config: WriteConfig) -> Path:
    """Config of the run `tiny`, which has made two steps here, with a checkpoint of each."""
    shutil.copytree(two_steps, tmp_path / "runs", symlinks=True)
    return tiny_config()


@pytest.fixture(scope="session")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the run `shown`, trained on labels, with its volume and labels."""
    place = tmp_path_factory.mktemp("shown")
    voxels = textured((40, 64, 128))
    scan = write_group(place / "scan.zarr", voxels, [8.0] * 3)
    labels = write_group(place / "labels.zarr", np.uint8((voxels > 100) * 2), [8.0] * 3)
    volumes = [{"path": str(scan), "condition": {"path": str(labels)}}]
    data = {"condition_classes": 3, "validation": {"fraction": 0.4}}
    return train_in(place, write_config(place / "shown.yaml", volumes, data))
