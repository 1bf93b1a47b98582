"""`vesuvius evaluate` on the command line: output, refusals, and no partial files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import write_array
from tests.support.runs import PATCH
from vesuvius.commands import evaluate, sample
from vesuvius.generate.evaluate.patches import open_generated
from vesuvius.generate.sample_zarr import CONDITIONS, SAMPLES, record_samples, sample_array


@pytest.fixture(autouse=True)
def _in_place(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shown)
    monkeypatch.setattr("vesuvius.generate.evaluate.copies._POSITIONS", 2**13)  # a coarser search takes less time


def evaluates(*arguments: object) -> int:
    command = ["--count", 16, "--classifier-steps", 2, "--steps", 2, *arguments]
    return evaluate.main([str(argument) for argument in command])


def test_samples_are_generated_once_and_evaluated_with_figures_floors_and_a_page(
    shown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vesuvius.generate.evaluate.metrics._EXCHANGES", 99)
    assert evaluates("shown", "--out", tmp_path / "first") == 0
    said = capsys.readouterr().out
    for words in (
        "share of air",
        "classifier AUC",
        "floor",
    ):
        assert words in said
    folder = tmp_path / "first"
    assert {path.name for path in folder.iterdir()} == {
        "evaluation.json", "evaluation.html", "montage.png"
    }  # fmt: skip
    page = (folder / "evaluation.html").read_text()
    assert "data:image/jpeg;base64," in page
    assert "http" not in page.replace("http://www.w3.org", "")
    found = json.loads((folder / "evaluation.json").read_text())
    assert found["figures"]["histogram_distance"]["floor"] >= 0
    width, height = Image.open(folder / "montage.png").size
    assert width < 8 * 120
    assert height == 20 + 2 * 2 * (20 + 100) + 20, "sixteen generated and real ones, in rows of eight"
    drawn = list((shown / "runs/shown/samples").iterdir())
    assert len(drawn) == 1
    attributes = drawn[0] / "samples.zarr/.zattrs"
    attributes.write_text(attributes.read_text().replace('"spectral"', '"edm"'))  # as earlier versions wrote it
    before = attributes.stat().st_mtime_ns
    assert evaluates("shown") == 0
    assert attributes.stat().st_mtime_ns == before
    reports = list((shown / "runs/shown/reports").iterdir())
    assert [(report / "evaluation.html").exists() for report in reports] == [True]
    again = json.loads((reports[0] / "evaluation.json").read_text())
    assert again["figures"] == found["figures"], "the same samples, the same figures"


@pytest.mark.long
def test_patches_of_a_generated_volume_are_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box = "8:24,0:32,64:128"
    volume = ["--checkpoint", "shown", "--condition", str(Path("labels.zarr").resolve()), "--box", box, "--steps", "1",
              "--overlap", "0", "--workers", "1"]  # fmt: skip
    assert sample.main([*volume, "--out", str(tmp_path / "big.zarr")]) == 0
    assert evaluates("shown", "--generated", tmp_path / "big.zarr", "--out", tmp_path / "out") == 0
    found = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert found["facts"]["generated"] == f"16 from {tmp_path / 'big.zarr'}"
    assert sample.main([*volume[:5], "8:16,0:16,0:64", *volume[6:], "--out", str(tmp_path / "small.zarr")]) == 0
    assert evaluates("shown", "--generated", tmp_path / "small.zarr", "--out", tmp_path / "none") == 2
    assert "4 disjoint patches fit into it" in capsys.readouterr().err


def test_positions_in_another_condition_do_not_count_as_held_out(tmp_path: Path) -> None:
    starts = [(0, 0, 16 * n) for n in range(16)]
    for condition, known in (("mine", True), ("another", False)):
        folder = tmp_path / condition
        for part in (SAMPLES, CONDITIONS):
            sample_array(folder / part, (16, *PATCH), np.dtype(np.uint8), None)[...] = np.ones((16, *PATCH), np.uint8)
            record_samples(folder / part, {"condition": condition, "starts_zyx": starts})
        places = open_generated(folder, PATCH, 16, "mine", 1).locations
        assert (None if places is None else places.tolist()) == ([[1, *start] for start in starts] if known else None)


@pytest.mark.parametrize("kind", [pytest.param("array", marks=pytest.mark.long), "float"])
def test_samples_of_other_programs_are_evaluated_in_intensities(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some of other dtype do not fit into the volume's."""
    rng = np.random.default_rng(0)
    patches = rng.integers(1, 200, (20, *PATCH)).astype(np.uint8)
    path = tmp_path / ("samples.zarr" if kind == "array" else "samples.npy")
    if kind == "array":
        write_array(path, patches, chunk=8)
    else:
        voxels = patches + 0.3
        voxels[0, 0, 0, :3] = -1.2, 255.4, 256
        np.save(path, voxels)
    assert evaluates("shown", "--generated", path, "--out", tmp_path / "out", "--seed", 1) == 0
    found, said = json.loads((tmp_path / "out/evaluation.json").read_text()), capsys.readouterr()
    assert "positions of the conditions of these samples are unknown" in said.out.splitlines()[-2]
    clipped = "generated voxels do not fit into uint8 and are clipped"
    assert (f"2 of {16 * math.prod(PATCH)} {clipped}" in said.err) == (kind != "array")
    assert "--seed, --steps: no effect on existing samples" in said.err
    metric: dict[str, Any] = found["figures"]["histogram_distance"]
    assert not metric["differs"], "real voxels are uniform from 1 to 199, too, and floats are rounded as they are"


