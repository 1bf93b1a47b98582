"""Checkpoints are found, verified and read; damaged ones, and only these, are skipped."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from vesuvius.config import TrainingConfig
from vesuvius.errors import StorageError
from vesuvius.training.checkpoint.format import (
    digest,
    find_checkpoint,
    find_damage,
    list_checkpoints,
    load_checkpoint,
    load_state,
    newest_checkpoint,
    step_of,
    stored_averages,
)
from vesuvius.training.checkpoint.model_file import is_model_file
from vesuvius.training.checkpoint.progress import Best, Progress
from vesuvius.training.checkpoint.save import save_checkpoint

CONFIG = "name: tiny\n"
NOBODY = 65534


def state_of(step: int, size: int = 1000) -> dict[str, Any]:
    """A state with weights of this value, two averages, and the other entries."""
    weights = {"conv.weight": torch.full((size,), float(step)), "conv.bias": torch.full((), float(step))}
    averages = {
        name: {"weights": {key: value + shift for key, value in weights.items()}, "updates": torch.tensor(float(step))}
        for name, shift in (("ema", 0.5), ("ema_0.999", 0.25))
    }
    return {"step": step, "model": weights, "averages": averages, "plain": {"a": [1, 2.5, "x", None]}}


def save(
    directory: Path,
    step: int,
    keep_last: int = 3,
    size: int = 1000,
    best_step: int | None = None,
    keep_every: int | None = None,
) -> Path:
    progress = Progress(best=Best(best_step, 0.5) if best_step else None)
    state = progress.state_dict() | state_of(step, size)
    return save_checkpoint(directory, step, state, CONFIG, TrainingConfig(keep_last=keep_last, keep_every=keep_every))


def steps_in(directory: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in list_checkpoints(directory)]


def assert_same(found: Any, expected: Any) -> None:
    """Assert equal bits and dtypes."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Limit files of this process to `limit` bytes: real writes fail without filling a disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@contextmanager
def as_nobody() -> Iterator[Path]:
    """Act as a user who is bound by permissions, unlike root.  Yields a directory of theirs; pytest's own may belong to
    root."""
    with tempfile.TemporaryDirectory() as directory:
        if os.geteuid() != 0:
            yield Path(directory)
            return
        os.chown(directory, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(directory)
        finally:
            os.seteuid(0)


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Conv3d(2, 4, 3), torch.nn.Conv3d(4, 2, 3))
    network.to(memory_format=torch.channels_last_3d)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    for _ in range(2):
        network(torch.randn(1, 2, 8, 8, 8)).square().mean().backward()
        optimizer.step()
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    state = state_of(2) | {
        "model": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": {},
        "averages": {
            "ema": {"weights": {name: weight * 0.1 for name, weight in weights.items()}, "updates": torch.tensor(2.0)},
            "ema_0.5": {"weights": {name: w.double() for name, w in weights.items()}, "updates": torch.tensor(1.0)},
        },
        "half": torch.randn(5).bfloat16(),
    }
    path = save_checkpoint(tmp_path, 2, state, CONFIG, TrainingConfig(keep_last=1))
    found = load_checkpoint(path)
    assert_same(found, state)
    optimizer.load_state_dict(found["optimizer"])
    assert newest_checkpoint(tmp_path) == path
    assert stored_averages(path) == ["ema", "ema_0.5"]
    moved = tmp_path / os.fsdecode(b"caf\xe9")  # Latin-1, which safetensors and torch's mmap refuse
    path.rename(moved)
    assert_same(load_checkpoint(moved), state)
    assert load_state(moved / "state.pt", mmap=True)["step"] == 2
    assert not is_model_file(moved / "model.safetensors")


