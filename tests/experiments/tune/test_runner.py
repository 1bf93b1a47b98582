"""Real trainers: measurements in one running process, and how each of its ends is reported."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import fork_server
from tests.support.kill_harness import processes_with
from vesuvius.config import Config
from vesuvius.config.load import dump_config, read_config
from vesuvius.experiments.trainer import trainer_config
from vesuvius.experiments.tune.measurement import Setting
from vesuvius.experiments.tune.session import TrialRunner
from vesuvius.monitor.session import read_session
from vesuvius.runlog.records import read_records
from vesuvius.stream.start.prepare import IntensityRange, IntensityRanges
from vesuvius.training.checkpoint.trained import read_facts, write_facts
from vesuvius.training.stop import StoppedError

_HANG_S = 120
# Far longer than any test takes: whoever waits for the end of such a trial hangs.
_LONG_S = 3600.0


@pytest.fixture
def config(tiny_config: Callable[..., Path]) -> Config:
    return read_config(tiny_config(training={"validate_every": 500}))


@pytest.fixture
def trials(tmp_path: Path) -> Path:
    return tmp_path / "trials"


def wait_for(happened: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + _HANG_S
    while not (found := happened()):
        assert time.monotonic() < deadline, f"no {what} within {_HANG_S} s"
        time.sleep(0.02)
    return found


def records_of(run: Path, kind: str) -> list[dict[str, Any]]:
    metrics = run / "metrics.jsonl"
    return [record for record in read_records(metrics) if record["kind"] == kind] if metrics.exists() else []


def pid_of(run: Path) -> int:
    session = read_session(run / "session.json")
    assert session is not None
    return session.pid


def no_process_of(trials: Path) -> bool:
    return not processes_with(f"VESUVIUS_RUNS={trials.resolve()}")


@contextmanager
def when_it_trains(run: Path, act: Callable[[int], object]) -> Iterator[None]:
    """Meanwhile, in another thread whose failure is the test's, do it to the pid of the trainer."""
    failures: list[BaseException] = []

    def body() -> None:
        try:
            wait_for(lambda: len(records_of(run, "step")) >= 3, "step")
            act(pid_of(run))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    yield
    thread.join()
    assert not failures, failures