def test_invalid_input_is_refused_in_one_line_and_nothing_is_written(
    shown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "other.npy", np.ones((20, 8, 16, 15), np.uint8))
    np.save(tmp_path / "few.npy", np.ones((3, *PATCH), np.uint8))
    np.save(tmp_path / "nan.npy", np.full((20, *PATCH), np.nan, np.float32))
    np.save(tmp_path / "good.npy", np.ones((20, *PATCH), np.uint8))
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "there").mkdir()
    shutil.copytree(shown / "runs/shown/checkpoints/step_00000002", tmp_path / "bare")
    manifest = json.loads((tmp_path / "bare/manifest.json").read_text())
    del manifest["files"]["model.safetensors"]
    (tmp_path / "bare/manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "bare/model.safetensors").unlink()
    write_array(tmp_path / "plain.zarr", np.ones((8, 8, 8), np.uint8))
    good = ("--generated", tmp_path / "good.npy")
    refused = {
        ("shown", "--generated", tmp_path / "other.npy"): (2, "other.npy has shape [20, 8, 16, 15]"),
        ("shown", "--generated", tmp_path / "few.npy"): (2, "few.npy holds 3 patches"),
        ("shown", "--generated", tmp_path / "nan.npy"): (2, "are not finite real numbers"),
        ("shown", "--generated", tmp_path / "text.npy"): (2, "is not a .npy file or zarr array"),
        ("shown", "--generated", tmp_path / "none.npy"): (2, "does not exist"),
        ("shown", "--generated", tmp_path / "plain.zarr"): (2, "0 disjoint patches fit into it"),
        ("shown", *good, "--training-volume", 1): (2, "--training-volume 1 does not exist"),
        ("shown", "--weights", "ema_0.7"): (2, "has no weights 'ema_0.7'"),
        (tmp_path / "bare",): (6, "manifest.json does not name model.safetensors"),
        ("nowhere",): (2, "RUN=nowhere is neither "),
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments, (code, message) in refused.items():
        assert evaluates(*arguments, "--out", tmp_path / "out") == code, arguments
        said = capsys.readouterr().err
        assert message in said, (arguments, said)
        assert "Traceback" not in said
        assert "unsafe" not in said
    assert evaluates("shown", *good, "--out", tmp_path / "there") == 2
    assert "already exists; choose another --out" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    with pytest.raises(SystemExit):
        evaluates("shown", "--count", 3)
