"""`vesuvius sample` on the command line: from a trained run to samples on disk, with its refusals and failures.

The generated content is tested in `diffusion/`; bit-identical results on a GPU are not tested here.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from tests.conftest import textured
from tests.support import fork_server
from tests.support.runs import PATCH, vesuvius_train, write_config
from tests.training.step.test_conditioning import write_group
from vesuvius import __version__
from vesuvius.commands import sample
from vesuvius.config import ArrayConfig
from vesuvius.config.load import read_config
from vesuvius.diffusion.estimate import Condition, generate, predict
from vesuvius.diffusion.network.unet import build_unet
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.generate import common
from vesuvius.generate.sample_zarr import to_intensities
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import Denoiser
from vesuvius.volumes.volume import open_volume


@dataclass(frozen=True)
class Samples:
    """Output of one call."""

    path: Path

    @property
    def group(self) -> dict[str, Any]:
        attributes: dict[str, Any] = json.loads((self.path / "samples.zarr/.zattrs").read_text())
        return attributes

    @property
    def record(self) -> dict[str, Any]:
        return dict(self.group["vesuvius_sample"])

    def voxels(self, name: str = "samples.zarr") -> np.ndarray[Any, Any]:
        return np.asarray(zarr.open_array(str(self.path / name / "0"), mode="r")[...])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the run `plain`, trained for 10 steps on two volumes that are gone."""
    place = tmp_path_factory.mktemp("plain")
    voxels = textured((48, 64, 128))
    volumes = [
        write_group(place / "bright.zarr", voxels, [8.0, 8.0, 8.0]),
        write_group(place / "dark.zarr", voxels // 2 + 1, [4.0, 4.0, 5.0]),
    ]
    config = write_config(place / "plain.yaml", [{"path": str(volume)} for volume in volumes], {})
    trains(config, place)
    for volume in volumes:
        shutil.rmtree(volume)
    return place


@pytest.fixture(scope="module")
def conditional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the run `shown`, trained on labels; the volume is gone, its labels are not."""
    place = tmp_path_factory.mktemp("conditional")
    voxels = textured((48, 64, 128), dtype="uint16")
    scan = write_group(place / "scan.zarr", voxels * 300, [8.0] * 3)
    labels = write_group(place / "labels.zarr", (voxels > 100).astype(np.uint8), [8.0] * 3)
    volumes = [{"path": str(scan), "condition": {"path": str(labels)}}]
    config = write_config(place / "shown.yaml", volumes, {"condition_classes": 2})
    trains(config, place, "training.max_steps=4")
    shutil.rmtree(scan)
    return place


def trains(config: Path, place: Path, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert vesuvius_train(config, *arguments) == 0


@pytest.fixture
def _in_plain(plain: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the directory of `plain`, unchanged by other tests."""
    monkeypatch.chdir(plain)
    before = {path: path.read_bytes() for path in plain.rglob("checkpoints/*/*")}
    yield
    for samples in (plain / "runs/plain/samples", plain / "samples"):
        shutil.rmtree(samples, ignore_errors=True)
    assert {path: path.read_bytes() for path in plain.rglob("checkpoints/*/*")} == before


in_plain = pytest.mark.usefixtures("_in_plain")


def drawn(out: Path, *arguments: object, checkpoint: object = "plain") -> Samples:
    """Generate samples into `out`, in this process."""
    assert ends("--out", out, *arguments, checkpoint=checkpoint) == 0
    return Samples(out)


def ends(*arguments: object, checkpoint: object = "plain") -> int:
    return sample.main([str(argument) for argument in ("--checkpoint", checkpoint, "--batch-size", 2, *arguments)])


@in_plain
def test_samples_are_an_ome_zarr_with_a_record_and_a_picture(tmp_path: Path) -> None:
    samples = drawn(tmp_path / "out", "--count", 5, "--seed", 7)
    array = zarr.open_array(str(samples.path / "samples.zarr/0"), mode="r")
    assert array.metadata.zarr_format == 2
    assert (array.shape, array.chunks, array.dtype) == ((5, *PATCH), (1, *PATCH), np.dtype("uint8"))
    (multiscale,) = samples.group["multiscales"]
    assert multiscale["version"] == "0.4"
    assert multiscale["axes"] == [
        {"name": "sample", "type": "sample"},
        *({"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"),
    ]
    assert multiscale["datasets"] == [
        {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1.0, 8.0, 8.0, 8.0]}]}
    ]
    volume = open_volume(ArrayConfig(path=str(tmp_path / "out/samples.zarr"), select=(1,)))
    assert volume.voxel_size_um == (8.0, 8.0, 8.0)
    np.testing.assert_array_equal(volume.read(((0, 0, 0), PATCH)), samples.voxels()[1])

    split = json.loads(Path("runs/plain/split.json").read_text())["volumes"][0]
    checkpoint = Path("runs/plain/checkpoints/step_00000010").absolute()
    weights = checkpoint / "model.safetensors"
    record = samples.record
    assert record.pop("torch") == torch.__version__
    assert record == {
        "seed": 7,
        "numbers": [0, 1, 2, 3, 4],
        "batch_size": 2,
        "noise": "spectral",
        "sampler": "dpmpp2m",
        "steps": 3,
        "clip": None,
        "guidance": 1.0,
        "residual_guidance": None,
        "residual_guidance_interval": None,
        "condition_noise": None,
        "guide_sha256": None,
        "evaluations_per_sample": 3,
        "checkpoint": str(checkpoint),
        "step": 10,
        "weights": "ema",
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "amp": "off",
        "volume": f"{split['path']} level 0",
        "intensity_low": split["intensity_low"],
        "intensity_high": split["intensity_high"],
        "vesuvius": __version__,
    }

    config = read_config(Path("plain.yaml"))
    network, state = build_unet(config.model, 0, config.input_channels), load_file(weights)
    spectrum = torch.load(checkpoint / "state.pt", weights_only=True)["spectrum"]
    schedule = Schedule.from_config(config.diffusion, Spectrum.from_state(spectrum))

    @torch.no_grad()
    def denoise(x_t: torch.Tensor, t: torch.Tensor, condition: Condition) -> torch.Tensor:
        return predict(lambda *arguments: functional_call(network, state, arguments), schedule, x_t, t, condition)

    x_0 = generate(denoise, schedule, config.diffusion, 7, [0, 1], (1, *PATCH), "cpu")[0]
    intensity = IntensityRange(record["intensity_low"], record["intensity_high"])
    np.testing.assert_array_equal(samples.voxels()[:2], to_intensities(x_0[:, 0].numpy(), intensity, np.dtype("uint8")))

    picture = np.asarray(Image.open(samples.path / "montage.png")).astype(float)
    # Voxels 6 pixels wide: slices of 96 next to and above ones of 48, a gap of 4 each, 8 between samples, a line of 20
    # above each, one for the title and one for the scale bar; 5 samples in 3 columns.
    side = 96 + 4 + 48 + 4
    assert picture.shape[0] == 20 + 2 * (20 + side) + 20
    for number in range(5):
        top, left = 40 + number // 3 * (20 + side), 4 + number % 3 * (side + 8)
        shown = picture[top : top + 96 : 6, left : left + 96 : 6]
        intensities = samples.voxels()[number, 4].astype(float)
        expected = 255 * (intensities - record["intensity_low"]) / (record["intensity_high"] - record["intensity_low"])
        # half an intensity is 0.7 of a pixel's here, and pixels are cut to whole numbers
        np.testing.assert_allclose(shown, expected.clip(0, 255), atol=2)