@pytest.mark.parametrize(
    ("harm", "file"),
    [
        ("flip a byte", "state.pt"),
        ("flip a byte", "model_ema_0.999.safetensors"),
        ("flip a byte", "config.yaml"),
        ("truncate", "model.safetensors"),
        ("truncate", "manifest.json"),
        ("remove", "state.pt"),
        ("remove", "manifest.json"),
        ("do not name", "model.safetensors"),
    ],
)
def test_a_damaged_file_is_named_and_its_checkpoint_skipped(
    tmp_path: Path, harm: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    match harm:
        case "flip a byte":
            flip_a_byte(bad / file)
        case "truncate":
            os.truncate(bad / file, 10)
        case "remove":
            (bad / file).unlink()
        case "do not name":
            manifest = json.loads((bad / "manifest.json").read_text())
            del manifest["files"][file]
            (bad / "manifest.json").write_text(json.dumps(manifest))
    assert find_damage(good) is None
    damage = find_damage(bad)
    assert damage is not None
    assert file in damage or file == "manifest.json"
    with pytest.raises(StorageError, match="step_00000002"):
        load_checkpoint(bad)
    assert newest_checkpoint(tmp_path) == good
    assert f"step_00000002: {damage}" in caplog.text


def test_without_an_intact_checkpoint_none_is_returned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    assert newest_checkpoint(tmp_path) is None
    assert caplog.text == ""
    for step in (1, 2):
        (save(tmp_path / "run/checkpoints", step) / "state.pt").write_bytes(b"")
    (tmp_path / "run/checkpoints/step_00000001").rename(tmp_path / "run/checkpoints/.replaced-step_00000001")
    with pytest.raises(StorageError, match=r"All checkpoints .* are damaged: .replaced-step_00000001, step_00000002"):
        find_checkpoint(tmp_path / "run")
    assert caplog.text.count("the checksum of state.pt is wrong") == 2


@pytest.mark.parametrize(("written_by", "age"), [(1, "an earlier"), (4, "a later")])
def test_a_checkpoint_of_another_version_is_refused_but_not_called_damaged(
    tmp_path: Path, written_by: int, age: str
) -> None:
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text()) | {"format": written_by}
    if written_by == 1:
        del manifest["format"]
        manifest["files"] = {"state.pt": manifest["files"]["state.pt"], "ema.safetensors": ""}
    (path / "manifest.json").write_text(json.dumps(manifest))
    for read in (newest_checkpoint, lambda directory: load_checkpoint(directory / path.name)):
        with pytest.raises(StorageError, match=f"step_00000001: {age} version of vesuvius wrote it"):
            read(tmp_path)


def test_missing_read_permission_is_an_error_and_not_damage() -> None:
    with as_nobody() as directory:
        save(directory, 1)
        newest = save(directory, 2)
        for hidden in (newest / "state.pt", newest, directory):
            mode = hidden.stat().st_mode
            hidden.chmod(0)
            with pytest.raises(StorageError, match=r"Cannot read a checkpoint: .*change the permissions"):
                newest_checkpoint(directory)
            hidden.chmod(mode)
        assert newest_checkpoint(directory) == newest


def test_a_checkpoint_being_replaced_at_a_kill_is_found_and_left_unchanged(tmp_path: Path) -> None:
    save(tmp_path, 1)
    replaced = save(tmp_path, 2).rename(tmp_path / ".replaced-step_00000002")
    assert newest_checkpoint(tmp_path) == replaced, "a reader beside the run must not rename it"
    assert step_of(replaced) == load_checkpoint(replaced)["step"] == 2
    newer = save(tmp_path, 3)
    assert newest_checkpoint(tmp_path) == newer
    replaced = newer.rename(tmp_path / ".replaced-step_00000003")
    assert newest_checkpoint(tmp_path) == replaced
    shutil.copytree(replaced, tmp_path / "step_00000003")
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000003"


def test_a_checkpoint_replaced_while_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path, 1)
    reads = []

    def save_meanwhile(file: Path) -> str:
        """Behind the second file of the checkpoint."""
        reads.append(file)
        if len(reads) == 2:
            save_checkpoint(tmp_path, 1, state_of(7), CONFIG, TrainingConfig(keep_last=1))
        return digest(file)

    monkeypatch.setattr("vesuvius.training.checkpoint.format.digest", save_meanwhile)
    assert newest_checkpoint(tmp_path) == path
    assert load_checkpoint(path)["step"] == 7
    assert caplog.text == ""


def test_the_search_ends_if_checkpoints_are_deleted_faster_than_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)

    def next_step_meanwhile(file: Path) -> str:
        file.parent.rename(tmp_path / f"step_{step_of(file.parent) + 1:08d}")
        return "another"

    monkeypatch.setattr("vesuvius.training.checkpoint.format.digest", next_step_meanwhile)
    with pytest.raises(StorageError, match=r"deleted while it was read, 10 times.*keep_last"):
        newest_checkpoint(tmp_path)
    assert caplog.text == ""
