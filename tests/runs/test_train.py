"""Whole runs on the command line: their files, exit codes and refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import chdir
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.conftest import REPOSITORY, run_vesuvius, textured, write_array
from tests.support import fork_server
from tests.support.runs import WriteConfig, assert_same_weights, records_of, steps_of, vesuvius_train
from tests.support.small_disk import with_small_files
from tests.support.tiny import tiny_sections
from vesuvius import __version__
from vesuvius.commands import cli
from vesuvius.runlog.records import read_records
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint, step_of

STEP_LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO Train step \d+/10 epoch [12]/2 loss \d+\.\d{5} lr \d\.\de-\d\d step_s [\d.]+ "
    r"data_s [\d.]+ h2d_s [\d.]+ gpu_s [\d.]+ other_s -?[\d.]+ data_pct [\d.]+ samples_s [\d.]+ vram_gib - "
    r"ram_gib [\d.]+/[\d.]+ workers 0 worker_max_gib - eta (-|\w+)( pause_s [\d.]+)?"
)
KEPT = {"save_every": 2, "keep_last": 1, "keep_every": 8, "extra_ema_decays": [0.5], "steps_per_epoch": 5}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config `tiny.yaml` and its run of 10 steps, read-only for tests."""
    folder = tmp_path_factory.mktemp("whole_run")
    config = tiny_sections("tiny", write_array(folder / "volume.zarr", textured((96, 128, 128))))
    config["training"] |= KEPT | {"validate_every": 4, "validate_patches": 2, "preview_every": 7}
    config["monitor"] |= {"verdict_every": 5, "sample_every_s": 0.5, "tensorboard": True}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    with chdir(folder):
        assert vesuvius_train(folder / "tiny.yaml") == 0
    return folder


@pytest.fixture
def in_whole_run(whole_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole_run)


@pytest.mark.usefixtures("in_whole_run")
def test_a_run_leaves_the_documented_files() -> None:
    config, run = Path("tiny.yaml"), Path("runs/tiny")
    files = "env.json", "logs/train_full.log", "metrics.jsonl", "system.jsonl", "checkpoints/step_00000008/config.yaml"
    states = "checkpoints/step_00000010/model.safetensors", "checkpoints/step_00000010/state.pt"
    for name in (*files, *states, "samples/step_00000007.png", "samples/step_00000010.png"):
        assert (run / name).exists(), name
    assert (run / "config.source.yaml").read_text() == config.read_text()
    assert yaml.safe_load((run / "config.resolved.yaml").read_text())["training"]["clip_norm"] == 1.0
    split = json.loads((run / "split.json").read_text())
    assert split["volumes"][0]["validation"] is not None
    assert json.loads((run / "env.json").read_text())["packages"]["torch"]
    log = (run / "logs/train_full.log").read_text()
    lines = [line for line in log.splitlines() if "Train step" in line]
    assert len(lines) == 10
    for line in lines:
        assert STEP_LINE.fullmatch(line), line
        figures = dict(pairwise(line.partition("Train step")[2].split()))
        parts = sum(float(figures[name]) for name in ("data_s", "h2d_s", "gpu_s", "other_s"))
        assert parts == pytest.approx(float(figures["step_s"]), abs=0.0026)  # five roundings of half a millisecond
    assert "Verdict step 10/10" in log
    assert len(re.findall(r"INFO Validation step \d+/10 loss_raw [\d.]+ loss_ema [\d.]+", log)) == 3
    alarming = r"killed|oom|out of memory|(?<!relative_)error|warn|\x1b"
    assert not re.search(alarming, log, re.IGNORECASE), "a healthy run says no alarming words"
    assert list((run / "tb").glob("events.*"))
    picture = np.asarray(Image.open(run / "samples/step_00000010.png"))
    left, right = np.array_split(picture[40:], 2, axis=1)
    assert min(left.std(), right.std()) > 10
    assert not np.array_equal(left[:, : right.shape[1]], right), "generated beside real slices"


