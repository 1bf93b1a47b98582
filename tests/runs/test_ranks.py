"""Several trainer processes on one machine: results equal to one rank's, a common stop, one cause, and restarts."""

from __future__ import annotations

import json
import os
import platform
import signal
import time
from contextlib import ExitStack, chdir, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.kill_harness import Session, left_after
from tests.support.rank_runs import ends_of, output_of, started_ranks
from tests.support.recorded_runs import current_records
from tests.support.runs import WriteConfig, vesuvius_train
from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError
from vesuvius.runlog import files
from vesuvius.runlog import run_dir as run_dirs
from vesuvius.runlog.records import read_records
from vesuvius.runlog.run_dir import run_dir
from vesuvius.training.checkpoint.format import list_checkpoints, step_of
from vesuvius.training.request import Request
from vesuvius.training.run import train_as_rank

START = """
import sys
from vesuvius.commands import train
sys.exit(train.main(sys.argv[1:]))
"""

ENDS_ON_RANK_1 = """
import os, sys
from vesuvius.commands import train
from vesuvius.errors import DataError
from vesuvius.training.loop import TrainingLoop
from vesuvius.training.ranks import failure, ranks
failure._UNWIND_S, ranks._CAUSE_S = 3.0, 1.0
one_step = TrainingLoop._one_step
def step(loop, *arguments):
    if loop.run.progress.step == 2 and os.environ["RANK"] == "1":
        raise DataError("a chunk must be readable; got none")
    one_step(loop, *arguments)
TrainingLoop._one_step = step
sys.exit(train.main(sys.argv[1:]))
"""


def steps_of(run: Path, kind: str = "step") -> dict[int, dict[str, Any]]:
    """Step records of a run, as if it had never been interrupted."""
    records = current_records(read_records(run / "metrics.jsonl"))
    return {record["step"]: record for record in records if record["kind"] == kind}


def relative(one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]], *figures: str) -> float:
    """Largest relative difference of these figures of a step; default: loss and gradient norm."""
    assert list(one) == list(other)
    figures = figures or ("loss", "grad_norm")
    return max(abs(one[step][name] / other[step][name] - 1) for step in one for name in figures)


def train_with(worlds: list[tuple[int, int]], config: Path, cwd: Path, *overrides: str) -> None:
    """Sessions of a run, each with a number of ranks and a final step."""
    for number, (world, step) in enumerate(worlds):
        arguments = (f"training.max_steps={step}", *overrides, *(("--resume",) if number else ()))
        with started_ranks(config, cwd, world, *arguments) as ranks:
            assert ends_of(ranks) == [0] * world, output_of(cwd, world)


# 12 samples a step.
FOUR = {"train_batch_size": 3, "accumulate_steps": 1, "ranks": 4, "epochs": 5, "save_every": 1000}
FOUR |= {"validate_every": 2, "validate_patches": 3}


@pytest.mark.parametrize(
    ("worlds", "optimizer"),
    [
        ([(2, 2), (3, 4)], "adamw"),
        pytest.param([(4, 12), (2, 25), (3, 38), (4, 50)], "adamw", marks=pytest.mark.long),
        pytest.param([(4, 12), (2, 25), (3, 38), (4, 50)], "muon", marks=pytest.mark.long),
    ],
)
def test_any_number_of_ranks_with_resumes_trains_on_the_same_data_as_one(
    tiny_config: WriteConfig,
    tmp_path: Path,
    worlds: list[tuple[int, int]],
    optimizer: str,
) -> None:
    tiny_config("one", training=FOUR | {"optimizer": optimizer})
    several = tiny_config("several", training=FOUR | {"optimizer": optimizer})
    train_with(worlds, several, tmp_path)
    alone = ("training.ranks=1", "training.accumulate_steps=4", f"training.max_steps={worlds[-1][1]}")
    assert vesuvius_train(tmp_path / "one.yaml", *alone) == 0
    one = steps_of(tmp_path / "runs/one")
    found = steps_of(tmp_path / "runs/several")
    assert len(found) == worlds[-1][1]
    difference = relative(found, one)
    print(f"{worlds}, {optimizer}: at most {difference:.1e} from one rank")
    assert difference < 1e-5
    validations = [steps_of(tmp_path / "runs" / name, "validation") for name in ("several", "one")]
    assert len(validations[0]) > 0
    assert relative(validations[0], validations[1], "loss", "relative_error") < 1e-4
    ranks = steps_of(tmp_path / "runs/several", "ranks")
    assert all(len(record["times"]) == next(w for w, last in worlds if step <= last) for step, record in ranks.items())
    told = [one for record in ranks.values() for one in record["times"]]
    assert all(one["node"] == platform.node() and one["trainer_bytes"] > 2**20 for one in told)
    for record in found.values():
        parts = ("data_s", "h2d_s", "forward_s", "backward_s", "optimizer_s", "comm_s", "other_s")
        assert sum(record[part] for part in parts) == pytest.approx(record["step_s"], rel=1e-6)


