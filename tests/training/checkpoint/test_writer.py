"""The checkpoint writer thread: its output, errors, and kills."""

from __future__ import annotations

import gc
import logging
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.support import fork_server
from tests.support.gpu import GPU, needs_gpu, sleep
from tests.training.checkpoint.test_format import CONFIG, assert_same, small_files, state_of, steps_in
from vesuvius.config import TrainingConfig
from vesuvius.errors import StorageError
from vesuvius.training.checkpoint import save as checkpoint_writer
from vesuvius.training.checkpoint.format import find_damage, load_checkpoint, newest_checkpoint
from vesuvius.training.checkpoint.save import CheckpointWriter, Snapshot, tensors_in


def writer_in(directory: Path, keep_last: int = 3, keep_every: int | None = None) -> CheckpointWriter:
    return CheckpointWriter(directory, TrainingConfig(keep_last=keep_last, keep_every=keep_every), CONFIG)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves begin when it is opened."""
    gate, save_checkpoint = threading.Event(), checkpoint_writer.save_checkpoint

    def gated(*arguments: Any) -> Path:
        assert gate.wait(60)
        return save_checkpoint(*arguments)

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", gated)
    return gate


def test_changes_after_a_save_do_not_reach_the_disk(tmp_path: Path, gate: threading.Event) -> None:
    state = state_of(1, size=1_000_000)
    with writer_in(tmp_path) as writer:
        writer.save(1, state)
        assert steps_in(tmp_path) == [], "the save is not waited for"
        for tensor in tensors_in(state):
            tensor.fill_(torch.nan)
        gate.set()
    assert_same(load_checkpoint(tmp_path / "step_00000001"), state_of(1, size=1_000_000))


def test_the_next_save_waits_for_the_previous_one(
    tmp_path: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    state = state_of(1)
    with writer_in(tmp_path) as writer:
        writer.save(1, state)
        threading.Timer(0.2, gate.set).start()
        state["model"]["conv.weight"].fill_(2)
        writer.save(2, state)
        assert find_damage(tmp_path / "step_00000001") is None
    found = [load_checkpoint(tmp_path / f"step_0000000{step}")["model"]["conv.weight"][0] for step in (1, 2)]
    assert found == [1, 2]
    assert f"saved {tmp_path / 'step_00000002'}" in caplog.text


def test_an_error_waits_for_the_pending_save(tmp_path: Path, gate: threading.Event) -> None:
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(KeyError, match="mine"), writer_in(tmp_path) as writer:  # noqa: PT012 - the save must be under way
        writer.save(7, state_of(7))
        raise KeyError("mine")
    assert find_damage(tmp_path / "step_00000007") is None


def test_a_failed_save_is_reported_and_a_later_one_succeeds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with writer_in(tmp_path, keep_last=1) as writer:
        assert writer.wait() is None
        writer.save(1, state_of(1))
        assert writer.wait() is None
        with small_files(1000):
            writer.save(2, state_of(2))
            error = writer.wait()
        assert error is not None
        assert "Cannot write checkpoint" in str(error)
        assert writer.ended.popleft().keys() == {"step", "seconds", "bytes", "saved_time"}
        assert list(writer.ended) == [{"step": 2, "text": str(error)}]
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"], "nothing half-written is left"
        assert find_damage(tmp_path / "step_00000001") is None
        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [str(error)]
        writer.save(3, state_of(3))
        assert writer.wait() is None
    assert steps_in(tmp_path) == [3]


def unpicklable() -> dict[str, Any]:
    return state_of(1) | {"no plain data": threading.Lock()}


def test_an_unexpected_error_on_the_thread_is_raised_once_by_the_next_call(tmp_path: Path) -> None:
    with writer_in(tmp_path) as writer:
        for step, call in enumerate((writer.wait, lambda: writer.save(9, state_of(9))), start=1):
            writer.save(step, unpicklable())
            with pytest.raises(TypeError, match="pickle"):
                call()
        writer.save(3, state_of(3))
        assert writer.wait() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003"]


def test_an_unexpected_error_of_the_last_save_is_raised_at_the_end_and_hides_no_other_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TypeError, match="pickle"), writer_in(tmp_path) as writer:
        writer.save(1, unpicklable())
    with pytest.raises(KeyError, match="mine"), writer_in(tmp_path) as writer:  # noqa: PT012 - the save must be under way
        writer.save(1, unpicklable())
        raise KeyError("mine")
    (record,) = caplog.records
    assert record.message == "the checkpoint writer also failed"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], TypeError)


def buffers_of(length: int) -> int:
    """Number of tensors with this many values."""
    gc.collect()
    return sum(type(found) is torch.Tensor and found.shape == (length,) for found in gc.get_objects())


def test_a_copy_that_does_not_fit_into_memory_fails_the_save_but_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = torch.ones(1).expand(54321)
    large = torch.ones(1).expand(2**45)  # one value, whose copy would be larger than an address space
    with writer_in(tmp_path) as writer:
        writer.save(1, state_of(1) | {"small": small, "large": large})
        error = writer.wait()
        assert error is not None
        assert str(error).startswith(
            "Cannot allocate host memory for a checkpoint ((35184372088832,), torch.float32): "
        )
        assert "; give the run more memory" in str(error)
        assert list(writer.ended) == [{"step": 1, "text": str(error)}]
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert buffers_of(54321) == 1, "the failure holds no memory: this one is ours"
        writer.save(2, state_of(2))
        assert writer.wait() is None
    assert steps_in(tmp_path) == [2]


def test_a_broken_gpu_is_not_reported_as_missing_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **options: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "empty_like", broken)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), shape=(3,), dtype=torch.float32)
    for synchronize, expected in ((broken, RuntimeError), (lambda: None, StorageError)):
        stream = SimpleNamespace(synchronize=synchronize)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device, stream=stream: stream)
        with pytest.raises(expected, match="illegal memory access"):
            checkpoint_writer._allocate(on_gpu)


def nested_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"a": torch.full((3, 4), value), "b": torch.full((), value, dtype=torch.float64)},
        "optimizer": {"state": {0: {"step": torch.tensor(value)}}, "param_groups": [{"betas": (0.9, 0.99), "p": [0]}]},
        "channels_last": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "empty": torch.empty(0),
        "half": torch.full((7,), value, dtype=torch.bfloat16),
        "plain": [1, "two", None, {"three": 3.0}],
    }


def test_buffers_are_reused_unless_shape_dtype_or_layout_change() -> None:
    state, snapshot = nested_state(), Snapshot()
    snapshot.take(state)
    first = snapshot.state
    assert first["channels_last"].stride() == state["channels_last"].stride()
    addresses = {name: first[name].data_ptr() for name in ("channels_last", "half")}
    state["channels_last"].mul_(2)
    snapshot.take(state)
    assert {name: snapshot.state[name].data_ptr() for name in addresses} == addresses
    assert torch.equal(snapshot.state["channels_last"], state["channels_last"])
    state["channels_last"] = state["channels_last"].contiguous()
    state["half"] = torch.ones(9)
    state["new"] = torch.ones(2)
    del state["empty"]
    snapshot.take(state)
    assert_same(snapshot.state, state)
    assert snapshot.state["channels_last"].is_contiguous()


@needs_gpu
def test_on_a_gpu_a_snapshot_does_not_wait_for_other_streams() -> None:
    """Such as that of sums with a rank that has failed, which never complete."""
    state, snapshot, sums = {"w": torch.zeros(2**20, device=GPU)}, Snapshot(), torch.Stream(GPU)
    state["w"].add_(0)  # loads the kernel, for which a GPU may finish all other work
    snapshot.take(state)
    with sums:
        sleep(1.0)
    state["w"].add_(1)
    snapshot.take(state)
    assert not sums.query()
    assert snapshot.state["w"].unique().tolist() == [1]


@needs_gpu
def test_on_a_gpu_later_updates_do_not_reach_the_snapshot() -> None:
    state, snapshot = {"w": torch.zeros(2**16, device=GPU), "host": torch.zeros(3)}, Snapshot()
    for round_ in range(3):
        sleep(0.05)
        snapshot.take(state)
        for tensor in state.values():
            tensor.add_(1)
        taken = snapshot.state
        assert taken["w"].is_pinned()
        assert taken["w"].unique().tolist() == [round_]
        assert taken["host"].unique().tolist() == [round_]


# Weights of 8 MB, and two averages of them.
SAVER = """
import sys
from itertools import count
from pathlib import Path
from tests.training.checkpoint.test_format import state_of
from tests.training.checkpoint.test_writer import writer_in
directory = Path(sys.argv[1])
with writer_in(directory, keep_last=1) as writer:
    for step in count(int(sys.argv[2])):
        writer.save(step, state_of(step, size=2_000_000) | {"best_judged": {"step": step}})
