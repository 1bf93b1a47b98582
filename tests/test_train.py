"""Whole runs through the door: what they leave behind, how they end, and that resuming changes nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.conftest import REPOSITORY, SCROLL_DATA, needs_scroll_data, run_vesuvius, textured, write_array
from vesuvius import cli, train
from vesuvius.engine.checkpoint import list_checkpoints, load_checkpoint, step_of
from vesuvius.observe.records import read_records

WriteConfig = Callable[..., Path]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def vesuvius_train(config: Path, *arguments: str) -> int:
    return train.main(["--config", str(config), *arguments])


def final_weights(name: str = "tiny") -> dict[str, torch.Tensor]:
    """The raw weights and each average of the newest checkpoint."""
    state = load_checkpoint(list_checkpoints(Path("runs") / name / "checkpoints")[-1])
    averages = {f"{a}.{k}": v for a, average in state["averages"].items() for k, v in average["weights"].items()}
    return state["model"] | averages


def records_of(kind: str, name: str = "tiny") -> list[dict[str, Any]]:
    return [record for record in read_records(Path("runs") / name / "metrics.jsonl") if record["kind"] == kind]


def steps_of(name: str = "tiny") -> list[dict[str, Any]]:
    return records_of("step", name)


STEP_LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO Train step \d+/20 epoch [12]/2 loss \d+\.\d{5} lr \d\.\de-\d\d step_s [\d.]+ "
    r"data_s [\d.]+ h2d_s [\d.]+ gpu_s [\d.]+ other_s -?[\d.]+ data_pct [\d.]+ samples_s [\d.]+ vram_gib - "
    r"ram_gib [\d.]+/[\d.]+ workers 0 worker_max_gib - eta \w+"
)


def test_a_run_leaves_what_the_conventions_say(tiny_config: WriteConfig) -> None:
    config = tiny_config(training={"preview_every": 10, "preview_count": 1, "keep_last": 2})
    assert vesuvius_train(config) == 0
    run = Path("runs/tiny")
    for name in (
        "config.source.yaml",
        "config.resolved.yaml",
        "env.json",
        "split.json",
        "logs/train_full.log",
        "logs/monitor.log",
        "metrics.jsonl",
        "system.jsonl",
        "checkpoints/step_00000010/model.safetensors",
        "checkpoints/step_00000010/config.yaml",
        "checkpoints/step_00000020/state.pt",
        "samples/step_00000010.png",
        "samples/step_00000020.png",
    ):
        assert (run / name).exists(), name
    assert (run / "config.source.yaml").read_text() == config.read_text()
    assert yaml.safe_load((run / "config.resolved.yaml").read_text())["training"]["clip_norm"] == 1.0
    split = json.loads((run / "split.json").read_text())
    assert split["volumes"][0]["validation"] is not None
    assert json.loads((run / "env.json").read_text())["packages"]["torch"]
    lines = [line for line in (run / "logs/train_full.log").read_text().splitlines() if "Train step" in line]
    assert len(lines) == 20
    for line in lines:
        assert STEP_LINE.fullmatch(line), line


def test_the_parts_of_every_step_add_up_and_records_are_unrounded(tiny_config: WriteConfig) -> None:
    assert vesuvius_train(tiny_config()) == 0
    steps = steps_of()
    assert [s["step"] for s in steps] == list(range(1, 21))
    for s in steps:
        parts = [s["data_s"], s["h2d_s"], s["gpu_s"], s["other_s"]]
        assert sum(parts) == pytest.approx(s["step_s"], rel=1e-9)
        assert min(parts) >= 0
        assert s["vram_used_bytes"] is None, "null, not 0, where there is no GPU"
        assert s["ram_used_bytes"] < s["ram_limit_bytes"]
    assert len({s["loss"] for s in steps}) == 20
    kinds = [r["kind"] for r in read_records(Path("runs/tiny/metrics.jsonl"))]
    assert kinds[0] == "run_start"
    assert kinds[-1] == "run_end"


def test_a_healthy_log_does_not_alarm(tiny_config: WriteConfig) -> None:
    assert vesuvius_train(tiny_config()) == 0
    log = Path("runs/tiny/logs/train_full.log").read_text()
    assert not re.search(r"killed|oom|out of memory|error|warn|\x1b", log, re.IGNORECASE)


def test_ten_steps_and_ten_resumed_are_twenty_bit_by_bit(tiny_config: WriteConfig) -> None:
    assert vesuvius_train(tiny_config("straight")) == 0
    config = tiny_config("parts")
    assert vesuvius_train(config, "training.max_steps=10") == 0
    assert load_checkpoint(list_checkpoints(Path("runs/parts/checkpoints"))[-1])["step"] == 10
    assert vesuvius_train(config, "--resume") == 0
    straight, parts = final_weights("straight"), final_weights("parts")
    assert straight.keys() == parts.keys()
    for name, weight in straight.items():
        assert torch.equal(weight, parts[name]), name
    assert [s["loss"] for s in steps_of("straight")] == [s["loss"] for s in steps_of("parts")]
    files = [list_checkpoints(Path(f"runs/{n}/checkpoints"))[-1] / "model.safetensors" for n in ("straight", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_resume_is_exact_with_the_threads_that_the_run_began_with(tiny_config: WriteConfig, tmp_path: Path) -> None:
    """The order in which threads add up is part of a result: another number of them at the resume changes nothing."""
    for name in ("straight", "parts"):
        tiny_config(name)
    parts = ["parts", "training.max_steps=3"], ["parts", "training.max_steps=6", "--resume"]
    for (name, *arguments), threads in zip((["straight", "training.max_steps=6"], *parts), "221", strict=True):
        result = run_vesuvius(
            "train", "--config", f"{name}.yaml", *arguments, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": threads}
        )
        assert result.returncode == 0, result.stderr
    assert [s["loss"] for s in steps_of("straight")] == [s["loss"] for s in steps_of("parts")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_deterministic_kernels_make_a_resume_exact(tiny_config: WriteConfig) -> None:
    training = {"deterministic": True, "validate_every": 4, "validate_patches": 2}
    assert vesuvius_train(tiny_config("straight", training=training), "training.max_steps=10") == 0
    config = tiny_config("parts", training=training)
    assert vesuvius_train(config, "training.max_steps=6") == 0
    assert vesuvius_train(config, "--resume", "training.max_steps=10") == 0
    for name, weight in final_weights("straight").items():
        assert torch.equal(weight, final_weights("parts")[name]), name


@pytest.mark.usefixtures("ray_cluster")
def test_ray_readers_train_the_same_weights_as_none(tiny_config: WriteConfig) -> None:
    assert vesuvius_train(tiny_config("alone"), "training.max_steps=6") == 0
    assert vesuvius_train(tiny_config("ray"), "training.max_steps=6", "training.workers=2") == 0
    for name, weight in final_weights("alone").items():
        assert torch.equal(weight, final_weights("ray")[name]), name
    log = Path("runs/ray/logs/train_full.log").read_text()
    assert re.search(r"workers 2 worker_max_gib \d\.\d", log)


def test_the_order_of_samples_does_not_depend_on_how_a_step_is_cut(tiny_config: WriteConfig) -> None:
    for name, cut in {"1x4": (1, 4), "2x2": (2, 2), "4x1": (4, 1)}.items():
        training = {"train_batch_size": cut[0], "accumulate_steps": cut[1], "max_steps": 8}
        assert vesuvius_train(tiny_config(name, training=training)) == 0
    losses = [[s["loss"] for s in steps_of(name)] for name in ("1x4", "2x2", "4x1")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)  # float32 sums in another order
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-5)


def test_a_finished_run_resumes_to_exit_0_and_an_existing_one_is_not_overwritten(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    assert vesuvius_train(config, "training.max_steps=2") == 0
    before = Path("runs/tiny/metrics.jsonl").read_bytes()
    assert vesuvius_train(config, "training.max_steps=2") == 2
    assert "--resume" in capsys.readouterr().err
    assert vesuvius_train(config, "training.max_steps=2", "--resume") == 0
    assert "is finished" in capsys.readouterr().out
    assert Path("runs/tiny/metrics.jsonl").read_bytes() == before


def test_resume_without_a_checkpoint_starts_at_0_and_says_so(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vesuvius_train(tiny_config(), "training.max_steps=1", "--resume") == 0
    assert "WARNING no whole checkpoint" in capsys.readouterr().err
    assert [s["step"] for s in steps_of()] == [1]


def test_training_resume_auto_is_resume(tiny_config: WriteConfig) -> None:
    config = tiny_config(training={"resume": "auto"})
    assert vesuvius_train(config, "training.max_steps=2") == 0
    assert vesuvius_train(config, "training.max_steps=4") == 0
    assert [s["step"] for s in steps_of()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("data.patches_per_region=8", "plan.patches_per_region: was 4, is 8"),
        ("seed=1", "seed: was 0, is 1"),
        ("model.blocks_per_level=2", "model.blocks_per_level: was 1, is 2"),
    ],
)
def test_a_resume_that_would_be_another_experiment_is_refused_with_the_difference(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str], override: str, shown: str
) -> None:
    config = tiny_config()
    assert vesuvius_train(config, "training.max_steps=1") == 0
    before = Path("runs/tiny/config.resolved.yaml").read_bytes()
    assert vesuvius_train(config, "--resume", override) == 2
    assert shown in capsys.readouterr().err
    assert Path("runs/tiny/config.resolved.yaml").read_bytes() == before


def test_a_resume_on_voxels_of_another_kind_is_refused(
    tiny_config: WriteConfig, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    assert vesuvius_train(config, "training.max_steps=1") == 0
    volume.rename(volume.with_name("old.zarr"))
    write_array(volume, textured((96, 128, 128), dtype="uint16"))
    assert vesuvius_train(config, "--resume") == 2
    assert "plan.volumes" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(training={"save_every": 2})
    assert vesuvius_train(tiny_config("straight", training={"save_every": 2}), "training.max_steps=6") == 0
    assert vesuvius_train(config, "training.max_steps=4") == 0
    damaged = Path("runs/tiny/checkpoints/step_00000004/state.pt")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert vesuvius_train(config, "--resume", "training.max_steps=6") == 0
    assert "step_00000004 is damaged (state.pt" in capsys.readouterr().err
    assert [s["step"] for s in steps_of()] == [1, 2, 3, 4, 3, 4, 5, 6]
    for name, weight in final_weights("straight").items():
        assert torch.equal(weight, final_weights()[name]), name


def test_a_run_without_a_whole_checkpoint_starts_at_0_and_says_so(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(training={"save_every": 2})
    assert vesuvius_train(config, "training.max_steps=4") == 0
    for checkpoint in list_checkpoints(Path("runs/tiny/checkpoints")):
        (checkpoint / "manifest.json").unlink()
    assert vesuvius_train(config, "--resume", "training.max_steps=4") == 0
    error = capsys.readouterr().err
    assert "step_00000002 is damaged" in error
    assert "WARNING no whole checkpoint" in error
    assert [s["step"] for s in steps_of()] == [1, 2, 3, 4, 1, 2, 3, 4]


@pytest.mark.parametrize("override", ["data.patches_per_region=8", "seed=1", "diffusion.schedule=linear"])
def test_allowed_drift_goes_on_and_is_written_down(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    config = tiny_config(training={"validate_every": 1, "validate_patches": 2})
    assert vesuvius_train(config, "training.max_steps=1") == 0
    assert vesuvius_train(config, "--resume", "--allow-drift", override, "training.max_steps=2") == 0
    key = override.partition("=")[0].removeprefix("data.")
    assert re.search(rf"WARNING accepted by --allow-drift.* (plan\.)?{key}: was", capsys.readouterr().err)
    assert [s["step"] for s in steps_of()] == [1, 2]
    assert any(key in line for line in records_of("run_start")[1]["accepted"])
    assert [v["best_step"] for v in records_of("validation")] == [1, 2], "losses before and behind do not compare"


def test_drift_that_changes_the_shapes_of_weights_is_refused_all_the_same(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    assert vesuvius_train(config, "training.max_steps=1") == 0
    assert vesuvius_train(config, "--resume", "--allow-drift", "model.blocks_per_level=2") == 2
    assert "even with --allow-drift the weights must fit" in capsys.readouterr().err


def test_other_grey_values_are_estimated_anew_only_where_the_data_have_changed(
    tiny_config: WriteConfig, volume: Path
) -> None:
    config = tiny_config()
    assert vesuvius_train(config, "training.max_steps=1") == 0
    newest = lambda: load_checkpoint(list_checkpoints(Path("runs/tiny/checkpoints"))[-1])  # noqa: E731
    greys = newest()["greys"]
    write_array(volume.with_name("new.zarr"), textured((96, 128, 128), dtype="uint8") // 2)
    data = f"data.volumes=[{{path: {volume.with_name('new.zarr')}}}]"
    assert vesuvius_train(config, "--resume", "--allow-drift", data, "training.max_steps=2") == 0
    assert newest()["greys"] == greys, "a volume may move: the same array at another place"
    assert vesuvius_train(config, "--resume", "--allow-drift", data, "data.patches_per_region=8") == 0
    assert newest()["greys"] != greys


def test_a_rare_volume_does_not_hold_up_the_start(tiny_config: WriteConfig, volume: Path) -> None:
    rare = write_array(volume.with_name("rare.zarr"), textured((96, 128, 128), seed=1))
    volumes = [{"path": str(volume)}, {"path": str(rare), "weight": 1e-12}]
    assert vesuvius_train(tiny_config(data={"volumes": volumes}), "training.max_steps=1") == 0


def test_the_printed_parts_of_a_step_add_up_within_rounding(tiny_config: WriteConfig) -> None:
    assert vesuvius_train(tiny_config()) == 0
    lines = re.findall("Train step.*", Path("runs/tiny/logs/train_full.log").read_text())
    for line in lines:
        words = line.split()
        figures = dict(pairwise(words))
        parts = sum(float(figures[name]) for name in ("data_s", "h2d_s", "gpu_s", "other_s"))
        assert parts == pytest.approx(float(figures["step_s"]), abs=0.0026)  # five roundings of half a millisecond


def test_a_volume_may_move_and_a_knob_may_turn_between_stop_and_resume(
    tiny_config: WriteConfig, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    assert vesuvius_train(config, "training.max_steps=1") == 0
    moved = volume.rename(volume.with_name("moved.zarr"))
    arguments = [f"data.volumes=[{{path: {moved}}}]", "training.lr=2e-3", "training.max_steps=2"]
    assert vesuvius_train(config, "--resume", *arguments) == 0
    assert "changed since the checkpoint: training.lr: was 0.001, is 0.002" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_the_rest_resumes_bit_by_bit(
    tiny_config: WriteConfig, tmp_path: Path, number: signal.Signals
) -> None:
    training = {"epochs": 40, "save_every": 1000}
    config = tiny_config("stopped", training=training)
    command = [sys.executable, "-m", "vesuvius.train", "--config", str(config)]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "Train step 3/" in line:
                process.send_signal(number)
                break
        output = process.stdout.read()
    assert process.returncode == (130 if number == signal.SIGINT else 75), output
    stopped_at = load_checkpoint(list_checkpoints(Path("runs/stopped/checkpoints"))[-1])["step"]
    assert stopped_at >= 3
    end = f"training.max_steps={stopped_at + 3}"
    assert vesuvius_train(config, "--resume", end) == 0
    assert vesuvius_train(tiny_config("straight", training=training), end) == 0
    for name, weight in final_weights("straight").items():
        assert torch.equal(weight, final_weights("stopped")[name]), name


def test_a_time_limit_stops_saves_and_exits_75(tiny_config: WriteConfig) -> None:
    config = tiny_config(training={"epochs": 1000, "max_hours": 1e-6})
    assert vesuvius_train(config) == 75
    assert "max_hours" in Path("runs/tiny/logs/train_full.log").read_text()


def test_a_nonfinite_loss_stops_the_run_with_exit_5_and_is_never_applied(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    # Voxels of 1e30 overflow float32 when squared in the loss: a real infinity, not a planted one.
    voxels = textured((96, 128, 128), dtype="float32")
    voxels[:] = 1e30
    path = write_array(Path("huge.zarr").absolute(), voxels)
    data = {"volumes": [{"path": str(path)}], "normalize": {"low": 0.0, "high": 1.0}}
    config = tiny_config(data=data, training={"max_nonfinite": 3})
    assert vesuvius_train(config) == 5
    error = capsys.readouterr().err
    assert "must be finite" in error
    assert "3 in a row" in error
    events = [r for r in read_records(Path("runs/tiny/metrics.jsonl")) if r["kind"] == "event"]
    assert [(e["step"], e["samples"], e["loss"]) for e in events] == [
        (n + 1, [4 * n, 4 * n + 4], None) for n in range(3)
    ]
    state = load_checkpoint(list_checkpoints(Path("runs/tiny/checkpoints"))[-1])
    assert state["step"] == 3, "a resume goes on behind the bad steps"
    assert float(state["averages"]["ema"]["updates"]) == 0
    assert read_records(Path("runs/tiny/metrics.jsonl"))[-1]["exit_code"] == 5


def test_a_run_validates_previews_and_keeps_what_it_was_asked_to_keep(tiny_config: WriteConfig) -> None:
    training = {"validate_every": 3, "validate_patches": 2, "preview_every": 4, "preview_count": 1}
    keep = {"save_every": 2, "keep_last": 1, "keep_every": 8, "extra_ema_decays": [0.5]}
    config = tiny_config(training=training | keep, monitor={"tensorboard": True})
    assert vesuvius_train(config) == 0
    validations = records_of("validation")
    assert [v["step"] for v in validations] == [3, 6, 9, 12, 15, 18, 20]
    for validation in validations:
        assert list(validation["weights"]) == ["raw", "ema", "ema_0.5"]
        for figures in validation["weights"].values():
            assert figures["loss"] == pytest.approx(np.mean(figures["bins"]), rel=1e-6)  # equal bins, float32 sums
            assert len(figures["bins"]) == 8
    assert [p["step"] for p in records_of("preview")] == [4, 8, 12, 16, 20]
    best = min(validations, key=lambda v: v["loss"])["step"]
    kept = {step_of(path) for path in list_checkpoints(Path("runs/tiny/checkpoints"))}
    assert kept == {8, 16, 20, best}
    assert step_of(Path("runs/tiny/checkpoints/best").resolve()) == best
    log = Path("runs/tiny/logs/train_full.log").read_text()
    assert len(re.findall(r"INFO Validation step \d+/20 loss_raw [\d.]+ loss_ema [\d.]+", log)) == 7
    assert not re.search(r"killed|oom|out of memory|error|warn", log, re.IGNORECASE)
    assert list(Path("runs/tiny/tb").glob("events.*"))


def test_validation_and_previews_change_no_weight(tiny_config: WriteConfig) -> None:
    training = {"validate_every": 2, "validate_patches": 2, "preview_every": 3, "preview_count": 1}
    assert vesuvius_train(tiny_config("watched", training=training), "training.max_steps=8") == 0
    assert vesuvius_train(tiny_config("alone"), "training.max_steps=8") == 0
    for name, weight in final_weights("alone").items():
        assert torch.equal(weight, final_weights("watched")[name]), name


def test_validations_of_runs_with_other_seeds_and_batches_begin_alike(tiny_config: WriteConfig) -> None:
    """With weights that are the same: a learning rate of almost 0 and weights of another run."""
    assert vesuvius_train(tiny_config("first"), "training.max_steps=1") == 0
    training = {"validate_every": 1, "lr": 1e-30, "weight_decay": 0.0, "init_from": "runs/first", "max_steps": 1}
    assert vesuvius_train(tiny_config("one", training=training)) == 0
    other = training | {"train_batch_size": 3, "accumulate_steps": 1}
    assert vesuvius_train(tiny_config("other", training=other), "seed=7") == 0
    one, other_one = (records_of("validation", name)[0]["weights"]["ema"]["bins"] for name in ("one", "other"))
    np.testing.assert_allclose(one, other_one, rtol=1e-5)  # batches of 2 and of 3 are summed in another order


def test_a_new_run_starts_from_the_averaged_weights_of_another(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vesuvius_train(tiny_config("first"), "training.max_steps=5") == 0
    config = tiny_config("second", training={"lr": 1e-30, "weight_decay": 0.0, "init_from": "runs/first"})
    assert vesuvius_train(config, "training.max_steps=1") == 0
    assert "starting from the weights of runs/first/checkpoints/step_00000005" in capsys.readouterr().out
    first = load_checkpoint(list_checkpoints(Path("runs/first/checkpoints"))[-1])["averages"]["ema"]["weights"]
    second = load_checkpoint(list_checkpoints(Path("runs/second/checkpoints"))[-1])
    assert second["step"] == 1
    for name, weight in first.items():
        torch.testing.assert_close(second["model"][name], weight, rtol=0, atol=1e-12)  # one step of 1e-30
    assert vesuvius_train(config, "--resume", "training.max_steps=2") == 0
    assert "starting from the weights" not in capsys.readouterr().out, "a resumed run has weights of its own"


def test_weights_of_another_network_do_not_start_a_run(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vesuvius_train(tiny_config("first"), "training.max_steps=1") == 0
    config = tiny_config("second", training={"init_from": "runs/first"})
    assert vesuvius_train(config, "model.blocks_per_level=2") == 2
    assert "training.init_from" in capsys.readouterr().err
    assert not Path("runs/second").exists()
    assert vesuvius_train(config, "training.init_from=runs/nowhere") == 2


def test_a_resumed_run_knows_how_far_it_is_before_its_first_step(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    assert vesuvius_train(config, "training.max_steps=12") == 0
    capsys.readouterr()
    assert vesuvius_train(config, "--resume", "training.max_steps=14") == 0
    said = "step 12 of 14, 48 samples, epoch 2 of 2; [0-9smhd]+ of training before session 2, about [0-9]+s left"
    before, _, _ = capsys.readouterr().out.partition("Train step 13")
    assert re.search(said, before)
    last, first = steps_of()[11], steps_of()[12]
    assert first["total_s"] > last["total_s"]
    assert first["session_s"] < first["total_s"]
    assert first["samples_total"] == 52


BAD_DATA = [
    ("data.volumes=[{path: nowhere.zarr}]", 6, "vesuvius volume synth"),
    ("data.patch_size=[96,128,128]", 6, "reduce data.patch_size"),
    ("data.patch_size=[7,16,16]", 2, "nearest that fit: [6, 16, 16] and [8, 16, 16]"),
    ("training.lr=fast", 2, "training.lr"),
    ("trainig.lr=1", 2, "did you mean"),
]


@pytest.mark.parametrize(("override", "exit_code", "message"), BAD_DATA)
@pytest.mark.parametrize("dry", [True, False], ids=["dry-run", "train"])
def test_bad_input_ends_with_its_exit_code_and_leaves_nothing(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str], override: str, exit_code: int, message: str, dry: bool
) -> None:
    assert vesuvius_train(tiny_config(), override, *(["--dry-run"] if dry else [])) == exit_code
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
    assert "volume.zarr, region z" in capsys.readouterr().err
    assert "Traceback" not in Path("runs/tiny/logs/train_full.log").read_text()
    assert list_checkpoints(Path("runs/tiny/checkpoints")) == []


# No file of this process may reach the size in its first argument: its writes fail as on a full disk.
TRAIN_WITH_SMALL_FILES = """
import resource
import signal
import sys

