"""Whole runs with `training.autotune`: readers and batches ahead change on the way, and what is learned does not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.runs import WriteConfig, final_weights, records_of, steps_of, vesuvius_train
from vesuvius.monitor.steering import Action, Decision, Headroom, Learned, ReaderSetup
from vesuvius.monitor.verdict import Verdict
from vesuvius.stream.reading.reader import Reader
from vesuvius.training.step.step import TrainStep


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sample indices of each micro-batch that the network was shown."""
    shown: list[list[int]] = []
    accumulate = TrainStep.accumulate

    def noted(self: TrainStep, x_0: torch.Tensor, indices: np.ndarray[Any, Any], *rest: Any) -> None:
        shown.append(indices.tolist())
        accumulate(self, x_0, indices, *rest)

    monkeypatch.setattr(TrainStep, "accumulate", noted)
    return shown


def starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of 8 micro-batches comes after 0.6 s and then at once; each is computed for 0.05 s at the least.  So one
    batch ahead is full for most of a task, and empty when the next one is to come."""
    read, accumulate = Reader.blocks, TrainStep.accumulate

    def late(self: Reader, *arguments: Any) -> Iterator[Any]:
        time.sleep(0.6)
        yield from read(self, *arguments)

    def slow(self: TrainStep, x_0: torch.Tensor, indices: Any, t: Any, condition: Any, timed: Any, last: bool) -> None:
        with timed("forward"):
            time.sleep(0.05)
        accumulate(self, x_0, indices, t, condition, timed, last)

    monkeypatch.setattr(Reader, "blocks", late)
    monkeypatch.setattr(TrainStep, "accumulate", slow)


def assert_trained_alike(name: str, other: str) -> None:
    for key in ("step", "sample_index", "loss", "grad_norm"):
        assert [step[key] for step in steps_of(name)] == [step[key] for step in steps_of(other)], key
    weights, others = final_weights(name), final_weights(other)
    assert weights.keys() == others.keys()
    for key, weight in weights.items():
        assert torch.equal(weight, others[key]), key


def autotune_events(name: str) -> list[dict[str, Any]]:
    return [event for event in records_of("event", name) if event["event"] == "autotune"]


TRAINING = {"prefetch_factor": 1, "steps_per_epoch": 20, "max_steps": 24}
# Whatever else this machine does, so much waiting counts.
MONITOR = {"verdict_every": 8, "data_share_good": 0.05, "gpu_share_good": 0.95}


@pytest.mark.long
def test_a_starved_run_puts_more_batches_together_ahead_and_learns_the_same(
    tiny_config: WriteConfig, trained: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("off", "act", "advise"):
        if name == "act":
            expected = list(trained)
            trained.clear()
            starve(monkeypatch)
        steps = 16 if name == "advise" else 24
        training = TRAINING | {"autotune": name, "max_steps": steps}
        # Two regions come into flight every four micro-batches, so that a task lasts eight.
        data = {"regions_in_flight": 8}
        assert vesuvius_train(tiny_config(name, data=data, training=training, monitor=MONITOR)) == 0
        if name == "act":
            assert trained == expected
    assert_trained_alike("act", "off")
    first, *more = autotune_events("act")
    assert (first["step"], first["outcome"], first["action"]) == (8, "done", "more_prefetch")
    assert (first["from"], first["to"]) == (4096, 8192), "batches of two patches of 2 KiB"
    assert first["reason"].startswith("waited for data")
    assert all(event["action"] == "more_prefetch" and event["to"] == 2 * event["from"] for event in more)
    (advice,) = autotune_events("advise")
    assert (advice["outcome"], advice["override"]) == ("advised", "training.prefetch_factor=2")
    assert not [event for event in records_of("event", "advise") if event["event"] == "reconfigured"]
    assert autotune_events("off") == []
    assert "autotune: batches ahead 1 -> 2" in Path("runs/act/logs/train_full.log").read_text()


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
def test_readers_that_come_and_go_while_a_run_trains_change_no_bit_of_it(
    tiny_config: WriteConfig, trained: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[tuple[Action, int, int]] = [
        ("more_workers", 2, 1),
        ("more_prefetch", 2, 6),
        ("fewer_workers", 1, 6),
        ("less_prefetch", 1, 2),
    ]
    seen = []

    def forced(
        verdict: Verdict, now: ReaderSetup, means: Headroom, learned: Learned
    ) -> tuple[Decision | None, Learned]:
        assert means.left_bytes > 0
        assert means.reader_bytes is not None, "real readers have said what they take"
        seen.append(now)
        if not changes:
            return None, learned
        action, workers, ahead = changes.pop(0)
        return Decision(action, now, ReaderSetup(workers, ahead), "", "forced"), learned

    # After each change the steps that were read ahead are left out too; short tasks are few blocks ahead.
    training, data = {"prefetch_factor": 1, "steps_per_epoch": 50}, {"regions_per_task": 1}
    assert vesuvius_train(tiny_config("off", data=data, training=training | {"autotune": "off"})) == 0
    expected = list(trained)
    trained.clear()
    monkeypatch.setattr("vesuvius.training.autotune.decide", forced)
    act = training | {"autotune": "act", "workers": 1}
    assert vesuvius_train(tiny_config("act", data=data, training=act, monitor={"verdict_every": 2})) == 0
    assert trained == expected
    assert_trained_alike("act", "off")
    assert seen[:5] == [ReaderSetup(1, 1), ReaderSetup(2, 1), ReaderSetup(2, 6), ReaderSetup(1, 6), ReaderSetup(1, 2)]
    assert [(e["action"], e["from"], e["to"]) for e in autotune_events("act")] == [
        ("more_workers", 1, 2),
        ("more_prefetch", 4096, 6 * 4096),
        ("fewer_workers", 2, 1),
        ("less_prefetch", 6 * 4096, 2 * 4096),
    ]
    living = {step["workers"] for step in steps_of("act")}
    assert max(living) <= 4, "none once all is read, twice two while one set hands over to the next"
    assert [event["workers"] for event in records_of("event", "act") if event["event"] == "reconfigured"] == [
        2,
        2,
        1,
        1,
    ]
    reopened = [event["step"] for event in autotune_events("act")]
    for verdict in records_of("verdict", "act"):
        within = range(verdict["step"] - verdict["steps"], verdict["step"])
        assert not any(step in within or step + 1 in within for step in reopened), "no window holds a new start"
