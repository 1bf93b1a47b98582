"""A rank fails in the middle of a step, and the pending sum of the others never completes, as with NCCL."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.rank_runs import ends_of, output_of, started_ranks
from tests.support.runs import WriteConfig
from vesuvius.runlog.records import read_records

# gloo's sums with NCCL's behaviour: waiting for a sum that another rank never joins, or the end of the process group,
# never returns unless the group is aborted: then it raises or, when waiting for the device, returns an invalid sum.
# "deaf": even the abort does not help.
HANGS_AS_NCCL_DOES = """
import os, sys, threading, time
import torch.distributed as dist
from vesuvius.commands import train
from vesuvius.errors import DataError
from vesuvius.training.ranks import failure
from vesuvius.training.step.step import (TrainStep)

rank, mode = int(os.environ["RANK"]), os.environ["TEST_ABORT"]
if mode == "deaf":
    failure._UNWIND_S = 3.0  # it is waited for in vain
aborted, sums = threading.Event(), []
all_reduce, accumulate, destroy = dist.all_reduce, TrainStep.accumulate, dist.destroy_process_group

class Sum:
    def __init__(self, work):
        self.work = work
        sums.append(self)

    def is_completed(self):
        return True  # the host need not wait: the device does

    def wait(self, *_):
        while not (self.work.is_completed() and self.work.is_success()):  # NCCL does not notice that a process is gone
            if aborted.is_set() and mode == "raises":
                raise RuntimeError("NCCL communicator was aborted on rank 0")
            if aborted.is_set() and mode == "returns":
                break
            time.sleep(0.01)

def summed(*arguments, **named):
    return Sum(all_reduce(*arguments, **named))

def destroyed(*arguments):
    for one in sums:
        one.wait()
    destroy(*arguments)

def accumulated(step, x_0, indices, *rest):
    if rank == int(os.environ["TEST_FAILS"]) and indices.min() >= 20:
        open("failed", "w").close()
        raise DataError("a chunk must be readable; got none")
    return accumulate(step, x_0, indices, *rest)

dist.all_reduce, TrainStep.accumulate, dist.destroy_process_group = summed, accumulated, destroyed
dist.ProcessGroup.abort = lambda group: aborted.set()
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.usefixtures("of_two_micro_batches")
@pytest.mark.parametrize(
    ("failing", "abort"),
    [
        pytest.param(1, "raises", marks=pytest.mark.long),
        pytest.param(0, "raises", marks=pytest.mark.long),
        pytest.param(1, "returns", marks=pytest.mark.long),
        (1, "deaf"),
    ],
)
def test_all_ranks_end_soon_after_one_fails_in_a_step_and_record_the_cause(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, abort: str
) -> None:
    """A program that kills processes silently or with the exit code of a kill would also end them in time; one that
    aborts and continues would record a step with an invalid gradient."""
    monkeypatch.setenv("TEST_FAILS", str(failing))
    monkeypatch.setenv("TEST_ABORT", abort)
    config = tiny_config(training={"ranks": 2, "epochs": 1000, "workers": 0})
    with started_ranks(config, tmp_path, 2, program=("-c", HANGS_AS_NCCL_DOES)) as ranks:
        while not (tmp_path / "failed").exists():
            assert all(rank.poll() is None for rank in ranks), output_of(tmp_path, 2)
            time.sleep(0.05)
        assert ends_of(ranks, 30) == [6, 6], output_of(tmp_path, 2)
    for rank in range(2):
        records = read_records(tmp_path / "runs/tiny" / (f"ranks/{rank}" if rank else "") / "metrics.jsonl")
        assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2]
        last = records[-1]
        cause = "" if rank == failing else f"rank {failing} failed: "
        assert (last["kind"], last["exit_code"]) == ("run_end", 6)
        assert last["cause"] == f"{cause}a chunk must be readable; got none"