@pytest.mark.usefixtures("in_whole_run")
def test_the_times_of_every_step_add_up_and_records_are_unrounded() -> None:
    steps = steps_of()
    assert [s["step"] for s in steps] == list(range(1, 11))
    for s in steps:
        parts = [s["data_s"], s["h2d_s"], s["gpu_s"], s["other_s"]]
        assert sum(parts) == pytest.approx(s["step_s"], rel=1e-9)
        assert min(parts) >= 0
        assert s["forward_s"] + s["backward_s"] + s["optimizer_s"] == pytest.approx(s["gpu_s"], rel=1e-9)
        assert 0 <= s["pause_s"] <= s["other_s"]
        assert s["vram_used_bytes"] is None, "null, not 0, where there is no GPU"
        assert s["ram_used_bytes"] < s["ram_limit_bytes"]
    assert len({s["loss"] for s in steps}) == 10
    # Each step begins where the one before ended; the records are written right behind their steps.
    between_s = steps[-1]["time"] - steps[0]["time"]
    assert sum(s["step_s"] for s in steps[1:]) == pytest.approx(between_s, rel=0.1)
    assert steps[0]["step_p95_s"] is None
    assert 0 < steps[-1]["step_p50_s"] <= steps[-1]["step_p95_s"] <= max(s["step_s"] for s in steps[1:])
    kinds = [r["kind"] for r in read_records(Path("runs/tiny/metrics.jsonl"))]
    assert (kinds[0], kinds[-1]) == ("run_start", "run_end")


@pytest.mark.usefixtures("in_whole_run")
def test_a_run_validates_previews_and_keeps_the_configured_checkpoints() -> None:
    validations = records_of("validation")
    assert [v["step"] for v in validations] == [4, 8, 10]
    for validation in validations:
        assert list(validation["weights"]) == ["raw", "ema", "ema_0.5"]
        for figures in validation["weights"].values():
            assert figures["loss"] == pytest.approx(np.mean(figures["bins"]), rel=1e-6)  # equal bins, float32 sums
            assert len(figures["bins"]) == 8
    assert [p["step"] for p in records_of("preview")] == [7, 10]
    best = min(validations, key=lambda v: v["relative_error"])["step"]
    kept = {step_of(path) for path in list_checkpoints(Path("runs/tiny/checkpoints"))}
    assert kept == {8, 10, best}
    assert step_of(Path("runs/tiny/checkpoints/best").resolve()) == best


def test_validations_and_previews_change_no_weight(tiny_config: WriteConfig, whole_run: Path) -> None:
    assert vesuvius_train(tiny_config("alone", training=KEPT | {"save_every": 10})) == 0
    Path("runs/tiny").symlink_to(whole_run / "runs/tiny")
    assert_same_weights("alone")


@pytest.mark.usefixtures("ray_cluster")
def test_ray_readers_train_the_same_weights_as_none(tiny_config: WriteConfig) -> None:
    assert vesuvius_train(tiny_config("alone"), "training.max_steps=4") == 0
    assert vesuvius_train(tiny_config("ray"), "training.max_steps=4", "training.workers=2") == 0
    assert_same_weights("alone", "ray")
    log = Path("runs/ray/logs/train_full.log").read_text()
    # So short a run may have been read, and its readers have ended, before its first step is logged.
    assert re.search(r"workers [0-2] (\(\d with work\) )?worker_max_gib \d\.\d", log)


def test_the_order_of_samples_does_not_depend_on_the_micro_batch(tiny_config: WriteConfig) -> None:
    for name, cut in {"2x2": (2, 2), "4x1": (4, 1)}.items():
        training = {"train_batch_size": cut[0], "accumulate_steps": cut[1], "max_steps": 2}
        assert vesuvius_train(tiny_config(name, training=training)) == 0
    losses = [[s["loss"] for s in steps_of(name)] for name in ("2x2", "4x1")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)  # float32 sums in another order


