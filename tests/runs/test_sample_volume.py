"""`vesuvius sample` of whole volumes on the command line: output, preserved voxels, refusals, and resuming."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.conftest import write_array
from tests.support.runs import PATCH
from tests.training.step.test_conditioning import write_group
from vesuvius.commands import sample
from vesuvius.config import ArrayConfig, Config
from vesuvius.errors import StorageError, VesuviusError
from vesuvius.generate.volume.inputs import InputConfig
from vesuvius.generate.volume.picture import check_picture, generate_held_out
from vesuvius.generate.volume.run import VolumeRequest, generate_volume, prepared, state_bytes
from vesuvius.loader.patch_loader import PatchLoader
from vesuvius.predict.progress import OnProgress
from vesuvius.predict.tasks import TaskRunner
from vesuvius.training.validation.pictures import GAP, MontageCell, draw_grid
from vesuvius.volume_tools.pyramid import downsample_mean, downsample_mode
from vesuvius.volumes.box import slices
from vesuvius.volumes.volume import open_volume

SHAPE = (12, 24, 24)


@pytest.fixture(autouse=True)
def _in_place(shown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shown)


def command_for(out: Path, *arguments: object) -> list[object]:
    return ["--checkpoint", "shown", "--out", out, "--steps", 2, "--workers", 1, *arguments]


def draws(out: Path, *arguments: object) -> int:
    return sample.main([str(argument) for argument in command_for(out, *arguments)])


def voxels(out: Path, level: int = 0) -> np.ndarray[Any, Any]:
    return np.asarray(zarr.open_array(str(out / str(level)), mode="r")[...])


def test_a_volume_is_a_pyramid_in_the_training_intensities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vesuvius.generate.volume.run._CHUNK", 16)
    out = tmp_path / "big.zarr"
    (tmp_path / "big.png").touch()
    assert draws(out, "--shape", "12,24,24", "--guidance", 0) == 2
    assert "big.png exists and would be replaced" in capsys.readouterr().err
    (tmp_path / "big.png").unlink()
    assert draws(out, "--shape", "12,24,24", "--guidance", 0) == 0
    assert re.search(
        r"wrote .*big.zarr: 12x24x24 uint8, 2 levels, in [\d.]+ s; middle slices: .*big.png\n",
        capsys.readouterr().out,
    )
    opened = open_volume(ArrayConfig(path=str(out)))
    assert (opened.shape_zyx, opened.dtype, opened.voxel_size_um) == (SHAPE, np.uint8, (8.0, 8.0, 8.0))
    assert opened.chunk_zyx == (12, 16, 16)
    assert voxels(out).std() > 10
    np.testing.assert_array_equal(voxels(out, 1), downsample_mean(voxels(out)))
    assert {path.name for path in tmp_path.iterdir()} == {"big.zarr", "big.png"}, "no state is left"
    assert np.asarray(Image.open(tmp_path / "big.png")).std() > 10
    check_picture(SimpleNamespace(out=tmp_path / "deleted.zarr"), tmp_path / "big.png")  # type: ignore[arg-type]
    attributes = json.loads((out / ".zattrs").read_text())
    assert attributes["vesuvius_drawing"]["shape_zyx"] == list(SHAPE)
    assert [dataset["path"] for dataset in attributes["multiscales"][0]["datasets"]] == ["0", "1"]

    before = voxels(out).tobytes()
    assert draws(out, "--shape", "12,24,24", "--guidance", 0) == 0
    assert "is already complete: 12x24x24 uint8" in capsys.readouterr().out
    (tmp_path / "big.png").unlink()
    (tmp_path / "big.png").mkdir()
    assert draws(out, "--shape", "12,24,24", "--guidance", 0) == StorageError.exit_code
    assert "Cannot write the picture" in capsys.readouterr().err
    assert draws(out, "--shape", "12,24,24", "--guidance", 0, "--seed", 1) == 2
    assert "big.zarr was started with other arguments: seed 1 (was 0)" \
        in capsys.readouterr().err  # fmt: skip
    assert voxels(out).tobytes() == before


def test_a_condition_of_any_size_is_used_tile_by_tile_and_a_box_keeps_its_position(tmp_path: Path) -> None:
    boxed, moved = tmp_path / "boxed.zarr", tmp_path / "moved.zarr"
    assert draws(boxed, "--condition", "labels.zarr", "--box", "4:16,0:24,8:32", "--batch-size", 3) == 0
    geometry = open_volume(ArrayConfig(path=str(boxed))).geometry
    assert geometry is not None
    assert (geometry.translation_zyx, geometry.voxel_size_um) == ((32.0, 0.0, 64.0), (8.0, 8.0, 8.0))
    labels = voxels(Path("labels.zarr"))[4:16, 0:24, 8:32]
    cut = write_array(tmp_path / "cut.zarr", labels)
    assert draws(moved, "--condition", cut, "--batch-size", 3) == 0
    np.testing.assert_array_equal(voxels(boxed), voxels(moved))
    other = write_array(tmp_path / "other.zarr", 2 - labels)
    assert draws(tmp_path / "another.zarr", "--condition", other, "--batch-size", 3) == 0
    assert (voxels(boxed) != voxels(tmp_path / "another.zarr")).mean() > 0.1


@pytest.mark.long
def test_a_pair_holds_scan_and_labels_on_one_grid_with_its_provenance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vesuvius.generate.volume.run._CHUNK", 16)
    pairs, box = tmp_path / "pairs", ("--condition", "labels.zarr", "--box", "4:16,0:24,8:32", "--seed", 3)
    numbers = np.arange(voxels(Path("labels.zarr")).size, dtype=np.int32).reshape(voxels(Path("labels.zarr")).shape)
    ids = write_group(tmp_path / "ids.zarr", numbers, [8.0] * 3)
    assert draws(pairs, *box) == 0
    box = (*box, "--instances", ids)
    assert draws(pairs, *box) == 0, "instances are added to a pair"
    assert "3.zarr is already complete" in capsys.readouterr().out
    scan, labels = pairs / "images" / "3.zarr", pairs / "labels" / "3_labels.zarr"
    with open_volume(pairs / "instances" / "3_instances.zarr") as drawn_ids, open_volume(scan) as one:
        np.testing.assert_array_equal(drawn_ids[:], numbers[4:16, 0:24, 8:32])
        assert (drawn_ids.geometry, drawn_ids.dtype) == (one.geometry, np.int32)
    assert voxels(pairs / "instances" / "3_instances.zarr", 1)[0, 0, 0] in numbers[4:6, 0:2, 8:10], "no mean of ids"
    one, other = (open_volume(ArrayConfig(path=str(path))) for path in (scan, labels))
    assert (one.shape_zyx, one.chunk_zyx, one.geometry) == (other.shape_zyx, other.chunk_zyx, other.geometry)
    assert one.geometry is not None
    assert one.geometry.translation_zyx == (32.0, 0.0, 64.0)
    np.testing.assert_array_equal(voxels(labels), voxels(Path("labels.zarr"))[4:16, 0:24, 8:32])
    assert set(np.unique(voxels(labels, 1))) == {0, 2}, "no mean of labels"
    np.testing.assert_array_equal(voxels(labels, 1), downsample_mode(voxels(labels)))

    records = [json.loads((path / ".zattrs").read_text())["vesuvius_drawing"] for path in (scan, labels)]
    assert records[0] == records[1]
    weights = next(Path("runs/shown/checkpoints").glob("*/model.safetensors"))
    assert records[0]["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert (records[0]["seed"], records[0]["config"]["data"]["condition_classes"]) == (3, 3)

    with PatchLoader(scan, labels=labels, patch_size=PATCH, batch_size=4, num_workers=0, augment=False, device="cpu",
                     batches_per_epoch=1) as loader:  # fmt: skip
        (batch,) = loader
    assert batch.label is not None
    for label, each in zip(batch.label, batch.samples, strict=True):
        np.testing.assert_array_equal(label[0], voxels(labels)[slices(each.box)])

    drawn = voxels(scan)
    shutil.rmtree(scan)  # a kill between the two
    (pairs / "3.png").unlink()
    assert draws(pairs, *box) == 0
    np.testing.assert_array_equal(voxels(scan), drawn)
    assert draws(pairs, *box) == 0
    assert "3.zarr is already complete" in capsys.readouterr().out
    assert draws(pairs, *box[:2], "--box", "4:16,0:24,0:24", "--seed", 3) == 2, "the seed names a pair"
    assert draws(tmp_path / "one.zarr", *box) == 2, "instances are for pairs"


def test_known_voxels_are_kept_bit_by_bit_gaps_filled_and_non_finite_voxels_read_as_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, gaps, mask = hole(tmp_path, dtype="float32")
    scan = voxels(Path("scan.zarr"))[:12, :24, :24].astype("float32")
    zarr.open_array(str(source), mode="r+")[0, 1, 2] = np.nan
    scan[0, 1, 2] = 0
    arguments = ("--inpaint", source, "--mask", gaps, "--guidance", 0, "--rounds", 2)
    assert draws(tmp_path / "filled.zarr", *arguments) == 0
    assert re.search(r"WARNING .* contains NaN or infinity .* read as 0", capsys.readouterr().err)
    found = voxels(tmp_path / "filled.zarr")
    np.testing.assert_array_equal(found[mask == 0], scan[mask == 0])
    assert found[mask != 0].mean() > 20, "what is filled is not the zeros that were there"


def test_missing_chunks_are_filled_and_a_complete_volume_is_copied_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scan = voxels(Path("scan.zarr"))[:16, :32, :32]
    source = write_array(tmp_path / "gone.zarr", scan, chunk=16)
    (source / "0/0/1").unlink()
    assert draws(tmp_path / "filled.zarr", "--inpaint", source, "--guidance", 0, "--overlap", 0, "--rounds", 1) == 0
    found = voxels(tmp_path / "filled.zarr")
    gone = np.zeros(scan.shape, bool)
    gone[:16, :16, 16:] = True
    np.testing.assert_array_equal(found[~gone], scan[~gone])
    assert found[gone].std() > 5
    assert "No voxel of --inpaint" not in capsys.readouterr().err
    assert draws(tmp_path / "same.zarr", "--inpaint", tmp_path / "filled.zarr", "--guidance", 0) == 0
    assert "No voxel of --inpaint is missing, so it is copied" in capsys.readouterr().err
    empty = write_array(tmp_path / "mask.zarr", np.zeros_like(scan), config={"write_empty_chunks": True})
    again = draws(tmp_path / "again.zarr", "--inpaint", tmp_path / "filled.zarr", "--mask", empty, "--guidance", 0)
    assert again == 0
    assert "No voxel of --inpaint is marked by --mask, so it is copied" in capsys.readouterr().err
    np.testing.assert_array_equal(voxels(tmp_path / "same.zarr"), found)


def hole(place: Path, *, dtype: str = "uint8") -> tuple[Path, Path, np.ndarray[Any, Any]]:
    """Part of the scan with a gap of zeros, its mask and the masked voxels."""
    mask = np.zeros(SHAPE, np.uint8)
    mask[3:8, 5:15, 9:20] = 255
    holed = np.where(mask, 0, voxels(Path("scan.zarr"))[:12, :24, :24]).astype(dtype)
    return write_array(place / "holed.zarr", holed), write_array(place / "mask.zarr", mask), mask


@pytest.mark.long
def test_a_signal_ends_each_phase_at_once_and_the_next_call_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vesuvius.generate.volume.run._CHUNK", 8)
    source, gaps, _ = hole(tmp_path)
    given = InputConfig(*(ArrayConfig(path=str(path)) for path in (source, gaps)))
    overrides = ("diffusion.sampler_steps=2", "diffusion.sampler_guidance=0")
    request = VolumeRequest(Path("shown"), "ema", overrides, 0, 4, 0, tmp_path / "out.zarr", None, workers=1,
                            inputs=given)  # fmt: skip
    told: list[str] = []

    def told_of(phase: str) -> OnProgress:
        def tell(what: str, done: int, total: int) -> None:
            told.append(what)
            if what == phase and told.count(phase) == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        return tell

    phases = ("blocks searched for gaps", "blocks of --inpaint read", "batches of tiles", "chunks written")
    for phase in phases:
        told.clear()
        with pytest.raises(
            VesuviusError,
            match=rf"SIGTERM: sampling stopped after \d+ of \d+ {phase}; run the same command again",
        ):
            generate_volume(request, told_of(phase))
        assert told[-1] == phase
        assert told.count(phase) <= 2, "no more is done after the signal than two batches that were handed out"
    assert "out.zarr: 12x24x24 uint8, " in generate_volume(request, told_of(""))


@pytest.mark.long
def test_another_network_or_mask_does_not_continue_the_volume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, gaps, mask = hole(tmp_path)
    run = tmp_path / "run"
    shutil.copytree("runs/shown", run, symlinks=True)
    arguments = ("--checkpoint", run, "--inpaint", source, "--mask", gaps, "--guidance", 0, "--rounds", 1)
    out = tmp_path / "out.zarr"
    assert draws(out, *arguments) == 0
    zarr.open_array(str(gaps), mode="r+")[...] = np.roll(mask, 1, axis=0)
    assert draws(out, *arguments) == 2
    assert "was started with other arguments: given {" in capsys.readouterr().err
    checkpoint = max((run / "checkpoints").glob("step_*"))
    weights = load_file(checkpoint / "model.safetensors")
    save_file({name: 1.01 * each for name, each in weights.items()}, checkpoint / "model.safetensors")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert draws(out, *arguments) == 2
    assert re.search(r"other arguments: .*weights_sha256 \S+ \(was ", capsys.readouterr().err)


def test_a_too_small_gpu_or_disk_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code, message in (
        (torch.OutOfMemoryError("CUDA out of memory"), 3, "The GPU ran out of memory with --batch-size 4"),
        (OSError(28, "No space left on device"), 6, "No space left on device"),
    ):

        def full(self: TaskRunner, pass_index: int, batch: int, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(TaskRunner, "evaluate_tiles", full)
        assert draws(tmp_path / "out.zarr", "--shape", "12,24,24", "--guidance", 0) == code
        said = capsys.readouterr().err
        assert message in said
        assert "Traceback" not in said


@pytest.mark.long
def test_a_dry_run_reports_disk_and_time_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--shape", "200,400,400", "--guidance", 0, "--dry-run")
    assert draws(tmp_path / "big.zarr", *arguments) == 0
    said = capsys.readouterr().out
    assert "volume 200x400x400: 53361 tiles, 106722 network evaluations of a tile" in said
    for line in (r"disk: [\d.]+ .iB for the state, at most", r"time: about \S+ with 1 worker"):
        assert re.search(line, said), line
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
        assert draws(tmp_path / "big.zarr", *arguments) == 6
        assert draws(tmp_path / "big.zarr", *arguments[:-1]) == 6
    assert capsys.readouterr().err.count("The disk is too small for ") == 2
    assert not list(tmp_path.iterdir())
    # Of an inpainting the tiles near gaps count.
    source, mask = tmp_path / "source.zarr", np.zeros((8, 16, 80), np.uint8)
    mask[:, :, 3] = 1  # in the first of five blocks, and too far from the second
    gaps = write_array(tmp_path / "mask.zarr", mask)
    write_array(source, mask)
    arguments = ("--inpaint", source, "--mask", gaps, "--guidance", 0, "--overlap", 0, "--batch-size", 1, "--dry-run")
    assert draws(tmp_path / "filled.zarr", *arguments) == 0
    assert "volume 8x16x80: 1 tiles, 8 network evaluations of a tile" in capsys.readouterr().out


@pytest.mark.parametrize("missing", [0, 1])
def test_a_pair_needs_space_for_its_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    """A program that forgot the labels would accept a disk that is too small by up to their size."""
    labels = InputConfig(condition=ArrayConfig(path="labels.zarr"), box=((0, 0, 0), SHAPE))
    request = VolumeRequest(Path("shown"), "ema", (), 0, 4, 0, tmp_path / "1.zarr", None, workers=1, inputs=labels,
                            labels_out=tmp_path / "1_labels.zarr")  # fmt: skip
    with prepared(request) as volume:
        every = range(volume.job.tiling.blocks)
        free = state_bytes(volume.job, every, 1) + 2 * math.prod(SHAPE) - missing
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
        with pytest.raises(StorageError, match="for the labels, but") if missing else nullcontext():
            assert "for the labels; " in volume.check_space(every)


REFUSED = {
    "a shape too small": (("--shape", "12,24,8"), 2, "A volume of 12x24x8 is smaller than a training patch"),
    "an overlap": (("--shape", "12,24,24", "--overlap", 0.9), 2, "--overlap 0.9 is not between"),
    "no condition": (("--shape", "12,24,24", "--guidance", 1), 2, "add --condition VOLUME, or --guidance 0 to"),
    "another shape": (("--shape", "12,24,24", "--condition", "labels.zarr"), 2, "do not match: 12x24x24 and 40x64x128"),
    "a box outside": (
        ("--condition", "labels.zarr", "--box", "0:12,0:24,120:144"),
        2,
        "is not inside --condition",
    ),
    "another mask": (("--inpaint", "scan.zarr", "--mask", "small.zarr"), 2, "do not match: 40x64x128"),
    "no volume": (("--inpaint", "no.zarr"), 6, "no.zarr: it does not exist"),
    "weights": (("--shape", "12,24,24", "--weights", "ema_0.7"), 2, "has no weights 'ema_0.7'"),
    "rounds": (("--shape", "12,24,24", "--rounds", 2), 2, "--rounds has no effect without --inpaint"),
    "a lonely mask": (
        ("--shape", "12,24,24", "--mask", "small.zarr"),
        2,
        "--mask has no effect without --inpaint",
    ),
    "options of patches": (
        ("--shape", "12,24,24", "--count", "2"),
        2,
        "--count applies to patches only",
    ),
}


def test_invalid_requests_are_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_array(Path("small.zarr"), np.ones(PATCH, np.uint8))
    for case, (arguments, code, message) in REFUSED.items():
        given = arguments if "--guidance" in arguments or "--condition" in arguments else (*arguments, "--guidance", 0)
        try:
            ended: Any = draws(tmp_path / "out.zarr", *given)
        except SystemExit as error:  # argparse's way
            ended = error.code
        assert ended == code, case
        said = capsys.readouterr().err
        assert message in said, case
        assert "Traceback" not in said
        assert not list(tmp_path.iterdir())
    out = tmp_path / "out.zarr"
    out.mkdir()
    (out / "mine").touch()
    assert draws(out, "--shape", "12,24,24", "--guidance", 0) == 2
    assert "out.zarr exists and was not made by this command" in capsys.readouterr().err
    assert draws(Path(), "--shape", "12,24,24", "--guidance", 0) == 2
    assert f"--out {Path.cwd()} does not end in .zarr" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["out.zarr", "mine"]


def test_a_model_that_always_had_a_condition_is_not_said_to_draw_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Config, "learns_without_condition", False)
    assert draws(tmp_path / "out.zarr", "--shape", "12,24,24") == 2
    assert capsys.readouterr().err.endswith("; add --condition VOLUME\n")


def test_the_picture_of_held_out_voxels_shows_real_labels_and_generated(
    shown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that swapped two columns or captions, or scaled intensities separately, would look right."""
    drawn: list[tuple[Any, ...]] = []

    def recorded(cells: list[MontageCell], title: str, *options: Any) -> Image.Image:
        drawn.append((cells, title, options[0]))
        return draw_grid(cells, title, *options)

    monkeypatch.setattr("vesuvius.generate.volume.picture.draw_grid", recorded)
    out, picture = tmp_path / "part.zarr", tmp_path / "part.png"
    generate_held_out(Path("runs/shown"), (64, 24, 20), out, picture, lambda what, done, total: None)
    (held_out,) = json.loads(Path("runs/shown/split.json").read_text())["volumes"]
    begin, end = held_out["validation"]
    record = json.loads((out / ".zattrs").read_text())["vesuvius_drawing"]
    (z0, y0, x0), (z1, y1, x1) = record["box"]
    assert (z0, z1) == (begin[0], end[0]), "less is held out than asked for"
    assert (y1 - y0, x1 - x0) == (24, 20)
    assert (y0 - begin[1], x0 - begin[2]) == (end[1] - y1, end[2] - x1), "the middle"
    again = ["--condition", shown / "labels.zarr", "--box", f"{z0}:{z1},{y0}:{y1},{x0}:{x1}", "--steps", 3]
    assert draws(tmp_path / "again.zarr", *again) == 0
    np.testing.assert_array_equal(voxels(out), voxels(tmp_path / "again.zarr"))

    low, high = held_out["intensity_low"], held_out["intensity_high"]
    real, labels = (voxels(shown / name)[z0:z1, y0:y1, x0:x1] for name in ("scan.zarr", "labels.zarr"))
    expected_cells = {
        "real (held out)": (real - np.float64(low)) / (high - low),
        "labels": labels / labels.max(),
        "generated from the labels": (voxels(out) - np.float64(low)) / (high - low),
    }
    cells, _, scale = drawn[0]
    assert (scale.pixels_zyx, scale.voxel_size_um) == ((6.0, 6.0, 6.0), (8.0, 8.0, 8.0))
    for cell, (caption, values) in zip(cells, expected_cells.items(), strict=True):
        assert cell.caption == caption
        expected = np.clip(values[(z1 - z0) // 2], 0, 1) * 255
        shown_voxels = cell.picture[: 6 * 24 : 6, : 6 * 20 : 6].astype(float)
        np.testing.assert_allclose(shown_voxels, expected, atol=1.01)  # intensities round down
    charts = np.asarray(Image.open(picture))[-200:]
    assert Image.open(picture).height > 6 * 24 + GAP + len(charts)
    for color in ((0x6E, 0xC6, 0xFF), (0xFF, 0xA6, 0x2B)):  # of real and generated
        assert (np.abs(charts.astype(int) - color).max(-1) < 8).sum() > 100