"""


def kill_while_saving(directory: Path, times: int, seed: int) -> None:
    """Kill a process that saves continuously until enough kills hit a save, and check the result of each."""
    rng, first, inside, attempts = random.Random(seed), 1, 0, 0
    while inside < times:
        assert attempts < 10 * times, f"only {inside} of {attempts} kills fell inside a save, {times} must"
        attempts += 1
        command = [sys.executable, "-c", SAVER, str(directory), str(first)]
        with fork_server.Popen(command, cwd=REPOSITORY) as process:
            while not (steps := steps_in(directory)) or steps[-1] < first:
                assert process.poll() is None
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
        inside += any(directory.glob(".partial-*"))
        newest = newest_checkpoint(directory)
        assert newest is not None
        state = load_checkpoint(newest)
        assert newest.name == f"step_{state['step']:08d}"
        assert_same(state, state_of(state["step"], size=2_000_000) | {"best_judged": {"step": state["step"]}})
        assert find_damage(directory / "best") is None
        assert state["step"] >= first
        first = state["step"] + 1


@pytest.mark.parametrize(("times", "seed"), [(2, 0), pytest.param(100, 1, marks=pytest.mark.long)])
def test_a_kill_during_a_save_leaves_an_intact_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, times: int, seed: int
) -> None:
    kill_while_saving(tmp_path, times, seed)
    assert caplog.text == "", "none is damaged"
