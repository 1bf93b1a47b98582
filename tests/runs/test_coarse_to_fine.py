"""Coarse to fine, end to end: generate a coarse level, then a finer one conditioned on it, as on the upsampled one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.stream.test_coarse_condition import upsampled
from tests.support.runs import PATCH, assert_same_weights, train_in, write_config
from vesuvius.commands import sample
from vesuvius.config import ArrayConfig, DataConfig, VolumeConfig
from vesuvius.generate.volume.inputs import InputConfig, Inputs
from vesuvius.volume_tools.pyramid import downsample_mean, multiscale

SCAN = (32, 80, 47)
COARSE, FINE = (9, 20, 18), (17, 40, 35)  # what is drawn: odd sizes, and more than one tile


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the runs `coarse`, `fine` and `explicit` (conditioned on an upsampled volume)."""
    place = tmp_path_factory.mktemp("coarse_to_fine")
    voxels = np.sort(textured(SCAN), axis=0)
    zarr.create_group(
        place / "scan.zarr",
        zarr_format=2,
        attributes={"multiscales": [multiscale("scan", 2, [8.0] * 3, ["micrometer"] * 3)]},
    )
    write_array(place / "scan.zarr/0", voxels, chunk=16)
    write_array(place / "scan.zarr/1", downsample_mean(voxels), chunk=16)
    write_array(place / "upsampled.zarr", upsampled(downsample_mean(voxels), SCAN))
    level_1 = {"path": "scan.zarr", "level": 1}
    volumes: dict[str, dict[str, Any]] = {
        "coarse": level_1,
        "fine": {"path": "scan.zarr", "condition": level_1},
        "explicit": {"path": "scan.zarr", "condition": {"path": "upsampled.zarr"}},
    }
    return train_in(
        place, *(write_config(place / f"{n}.yaml", [v], {"validation": {"gap": 0}}) for n, v in volumes.items())
    )


@pytest.fixture(autouse=True)
def _in_place(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)


def draws(run: str, out: str, *arguments: object) -> int:
    command = ["--checkpoint", run, "--out", out, "--steps", 2, "--overlap", 0.25, "--workers", 1, *arguments]
    return sample.main([str(argument) for argument in command])


def voxels(path: str) -> np.ndarray[Any, Any]:
    return np.asarray(zarr.open_array(path, mode="r")[...])


@pytest.mark.long
def test_a_generated_coarse_volume_conditions_the_fine_one() -> None:
    assert_same_weights("fine", "explicit")
    assert draws("coarse", "coarse.zarr", "--shape", ",".join(map(str, COARSE))) == 0
    coarse = voxels("coarse.zarr/0")
    write_array(Path("coarse.upsampled.zarr"), upsampled(coarse, FINE))
    assert draws("fine", "fine.zarr", "--shape", ",".join(map(str, FINE)), "--condition", "coarse.zarr") == 0
    assert draws("explicit", "explicit.zarr", "--condition", "coarse.upsampled.zarr") == 0
    fine = voxels("fine.zarr/0")
    np.testing.assert_array_equal(fine, voxels("explicit.zarr/0"))
    assert draws("explicit", "other.zarr", "--condition", "coarse.upsampled.zarr", "--guidance", 0) == 0
    assert (fine != voxels("other.zarr/0")).any(), "the condition matters"


def test_patch_sized_samples_get_conditions_of_the_same_positions() -> None:
    for run in ("fine", "explicit"):
        assert sample.main(f"--checkpoint {run} --count 2 --steps 2 --out samples/{run}".split()) == 0
    for name in ("samples", "conditions"):
        np.testing.assert_array_equal(*(voxels(f"samples/{run}/{name}.zarr/0") for run in ("fine", "explicit")))
    attributes = dict(zarr.open_group("samples/fine/conditions.zarr", mode="r").attrs)
    assert attributes["multiscales"][0]["datasets"][0]["coordinateTransformations"][0]["scale"] == [1, 8, 8, 8]  # type: ignore[index, call-overload]


def test_a_condition_of_another_scale_than_in_training_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused = {
        ("fine", "16,40,40", "scan.zarr@1"): "--shape and --condition do not match with the factors of the "
        "training run, 2x2x2: 16x40x40 and 16x40x24;",
        (
            "explicit",
            "32,80,47",
            "scan.zarr@1",
        ): "--shape and --condition do not match: 32x80x47 and 16x40x24;",
        ("fine", "16,40,24", "scan.zarr@1"): ": 16x40x24 and 16x40x24;",
    }
    for (run, shape, condition), message in refused.items():
        assert draws(run, "none.zarr", "--shape", shape, "--condition", condition) == 2
        assert message in capsys.readouterr().err
    patch = ",".join(f"0:{size}" for size in PATCH[:2]) + ",90:106"
    assert draws("fine", "none.zarr", "--condition", "scan.zarr@1", "--box", patch) == 2
    assert "is not inside" in capsys.readouterr().err
    assert not list(Path().glob("none*"))


def test_a_generated_volume_is_aligned_with_its_coarser_condition() -> None:
    """Scaling twice or not at all would move any position except the origin."""
    placed = multiscale("placed", 1, [16.0] * 3, ["micrometer"] * 3, (32.0, 0.0, 64.0))
    zarr.create_group("placed.zarr", zarr_format=2, attributes={"multiscales": [placed]})
    write_array(Path("placed.zarr/0"), np.ones(COARSE, np.uint8), chunk=16)
    given = InputConfig(condition=ArrayConfig(path="placed.zarr"))
    with Inputs(given, DataConfig(volumes=(VolumeConfig(path="scan"),)), FINE, (2, 2, 2)) as inputs:
        assert inputs.space(None) == ((8.0, 8.0, 8.0), "micrometer", (32.0, 0.0, 64.0))