@pytest.mark.long
@in_plain
def test_an_earlier_checkpoint_of_the_run_guides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that used another network as the guide would change samples even with identical weights."""
    earlier, own = (Path("runs/plain/checkpoints") / name for name in ("step_00000005", "step_00000010"))
    # The same weights under an earlier step's name.
    twin = tmp_path / "twin/step_00000010"
    shutil.copytree(own, twin)
    plain, alike, guided = (
        drawn(tmp_path / name, "--count", 2, *options)
        for name, options in (
            ("plain", ()),
            ("alike", ("--residual-guidance", 20, "--guide", twin)),
            ("guided", ("--residual-guidance", 20, "--guide", earlier, "--residual-guidance-interval", "null")),
        )
    )
    np.testing.assert_allclose(alike.voxels().astype(float), plain.voxels(), atol=1)
    assert np.abs(guided.voxels().astype(float) - plain.voxels()).max() > 1
    assert (plain.record["evaluations_per_sample"], guided.record["evaluations_per_sample"]) == (3, 6)
    assert guided.record["guide_sha256"] == hashlib.sha256((earlier / "model.safetensors").read_bytes()).hexdigest()
    assert ends("--out", tmp_path / "none", "--guide", earlier) == 2
    assert "--guide has no effect with a residual guidance of 1; add --residual-guidance 1.5" in capsys.readouterr().err
    assert ends("--out", tmp_path / "none", "--guide", own, "--residual-guidance", 2, checkpoint=earlier) == 2
    assert "is not earlier than" in capsys.readouterr().err
    within = ("--residual-guidance", 2, "--guide", earlier)
    some = drawn(tmp_path / "some", "--count", 2, *within).record["evaluations_per_sample"]
    assert some == 3 + 1, "of the three levels, two lie outside of the interval"
    assert ends("--out", tmp_path / "one.zarr", "--shape", "8,16,16", "--dry-run", *within) == 0
    assert f"1 tiles, {some} network evaluations of a tile" in capsys.readouterr().out
    volume = ("--shape", "12,24,24", "--workers", 1)
    assert ends("--out", tmp_path / "v.zarr", *volume, "--residual-guidance", 2, "--guide", earlier) == 0
    assert ends("--out", tmp_path / "v.zarr", *volume, "--residual-guidance", 2) == 2, (
        "another volume, not the same one"
    )
    assert "guide_sha256 null (was " in capsys.readouterr().err


@in_plain
def test_residual_guidance_has_levels_to_act_on_and_records_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that took an old record for one of today's default interval would mix two kinds of samples."""
    guided = ("--out", tmp_path / "v.zarr", "--shape", "8,16,16", "--workers", 1, "--residual-guidance", 2)
    for interval, message in (
        ("1e7,1e8", r"1e\+08: the 3 noise levels lie between \S+ and"),
        ("3,0.3", r"\[3.0, 0.3\] is empty"),
    ):
        assert ends(*guided, "--residual-guidance-interval", interval) == 2
        assert re.search(message, capsys.readouterr().err)
    assert ends("--out", tmp_path / "none", "--residual-guidance-interval", "0.3,3") == 2
    assert "has no effect with a residual guidance of 1" in capsys.readouterr().err
    assert ends(*guided, "--residual-guidance-interval", "null") == 0
    attributes = tmp_path / "v.zarr/.zattrs"
    stored = json.loads(attributes.read_text())
    assert stored["vesuvius_drawing"].pop("residual_guidance_interval", 0) is None
    attributes.write_text(json.dumps(stored))
    assert ends(*guided, "--residual-guidance-interval", "null") == 0
    assert "already complete" in capsys.readouterr().out
    assert ends(*guided) == 2
    assert "residual_guidance_interval [1.0, 30.0] (was null)" in capsys.readouterr().err