limit = int(sys.argv.pop(1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

from vesuvius.train import main

sys.exit(main(sys.argv[1:]))
"""


def test_saves_that_fail_leave_the_older_checkpoint_whole_and_the_run_goes_on_to_exit_6(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    config = tiny_config(training={"save_every": 2})
    assert vesuvius_train(config, "training.max_steps=2") == 0
    (old,) = list_checkpoints(Path("runs/tiny/checkpoints"))
    size = (old / "state.pt").stat().st_size
    arguments = ["--config", str(config), "--resume", "training.max_steps=6"]
    result = subprocess.run(
        [sys.executable, "-c", TRAIN_WITH_SMALL_FILES, str(size // 2), *arguments],
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert result.returncode == 6, result.stderr
    assert "must fit on the disk" in result.stderr
    assert "Train step 6/6" in result.stdout, "a failed save does not end the run"
    assert [(e["event"], e["step"]) for e in records_of("event")] == [("save_failed", n) for n in (4, 6)]
    assert list_checkpoints(Path("runs/tiny/checkpoints")) == [old]
    assert load_checkpoint(old)["step"] == 2
    assert vesuvius_train(config, "--resume") == 0


def test_the_dry_run_says_what_would_happen_and_writes_nothing(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vesuvius_train(tiny_config(), "--dry-run", "training.workers=2") == 0
    text = capsys.readouterr().out
    for fact in (
        "96x128x128 uint8",
        "decoded by zarrs",
        "validation",
        "read amplification",
        "M parameters",
        "GiB free",
    ):
        assert fact in text
    assert not Path("runs").exists()


def test_the_dry_run_plans_the_memory_of_a_gpu(tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert vesuvius_train(tiny_config(), "--dry-run", "--vram-gib", "24", "training.amp=bf16") == 0
    text = capsys.readouterr().out
    assert "planned for 24.0 GiB of VRAM (--vram-gib), amp bf16" in text
    for fact in (
        r"compute +[\d.]+ GFLOP a step",
        r"fixed +[\d.]+ MiB: weights [\d.]+ MiB, gradients [\d.]+ MiB, optimizer [\d.]+ MiB, EMA [\d.]+ MiB",
        r"kept +[\d.]+ MiB of activations per patch",
        r"peak +[\d.]+ MiB with train_batch_size 2, 0\.6\d GiB with the reserve",
        r"largest +train_batch_size 1024 or more",
    ):
        assert re.search(fact, text)
    assert "WARN       train_batch_size" not in text


def test_without_a_gpu_the_dry_run_says_what_it_assumes(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert vesuvius_train(tiny_config(), "--dry-run") == 0
    assert "80.0 GiB of VRAM (assumed, as this machine has no GPU; --vram-gib N" in capsys.readouterr().out


def test_the_dry_run_warns_of_a_batch_that_will_not_fit_and_names_one_that_does(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vesuvius_train(tiny_config(), "--dry-run", "--vram-gib", "0.65", "training.train_batch_size=512") == 0
    warning = re.search(r"WARN +train_batch_size 512 will not fit: .* set (\S+) and", capsys.readouterr().out)
    assert warning
    assert vesuvius_train(tiny_config(), "--dry-run", "--vram-gib", "0.65", warning[1]) == 0
    assert "WARN       train_batch_size" not in capsys.readouterr().out


def test_the_dry_run_says_where_not_even_one_patch_fits(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    too_small = ("--dry-run", "--vram-gib", "0.5")
    assert vesuvius_train(tiny_config(), *too_small) == 0
    text = capsys.readouterr().out
    assert "largest  train_batch_size 0" in text
    assert "GiB; name more training.checkpoint_levels" in text, "lean_norm is on already"
    assert vesuvius_train(tiny_config(), *too_small, "training.lean_norm=false") == 0
    assert "GiB; set training.lean_norm=true, name more" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--vram-gib", "80"], *(["--dry-run", "--vram-gib", n] for n in ("0", "x", "inf"))]
)
def test_vram_is_a_positive_number_that_goes_with_a_dry_run(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        vesuvius_train(tiny_config(), *arguments)
    assert exit_info.value.code == 2
    assert "--vram-gib" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_print_config_reads_back_as_the_same_config(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vesuvius_train(tiny_config(), "--print-config", "training.lr=3e-4") == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["training"]["lr"] == 3e-4
    assert "# peak learning rate" in text


def test_the_picture_shows_generated_beside_real_slices(tiny_config: WriteConfig) -> None:
    config = tiny_config(training={"max_steps": 2, "preview_every": 2, "preview_count": 2})
    assert vesuvius_train(config) == 0
    picture = np.asarray(Image.open("runs/tiny/samples/step_00000002.png"))
    left, right = np.array_split(picture[40:], 2, axis=1)
    assert left.std() > 10
    assert right.std() > 10
    assert not np.array_equal(left[:, : right.shape[1]], right)


def test_the_full_experiment_says_how_to_get_data_on_a_fresh_clone(capsys: pytest.CaptureFixture[str]) -> None:
    assert vesuvius_train(REPOSITORY / "configs/exp001_full.yaml") == 6
    error = capsys.readouterr().err
    assert "vesuvius volume synth" in error
    assert "configs/exp001_full.yaml" in error
    assert "data.volumes=" in error


@needs_scroll_data
def test_the_full_experiment_passes_its_dry_run_on_a_real_scroll(capsys: pytest.CaptureFixture[str]) -> None:
    override = f"data.volumes=[{{path: {SCROLL_DATA / 'scroll_v2_blosc.zarr'}, level: 0}}]"
    assert vesuvius_train(REPOSITORY / "configs/exp001_full.yaml", "--dry-run", override) == 0
    assert "155.3 M parameters" in capsys.readouterr().out


def test_the_module_and_the_command_are_the_same_door(tiny_config: WriteConfig, tmp_path: Path) -> None:
    result = run_vesuvius("train", "--config", tiny_config(), "training.max_steps=1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    script = Path(sys.executable).with_name("vesuvius")
    again = subprocess.run([script, "train", "--config", "tiny.yaml"], cwd=tmp_path, text=True, capture_output=True)
    assert again.returncode == 2
    assert "--resume" in again.stderr


HELP_THEN_HEAVY_MODULES = """
import sys

from vesuvius.cli import main

main(["--help"])
print(sorted({"torch", "ray", "zarr", "numpy"} & set(sys.modules)))
"""


def test_help_needs_nothing_heavy() -> None:
    result = subprocess.run([sys.executable, "-c", HELP_THEN_HEAVY_MODULES], text=True, capture_output=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    assert cli.main(["no-such-command"]) == 2


def test_the_namesake_on_the_package_index_is_warned_of(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    installed = tmp_path / "site" / "vesuvius-0.9.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vesuvius\nVersion: 0.9\n")
    monkeypatch.syspath_prepend(str(installed.parent))
    assert vesuvius_train(tiny_config(), "--dry-run") == 0
    assert "'vesuvius' 0.9 is installed beside ours" in capsys.readouterr().err


def test_no_process_of_a_run_outlives_it(tiny_config: WriteConfig, tmp_path: Path) -> None:
    marker = f"marker-{os.getpid()}-{time.time_ns()}"
    environment = os.environ | {"VESUVIUS_TEST_MARKER": marker}
    result = run_vesuvius(
        "train", "--config", tiny_config(), "training.max_steps=2", "training.workers=2", cwd=tmp_path, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    deadline = time.monotonic() + 30
    while (left := _processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []


def _processes_with(marker: str) -> list[str]:
    """Command lines of the processes that inherited our environment variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found
