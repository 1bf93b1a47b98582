"""Initial weights of a new run.  `vesuvius sample` is tested in `tests/runs/test_sample.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.training.checkpoint.test_format import flip_a_byte, save
from vesuvius.errors import ConfigError, StorageError
from vesuvius.training.checkpoint.start import read_initial_weights

CHECKPOINTS = "runs/other/checkpoints"


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints of runs/other: 1 (the best) and 2."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        save(Path(CHECKPOINTS), step, best_step=1)
    return Path(CHECKPOINTS)


@pytest.mark.parametrize(
    ("given", "value", "source"),
    [
        ("runs/other", 2.5, "step_00000002/model.safetensors"),
        ("other", 2.5, "step_00000002/model.safetensors"),
        (f"{CHECKPOINTS}/best", 1.5, "step_00000001/model.safetensors"),
        (f"{CHECKPOINTS}/step_00000001/state.pt", 1.5, "step_00000001/model.safetensors"),
        (f"{CHECKPOINTS}/step_00000001/model.safetensors", 1.5, "step_00000001/model.safetensors"),
        (f"{CHECKPOINTS}/step_00000001/model_ema_0.999.safetensors", 1.25, "step_00000001/model_ema_0.999.safetensors"),
    ],
)
@pytest.mark.usefixtures("checkpoints")
def test_averaged_weights_are_read_from_a_run_a_checkpoint_or_its_file(given: str, value: float, source: str) -> None:
    weights, file = read_initial_weights(Path(given))
    assert file.absolute() == Path(CHECKPOINTS, source).absolute()
    assert sorted(weights) == ["conv.bias", "conv.weight"]
    assert weights["conv.weight"].unique().tolist() == [value]


def test_a_separate_file_gives_its_weights_in_float32(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}, file)
    weights, _ = read_initial_weights(file)
    assert weights["w"].dtype == torch.float32
    assert weights["w"].tolist() == [1.5, -2.0]


def test_missing_and_damaged_models_are_refused_with_the_key(checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"init_from=nowhere is neither /.*/nowhere nor a run in /.*/runs; give",
    ):
        read_initial_weights(Path("nowhere"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to("/no/disk")
    with pytest.raises(ConfigError, match=r"run/checkpoints is a link to /no/disk, which does not exist: mount"):
        read_initial_weights(tmp_path / "run")
    file = checkpoints / "step_00000001/model.safetensors"
    flip_a_byte(file)
    for given in (file, file.parent):
        with pytest.raises(StorageError, match=r"the checksum of model.safetensors is wrong"):
            read_initial_weights(given)
    alone = shutil.copy(file, tmp_path / "alone.safetensors")
    alone.write_bytes(b"no weights")
    with pytest.raises(StorageError, match=r"Cannot read .*alone.safetensors: SafetensorError"):
        read_initial_weights(alone)
