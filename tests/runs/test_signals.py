"""SIGTERM and SIGINT at awkward moments of a run that has something to lose; more in training/test_stop.py."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support import fork_server
from tests.support.kill_harness import Session
from tests.support.runs import WriteConfig, assert_same_weights, vesuvius_train
from vesuvius.errors import STOP_SIGNALS
from vesuvius.runlog.records import read_records
from vesuvius.training.checkpoint.format import find_damage, list_checkpoints, step_of

SIGTERM_IN_STEP_3 = """
import os, signal, sys
from vesuvius.commands import train
from vesuvius.training.loop import TrainingLoop
one_step = TrainingLoop._one_step
def step_and_signal(loop, *arguments):
    if loop.run.progress.step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    one_step(loop, *arguments)
TrainingLoop._one_step = step_and_signal
sys.exit(train.main(sys.argv[1:]))
"""


def checkpoint_steps(run: Path) -> list[int]:
    """Steps of all checkpoints, which must be intact."""
    paths = list_checkpoints(run / "checkpoints")
    assert [find_damage(path) for path in paths] == [None] * len(paths)
    return [step_of(path) for path in paths]


def one_step_done(config: Path, cwd: Path) -> None:
    with Session(config, cwd, "training.max_steps=1") as session:
        assert session.end() == 0, session.text()


@pytest.mark.sample(2)
@pytest.mark.parametrize("steps", [3, 4])
def test_a_sigterm_stops_the_run_before_the_last_step_but_not_in_it(
    tiny_config: WriteConfig, tmp_path: Path, steps: int
) -> None:
    config = tiny_config(training={"max_steps": steps})
    command = [sys.executable, "-c", SIGTERM_IN_STEP_3, "--config", str(config)]
    done = fork_server.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert checkpoint_steps(tmp_path / "runs/tiny") == [3]
    if steps == 3:
        assert done.returncode == 0, output
        assert "done: step 3" in output
        assert "--resume" not in output
    else:
        assert done.returncode == 75, output
        assert "stopped at step 3 of 4; continue with --resume" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_second_signal_does_not_wait_for_the_step_and_the_older_checkpoint_is_intact(
    tiny_config: WriteConfig, tmp_path: Path, number: signal.Signals
) -> None:
    config = tiny_config(training={"epochs": 1000}, monitor={"sample_every_s": 0.5})
    one_step_done(config, tmp_path)
    system = tmp_path / "runs/tiny/system.jsonl"
    system.unlink()
    # The next step has so many micro-batches that it takes minutes, and none of them is waited for.
    overrides = ("training.accumulate_steps=100000", "training.prefetch_factor=100")
    with Session(config, tmp_path, "--resume", *overrides) as session:
        # The monitor starts right before the steps.
        session.wait_until(lambda: system.exists() and len(read_records(system)) > 1, "it was in the step")
        session.process.send_signal(number)
        session.wait_for("stopping after the current step")
        session.process.send_signal(number)
        assert session.end() == -number
        assert "Train step" not in session.text()
    assert checkpoint_steps(tmp_path / "runs/tiny") == [1]


ENDLESS = """
import sys, time
from vesuvius.commands import train
{patch}
sys.exit(train.main(sys.argv[1:]))
"""
# What takes long: a step of many micro-batches, a validation of many batches, and kernels under test.
SLOW = """
def slowed(function, is_slow):
    def slow(*given, **more):
        if is_slow(*given):
            print("it takes long", flush=True)
            time.sleep(2)
        return function(*given, **more)
    return slow
"""
ENDLESS_WORK = {
    "micro-batches": """
from vesuvius.training.step import step
step.TrainStep.accumulate = slowed(step.TrainStep.accumulate, lambda self, x_0, indices, *_: indices[0] >= 12)
""",
    "validation": """
from vesuvius.training.step import step
denoiser = step.TrainStep.denoiser
step.TrainStep.denoiser = lambda *given: slowed(denoiser(*given), lambda *_: True)
""",
    "kernels": """
from vesuvius.training.step import self_test
self_test.convolution_errors = slowed(lambda *_: {}, lambda *_: True)
""",
}
CASES = [
    ("micro-batches", "TERM", 2),
    pytest.param("validation", "XCPU", 3, marks=pytest.mark.long),
    ("kernels", "INT", None),
]


@pytest.mark.parametrize(("work", "name", "saved"), CASES)
def test_a_signal_drops_work_that_takes_long_and_the_resume_is_exact(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, name: str, saved: int | None
) -> None:
    keys = {
        "accumulate_steps": 6,
        "train_batch_size": 1,
        "max_steps": 3,
        "save_every": 100,
        "optimizer": "muon",
    }
    keys |= {"validate_every": 3, "validate_patches": 2, "max_steps": 4} if work == "validation" else {}
    config = tiny_config(training=keys)
    program = ENDLESS.format(patch=SLOW + ENDLESS_WORK[work])
    overrides = ["training.amp=bf16"] * (work == "kernels")
    with Session(config, tmp_path, *overrides, program=("-c", program)) as session:
        session.wait_for("it takes long")
        session.process.send_signal(getattr(signal, f"SIG{name}"))
        if name == "XCPU":  # repeated every second
            session.wait_for("SIGXCPU: stopping")
            session.process.send_signal(signal.SIGXCPU)
        assert session.end() == (130 if name == "INT" else 75), session.text()
        assert "Traceback" not in session.text()
        assert session.text().count("it takes long") < 5, "most of it was dropped"
    run = tmp_path / "runs/tiny"
    if saved is None:
        assert not run.exists()
        return
    assert checkpoint_steps(run) == [saved] * (saved > 0)
    monkeypatch.chdir(tmp_path)
    assert vesuvius_train(config, "--resume") == 0
    assert vesuvius_train(tiny_config("straight", training=keys)) == 0
    assert_same_weights("straight")


@pytest.mark.sample(9)
@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_each_signal_of_a_scheduler_saves(tiny_config: WriteConfig, tmp_path: Path, number: signal.Signals) -> None:
    with Session(tiny_config(training={"epochs": 1000}), tmp_path) as session:
        session.wait_for("Train step 2/")
        session.process.send_signal(number)
        assert session.end() == 75, session.text()
        assert f"{number.name}: stopping" in session.text()
    assert checkpoint_steps(tmp_path / "runs/tiny")


@pytest.mark.long
def test_readers_and_daemons_survive_the_signals_of_a_scheduler(tiny_config: WriteConfig, tmp_path: Path) -> None:
    """It sends them to all processes of a job."""
    with Session(tiny_config(training={"epochs": 1000, "workers": 1}), tmp_path) as session:
        session.wait_for("Train step 40/")  # beyond the regions that the trainer reads itself
        os.killpg(session.process.pid, signal.SIGUSR1)
        assert session.end() == 75, session.text()
        assert "died" not in session.text()
    assert checkpoint_steps(tmp_path / "runs/tiny")
