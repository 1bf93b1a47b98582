"""Resuming with another config or data: refused, or accepted and recorded."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import textured, write_array
from tests.support.runs import WriteConfig, records_of, steps_of, vesuvius_train
from vesuvius.config.load import read_config
from vesuvius.plan.plan import Plan
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint
from vesuvius.training.checkpoint.progress import Best, Progress
from vesuvius.training.checkpoint.start import drift_effects, restore, with_network_of


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("data.patches_per_region=8", "plan.patches_per_region: was 4, is 8"),
        ("seed=1", "seed: was 0, is 1"),
        ("model.blocks_per_level=2", "model.blocks_per_level: was 1, is 2"),
    ],
)
def test_resuming_another_experiment_is_refused_with_the_differences(
    trained: Path, capsys: pytest.CaptureFixture[str], override: str, shown: str
) -> None:
    before = Path("runs/tiny/config.resolved.yaml").read_bytes()
    assert vesuvius_train(trained, "--resume", override) == 2
    assert shown in capsys.readouterr().err
    assert Path("runs/tiny/config.resolved.yaml").read_bytes() == before


def test_resuming_on_another_dtype_is_refused(trained: Path, volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volume.rename(volume.with_name("old.zarr"))
    write_array(volume, textured((96, 128, 128), dtype="uint16"))
    assert vesuvius_train(trained, "--resume") == 2
    assert "plan.volumes" in capsys.readouterr().err


def test_a_resume_on_a_volume_written_anew_says_so_once(
    tiny_config: WriteConfig, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same shape, dtype and chunks: only the voxels tell.  More patches are no other voxels."""
    config = tiny_config(training={"validate_every": 1, "validate_patches": 2})

    def warned(*overrides: str) -> bool:
        assert vesuvius_train(config, *overrides) == 0
        return "the fixed patches have other voxels" in capsys.readouterr().err

    assert not warned("training.max_steps=1")
    assert not warned(
        "--resume", "training.max_steps=2", f"data.volumes.0.path={volume.rename(volume.parent / 'moved')}"
    )
    assert not warned("--resume", "training.max_steps=3", "training.validate_patches=3", "data.volumes.0.path=moved")
    write_array(volume, textured((96, 128, 128), seed=1))
    same = "--resume", "training.validate_patches=3"
    assert warned(*same, "training.max_steps=4")
    assert not warned(*same, "training.max_steps=5")
    best = [record["best_step"] for record in records_of("validation")]
    assert best[3] == 4, "the errors of other voxels do not compare"