DATA_OF_RANK_0_END = """
import os, sys, time
from vesuvius.commands import train
from vesuvius.errors import DataError
from vesuvius.stream.feeder import StreamInterrupted
from vesuvius.stream.stream import PatchStream
whole_next, asked = PatchStream.__next__, iter(range(1000))
def hanging_next(stream):
    late = next(asked) >= int(os.environ["TEST_BATCHES"])
    hangs = os.environ["RANK"] == "0" and late
    if late and "TEST_FAILS" in os.environ and not hangs:
        while not os.path.exists("waits"):
            time.sleep(0.05)
        raise DataError("a chunk must be readable; got none")
    while hangs:  # an outage
        open("waits", "w").close()
        if stream._interrupted():
            raise StreamInterrupted
        time.sleep(0.05)
    return whole_next(stream)
PatchStream.__next__ = hanging_next
from vesuvius.training import loop
loop._GRACE_S = 2.0
sys.exit(train.main(sys.argv[1:]))
"""


# Two micro-batches a step: the ninth batch is the first of step 5.
@pytest.mark.usefixtures("of_two_micro_batches")
def test_a_signal_to_one_rank_stops_all_while_another_waits_for_data(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_BATCHES", "8")
    config = tiny_config(training={"ranks": 2, "epochs": 1000})
    with started_ranks(config, tmp_path, 2, program=("-c", DATA_OF_RANK_0_END)) as ranks:
        wait_for_step(tmp_path / "runs/tiny", 4, ranks)
        while not (tmp_path / "waits").exists():
            time.sleep(0.05)
        ranks[1].terminate()
        assert ends_of(ranks, 120) == [75, 75], output_of(tmp_path, 2)
    assert [step_of(path) for path in list_checkpoints(tmp_path / "runs/tiny/checkpoints")] == [4]
    last = [max(steps_of(tmp_path / "runs/tiny" / part)) for part in (".", "ranks/1")]
    assert last == [4, 4]
    assert "Traceback" not in output_of(tmp_path, 2)


@pytest.mark.long
@pytest.mark.usefixtures("of_two_micro_batches")
def test_rank_0_saves_while_waiting_for_data_when_another_rank_fails(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be killed half a minute later, as if hanging in a collective, and lose everything since the
    last save."""
    monkeypatch.setenv("TEST_BATCHES", "9")
    monkeypatch.setenv("TEST_FAILS", "1")
    config = tiny_config(training={"ranks": 2, "epochs": 1000, "save_every": 1000})
    with started_ranks(config, tmp_path, 2, program=("-c", DATA_OF_RANK_0_END)) as ranks:
        assert ends_of(ranks, 120) == [6, 6], output_of(tmp_path, 2)
    assert [step_of(path) for path in list_checkpoints(tmp_path / "runs/tiny/checkpoints")] == [4]
    assert "rank 1 failed: a chunk must be readable" in output_of(tmp_path, 2)
    assert "hangs in a collective" not in output_of(tmp_path, 2)


def test_the_error_of_one_rank_ends_all_with_its_cause_and_keeps_earlier_steps(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    config = tiny_config(training={"ranks": 2})
    with started_ranks(config, tmp_path, 2, program=("-c", ENDS_ON_RANK_1)) as ranks:
        assert ends_of(ranks) == [6, 6], output_of(tmp_path, 2)
    log = (tmp_path / "runs/tiny/logs/train_full.log").read_text()
    assert log.count("rank 1 failed: a chunk must be readable; got none") == 1
    assert "Traceback" not in log
    assert [step_of(path) for path in list_checkpoints(tmp_path / "runs/tiny/checkpoints")] == [2]


def test_a_config_rejected_by_rank_0_ends_all_with_its_exit_code(tiny_config: WriteConfig, tmp_path: Path) -> None:
    config = tiny_config(training={"ranks": 2}, data={"volumes": [{"path": "nowhere.zarr"}]})
    with started_ranks(config, tmp_path, 2) as ranks:
        assert ends_of(ranks, 120) == [6, 6]
    assert not (tmp_path / "runs").exists()


def wait_for_step(run: Path, step: int, processes: list[Any], at_most_s: float = 240) -> None:
    deadline = time.monotonic() + at_most_s
    while time.monotonic() < deadline:
        log = run / "logs/train_full.log"
        if log.exists() and f"Train step {step}/" in log.read_text():
            return
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within {at_most_s:g} s")


def kill_rank(run: Path, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
    place = run / f"ranks/{rank}" if rank else run
    os.kill(json.loads((place / "session.json").read_text())["pid"], number)


# 4 samples a step.
PLAIN = {"save_every": 4, "workers": 1}


def assert_trained_as_one_rank(tiny_config: WriteConfig, tmp_path: Path, run: Path, epochs: int) -> None:
    steps = steps_of(run)
    whole = tiny_config("whole", training=PLAIN | {"epochs": epochs, "accumulate_steps": 2, "workers": 0})
    with chdir(tmp_path):
        assert vesuvius_train(whole, f"training.max_steps={len(steps)}") == 0
    assert relative(steps, steps_of(tmp_path / "runs/whole")) < 1e-5


@pytest.mark.long
def test_a_signal_to_the_command_saves_and_stops_ray_trains_ranks_and_one_to_a_rank_does_not(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    config = tiny_config("stopped", training=PLAIN | {"epochs": 1000, "accumulate_steps": 1, "ranks": 2})
    run, marker = tmp_path / "runs/stopped", f"TEST_OF_VESUVIUS={tmp_path}"
    with Session(config, tmp_path, environment=dict([marker.split("=", 1)])) as session:
        wait_for_step(run, 5, [session.process])
        kill_rank(run, 1, signal.SIGTERM)
        steps = max(steps_of(run))
        session.wait_until(lambda: max(steps_of(run)) > steps + 9, "it went on")
        session.process.terminate()
        assert session.end() == 75, session.text()
    assert " ERROR " not in session.text(), "an ordinary stop"
    (*_, last) = list_checkpoints(run / "checkpoints")
    assert step_of(last) == max(steps_of(run))
    assert left_after(marker, at_most_s=30) == []
    assert_trained_as_one_rank(tiny_config, tmp_path, run, epochs=1000)


@pytest.mark.long
def test_ten_killed_ranks_lose_nothing_before_the_last_checkpoint(tiny_config: WriteConfig, tmp_path: Path) -> None:
    config = tiny_config("killed", training=PLAIN | {"epochs": 20, "accumulate_steps": 1, "ranks": 2})
    run, marker, lost = tmp_path / "runs/killed", f"TEST_OF_VESUVIUS={tmp_path}", []
    with Session(config, tmp_path, environment=dict([marker.split("=", 1)])) as session:
        for number in range(10):
            wait_for_step(run, 18 * number + 9, [session.process])
            kill_rank(run, (number + 1) % 2)
            session.wait_for("continuing from", number + 1)
            lost.append(max(steps_of(run)) % PLAIN["save_every"])
        assert session.end() == 0, session.text()
    print(f"10 kills: {lost} steps behind the checkpoint, {session.age_s:.0f} s")
    assert left_after(marker, at_most_s=30) == []
    assert len(steps_of(run)) == 200
    assert_trained_as_one_rank(tiny_config, tmp_path, run, epochs=20)


@pytest.mark.long
def test_the_end_of_ray_trains_controller_ends_all_ranks_with_a_remedy(
    tiny_config: WriteConfig, tmp_path: Path
) -> None:
    config = tiny_config("killed", training=PLAIN | {"epochs": 1000, "accumulate_steps": 1, "ranks": 2})
    marker = f"TEST_OF_VESUVIUS={tmp_path}"
    with Session(config, tmp_path, environment=dict([marker.split("=", 1)])) as session:
        wait_for_step(tmp_path / "runs/killed", 5, [session.process])
        (controller,) = (process for process in psutil.process_iter(["cmdline"]) if is_controller(process, marker))
        controller.kill()
        assert session.end() == 1, session.text()
    assert "Ray Train gave up" in session.text()
    assert "Traceback" not in session.text().split("Ray Train gave up")[1]
    assert left_after(marker, at_most_s=30) == []


def is_controller(process: psutil.Process, marker: str) -> bool:
    """Whether this is the Ray Train controller of the run with this environment marker."""
    name, value = marker.split("=", 1)
    with suppress(psutil.Error):
        return "TrainController" in " ".join(process.cmdline()) and process.environ().get(name) == value
    return False


@pytest.mark.long
def test_all_ranks_train_with_the_config_of_rank_0(tiny_config: WriteConfig, tmp_path: Path) -> None:
    config = tiny_config(training={"ranks": 2, "max_steps": 2})
    other = "import os\nif os.environ['RANK'] == '1': os.environ['VESUVIUS_TRAINING__LR'] = '0.5'\n" + START
    with started_ranks(config, tmp_path, 2, program=("-c", other)) as ranks:
        assert ends_of(ranks) == [0, 0], output_of(tmp_path, 2)
    lrs = [[one["lr"] for one in steps_of(tmp_path / "runs/tiny" / part).values()] for part in (".", "ranks/1")]
    assert lrs[0] == lrs[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_only_remaining_rank_waits_for_the_previous_rank_0_and_a_single_rank_does_not(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """With `cluster.min_ranks: 1` it is restarted while its predecessor may still hold the run's lock."""
    path = tiny_config(training={"ranks": ranks})
    assert train_as_rank(Request(read_config(path, ["training.max_steps=1"]), path, resume=False)) == 0
    request, held = Request(read_config(path, ["training.max_steps=2"]), path, resume=True), ExitStack()
    held.enter_context(run_dir(request.config).locked(new=False))

    def take(descriptor: int, lock: Path) -> bool:
        if not (taken := files.take_lock(descriptor, lock)):
            held.close()  # the other one ends after the first try
        return taken

    monkeypatch.setattr(run_dirs, "take_lock", take)
    if ranks == 1:
        with pytest.raises(ConfigError, match="is in use by process"):
            train_as_rank(request)
    else:
        assert train_as_rank(request) == 0
    assert max(steps_of(tmp_path / "runs/tiny")) == ranks
