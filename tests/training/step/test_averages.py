"""Moving averages of the weights: recurrence, decays, and added or removed averages."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from vesuvius.training.step.optimizer import MovingAverage, load_averages

APPLIED = torch.tensor(True)


def make_network() -> nn.Module:
    move(network := nn.Linear(3, 2), 1.0)
    return network


def move(network: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(value)


@pytest.mark.parametrize("decay", [0.0, 0.15, 0.5, 0.9999])
def test_an_average_follows_its_recurrence_with_warm_up(decay: float) -> None:
    network = make_network()
    average = MovingAverage(network, decay)
    expected = 1.0
    for n in range(6):
        move(network, 2.0 + n)
        average.update(APPLIED)
        d = min(decay, (1 + n) / (10 + n))
        expected = d * expected + (1 - d) * (2.0 + n)
    for weight in average.weights.values():
        torch.testing.assert_close(weight, torch.full_like(weight, expected), rtol=1e-6, atol=0)  # rounding of lerp
    assert float(average.updates) == 6


def test_a_new_average_starts_from_the_raw_weights_and_a_removed_one_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = make_network()
    before = {name: MovingAverage(network, decay) for name, decay in {"ema": 0.9, "ema_0.5": 0.5}.items()}
    move(network, 2.0)
    for average in before.values():
        average.update(APPLIED)
    stored = copy.deepcopy({name: average.state_dict() for name, average in before.items()})
    now = {name: MovingAverage(make_network(), decay) for name, decay in {"ema": 0.9, "ema_0.8": 0.8}.items()}
    with caplog.at_level(logging.INFO):
        load_averages(now, stored, network.state_dict())
    torch.testing.assert_close(now["ema"].state_dict(), stored["ema"], rtol=0, atol=0)
    assert all((weight == 2.0).all() for weight in now["ema_0.8"].weights.values())
    assert float(now["ema_0.8"].updates) == 0
    assert [(record.levelname, record.args) for record in caplog.records] == [
        ("WARNING", ("ema_0.8",)),
        ("INFO", ("ema_0.5",)),
    ]