@pytest.mark.long
@pytest.mark.usefixtures("of_two_micro_batches")
def test_one_trainer_measures_trial_after_trial(config: Config, trials: Path) -> None:
    """Global batches of 4 samples; a task gives 16, and so many regions are in flight."""
    config = config.model_copy(update={"data": config.data.model_copy(update={"regions_in_flight": 16})})
    setting = Setting.of(config)
    deeper, other = replace(setting, prefetch_factor=4), replace(setting, train_batch_size=4, accumulate_steps=1)
    with closing(TrialRunner(config, trials)) as lab:
        first = lab.measure(setting, "run", 0.2, _HANG_S)
        assert (first.ended, first.cause) == ("ok", "")
        pid, run = pid_of(trials / "000"), trials / "000"
        assert first.seconds > first.measured_s > 0

        # The full run: the time of its last steps, as their own records have it.
        steps = records_of(run, "step")
        assert first.samples % 4 == 0
        measured = steps[-first.samples // 4 :]
        assert first.measured_s == pytest.approx(math.fsum(step["step_s"] - step["pause_s"] for step in measured))
        waited_s = math.fsum(step["data_s"] for step in measured)
        assert first.data_share == pytest.approx(waited_s / first.measured_s)
        assert first.text == records_of(run, "verdict")[-1]["text"]
        assert first.ram_bytes is not None
        assert first.ram_bytes > 100 * 2**20, "torch alone is larger"

        # Readers and steps by themselves: what the loop sees of them is a gap in the order of samples.
        read = lab.measure(setting, "reading", 0.2, _HANG_S)
        computed = lab.measure(setting, "step", 0.2, _HANG_S)
        again = lab.measure(deeper, "run", 0.2, _HANG_S)
        assert [result.ended for result in (read, computed, again)] == ["ok"] * 3
        later = records_of(run, "step")[len(steps) :]
        assert [step["step"] for step in later] == list(range(steps[-1]["step"] + 1, later[-1]["step"] + 1))
        gap = later[0]["sample_index"] - steps[-1]["samples_total"]
        assert gap >= read.samples + 2, "one batch for all steps"
        assert computed.samples >= 3 * 4
        assert read.samples % 16 == 0, "whole cycles"
        assert read.reader_s is not None
        assert read.rate == pytest.approx(1 / read.reader_s, rel=0.7), "the trainer reads, and does nothing else"
        assert read.text == computed.text == ""

        # One process, with one validation and one checkpoint; the prefetch was changed in it.
        assert pid_of(run) == pid
        assert len(records_of(run, "validation")) == 1
        assert (trials / "000.log").read_text().count("saved ") == 1
        changes = [event for event in records_of(run, "event") if event["event"] == "reconfigured"]
        assert [(event["num_workers"], event["prefetch_factor"]) for event in changes] == [(0, 4)]

        # Another batch is another process, with another seed.  It does not measure the data again.
        facts = read_facts(trials / "data_facts.pt", config.data)
        assert facts is not None
        intensities = IntensityRanges((IntensityRange(-7.0, 777.0),), ())
        write_facts(trials / "data_facts.pt", config.data, replace(facts, intensities=intensities))
        assert lab.measure(other, "step", 0.2, _HANG_S).ended == "ok"
        assert not psutil.pid_exists(pid)
        assert pid_of(trials / "001") != pid
        assert "777.0" in (trials / "001/split.json").read_text()
        assert not (run / "checkpoints").exists()
    assert no_process_of(trials)
    assert trainer_config(config, 0).seed != trainer_config(config, 1).seed


def test_a_killed_or_stopped_trainer_costs_one_trial_and_leaves_no_process(config: Config, trials: Path) -> None:
    setting, stopped = Setting.of(config), threading.Event()
    with closing(TrialRunner(config, trials, stopping=stopped.is_set)) as lab:
        with when_it_trains(trials / "000", lambda pid: os.kill(pid, signal.SIGKILL)):
            killed = lab.measure(setting, "run", _LONG_S, _HANG_S)
        assert killed.ended == "killed"
        assert "the run (pid" in killed.cause
        assert "\n" not in killed.cause
        assert killed.rate == 0.0

        assert lab.measure(setting, "run", 0.1, _HANG_S).ended == "ok", "the next has a trainer of its own"
        pid = pid_of(trials / "001")
        os.kill(pid, signal.SIGSTOP)
        held = lab.measure(setting, "run", 0.1, 0.3)
        assert held.ended == "timeout"
        assert held.cause == "no result within 0 s"
        assert not psutil.pid_exists(pid)

        with when_it_trains(trials / "002", lambda pid: stopped.set()), pytest.raises(StoppedError):
            lab.measure(setting, "run", _LONG_S, _HANG_S)
        assert no_process_of(trials)
        with pytest.raises(StoppedError):
            lab.measure(setting, "run", _LONG_S, _HANG_S)


def test_the_guard_ends_a_setting_that_does_not_fit(tiny_config: Callable[..., Path], trials: Path) -> None:
    config = read_config(tiny_config(monitor={"ram_limit_gib": 0.2}))
    with closing(TrialRunner(config, trials)) as lab:
        result = lab.measure(Setting.of(config), "run", _LONG_S, _HANG_S)
    assert result.ended == "guard"
    assert "close to running out of memory: monitor.ram_limit_gib: " in result.cause


def test_a_trainer_ends_by_itself_when_its_tune_is_killed(config: Config, trials: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(config))
    script = """
import sys
from contextlib import closing
from pathlib import Path
from tests.support import fork_server
from vesuvius.experiments import trainer
fork_server.start_server()
def forked(command, **options):  # without the signal that ends such a process with its parent
    code = "import ctypes; ctypes.CDLL(None).prctl(1, 0); from vesuvius.commands import train; train.main(sys.argv[1:])"
    return fork_server.Popen([sys.executable, "-c", "import sys; " + code, *command[3:]], **options)
trainer.subprocess.Popen = forked
from vesuvius.config.load import read_config
from vesuvius.experiments.tune.measurement import Setting
from vesuvius.experiments.tune.session import TrialRunner
config = read_config(Path(sys.argv[1]))
with closing(TrialRunner(config, Path(sys.argv[2]))) as lab:
    lab.measure(Setting.of(config), "run", 3600.0, 3600.0)
"""
    tune = fork_server.Popen([sys.executable, "-c", script, str(tmp_path / "config.yaml"), str(trials)])
    try:
        wait_for(lambda: len(records_of(trials / "000", "step")) >= 3, "step")
        trainer = psutil.Process(pid_of(trials / "000"))
    finally:
        tune.kill()
        tune.wait()
    wait_for(lambda: not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE, "end of the trainer")
    assert records_of(trials / "000", "run_end")[-1]["exit_code"] == 75, "in good order"


def test_an_invalid_setting_is_reported_with_its_cause(config: Config, trials: Path) -> None:
    with closing(TrialRunner(config, trials)) as lab:
        invalid = lab.measure(replace(Setting.of(config), train_batch_size=0), "run", 1.0, _HANG_S)
        assert invalid.ended == "failed"
        assert "Input should be greater than or equal to 1" in invalid.cause
        trials.mkdir()
        (trials / "000").symlink_to("/proc/no-such-place")
        unwritable = lab.measure(Setting.of(config), "run", 1.0, _HANG_S)
        assert unwritable.ended == "failed"
        assert "is a link to /proc/no-such-place, which does not exist" in unwritable.cause
        assert no_process_of(trials)
