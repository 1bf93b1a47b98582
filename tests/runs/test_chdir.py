"""Relative paths lead where they led when they were given, also after a library or a thread changes the directory."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import vesuvius
from tests.conftest import textured, write_array
from tests.support.runs import vesuvius_train
from tests.support.tiny import tiny_sections
from vesuvius.config import ArrayConfig, StoreConfig, VolumeConfig
from vesuvius.training.checkpoint.format import list_checkpoints
from vesuvius.training.step.step import TrainStep


@pytest.fixture
def two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two folders with volumes of the same relative paths and other voxels; the first is the working directory."""
    folders = tmp_path / "a", tmp_path / "b"
    for number, folder in enumerate(folders):
        write_array(folder / "v.zarr", textured((32, 64, 64)) // 2 + 100 * number)
        write_array(folder / "labels.zarr", np.full((32, 64, 64), 1 + number, np.uint8))
        write_array(folder / "mask.zarr", np.ones((32, 64, 64), np.uint8))
    monkeypatch.chdir(folders[0])
    return folders


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_loader_reads_the_volumes_that_it_was_given(two_folders: tuple[Path, Path], workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 2, "patch_size": (8, 16, 16), "normalize": False, "device": "cpu"}
    options["processes"] = workers > 0
    loader = vesuvius.PatchLoader("v.zarr", labels="labels.zarr", mask="mask.zarr", num_workers=workers, **options)
    config, opened = VolumeConfig(path="v.zarr"), vesuvius.open_volume("v.zarr")
    os.chdir(two_folders[1])
    for later in (loader, vesuvius.PatchLoader(config, num_workers=workers, batches_per_epoch=2, **options)):
        for _ in range(2):
            batch = next(iter(later))
            assert batch.image.max() < 100
            assert batch.label is None or batch.label.max() == 1
            later.close()  # the next loop opens it again
    assert opened[:].max() < 100
    with vesuvius.PatchLoader("v.zarr", num_workers=0, **options | {"processes": False}) as here:
        assert next(iter(here)).image.min() >= 100
    by_full_path = vesuvius.PatchLoader(
        two_folders[0] / "v.zarr", labels=two_folders[0] / "labels.zarr", mask=two_folders[0] / "mask.zarr", **options
    )
    by_full_path.load_state_dict(loader.state_dict())  # the states of both are the same


def test_a_config_is_dumped_as_written_and_says_where_its_paths_lead(two_folders: tuple[Path, Path]) -> None:
    spec, cached = ArrayConfig(path="v.zarr"), StoreConfig(cache_dir="cache")
    os.chdir(two_folders[1])
    assert (spec.path, cached.cache_dir) == (str(two_folders[0] / "v.zarr"), str(two_folders[0] / "cache"))
    assert spec.model_dump(mode="json")["path"] == "v.zarr"
    assert ArrayConfig.model_validate(spec.model_dump()) == spec != ArrayConfig(path="v.zarr")
    os.chdir(two_folders[0])
    assert ArrayConfig.model_validate_json(spec.model_dump_json()) == spec


def test_a_run_survives_a_change_of_directory_and_a_move_of_its_project(
    two_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home, elsewhere), accumulate = two_folders, TrainStep.accumulate

    def change_directory(*arguments: Any, **options: Any) -> Any:
        os.chdir(elsewhere)
        return accumulate(*arguments, **options)

    monkeypatch.setattr(TrainStep, "accumulate", change_directory)
    sections = tiny_sections("tiny", Path("v.zarr"))
    sections["training"] |= {
        "validate_every": 2,
        "validate_patches": 2,
        "preview_every": 2,
        "save_every": 1,
        "max_steps": 2,
    }
    (home / "tiny.yaml").write_text(yaml.safe_dump(sections))
    assert vesuvius_train(Path("tiny.yaml")) == 0
    assert not (elsewhere / "runs").exists()
    run = home / "runs/tiny"
    assert [path.name[-2:] for path in list_checkpoints(run / "checkpoints")] == ["01", "02"]
    text = (run / "config.resolved.yaml").read_text()
    assert re.search(rf"- path: v.zarr  # {home}/v.zarr$", text, re.MULTILINE)
    assert json.loads((run / "split.json").read_text())["volumes"][0]["path"] == str(home / "v.zarr")
    shutil.move(home, home.with_name("moved"))
    os.chdir(home.with_name("moved"))
    resumed = Path("runs/tiny/config.resolved.yaml")
    assert vesuvius_train(resumed, "training.max_steps=3", "training.preview_every=0", "--resume") == 0
    assert list_checkpoints(home.with_name("moved") / "runs/tiny/checkpoints")[-1].name.endswith("03")
