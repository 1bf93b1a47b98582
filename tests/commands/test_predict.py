"""`vesuvius predict`: the volume of `predict_volume`, its picture, and arguments that are wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import vesuvius
from vesuvius.commands.cli import main
from vesuvius.errors import EXIT_CONFIG, EXIT_OK

VOXELS = np.random.default_rng(0).integers(0, 256, (20, 24, 28)).astype(np.uint8)
PATCH = ["--patch-size", "12,12,16"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv3d(1, 2, 3, padding=1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a volume, and a module that builds the network."""
    monkeypatch.chdir(tmp_path)
    array = zarr.create_array("scan.zarr", shape=VOXELS.shape, dtype=VOXELS.dtype, chunks=(8, 16, 16))
    array[:] = VOXELS
    Path("nets_of_predict.py").write_text("from tests.commands.test_predict import network\n")
    return tmp_path


def predict(out: str, *options: str) -> int:
    given = ["--network", "nets_of_predict:network", "--volume", "scan.zarr", "--out", out, *PATCH, *options]
    return main(["predict", *given])


def voxels(path: str) -> NDArray[Any]:
    return np.asarray(zarr.open_array(f"{path}/0", mode="r")[:])


def test_the_command_writes_what_the_function_does_and_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    loader = vesuvius.PatchLoader("scan.zarr", batch_size=1, patch_size=(8, 8, 8), normalize=(10, 90))
    Path("loader.json").write_text(json.dumps(loader.state_dict()))
    options = ["--normalize", "loader.json", "--box", "3:19,0:24,4:28", "--overlap", "0.5", "--mirror", "zx"]
    assert predict("a.zarr", *options) == EXIT_OK
    box = ((3, 0, 4), (19, 24, 28))
    same = {"patch_size": (12, 12, 16), "box": box, "overlap": 0.5, "mirror": "zx", "normalize": loader}
    vesuvius.predict_volume(network(), "scan.zarr", "b.zarr", **same)
    np.testing.assert_array_equal(voxels("a.zarr"), voxels("b.zarr"))
    assert voxels("a.zarr").shape == (2, 16, 24, 24)
    said = capsys.readouterr().out
    assert "wrote " in said
    assert f"middle slices: {Path('a.png').absolute()}" in said
    picture = np.asarray(Image.open("a.png").convert("L"))
    assert len(np.unique(picture[60:-40, picture.shape[1] // 2 + 10 :])) > 20  # the prediction, not an empty frame


def test_a_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path.cwd().rglob("*"))
    assert predict("o.zarr", "--activation", "argmax", "--dry-run") == EXIT_OK
    assert [path for path in sorted(Path.cwd().rglob("*")) if "__pycache__" not in path.parts] == before
    assert "12 tiles of 12x12x16" in capsys.readouterr().out


def test_without_the_libraries_of_pictures_the_volume_is_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vesuvius.generate.volume.picture", None)
    assert predict("o.zarr", "--activation", "argmax") == EXIT_OK
    assert "no picture: " in capsys.readouterr().out
    assert set(np.unique(voxels("o.zarr"))) <= {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--network", "absent.pt2"], "The network absent.pt2 does not exist"),
        (["--network", "nets_of_predict:absent"], "has no attribute 'absent'"),
        (["--overlap", "1"], "overlap 1.0 is not"),
        (["--channels", "2"], "channels (2,) are not channels of the network (0 to 1)"),
        (["--workers", "2", "--box", "0:12,0:12,0:99"], "box z 0:12, y 0:12, x 0:99 is not inside"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_written(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict("o.zarr", *options) == EXIT_CONFIG
    assert message in capsys.readouterr().err
    assert not list(Path.cwd().glob("o.*"))


@pytest.mark.parametrize("text", ["absent.json", "scan.zarr", "5", "nan"])
def test_a_normalization_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        predict("o.zarr", "--normalize", text)
    assert f"'{text}' is not auto, none, LOW,HIGH or a JSON file" in capsys.readouterr().err
