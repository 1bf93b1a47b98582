"""Coarse to fine, end to end: generate a coarse level, then a finer one conditioned on it, as on the upsampled one."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from contextlib import chdir
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
import zarr
from safetensors.torch import load_file, save_file

from tests.conftest import textured, write_array
from tests.stream.test_coarse_condition import upsampled
from tests.support.runs import PATCH, assert_same_weights, train_in, write_config
from vesuvius.commands import sample
from vesuvius.config import ArrayConfig, ConditionConfig, DataConfig, VolumeConfig
from vesuvius.generate.common import resolve_checkpoint
from vesuvius.generate.volume.inputs import InputConfig, Inputs
from vesuvius.generate.volume.run import VolumeRequest, generate_volume, with_coarse
from vesuvius.training.checkpoint.trained import CheckpointInfo
from vesuvius.volume_tools.pyramid import downsample_mean, multiscale
from vesuvius.volumes.box import box_at
from vesuvius.volumes.geometry import Geometry

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
        attributes={"multiscales": [multiscale("scan", 2, Geometry((8.0,) * 3, (0.0,) * 3, ("micrometer",) * 3))]},
    )
    write_array(place / "scan.zarr/0", voxels, chunk=16)
    write_array(place / "scan.zarr/1", downsample_mean(voxels), chunk=16)
    write_array(place / "upsampled.zarr", upsampled(downsample_mean(voxels), SCAN))
    level_1 = {"path": "scan.zarr", "level": 1}
    volumes: dict[str, dict[str, Any]] = {
        "coarse": level_1,
        "fine": {"path": "scan.zarr", "condition": level_1},
        "explicit": {"path": "scan.zarr", "condition": {"path": "upsampled.zarr"}},
        "around": {"path": "scan.zarr", "condition": level_1 | {"context": 2}},
    }
    configs = [write_config(place / f"{n}.yaml", [v], {"validation": {"gap": 0}}) for n, v in volumes.items()]
    noisy = yaml.safe_load(configs[-1].read_text())
    noisy["diffusion"]["condition_noise"] = 0.4
    configs[-1].write_text(yaml.safe_dump(noisy))
    train_in(place, *configs)
    with chdir(place):
        _see_windows("around")
    return place


def _see_windows(run: str) -> None:
    """Give the branch that sees the window weights other than 0, as many more steps would."""
    (checkpoint,) = (Path("runs") / run / "checkpoints").glob("step_*")
    weights = load_file(path := checkpoint / "model.safetensors")
    for name, weight in weights.items():
        if name.startswith(("context.outs", "conv_out")):
            weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    save_file(weights, path)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


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
    assert draws("fine", "scaled.zarr", "--condition", "scan.zarr@0", "--box", "0:16,0:40,0:16", "--dry-run") == 0
    assert "make voxels of 4x4x4 um, but the model was trained on 8x8x8 um" in capsys.readouterr().err
    for (run, shape, condition), message in refused.items():
        assert draws(run, "none.zarr", "--shape", shape, "--condition", condition) == 2
        assert message in capsys.readouterr().err
    patch = ",".join(f"0:{size}" for size in PATCH[:2]) + ",90:106"
    assert draws("fine", "none.zarr", "--condition", "scan.zarr@1", "--box", patch) == 2
    assert "is not inside" in capsys.readouterr().err
    assert not list(Path().glob("none*"))


def test_a_generated_volume_is_aligned_with_its_coarser_condition() -> None:
    """Scaling twice or not at all would move any position except the origin."""
    placed = multiscale("placed", 1, Geometry((16.0,) * 3, (32.0, 0.0, 64.0), ("micrometer",) * 3, True))
    zarr.create_group("placed.zarr", zarr_format=2, attributes={"multiscales": [placed]})
    write_array(Path("placed.zarr/0"), np.ones(COARSE, np.uint8), chunk=16)
    given = InputConfig(condition=ArrayConfig(path="placed.zarr"))
    with Inputs(given, DataConfig(volumes=(VolumeConfig(path="scan"),)), FINE, (2, 2, 2)) as inputs:
        assert inputs.geometry(None) == Geometry((8.0, 8.0, 8.0), (32.0, 0.0, 64.0), ("micrometer",) * 3)


def test_with_context_a_volume_depends_on_the_voxels_around_its_box() -> None:
    coarse = write_array(Path("stamped.zarr"), textured((16, 40, 48)), chunk=8)
    given = InputConfig(condition=ArrayConfig(path=str(coarse)), box=box_at((0, 0, 0), (16, 16, 16)))
    records = []
    for context in (None, 2):
        condition = ConditionConfig(path=str(coarse), context=context)
        config = DataConfig(volumes=(VolumeConfig(path="scan", condition=condition),), patch_size=(16, 16, 16))
        for value in (1, 2):
            zarr.open_array(str(coarse), mode="r+")[0, 0, 9] = value
            with Inputs(given, config, None, (Fraction(2),) * 3) as inputs:
                records.append(inputs.record())
    assert records[0] == records[1] != records[2]
    assert records[2] != records[3], "a window sees it"


def test_with_context_one_command_draws_both_volumes_and_a_tile_sees_what_lies_beyond_the_volume(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fine = (17, 24, 19)
    draw = ("around.zarr", "--coarse", "coarse", "--shape", ",".join(map(str, fine)))
    assert draws("around", *draw, "--dry-run") == 0
    expected = re.findall(r"(\S+): volume (\S+):", capsys.readouterr().out)
    assert not list(Path().glob("around*zarr*"))
    assert draws("around", *draw) == 0
    coarse = voxels("around.coarse.zarr/0")
    drawn_first = "x".join(map(str, coarse.shape))
    assert expected == [("around.coarse.zarr", drawn_first), ("around.zarr", "x".join(map(str, fine)))]
    assert coarse.shape == tuple(-(-size // 2) + 2 * (patch // 4) for size, patch in zip(fine, PATCH, strict=True))
    margin = [patch // 4 for patch in PATCH]
    box = ",".join(f"{2 * more}:{2 * more + size}" for more, size in zip(margin, fine, strict=True))
    drawn = {}
    for name, where in (("same", ()), ("outside", tuple(more - 1 for more in margin)), ("noise", ())):
        changed = coarse.copy()
        if where:
            changed[where] += 99
        write_array(Path(f"{name}.zarr"), changed)
        noise = ("--condition-noise", 0.3) if name == "noise" else ()
        assert draws("around", f"from_{name}.zarr", "--condition", f"{name}.zarr", "--box", box, *noise) == 0
        drawn[name] = voxels(f"from_{name}.zarr/0")
    np.testing.assert_array_equal(drawn["same"], voxels("around.zarr/0"))
    assert (drawn["outside"] != drawn["same"])[:4, :8, :8].any(), "a voxel of the coarse volume outside the box"
    np.testing.assert_array_equal(drawn["outside"][12:], drawn["same"][12:], "of the last tiles alone")
    assert (drawn["noise"] != drawn["same"]).mean() > 0.5


def test_coarse_first_is_refused_before_it_draws_and_takes_no_settings_of_a_guide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ",".join(map(str, FINE))
    assert draws("around", "folder", "--coarse", "coarse", "--shape", shape) == 2
    assert "folder does not end in .zarr" in capsys.readouterr().err
    assert draws("around", "folder.zarr", "--coarse", "coarse", "--shape", shape, "--instances", "ids.zarr") == 2
    assert "--coarse draws the condition, so it does not go with --instances" in capsys.readouterr().err
    assert draws("around", "folder.zarr", "--coarse", "coarse") == 2
    assert "add --shape" in capsys.readouterr().err
    for coarse, message in (("none", "=none is neither"), ("fine", ": trained with conditions; choose a run without")):
        assert draws("around", "folder.zarr", "--coarse", coarse, "--shape", shape) == 2
        assert re.search(f"ERROR --coarse.*{message}", capsys.readouterr().err)

    def not_coarser(request: VolumeRequest) -> CheckpointInfo:
        info = resolve_checkpoint(request)
        drawn = tuple(replace(volume, voxel_size_um=(8.0,) * 3) for volume in info.data.volumes)
        return replace(info, data=replace(info.data, volumes=drawn))

    with monkeypatch.context() as patch:
        patch.setattr("vesuvius.generate.volume.run.resolve_checkpoint", not_coarser)
        assert draws("around", "folder.zarr", "--coarse", "coarse", "--shape", shape, "--dry-run") == 2
    assert "makes voxels of 8x8x8 um, but the condition needs 16x16x16 um; choose" in capsys.readouterr().err
    assert not list(Path().glob("folder*"))
    (newest,) = Path("runs/around/checkpoints").glob("step_*")
    shutil.copytree(newest, "earlier")
    overrides = "diffusion.sampler_steps=20", "diffusion.residual_guidance=1.5"
    common: dict[str, Any] = {"checkpoint": Path("around"), "weights": "ema", "overrides": overrides, "seed": 0}
    common |= {"batch_size": 4, "volume_index": 0, "out": Path("guided.zarr"), "shape_zyx": FINE}
    for guide, own in ((None, overrides), (Path("earlier").resolve(), overrides[:1])):
        assert with_coarse(VolumeRequest(**common, guide=guide), Path("coarse"))[0].overrides == own


def test_with_context_a_stopped_volume_continues_with_the_same_bits_in_other_processes() -> None:
    request: dict[str, Any] = {
        "checkpoint": Path("around"),
        "weights": "ema",
        "overrides": ("diffusion.sampler_steps=2",),
        "seed": 3,
        "batch_size": 4,
        "volume_index": 0,
        "shape_zyx": None,
        "inputs": InputConfig(condition=ArrayConfig(path="scan.zarr", level=1), box=((0, 0, 0), (12, 24, 24))),
        "workers": 1,
    }
    generate_volume(VolumeRequest(**request, out=Path("whole.zarr")))

    def stop(what: str, done: int, total: int | None) -> None:
        if what == "batches of tiles" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_volume(VolumeRequest(**request, out=Path("stopped.zarr")), stop)
    assert not Path("stopped.zarr").exists()
    generate_volume(VolumeRequest(**request, out=Path("stopped.zarr")))
    np.testing.assert_array_equal(voxels("stopped.zarr/0"), voxels("whole.zarr/0"))