@pytest.mark.long
def test_accepted_drift_continues_and_is_recorded(tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    training = {"validate_every": 1, "validate_patches": 1}
    config = tiny_config(training=training, diffusion={"noise": "cosine"})
    assert vesuvius_train(config, "training.max_steps=1") == 0
    changes = ("seed=1", "diffusion.noise=linear")
    assert vesuvius_train(config, "--resume", "--allow-drift", *changes, "training.max_steps=2") == 0
    warned, accepted = capsys.readouterr().err, records_of("run_start")[1]["accepted"]
    for key in ("seed", "diffusion.noise"):
        assert re.search(rf"WARNING accepted by --allow-drift.*{key}: was", warned)
        assert any(key in line for line in accepted)
    assert [s["step"] for s in steps_of()] == [1, 2]
    assert [v["best_step"] for v in records_of("validation")] == [1, 2], "losses before and behind do not compare"


@pytest.mark.parametrize("key", ["training.validate_patches", "diffusion.sampler_condition_noise", "training.lr"])
def test_the_best_error_is_kept_unless_it_is_judged_otherwise(key: str) -> None:
    state = Progress(best=Best(4, 0.5)).state_dict() | {"omp_num_threads": "none", "torch_threads": 1}
    found: Any = SimpleNamespace(state=state, other_data=False, accepted=[], drift=[f"{key}: was 0.1, is 0.2"])
    step: Any = SimpleNamespace(load_state_dict=lambda _: None)
    assert (restore(found, step, torch.device("cpu")).best is None) == (key != "training.lr")


def test_the_default_of_noise_embedding_and_its_name_are_no_drift(trained: Path) -> None:
    stored, named = read_config(trained), read_config(trained, ["diffusion.noise_embedding=log_sigma"])
    assert with_network_of(stored, stored) == with_network_of(stored, named)


def test_drift_that_changes_weight_shapes_is_always_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vesuvius_train(trained, "--resume", "--allow-drift", "model.blocks_per_level=2") == 2
    assert "do not fit the network, even with --allow-drift" in capsys.readouterr().err


def test_intensity_ranges_are_estimated_again_only_if_the_data_changed(trained: Path, volume: Path) -> None:
    newest = lambda: load_checkpoint(list_checkpoints(Path("runs/tiny/checkpoints"))[-1])  # noqa: E731
    intensities = newest()["intensities"]
    write_array(volume.with_name("new.zarr"), textured((96, 128, 128), dtype="uint8") // 2)
    data = f"data.volumes=[{{path: {volume.with_name('new.zarr')}}}]"
    assert vesuvius_train(trained, "--resume", "--allow-drift", data, "training.max_steps=3") == 0
    assert newest()["intensities"] == intensities, "a volume may move: the same array at another place"
    other = [data, "data.patches_per_region=8", "training.max_steps=4"]
    assert vesuvius_train(trained, "--resume", "--allow-drift", *other) == 0
    assert newest()["intensities"] != intensities


def test_a_volume_may_move_and_a_setting_may_change_between_stop_and_resume(
    trained: Path, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = volume.rename(volume.with_name("moved.zarr"))
    arguments = [f"data.volumes=[{{path: {moved}}}]", "training.lr=2e-3", "training.max_steps=3"]
    assert vesuvius_train(trained, "--resume", *arguments) == 0
    shown = capsys.readouterr()
    assert "changed since the checkpoint: training.lr: was 0.001, is 0.002" in shown.out
    assert re.search(
        r"WARNING changed since the checkpoint: learning rate: \S+ in step 2, \S+ instead of \S+ in step 3", shown.err
    )


EFFECTS = [
    ("training.workers=7 training.save_every=3 training.max_steps=15 training.keep_last=9", None),
    ("training.accumulate_steps=1 training.train_batch_size=4", None),  # gives the same steps
    ("training.epochs=2", "learning rate: 0.00065 in step 12, 0.0009 instead of 0.00055 in step 13"),
    ("training.lr=1.0001e-3", "learning rate: 0.00065 in step 12, 0.00055232 instead of 0.00055226 in step 13"),
    ("training.lr=2e-3", "learning rate: 0.00065 in step 12, 0.0011 instead of 0.00055 in step 13"),
    ("training.lr_schedule=constant", "learning rate: 0.00065 in step 12, 0.001 instead of 0.00055 in step 13"),
    (
        "training.ranks=4",
        "effective batch: 4 samples per step until now, 16 from now on, at the same training.lr=0.001; the square-root "
        "rule gives training.lr=0.002, or keep 4 samples with training.train_batch_size=1 training.accumulate_steps=1",
    ),
    (
        "training.train_batch_size=1 training.accumulate_steps=1 training.ranks=3",
        "effective batch: 4 samples per step until now, 3 from now on, at the same training.lr=0.001; the square-root "
        "rule gives training.lr=0.000866",
    ),
    ("training.ema_decay=0.99", "average of the weights: over about 10 steps until now, over 100 from now on"),
]


@pytest.mark.parametrize(("overrides", "effect"), EFFECTS)
def test_the_effect_of_a_change_on_further_steps_is_reported_with_figures(
    tiny_config: WriteConfig, overrides: str, effect: str | None
) -> None:
    training = {"lr": 1e-3, "lr_schedule": "cosine", "warmup_steps": 5, "epochs": 1, "steps_per_epoch": 20}
    path = tiny_config(training=training | {"train_batch_size": 2, "accumulate_steps": 2, "ema_decay": 0.9})
    assert drift_effects(read_config(path), read_config(path, overrides.split()), 12) == ([effect] if effect else [])


def test_allow_drift_requires_resume(tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        vesuvius_train(tiny_config(), "--allow-drift")
    assert exit_info.value.code == 2
    assert "--resume" in capsys.readouterr().err


def test_another_plan_version_is_named_as_the_only_difference_and_accepted_drift_keeps_the_intensity_ranges(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data and the meaning of the weights are the same; only the voxels of sample i differ."""
    describe = Plan.describe

    def newer(self: Plan) -> dict[str, Any]:
        described = describe(self)
        del described["patches_per_region"]
        return described | {"version": described.get("version", 1) + 1, "a_new_key": 3}

    monkeypatch.setattr(Plan, "describe", newer)
    capsys.readouterr()
    assert vesuvius_train(trained, "--resume", "training.max_steps=3") == 2
    _, line, remedy = capsys.readouterr().err.splitlines()
    assert re.search(r"plan.version: was \d, is \d \(this version of vesuvius draws other samples", line)
    assert "--allow-drift" in remedy
    monkeypatch.setattr("vesuvius.stream.start.prepare.estimate_intensity_range", None)  # nobody may ask for it
    assert vesuvius_train(trained, "--resume", "--allow-drift", "training.max_steps=3") == 0
    assert [s["step"] for s in steps_of()] == [1, 2, 3]
    assert re.match(r"plan\.version: was \d, is \d ", records_of("run_start")[1]["accepted"][0])


def test_another_optimizer_is_refused_even_with_allow_drift(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--allow-drift"]):
        assert vesuvius_train(trained, "--resume", *arguments, "training.optimizer=muon") == 2
        assert "Cannot resume with training.optimizer=" in capsys.readouterr().err