@in_plain
def test_a_network_is_compiled_only_if_its_evaluations_pay_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def opened(*arguments: Any) -> Denoiser:
        compiled.append(arguments[-1])
        return Denoiser(*arguments[:-1], compiled=False)

    monkeypatch.setattr(common, "Denoiser", opened)
    monkeypatch.setattr(common, "WORTH_COMPILING", 6)
    one_worker = ("--workers", 1, "--shape")
    asked: dict[str, tuple[object, ...]] = {  # in three steps, of one and two patches or tiles
        "one": ("--count", 1),
        "two": ("--count", 2),
        "one.zarr": (*one_worker, "8,16,16"),
        "two.zarr": (*one_worker, "8,16,28"),
    }
    drawn(tmp_path / "on_cpu", *asked["two"])
    assert compiled == [False], "training.compile=auto is off on a CPU"
    monkeypatch.setattr(common, "is_compiled", lambda *_: True)
    for name, options in asked.items():
        drawn(tmp_path / name, *options)
    assert compiled[1:] == [False, True, False, True]


@pytest.mark.long
@in_plain
def test_a_sample_depends_on_seed_and_index_and_batches_start_at_multiples_of_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []

    def noting(*arguments: Any, **options: Any) -> tuple[torch.Tensor, int]:
        batches.append(list(arguments[4]))
        return generate(*arguments, **options)

    monkeypatch.setattr(common, "generate", noting)
    three, five = (drawn(tmp_path / str(count), "--count", count).voxels() for count in (3, 5))
    assert batches == [[0, 1], [2], [0, 1], [2, 3], [4]]
    np.testing.assert_array_equal(three[:2], five[:2])
    assert len({sample.tobytes() for sample in five}) == 5
    other = drawn(tmp_path / "other", "--count", 2, "--seed", 1).voxels()
    assert all((a != b).any() for a in other for b in three)


