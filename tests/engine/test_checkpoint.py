"""Checkpoints: whole or not there, and the older one always whole."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vesuvius.engine.checkpoint import (
    find_damage,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from vesuvius.errors import StorageError


def state_of(step: int, size: int = 1000) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((size,), float(step)), "plain": {"a": [1, 2.5, "x", None]}}


def save(directory: Path, step: int, keep_last: int = 3, size: int = 1000) -> Path:
    return save_checkpoint(directory, step, state_of(step, size), {"w": torch.full((4,), float(step))}, keep_last)


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    state = load_checkpoint(path)
    assert state["plain"] == {"a": [1, 2.5, "x", None]}
    assert torch.equal(state["weights"], torch.full((1000,), 7.0))
    assert newest_checkpoint(tmp_path) == path


def test_old_ones_are_pruned_after_the_new_one_is_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10, 20):
        save(tmp_path, step, keep_last=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000010", "step_00000020"]


def test_the_exported_weights_depend_on_the_weights_alone(tmp_path: Path) -> None:
    weights = {"b": torch.arange(6.0).reshape(2, 3).T, "a": torch.ones(2)}
    first = save_checkpoint(tmp_path / "1", 1, state_of(1), weights, 1)
    second = save_checkpoint(tmp_path / "2", 99, state_of(5), dict(reversed(weights.items())), 1)
    assert (first / "ema.safetensors").read_bytes() == (second / "ema.safetensors").read_bytes()


@pytest.mark.parametrize("harm", ["flip a byte", "truncate", "no manifest", "no weights"])
def test_a_damaged_checkpoint_is_found_named_and_passed_over(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    file = bad / "state.pt"
    match harm:
        case "flip a byte":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        case "truncate":
            os.truncate(file, 100)
        case "no manifest":
            (bad / "manifest.json").unlink()
        case "no weights":
            (bad / "ema.safetensors").unlink()
    assert find_damage(good) is None
    assert find_damage(bad)
    with pytest.raises(StorageError, match="step_00000002"):
        load_checkpoint(bad)
    assert newest_checkpoint(tmp_path) == good
    assert "step_00000002 is damaged" in caplog.text


def test_a_damaged_newer_one_does_not_push_out_whole_ones(tmp_path: Path) -> None:
    save(tmp_path, 20)
    (save(tmp_path, 30) / "manifest.json").unlink()
    save(tmp_path, 25, keep_last=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000020", "step_00000025", "step_00000030"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000025"
    save(tmp_path, 30, keep_last=2)
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000030"


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.txt").touch()
    (tmp_path / "step_00000002.bak").mkdir()
    (tmp_path / "step_00000003").touch()
    for step in (4, 5):
        save(tmp_path, step, keep_last=1)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000005"]
    assert len(list(tmp_path.iterdir())) == 4


def test_checkpoints_that_are_all_damaged_are_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    (save(tmp_path, 1) / "state.pt").write_bytes(b"")
    with pytest.raises(
        StorageError, match=r"one checkpoint must be whole.*step_00000001: state.pt has another checksum"
    ):
        newest_checkpoint(tmp_path)


SAVER = """
import sys
from pathlib import Path
from tests.engine.test_checkpoint import save
directory = Path(sys.argv[1])
save(directory, 1, size=2_000_000)
print("ready", flush=True)
step = 2
while True:
    save(directory, step, keep_last=1, size=2_000_000)
    step += 1
"""


def kill_while_saving(directory: Path, times: int, seed: int) -> None:
    """Start a process that saves without end, kill it at a random moment, and check what it left; again and again."""
    delays = random.Random(seed)
    for _ in range(times):
        root = Path(__file__).parents[2]
        with subprocess.Popen(
            [sys.executable, "-c", SAVER, str(directory)], stdout=subprocess.PIPE, cwd=root, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(delays.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
        newest = newest_checkpoint(directory)
        assert newest is not None
        state = load_checkpoint(newest)
        assert newest.name == f"step_{state['step']:08d}"
        assert float(state["weights"][0]) == state["step"]


def test_a_kill_in_the_middle_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, times=4, seed=0)


@pytest.mark.long
def test_a_hundred_kills_in_the_middle_of_a_save_leave_whole_checkpoints(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, times=100, seed=1)


def test_a_full_disk_is_an_error_and_leaves_the_older_checkpoint_whole(tmp_path: Path) -> None:
    """The process may not write files of over 1 MB: a real failing write, without filling a real disk."""
    old = save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"must fit on the disk.*step_00000002.*--resume"):
            save(tmp_path, 2, keep_last=1, size=2_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert find_damage(old) is None
    assert [p.name for p in tmp_path.iterdir()] == [old.name], "nothing half-written is left"
