"""A whole run with `training.autotune: act`: readers and prefetch change on the way, and what is learned does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.runs import WriteConfig, final_weights, records_of, steps_of, vesuvius_train
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


def assert_trained_alike(name: str, other: str) -> None:
    for key in ("step", "sample_index", "loss", "grad_norm"):
        assert [step[key] for step in steps_of(name)] == [step[key] for step in steps_of(other)], key
    weights, others = final_weights(name), final_weights(other)
    assert weights.keys() == others.keys()
    for key, weight in weights.items():
        assert torch.equal(weight, others[key]), key


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
def test_readers_that_come_and_go_while_a_run_trains_change_no_bit_of_it(
    tiny_config: WriteConfig, trained: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = [{"workers": 2}, {"prefetch_factor": 3}, {"workers": 1}]
    # After each change the steps that were read ahead are left out too; short tasks are few blocks ahead.
    training, data = {"prefetch_factor": 1, "steps_per_epoch": 50}, {"regions_per_task": 1}
    assert vesuvius_train(tiny_config("off", data=data, training=training)) == 0
    expected = list(trained)
    trained.clear()
    changes = list(forced)
    monkeypatch.setattr("vesuvius.training.actions.changes_of", lambda *_: changes.pop(0) if changes else {})
    act = training | {"autotune": "act", "workers": 1}
    assert vesuvius_train(tiny_config("act", data=data, training=act, monitor={"verdict_every": 2})) == 0
    assert trained == expected
    assert_trained_alike("act", "off")
    events = records_of("event", "act")
    tuned = [event for event in events if event["event"] == "autotune"]
    assert [event["refused"] for event in tuned] == [None] * 3
    reopened = [
        {key: event[key] for key in forced[n]}
        for n, event in enumerate(e for e in events if e["event"] == "reconfigured")
    ]
    assert reopened == forced
    assert max(step["workers"] for step in steps_of("act")) <= 4, "twice two while one set hands over to the next"
    steps = [event["step"] for event in tuned]
    for verdict in records_of("verdict", "act"):
        within = range(verdict["step"] - verdict["steps"], verdict["step"])
        assert not any(step in within or step + 1 in within for step in steps), "no window holds a new start"
