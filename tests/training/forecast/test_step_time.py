"""The predicted time of a step is that of the steps themselves, or a range."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.support.tiny import tiny_sections
from vesuvius.config import Config
from vesuvius.config.load import parse_config
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.training.forecast import step_time
from vesuvius.training.forecast.step_time import StepTime, predict_step_time
from vesuvius.training.step.step import TrainStep

CPU = torch.device("cpu")
SPECTRUM = Spectrum(0.0, 1.0, np.ones((8, 16, 9), np.float32), 16)


def tiny(**training: object) -> Config:
    sections = tiny_sections("tiny", Path("v.zarr"))
    sections["model"] |= {"scalars": ["level"]}
    sections["data"]["condition_classes"] = 2
    sections["data"]["volumes"][0]["condition"] = {"path": "labels.zarr"}
    return parse_config(yaml.safe_dump(sections | {"training": sections["training"] | training}))


@pytest.fixture
def calls_s(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Seconds that micro-batches and updates have taken; a micro-batch takes 50 ms more than its operations say."""
    taken: dict[str, list[float]] = {"accumulate": [], "apply": []}

    def timed(name: str, extra_s: float) -> None:
        original = getattr(TrainStep, name)

        def call(self: TrainStep, *args: Any) -> Any:
            began = time.perf_counter()
            time.sleep(extra_s)
            result = original(self, *args)
            taken[name].append(time.perf_counter() - began)
            return result

        monkeypatch.setattr(TrainStep, name, call)

    timed("accumulate", 0.05)
    timed("apply", 0.01)
    monkeypatch.setattr(step_time, "_MEASURED_S", 0.2)
    return taken


def test_a_quick_step_is_measured_with_all_its_micro_batches(calls_s: dict[str, list[float]]) -> None:
    found = predict_step_time(tiny(accumulate_steps=3), SPECTRUM, CPU, flops_per_step=1000)
    first, *micro_batches = calls_s["accumulate"]
    assert first > 0
    assert found.measured
    assert len(micro_batches) >= 2
    update = calls_s["apply"][-1]
    # The clock around a call has little more in it than the clock within.
    assert found.low_s >= 3 * min(micro_batches) + update
    assert found.high_s <= 3 * (max(micro_batches) + 0.05) + update + 0.05
    if max(micro_batches) > 1.5 * min(micro_batches):
        assert found.high_s > found.low_s


@pytest.mark.parametrize("changes", [{}, {"compile": True}])
def test_a_slow_step_is_given_as_a_range_and_not_run(calls_s: dict[str, list[float]], changes: dict[str, Any]) -> None:
    found = predict_step_time(tiny(**changes), SPECTRUM, CPU, flops_per_step=1000 if changes else 10**15)
    assert not found.measured
    assert found.high_s >= 2 * found.low_s > 0
    assert not calls_s["accumulate"]


def test_a_range_is_shown_as_one() -> None:
    found = StepTime(0.5, 2.0, True, "")
    assert (found.step_text, found.run_text(120)) == ("0.5 s to 2 s", "1m00s to 4m00s")
    found = StepTime(0.5, 0.5, True, "")
    assert (found.step_text, found.run_text(120)) == ("0.5 s", "1m00s")
