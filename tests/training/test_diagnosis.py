"""Non-finite steps: records and diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from tests.conftest import textured, write_array
from tests.training.fakes import CPU, Session
from vesuvius.commands import train
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.errors import NonFiniteError
from vesuvius.monitor.clock import StepClock, StepTimes
from vesuvius.runlog.records import read_records
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.checkpoint.format import list_checkpoints, load_checkpoint
from vesuvius.training.step.setup import build_network
from vesuvius.training.step.step import TrainStep

WriteConfig = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("of_two_micro_batches")


class LateClock(StepClock):
    """Steps finish two steps late, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[StepTimes] = []

    def finished(self, wait: bool = False) -> list[StepTimes]:
        self._late += super().finished()
        count = len(self._late) if wait else max(len(self._late) - 2, 0)
        done, self._late = self._late[:count], self._late[count:]
        return done


def spoil(path: Path, data: PreparedData, sample: int, value: float) -> None:
    """Set one voxel of a sample, outside the other first 32 samples, to this value."""
    starts = [data.plan.sample(index).start_zyx for index in range(32) if index != sample]
    first, size = data.plan.sample(sample).start_zyx, data.plan.patch_zyx
    alone = np.ones(size, bool)
    for start in starts:
        ends = zip(np.subtract(start, first), size, strict=True)
        alone[tuple(slice(max(lo, 0), max(lo + length, 0)) for lo, length in ends)] = False
    voxel = first + np.argwhere(alone)[0]
    array: Any = zarr.open_array(str(path), mode="r+")
    array[tuple(voxel)] = value


def spoiled_config(tiny_config: WriteConfig, value: float = 1e30, **sections: Any) -> Config:
    """A config on a float volume with one spoiled voxel in sample 6, the third of step 2.

    1e30 overflows float32 when squared in the loss: a real infinity.
    """
    path = write_array(Path("floats.zarr").absolute(), textured((96, 128, 128), dtype="float32"))
    data = {
        "volumes": [{"path": str(path)}],
        "normalize": {"low": 0.0, "high": 200.0},
    }
    config = read_config(tiny_config(data=data, **sections))
    spoil(path, prepare_data(config.seed, config.data), 6, value)
    return config


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_names_sample_and_layer(tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    # A model value of 3e5: more than fp16 holds, whose largest number is 65504, and little for float32.
    config = spoiled_config(tiny_config, value=3e7, training={"amp": "fp16"})
    assert train.main(["--config", "tiny.yaml"]) == 5
    said = capsys.readouterr().err
    run = Path("runs/tiny")
    (event,) = [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "event"]
    timesteps = stratified_timesteps(config.seed, 1, 4, 1000).tolist()
    assert (event["step"], event["samples"], event["cause"], event["offending"]) == (2, [4, 8], "loss", [6])
    assert event["timesteps"] == timesteps
    assert [loss is None for loss in event["losses"]] == [False, False, True, False]
    assert event["layer"] in dict(build_network(config, CPU).named_modules())
    assert 0 < event["input_max"] < math.inf
    assert len(event["gradients"]) > 0
    assert f"samples 4 to 7, loss not finite for 6 (t {timesteps[2]})" in said
    assert f"first non-finite output: {event['layer']}, sample 6; largest finite |x|" in said
    assert load_checkpoint(list_checkpoints(run / "checkpoints")[-1])["step"] == 2


def test_a_non_finite_gradient_is_distinguished_from_a_loss_and_named(tiny_config: WriteConfig) -> None:
    session = Session(read_config(tiny_config()), Path.cwd())
    name, weight = next(iter(session.step.network.named_parameters()))
    weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match="samples 0 to 3, all losses finite"):
        session.run(1)
    (event,) = session.records("event")
    assert (event["cause"], event["offending"], event["grad_norm"]) == ("gradient", [], None)
    assert (event["layer"], event["gradients"]) == (None, [name])


def test_steps_launched_before_a_bad_one_is_noticed_are_rolled_back(tiny_config: WriteConfig) -> None:
    """Diagnosis leaves nothing behind either."""
    config = spoiled_config(tiny_config)
    session = Session(config, Path.cwd(), LateClock())
    with pytest.raises(NonFiniteError) as error:
        session.run(8)
    assert error.value.step == 2
    Path("before").mkdir()
    before = Session(config, Path("before"))
    before.run(1)
    torch.testing.assert_close(_lasting(session.step), _lasting(before.step), rtol=0, atol=0)


def _lasting(step: TrainStep) -> list[Any]:
    state = step.state_dict()
    return [state["model"], state["optimizer"]["state"], state["averages"]]


def test_diagnosis_does_not_change_the_training(
    tiny_config: WriteConfig,
) -> None:
    config = spoiled_config(tiny_config, training={"max_nonfinite": 2})
    sessions = []
    for name, again in (("again", None), ("not", lambda batches: 1 / 0)):
        Path(name).mkdir()
        sessions.append(session := Session(config, Path(name), again=again))
        session.run(4)
    torch.testing.assert_close(_lasting(sessions[0].step), _lasting(sessions[1].step), rtol=0, atol=0)
    assert [session.records("event")[0]["layer"] is None for session in sessions] == [False, True]


def test_batches_are_released_once_their_step_is_reported(tiny_config: WriteConfig) -> None:
    session = Session(read_config(tiny_config()), Path.cwd(), LateClock())
    session.run(4)
    assert [batch() for batch in session.kept] == [None] * 8