BAD_DATA = [
    ("data.volumes=[{path: nowhere.zarr}]", 6, "vesuvius volume synth"),
    ("data.patch_size=[96,128,128]", 6, "reduce data.patch_size"),
    ("data.patch_size=[7,16,16]", 2, "the nearest valid sizes are [6, 16, 16] and [8, 16, 16]"),
    ("training.lr=fast", 2, "training.lr"),
    ("trainig.lr=1", 2, "did you mean"),
]


@pytest.mark.parametrize(("override", "exit_code", "message"), BAD_DATA)
def test_bad_input_ends_with_its_exit_code_and_leaves_nothing(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str], override: str, exit_code: int, message: str
) -> None:
    assert vesuvius_train(tiny_config(model={"channels": [8, 16]}), override) == exit_code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not Path("runs").exists()


def test_an_unreadable_chunk_ends_a_run_with_exit_6_and_one_line(
    tiny_config: WriteConfig, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(data={"normalize": {"low": 0.0, "high": 200.0}})
    for chunk in volume.glob("[0-9]/*/*"):
        chunk.write_bytes(b"torn")
    assert vesuvius_train(config) == 6
    error = capsys.readouterr().err
    assert re.search(r"Only 0 of (64|256) training patches can be read; the last: ", error)
    assert "volume.zarr, region z" in error
    assert "Traceback" not in error
    assert not Path("runs/tiny").exists()


@pytest.mark.long
def test_failed_saves_leave_the_older_checkpoint_intact_and_the_run_continues_to_exit_6(
    trained: Path, tmp_path: Path
) -> None:
    old = list_checkpoints(Path("runs/tiny/checkpoints"))
    size = (old[-1] / "state.pt").stat().st_size
    arguments = ["--config", str(trained), "--resume", "training.max_steps=4", "training.save_every=1"]
    result = fork_server.run(
        [*with_small_files("train", size // 2), *arguments], cwd=tmp_path, text=True, capture_output=True
    )
    assert result.returncode == 6, result.stderr
    assert "Cannot write checkpoint" in result.stderr
    assert "Train step 4/4" in result.stdout, "a failed save does not end the run"
    assert [(e["event"], e["step"]) for e in records_of("event")] == [("save_failed", n) for n in (3, 4)]
    saved = records_of("checkpoint")
    sizes = [sum(path.stat().st_size for path in each.iterdir()) for each in old]
    assert [(each["step"], each["bytes"]) for each in saved] == list(zip((1, 2), sizes, strict=True))
    assert [end["cause"][:4] for end in records_of("run_end")] == ["done", "Cann"], "Cannot write checkpoint ..."
    assert list_checkpoints(Path("runs/tiny/checkpoints")) == old
    assert load_checkpoint(old[-1])["step"] == 2
    assert vesuvius_train(trained, "--resume", "training.max_steps=3") == 0


def test_the_full_experiment_explains_how_to_get_data_on_a_fresh_clone(capsys: pytest.CaptureFixture[str]) -> None:
    assert vesuvius_train(REPOSITORY / "configs/exp001_full.yaml", "training.train_batch_size=1") == 6
    error = capsys.readouterr().err
    assert "vesuvius volume synth" in error
    assert "configs/exp001_full.yaml" in error
    assert "data.volumes=" in error


@pytest.mark.long
def test_the_module_and_the_command_are_equivalent(tiny_config: WriteConfig, tmp_path: Path) -> None:
    result = run_vesuvius("train", "--config", tiny_config(), "training.max_steps=1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    again = run_vesuvius("train", "--config", "tiny.yaml", cwd=tmp_path)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    script = Path(sys.executable).with_name("vesuvius")
    said = subprocess.run([script, "--version"], cwd=tmp_path, text=True, capture_output=True, check=True)
    assert said.stdout == f"vesuvius {__version__}\n"


HELP_THEN_HEAVY_MODULES = """
import sys

from vesuvius.commands.cli import main

main(["--help"])
print(sorted({"torch", "ray", "zarr", "numpy"} & set(sys.modules)))
"""


def test_help_imports_nothing_heavy() -> None:
    result = subprocess.run([sys.executable, "-c", HELP_THEN_HEAVY_MODULES], text=True, capture_output=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    assert cli.main(["no-such-command"]) == 2
