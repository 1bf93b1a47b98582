"""Resuming a run bit by bit, after any end of a session and from the right checkpoint."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.gpu import needs_gpu
from tests.support.runs import WriteConfig, assert_same_weights, records_of, steps_of, vesuvius_train
from vesuvius.config.load import read_config
from vesuvius.training import between_steps, run
from vesuvius.training import stop as stop_module
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint
from vesuvius.training.checkpoint.start import run_state
from vesuvius.training.checkpoint.trained import read_checkpoint_info
from vesuvius.training.step.step import TrainStep


def test_three_steps_and_one_resumed_equal_four_bit_by_bit(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with another number of threads, whose summation order is part of the result: the original number is kept."""
    # Muon has AdamW as well; a network of two levels has upsampling.
    keys = {"training": {"optimizer": "muon", "steps_per_epoch": 2, "warmup_steps": 1}, "model": {"channels": [8, 16]}}
    config, threads = tiny_config("parts", **keys), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert vesuvius_train(tiny_config("straight", **keys)) == 0
        assert vesuvius_train(config, "training.max_steps=3") == 0
        torch.set_num_threads(1)
        capsys.readouterr()
        assert vesuvius_train(config, "--resume") == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert_same_weights("straight", "parts")
    assert [s["loss"] for s in steps_of("straight")] == [s["loss"] for s in steps_of("parts")]
    files = [list_checkpoints(Path(f"runs/{n}/checkpoints"))[-1] / "model.safetensors" for n in ("straight", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    # How far it is was known before the first step.
    said = "step 3 of 4, 6 samples, epoch 2 of 2; session 2 after [0-9.smhd ]+ of training"
    assert re.search(said, capsys.readouterr().out.partition("Train step 4")[0])
    last, first = steps_of("parts")[2:]
    assert first["total_s"] > last["total_s"]
    assert first["session_s"] < first["total_s"]
    assert first["samples_total"] == 8


def test_a_run_from_before_patch_embed_kernel_and_noise_embedding_resumes_bit_by_bit(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its network has kernels of 3 and is told t, and neither its checkpoint's config nor its file has the keys."""

    def before(*arguments: Any) -> dict[str, Any]:
        state = run_state(*arguments)
        del state["config"]["model"]["patch_embed_kernel"], state["config"]["diffusion"]["noise_embedding"]
        return state

    wide, of_before = "model.full_res_channels=4", ("model.patch_embed_kernel=3", "diffusion.noise_embedding=t")
    assert vesuvius_train(tiny_config("straight"), wide, *of_before, "training.max_steps=2") == 0
    config = tiny_config("parts")
    with monkeypatch.context() as patch:
        patch.setattr(between_steps, "run_state", before)
        assert vesuvius_train(config, wide, *of_before, "training.max_steps=1") == 0
    (only,) = list_checkpoints(Path("runs/parts/checkpoints"))
    found = read_checkpoint_info(only).config
    assert (found.model.patch_embed_kernel, found.diffusion.noise_embedding) == (3, "t"), "of samples"
    assert vesuvius_train(config, wide, "model.patch_embed_kernel=1", "training.max_steps=2", "--resume") == 2
    assert "model.patch_embed_kernel" in capsys.readouterr().err, "an explicit request is not replaced"
    assert vesuvius_train(config, wide, "training.max_steps=2", "--resume") == 0
    assert_same_weights("straight", "parts")


@pytest.mark.usefixtures("of_two_micro_batches")
def test_a_resume_with_another_batch_continues_at_the_next_sample(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    accumulate = TrainStep.accumulate

    def noted(step: TrainStep, x_0: torch.Tensor, indices: Any, *others: Any, **more: Any) -> None:
        trained.extend(indices.tolist())
        accumulate(step, x_0, indices, *others, **more)

    monkeypatch.setattr(TrainStep, "accumulate", noted)
    config = tiny_config()
    assert vesuvius_train(config, "training.max_steps=2") == 0
    assert vesuvius_train(config, "training.max_steps=4", "training.train_batch_size=3", "--resume") == 0
    assert trained == list(range(2 * 4 + 2 * 6)), "each sample once"


@needs_gpu
def test_on_a_gpu_deterministic_kernels_make_a_resume_exact(tiny_config: WriteConfig) -> None:
    training = {"deterministic": True, "validate_every": 4, "validate_patches": 2}
    assert vesuvius_train(tiny_config("straight", training=training), "training.max_steps=10") == 0
    config = tiny_config("parts", training=training)
    assert vesuvius_train(config, "training.max_steps=6") == 0
    assert vesuvius_train(config, "--resume", "training.max_steps=10") == 0
    assert_same_weights("straight", "parts")


def test_a_finished_run_resumes_with_exit_0_without_its_volumes_and_an_existing_run_is_not_overwritten(
    trained: Path, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("runs/tiny/metrics.jsonl").read_bytes()
    assert vesuvius_train(trained, "training.max_steps=2") == 2
    assert "--resume" in capsys.readouterr().err
    volume.rename(volume.with_name("archived.zarr"))
    assert vesuvius_train(trained, "training.max_steps=2", "--resume") == 0
    assert "is already finished" in capsys.readouterr().out
    assert Path("runs/tiny/metrics.jsonl").read_bytes() == before


def test_resume_without_a_checkpoint_starts_at_0_with_a_warning(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/tiny").mkdir(parents=True)  # as a run that was killed before its first save leaves it
    Path("runs/tiny/note.txt").write_text("whoever wrote this wants the folder")
    assert vesuvius_train(tiny_config(), "training.max_steps=1", "--resume") == 0
    assert "WARNING no complete checkpoint" in capsys.readouterr().err
    assert [s["step"] for s in steps_of()] == [1]


@pytest.mark.parametrize("found", ["no runs", "an empty folder", "only files of tune", "a link to a missing disk"])
@pytest.mark.parametrize("more", [(), ("training.resume=auto",), ("--dry-run",), ("--allow-drift",)], ids=" ".join)
def test_an_explicit_resume_of_no_run_is_refused_with_the_place(
    tiny_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], found: str, more: tuple[str, ...]
) -> None:
    if found != "no runs":
        Path("runs").mkdir()
    if found == "an empty folder":
        Path("runs/tiny").mkdir()
    if found == "only files of tune":
        Path("runs/tiny/tune/one").mkdir(parents=True)
    if found == "a link to a missing disk":
        Path("runs/tiny").symlink_to(tmp_path / "not/mounted")
    before = sorted(Path("runs").rglob("*"))
    assert vesuvius_train(tiny_config(), "--resume", *more) == 2
    assert f"there is no run in {tmp_path / 'runs/tiny'}" in capsys.readouterr().err
    assert sorted(Path("runs").rglob("*")) == before


def test_a_run_killed_before_its_first_step_can_be_resumed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in Path("runs/tiny").iterdir():  # what a start writes before its first step
        if path.name not in ("config.source.yaml", "config.resolved.yaml", "session.json", ".lock"):
            path.rename(tmp_path / path.name)
    assert vesuvius_train(trained, "--resume", "training.max_steps=1") == 0
    captured = capsys.readouterr()
    assert f"no complete checkpoint in {tmp_path / 'runs/tiny/checkpoints'}: starting at step 0" in captured.out


@pytest.mark.long
def test_training_resume_auto_resumes_also_from_the_copied_config(
    tiny_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(training={"resume": "auto"})
    assert vesuvius_train(config, "training.max_steps=2") == 0
    captured = capsys.readouterr()
    assert f"no complete checkpoint in {tmp_path / 'runs/tiny/checkpoints'}: starting at step 0" in captured.out
    assert captured.err == "", "a new run has nothing to go on from, and nothing to warn of"
    assert vesuvius_train(Path("runs/tiny/config.source.yaml"), "training.max_steps=4") == 0
    assert [s["step"] for s in steps_of()] == [1, 2, 3, 4]


def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(
    trained: Path, tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = Path("runs/tiny/checkpoints/step_00000002/state.pt")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert vesuvius_train(trained, "--resume", "training.max_steps=3") == 0
    assert "step_00000002: the checksum of state.pt" in capsys.readouterr().err
    assert [s["step"] for s in steps_of()] == [1, 2, 2, 3]
    assert vesuvius_train(tiny_config("straight"), "training.max_steps=3") == 0
    assert_same_weights("straight")


def files_below(path: Path) -> dict[str, bytes]:
    """All files except the lock, which names its last holder, also a refused resume."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_nothing_overwritten(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for checkpoint in list_checkpoints(Path("runs/tiny/checkpoints")):
        (checkpoint / "manifest.json").unlink()
    before = files_below(Path("runs"))
    for more in ([], ["--dry-run"]):
        assert vesuvius_train(trained, "--resume", "training.max_steps=3", *more) == 6
        (error,) = (line for line in capsys.readouterr().err.splitlines() if "ERROR" in line)
        assert (
            f"All checkpoints in {Path.cwd()}/runs/tiny/checkpoints are damaged: step_00000001, step_00000002; restore"
            in error
        )
        assert files_below(Path("runs")) == before
    Path("runs/tiny/checkpoints").rename("damaged")
    assert vesuvius_train(trained, "--resume", "training.max_steps=1") == 0, "as the message says"
    assert [s["step"] for s in steps_of()] == [1, 2, 1]


def stop_in(kind: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM once in the middle of a validation or preview."""
    name, came = {"validation": "validate", "preview": "make_preview"}[kind], []
    original = getattr(between_steps, name)

    def interrupted(*arguments: Any) -> Any:
        if not came and records_of("step")[-1]["step"] == step:
            came.append(step)
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(between_steps, name, interrupted)


@pytest.mark.parametrize("kind", ["validation", pytest.param("preview", marks=pytest.mark.long)])
def test_tasks_interrupted_after_the_last_step_are_repeated(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    training = {"validate_every": 1, "validate_patches": 1, "preview_every": 1}
    config = tiny_config(training=training | {"steps_per_epoch": 1, "warmup_steps": 1, "save_every": 100})
    stop_in(kind, 2, monkeypatch)
    assert vesuvius_train(config) == 75
    assert [r["step"] for r in records_of(kind)] == [1]
    checkpoint = list_checkpoints(Path("runs/tiny/checkpoints"))[-1]
    done = {"validation": "validated_step", "preview": "previewed_step"}[kind]
    assert load_checkpoint(checkpoint)[done] == 1
    assert vesuvius_train(config, "--resume") == 0
    assert load_checkpoint(checkpoint)[done] == 2, "the checkpoint of the step knows of it"
    assert [r["step"] for r in records_of("validation")] == [1, 2]
    assert [r["step"] for r in records_of("preview")] == [1, 2]
    assert len(steps_of()) == 2, "no step is done again"
    before = Path("runs/tiny/metrics.jsonl").read_bytes()
    assert vesuvius_train(config, "--resume") == 0
    assert "is already finished" in capsys.readouterr().out
    assert Path("runs/tiny/metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_a_run_of_an_extending_config_resumes_without_the_base_config(tiny_config: WriteConfig) -> None:
    base, config = tiny_config(), Path("deep/own.yaml")
    config.parent.mkdir()
    config.write_text(f"extends: ../{base.name}\ntraining: {{lr: 2e-3}}\n")
    assert vesuvius_train(config, "training.max_steps=1") == 0
    base.unlink()
    kept = Path("runs/tiny/config.source.yaml")
    assert vesuvius_train(kept, "--resume", "training.max_steps=2") == 0
    assert read_config(kept).training.lr == read_config(Path("runs/tiny/config.resolved.yaml")).training.lr == 2e-3


def test_a_time_limit_stops_saves_and_exits_75(tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(training={"epochs": 1000, "max_hours": 1.0})
    now_s, accumulate = [0.0], TrainStep.accumulate

    def half_an_hour(self: TrainStep, *arguments: Any) -> None:
        now_s[0] += 1800
        accumulate(self, *arguments)

    monkeypatch.setattr(TrainStep, "accumulate", half_an_hour)
    monkeypatch.setattr(stop_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    assert vesuvius_train(config) == 75
    assert "training.max_hours=1 reached" in Path("runs/tiny/logs/train_full.log").read_text()
    (saved,) = list_checkpoints(Path("runs/tiny/checkpoints"))
    assert load_checkpoint(saved)["step"] == steps_of()[-1]["step"] >= 1


def test_a_time_limit_reached_before_the_run_begins_leaves_nothing(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vesuvius_train(tiny_config(training={"epochs": 1000, "max_hours": 1e-6})) == 75
    assert "training.max_hours=1e-06 reached" in capsys.readouterr().out
    assert not Path("runs/tiny").exists()


@pytest.mark.long
def test_a_new_run_starts_from_the_averaged_weights_of_another_of_the_same_network(
    trained: Path, tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("second", training={"lr": 1e-30, "weight_decay": 0.0, "init_from": "runs/tiny"})
    assert vesuvius_train(config, "model.blocks_per_level=2") == 2
    assert "training.init_from" in capsys.readouterr().err
    assert not Path("runs/second").exists()
    assert vesuvius_train(config, "training.init_from=runs/nowhere") == 2
    first = load_checkpoint(list_checkpoints(Path("runs/tiny/checkpoints"))[-1])["averages"]["ema"]["weights"]
    # After the checks, as if the other run pruned it during the start.
    check = run._check_kernels

    def prune_and_check(*arguments: Any) -> Any:
        shutil.rmtree("runs/tiny/checkpoints", ignore_errors=True)
        return check(*arguments)

    monkeypatch.setattr(run, "_check_kernels", prune_and_check)
    assert vesuvius_train(config, "training.max_steps=1") == 0
    assert f"starting from the weights of {Path.cwd()}/runs/tiny/checkpoints/step_00000002" in capsys.readouterr().out
    second = load_checkpoint(list_checkpoints(Path("runs/second/checkpoints"))[-1])
    assert second["step"] == 1
    for name, weight in first.items():
        torch.testing.assert_close(second["model"][name], weight, rtol=0, atol=1e-12)  # one step of 1e-30
    assert vesuvius_train(config, "--resume", "training.max_steps=2") == 0
    assert "starting from the weights" not in capsys.readouterr().out, "a resumed run has weights of its own"
