"""Runs with `train_batch_size: auto`: the chosen micro-batch, and the reaction to running out of memory.

A failing allocator is simulated in the convolutions of the backward pass, when half of the gradient already exists.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_runs import ends_of, output_of, started_ranks
from tests.support.runs import WriteConfig, assert_same_weights, records_of, steps_of, vesuvius_train
from vesuvius.config import Config
from vesuvius.training.forecast import plan

OUT_OF_MEMORY = """
import torch, weakref
from torch._subclasses.fake_tensor import FakeTensor
convolve = torch.nn.functional.conv3d
def fail_beyond(batch, first=1, last=10**9):
    "In the backward passes `first` to `last` of those on more than so many patches, at their end: in the first kernel."
    passes, held = [0], []
    def fail(gradient):
        passes[0] += 1
        if first <= passes[0] <= last:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 640.00 MiB. GPU 0 has")
    def conv3d(input, *rest, **options):
        output = convolve(input, *rest, **options)
        if output.requires_grad and not input.requires_grad and not isinstance(output, FakeTensor):
            assert not any(activation() is not None for activation in held), "held while the next pass begins"
            held[:] = [weakref.ref(output.untyped_storage())]
            if len(input) > batch:
                output.register_hook(fail)
        return output
    torch.nn.functional.conv3d = conv3d
"""
EIGHT = {"accumulate_steps": 8, "max_steps": 5, "save_every": 5, "train_batch_size": "auto"}


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The planned micro-batch, and those that run out of memory."""

    def cut(planned: int, fails_beyond: int, first: int = 1) -> None:
        fit = plan.fit_micro_batch

        def fitted(config: Config, available_bytes: int, gpu: bool) -> plan.MicroBatchFit:
            found = fit(config, available_bytes, gpu)
            assert found.config.training.train_batch_size == config.training.accumulate_steps, "all fit here"
            return plan.MicroBatchFit(
                config.with_micro_batch(planned), found.step, True, f"micro-batch {planned} x {8 // planned}: as told"
            )

        monkeypatch.setattr(plan, "fit_micro_batch", fitted)
        monkeypatch.setattr(torch.nn.functional, "conv3d", torch.nn.functional.conv3d)  # put back at the end
        names = dict[str, Any]()
        exec(OUT_OF_MEMORY, names)
        names["fail_beyond"](fails_beyond, first)

    return cut


@pytest.mark.parametrize(
    ("planned", "holds", "first", "tried"),
    [
        (8, 2, 1, [(8, 4), (4, 2)]),
        pytest.param(4, 2, 2, [(4, 2)], marks=pytest.mark.long),  # in the second micro-batch of the first step
        pytest.param(2, 1, 6, [(2, 1)], marks=pytest.mark.long),  # in the second micro-batch of the second step
    ],
)
def test_a_micro_batch_that_runs_out_of_memory_is_halved_and_the_run_equals_one_with_half(
    tiny_config: WriteConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuts: Any,
    planned: int,
    holds: int,
    first: int,
    tried: list[tuple[int, int]],
) -> None:
    """Bit by bit.  Wrong programs count gradients of earlier micro-batches twice, skip or repeat samples, use other
    timesteps or noise, or count a step twice."""
    monkeypatch.chdir(tmp_path)
    eight = EIGHT | {"max_steps": 2 + (first > 1)}
    half = eight | {"train_batch_size": holds, "accumulate_steps": 8 // holds}
    assert vesuvius_train(tiny_config("half", training=half)) == 0
    cuts(planned, holds, first)
    assert vesuvius_train(tiny_config(training=eight)) == 0
    figures = ("step", "loss", "grad_norm", "lr", "samples", "sample_index", "samples_total")
    found, wanted = ([[step[name] for name in figures] for step in steps_of(run)] for run in ("tiny", "half"))
    if first == 1:
        assert found == wanted
        assert_same_weights("tiny", "half")
    else:  # steps before it added up in other parts
        assert found == [pytest.approx(step, rel=1e-5) for step in wanted]
    events = [record for record in records_of("event") if record["event"] == "micro_batch"]
    assert [(event["before"], event["now"]) for event in events] == tried
    log = (tmp_path / "runs/tiny/logs/train_full.log").read_text()
    assert log.count(" (CUDA out of memory. Tried to allocate 640.00 MiB") == len(tried)
    assert f"micro-batch {planned} x {8 // planned}: " in log


@pytest.mark.long
def test_a_single_patch_that_runs_out_of_memory_ends_the_run(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    cuts(8, 0, 1)
    assert vesuvius_train(tiny_config(training=EIGHT)) == 3
    assert [event["now"] for event in records_of("event") if event["event"] == "micro_batch"] == [4, 2, 1]
    assert "train_batch_size 1 does not fit the GPU: out of memory" in records_of("run_end")[-1]["cause"]


@pytest.mark.long
def test_a_resume_chooses_the_micro_batch_again_and_continues_at_the_next_sample(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny_config(training=EIGHT)
    assert vesuvius_train(config, "training.max_steps=2", "training.train_batch_size=2") == 0
    assert [step["samples"] for step in steps_of()] == [16, 16]
    assert vesuvius_train(config, "--resume") == 0
    assert [step["sample_index"] for step in steps_of()] == [0, 16, 32, 40, 48]
    log = (tmp_path / "runs/tiny/logs/train_full.log").read_text()
    assert "changed since the checkpoint: training.train_batch_size: was 2, is 8" in log


@pytest.mark.long
def test_the_dry_run_names_the_micro_batch_of_the_run(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(training=EIGHT)
    assert vesuvius_train(config, "--dry-run") == 0
    text = capsys.readouterr().out
    assert re.search(r"^memory +micro-batch 8 x 1: [\d.]+ \w+ of [\d.]+ GiB by the memory plan$", text, re.MULTILINE)
    assert "batch      8 x 1 = 8 samples per step" in text
    tried = []
    for mib in range(688, 620, -4):
        if vesuvius_train(config, "--dry-run", "--vram-gib", str(mib / 1024)) == 0:
            tried += re.findall(r"micro-batch (\d) x (\d)[a-z ]*: 0.\d\d GiB of", capsys.readouterr().out)
    assert {int(size) * int(count) for size, count in tried} == {8}
    assert {size for size, _ in tried} > {"8"}, "some memory takes less"


RANK_1_FAILS = f"""
import os, sys
from vesuvius.commands import train
{OUT_OF_MEMORY}
if os.environ["RANK"] == "1":
    fail_beyond(*map(int, os.environ["TEST_FAILS"].split()))
sys.exit(train.main(sys.argv[1:]))
"""


def train_two(config: Path, cwd: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setenv("TEST_FAILS", fails)
    with started_ranks(config, cwd, 2, program=("-c", RANK_1_FAILS)) as ranks:
        return ends_of(ranks)


def test_a_rank_that_runs_out_of_memory_ends_all(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are under way during the backward pass, and no rank can undo them."""
    monkeypatch.chdir(tmp_path)
    config = tiny_config(training=EIGHT | {"accumulate_steps": 2, "ranks": 2})
    assert train_two(config, tmp_path, "1 4", monkeypatch) == [3, 3], output_of(tmp_path, 2)
    assert not [each for each in records_of("event", "tiny/ranks/1") if each["event"] == "micro_batch"]
    assert len(steps_of()) == 3
    assert os.path.exists("runs/tiny/checkpoints")