@pytest.mark.long
@in_plain
def test_averaged_weights_and_the_first_volume_are_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    default = drawn(tmp_path / "default", "--count", 1)
    chosen = {name: drawn(tmp_path / name, "--count", 1, "--weights", name) for name in ("ema", "ema_0.5", "model")}
    np.testing.assert_array_equal(default.voxels(), chosen["ema"].voxels())
    assert len({samples.voxels().tobytes() for samples in chosen.values()}) == 3
    assert [samples.record["weights"] for samples in (default, *chosen.values())] == ["ema", *chosen]
    assert ends("--out", tmp_path / "other", "--weights", "ema_0.7") == 2
    assert "has no weights 'ema_0.7'; choose --weights from ema, ema_0.5, model" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    dark = drawn(tmp_path / "dark", "--count", 1, "--volume", 1)
    scale = dark.group["multiscales"][0]["datasets"][0]["coordinateTransformations"][0]["scale"]
    assert scale == [1.0, 4.0, 4.0, 5.0]
    assert dark.record["intensity_high"] < 0.6 * default.record["intensity_high"]
    assert dark.voxels().mean() < 0.7 * default.voxels().mean()


@pytest.mark.long
@in_plain
def test_each_way_to_name_a_checkpoint_finds_it_and_its_run(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = plain / "runs/plain/checkpoints/step_00000010"
    best = newest.with_name("best")
    best.symlink_to(newest.name)
    ways = ("plain", plain / "runs/plain", newest, newest / "state.pt", best / "model_ema_0.5.safetensors")
    assert {find_checkpoint(Path(way)) for way in ways} == {newest}
    best.unlink()
    monkeypatch.chdir(newest)
    assert ends("--count", 1, "--steps", 2, checkpoint="model_ema_0.5.safetensors") == 0
    assert Samples(plain / "runs/plain/samples/step_00000010_dpmpp2m_2_seed0").record["step"] == 10
    monkeypatch.chdir(tmp_path)
    shutil.copytree(newest.with_name("step_00000005"), tmp_path / "copy")
    assert ends("--count", 1, "--seed", 5, checkpoint="copy") == 0
    assert Samples(tmp_path / "samples/step_00000005_dpmpp2m_3_seed5").record["step"] == 5


@in_plain
def test_existing_output_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    first = drawn(out, "--count", 1).voxels()
    assert ends("--out", out, "--count", 2) == 2
    assert "already exists; choose another --out" in capsys.readouterr().err
    np.testing.assert_array_equal(Samples(out).voxels(), first)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


REFUSALS = {
    ("--steps", "1001"): "sampler_steps 1001 exceed timesteps 1000",
    (
        "--steps",
        "many",
    ): "override diffusion.sampler_steps=many: diffusion.sampler_steps: 'many' is not valid; use an integer",
    ("--sampler", "euler"): "'euler' is not valid; use one of ddim, ddpm, dpmpp2m, heun",
    ("--guidance", "2"): "needs a model trained with and without a condition",
    ("--volume", "2"): "--volume 2 does not exist: the 2 training volumes",
    ("--batch-size", "4000000", "--count", "4000000"): "(--batch-size, when sampling)",
}


@in_plain
def test_invalid_arguments_and_checkpoints_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in REFUSALS.items():
        assert ends("--out", tmp_path / "out", "--count", 1, *arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
    for argument in (("--count", "0"), ("--batch-size", "0"), ("--seed", "-1"), ("--count", "few")):
        with pytest.raises(SystemExit) as ended:
            ends(*argument)
        assert ended.value.code == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "young/checkpoints").mkdir(parents=True)
    for wrong in ("nowhere", "runs", "plain.yaml", "runs/plain/metrics.jsonl", tmp_path / "none/model.safetensors"):
        assert ends(checkpoint=wrong) == 2
        assert f"--checkpoint={wrong} " in capsys.readouterr().err
    assert ends(checkpoint=tmp_path / "young") == 2
    assert "young has no checkpoint yet; wait for the first" in capsys.readouterr().err


@pytest.mark.long
def test_a_damaged_file_is_refused_and_an_intact_one_next_to_it_is_used(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(plain / "runs/plain/checkpoints", tmp_path / "run/checkpoints")
    older, newest = (tmp_path / f"run/checkpoints/step_000000{step}" for step in ("05", "10"))
    for ema, step in ((newest / "model.safetensors", 10), (older / "model.safetensors", 5)):
        assert drawn(tmp_path / str(step), "--count", 1, "--steps", 2, checkpoint="run").record["step"] == step
        ema.write_bytes(ema.read_bytes()[:-1] + b"\x55")
        capsys.readouterr()
    assert ends(checkpoint="run") == 6
    errors = capsys.readouterr().err
    assert errors.count("the checksum of model.safetensors is wrong") == 2
    assert f"All checkpoints in {tmp_path}/run/checkpoints are damaged: step_00000005, step_00000010; restore" in errors
    assert drawn(tmp_path / "model", "--count", 1, "--weights", "model", checkpoint=newest).record["step"] == 10
    state, manifest = newest / "state.pt", newest / "manifest.json"
    whole, earlier = state.read_bytes(), json.loads(manifest.read_text())
    without = torch.load(older / "state.pt", weights_only=True)
    del without["volumes"], earlier["format"]
    earlier["files"]["ema.safetensors"] = earlier["files"].pop("model.safetensors")

    def is_refused(message: str) -> None:
        assert ends(checkpoint=newest) == 6
        assert message in capsys.readouterr().err

    is_refused("the checksum of model.safetensors is wrong; use another checkpoint")
    state.write_bytes(whole[: len(whole) // 2])
    is_refused(f"Cannot read {state}: ")
    torch.save(without, state)
    is_refused("does not describe its training data (KeyError: 'volumes')")
    manifest.write_text(json.dumps(earlier))
    is_refused("step_00000010: an earlier version of vesuvius wrote it; use that version")
    manifest.unlink()
    is_refused("FileNotFoundError")


@in_plain
def test_a_failure_names_the_remedy_and_leaves_nothing(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full GPU, a file in the way, and a network that returns NaN."""

    def full(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(common, "generate", full)
        assert ends("--out", tmp_path / "out") == 3
    assert "lower --batch-size" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert ends("--out", tmp_path / "file/out") == 6
    assert "Cannot write samples to" in capsys.readouterr().err
    checkpoint = tmp_path / "bad"
    shutil.copytree(plain / "runs/plain/checkpoints/step_00000010", checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    weights["full_in.weight"][0] = torch.nan
    save_file(weights, checkpoint / "model.safetensors")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.chdir(tmp_path)
    assert ends("--count", 1, checkpoint="bad") == 5
    assert "returned NaN or infinity for samples 0 (amp off" in capsys.readouterr().err
    assert list((tmp_path / "samples").iterdir()) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75)])
def test_an_interrupted_process_leaves_nothing_that_looks_finished(
    plain: Path, tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    command = [sys.executable, "-m", "vesuvius.sample", "--checkpoint", "plain", "--out", str(tmp_path / "out")]
    long = [*command, "--count", "100000", "--batch-size", "1", "--steps", "2"]
    with fork_server.Popen(long, cwd=plain, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.*/new/samples.zarr/0/2/0/0/0")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.stderr is not None
        error = process.stderr.read()
    assert process.returncode == exit_code, error
    assert not (tmp_path / "out").exists()
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []
        assert f"{number.name}: sampling stopped after" in error


@pytest.mark.long
def test_a_conditional_model_uses_the_held_out_condition_and_both_are_written(
    conditional: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(conditional)
    three = drawn(tmp_path / "three", "--count", 3, checkpoint="shown")
    one = drawn(tmp_path / "one", "--count", 1, "--guidance", 2, checkpoint="shown")
    labels = zarr.open_array(str(conditional / "labels.zarr/0"), mode="r")
    conditions = three.voxels("conditions.zarr")
    assert (three.voxels().dtype, conditions.dtype, conditions.shape) == (np.uint16, np.uint8, (3, *PATCH))
    record = json.loads((tmp_path / "three/conditions.zarr/.zattrs").read_text())["vesuvius_sample"]
    assert record["condition"] == f"{conditional / 'labels.zarr'} level 0"
    (low, high) = json.loads((conditional / "runs/shown/split.json").read_text())["volumes"][0]["validation"]
    for condition, start in zip(conditions, record["starts_zyx"], strict=True):
        stop = [a + b for a, b in zip(start, PATCH, strict=True)]
        np.testing.assert_array_equal(condition, labels[tuple(map(slice, start, stop))])
        assert all(lo <= a and b <= hi for lo, a, b, hi in zip(low, start, stop, high, strict=True))
    np.testing.assert_array_equal(one.voxels("conditions.zarr"), conditions[:1])
    assert (one.voxels() != three.voxels()[:1]).any()
    assert (one.record["evaluations_per_sample"], three.record["evaluations_per_sample"]) == (6, 3)
    width, height = Image.open(tmp_path / "three/montage.png").size
    assert (width, height) == (2 * (2 * 152 + 8) + 4, 20 + 2 * 172 + 20), "labels and sample of three, in two columns"
    moved = (conditional / "labels.zarr").rename(tmp_path / "moved.zarr")
    assert ends("--out", tmp_path / "out", checkpoint="shown") == 6
    moved.rename(conditional / "labels.zarr")
    assert "labels.zarr: it does not exist" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
