"""Whole runs with non-finite losses."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import textured, write_array
from tests.support.rank_runs import ends_of, output_of, started_ranks
from tests.support.runs import WriteConfig, records_of, steps_of, vesuvius_train
from vesuvius.errors import DataError
from vesuvius.monitor.clock import StepClock, StepTimes
from vesuvius.runlog.records import read_records
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint
from vesuvius.training.step.step import TrainStep

pytestmark = pytest.mark.usefixtures("of_two_micro_batches")


class LateClock(StepClock):
    """A host clock that reports a step only after the next one, as a GPU's does."""

    def finished(self, wait: bool = False) -> list[StepTimes]:
        done = super().finished()
        late = [*getattr(self, "_late", []), *done]
        self._late = [] if wait else late[-1:]
        return late if wait else late[:-1]


@pytest.mark.parametrize("behind", [pytest.param("another error", marks=pytest.mark.long), "the end"])
def test_a_non_finite_step_is_noticed_although_its_figures_arrive_late(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    """Steps launched after it do not count: a resume repeats them."""
    monkeypatch.setattr("vesuvius.training.loop.make_clock", lambda device: LateClock())
    bad_step = 3
    accumulate = TrainStep.accumulate

    def poisoned(self: TrainStep, x_0: torch.Tensor, indices: Any, *rest: Any) -> None:
        step = int(indices[0]) // 4 + 1
        if step == bad_step + 1 and behind == "another error":
            raise DataError("a volume must be there; got none; mount it")
        accumulate(self, x_0 * math.inf if step == bad_step else x_0, indices, *rest)

    monkeypatch.setattr(TrainStep, "accumulate", poisoned)
    assert vesuvius_train(tiny_config()) == 5
    (event,) = records_of("event")
    assert (event["event"], event["step"]) == ("nonfinite", bad_step)
    assert load_checkpoint(list_checkpoints(Path("runs/tiny/checkpoints"))[-1])["step"] == bad_step
    assert [s["step"] for s in steps_of()] == list(range(1, bad_step + 1))


LATE_ON_RANK_0 = """
import math, os, sys
from tests.runs.test_nonfinite import LateClock
from vesuvius.commands import train
from vesuvius.training import loop
from vesuvius.training.step.step import TrainStep
if os.environ["RANK"] == "0":
    loop.make_clock = lambda device: LateClock()
accumulate = TrainStep.accumulate
def poisoned(self, x_0, indices, *rest):
    return accumulate(self, x_0 * math.inf if indices[0] // 4 == 2 else x_0, indices, *rest)
TrainStep.accumulate = poisoned
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("validate_every", [pytest.param(0, marks=pytest.mark.long), 3])
def test_the_ranks_end_together_after_a_step_that_rank_0_is_last_to_know_of(
    tiny_config: WriteConfig, tmp_path: Path, validate_every: int
) -> None:
    """As on GPUs.  A rank that ends at once makes rank 0 report its failure instead, and on a GPU save nothing."""
    keys = {"ranks": 2, "train_batch_size": 2, "accumulate_steps": 1, "validate_every": validate_every}
    config = tiny_config(training=keys | {"validate_patches": 2})
    program = ("-c", LATE_ON_RANK_0)
    environment = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path.cwd()), environment]))
        with started_ranks(config, tmp_path, 2, program=program) as ranks:
            assert ends_of(ranks) == [5, 5], output_of(tmp_path, 2)
    assert "step 3 was not finite: stopping after the current step" in output_of(tmp_path, 2)
    ended = read_records(tmp_path / "runs/tiny/metrics.jsonl")[-1]
    assert (ended["kind"], ended["exit_code"]) == ("run_end", 5)
    assert ended["cause"].startswith("Loss or gradient not finite: step 3 ")
    assert load_checkpoint(list_checkpoints(tmp_path / "runs/tiny/checkpoints")[-1])["step"] == 3


@pytest.mark.long
def test_consecutive_bad_steps_are_counted_across_a_resume(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulate = TrainStep.accumulate

    def poisoned(self: TrainStep, x_0: torch.Tensor, indices: Any, *rest: Any) -> None:
        accumulate(self, x_0 * math.inf if 2 <= int(indices[0]) // 4 + 1 <= 4 else x_0, indices, *rest)

    monkeypatch.setattr(TrainStep, "accumulate", poisoned)
    config = tiny_config(training={"max_nonfinite": 3})
    assert vesuvius_train(config, "training.max_steps=3") == 0
    assert vesuvius_train(config, "--resume") == 5
    assert steps_of()[-1]["step"] == 4
    assert vesuvius_train(config, "--resume", "training.max_steps=6") == 0, "behind the bad steps it trains on"
    assert [s["finite"] for s in steps_of()[4:]] == [True, True]


def test_a_nonfinite_loss_stops_the_run_with_exit_5_and_is_never_applied(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    # Voxels of 1e30 overflow float32 when squared in the loss: a real infinity, not a planted one.
    voxels = textured((96, 128, 128), dtype="float32")
    voxels[:] = 1e30
    path = write_array(Path("huge.zarr").absolute(), voxels)
    data = {"volumes": [{"path": str(path)}], "normalize": {"low": 0.0, "high": 1.0}}
    # Spectral noise standardizes: there 1e30 is as good as any other number.
    config = tiny_config(data=data, training={"max_nonfinite": 3}, diffusion={"noise": "cosine"})
    assert vesuvius_train(config) == 5
    error = capsys.readouterr().err
    assert "not finite" in error
    assert "3 in a row" in error
    records = read_records(Path("runs/tiny/metrics.jsonl"))
    events = [record for record in records if record["kind"] == "event"]
    assert [(e["step"], e["samples"], e["loss"]) for e in events] == [
        (n + 1, [4 * n, 4 * n + 4], None) for n in range(3)
    ]
    state = load_checkpoint(list_checkpoints(Path("runs/tiny/checkpoints"))[-1])
    assert state["step"] == 3, "a resume goes on behind the bad steps"
    assert float(state["averages"]["ema"]["updates"]) == 0
    assert (records[-1]["kind"], records[-1]["step"], records[-1]["exit_code"]) == ("run_end", 3, 5)
    assert "Loss or gradient not finite" in records[-1]["cause"]
