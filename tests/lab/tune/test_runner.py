"""Real trials: the real trainer as a subprocess."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from tests.chunk_server import ChunkServer
from tests.conftest import TINY_MODEL, textured, write_array
from tests.kill_harness import processes_with
from tests.lab.tune.trials import step_record, trial_of
from vesuvius.config import Config
from vesuvius.config_file import parse_config, read_config
from vesuvius.errors import EXIT_DATA, EXIT_GPU_MEMORY, EXIT_STOPPED, StorageError
from vesuvius.lab.tune.terms.trial import Outcome, Stage
from vesuvius.lab.tune.trials import process as trial_process
from vesuvius.lab.tune.trials import runner as runner_module
from vesuvius.lab.tune.trials.config import Course
from vesuvius.lab.tune.trials.measure import TaskSize
from vesuvius.lab.tune.trials.runner import RunnerOptions, SubprocessRunner, TuneInterrupted
from vesuvius.lab.tune.trials.watch import TrialFiles, TrialWatch
from vesuvius.observe.death.death import read_deaths
from vesuvius.observe.records import read_records
from vesuvius.observe.session import read_session

_HANG_S = 120
ENDLESS = {"steps_per_epoch": 100_000, "epochs": 1}
LONG = RunnerOptions(least_steps=10_000, most_steps=20_000)
TEXT = """
name: finished
data: {{volumes: [{{path: {volume}}}], patch_size: [8, 16, 16], patches_per_region: 4, regions_per_task: 4}}
training: {{train_batch_size: 2, accumulate_steps: 2, workers: 0, warmup_steps: 3, steps_per_epoch: 100000}}
model: {model}
"""


@pytest.fixture
def config(tiny_config: Callable[..., Path]) -> Config:
    return read_config(tiny_config(training=ENDLESS | {"validate_every": 500}))


@pytest.fixture
def trials(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "tiny" / "tune" / "trials"


def wait_for(happened: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _HANG_S
    while not happened():
        assert time.monotonic() < deadline, f"no {what} within {_HANG_S} s"
        time.sleep(0.02)


def kinds(run: Path) -> list[str]:
    metrics = run / "metrics.jsonl"
    return [record["kind"] for record in read_records(metrics)] if metrics.exists() else []


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Do it in another thread, whose failure is the test's."""
    failures: list[BaseException] = []

    def body() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    yield
    thread.join()
    assert not failures, failures


def when_it_trains(run: Path, act: Callable[[], None]) -> Callable[[], None]:
    def body() -> None:
        wait_for(lambda: "step" in kinds(run), "step")
        act()

    return body


def no_process_of(trials: Path) -> bool:
    return not processes_with(f"VESUVIUS_RUNS={trials.resolve()}")


def test_a_trial_measures_what_its_records_say_and_leaves_no_checkpoint(config: Config, trials: Path) -> None:
    options = RunnerOptions(least_steps=20, most_steps=24, half_width=1e-9, task_samples=16)
    outcome = SubprocessRunner(config, trials, options).run(trial_of(config))
    assert (outcome.ended, outcome.cause) == ("ok", "")
    figures = outcome.measured
    assert figures is not None
    records = read_records(trials / "000" / "metrics.jsonl")
    work_s = {r["step"]: r["step_s"] - r["pause_s"] for r in records if r["kind"] == "step"}
    # Behind each eighth step it validates and saves; of one batch ahead, two steps are left out.
    measured = [step for step in work_s if step in range(6, 9) or (step > 8 and (step - 1) % 8 >= 2)]
    window = [work_s[step] for step in measured][-figures.steps :]
    assert figures.steps >= 24
    assert figures.samples_s == pytest.approx(4 / fmean(window))
    assert figures.low < figures.samples_s < figures.high
    assert not figures.narrow
    assert figures.data_share + figures.h2d_share + figures.compute_share + figures.host_share == pytest.approx(1)
    assert figures.ram_bytes > 100 * 2**20, "torch alone is larger"
    assert figures.reader_s is not None
    assert 0 < figures.reader_s < 1
    assert [r["step"] for r in records if r["kind"] == "validation"][:3] == [8, 16, 24]
    assert not (trials / "000" / "checkpoints").exists()
    assert "saved" in (trials / "000.log").read_text(), "but one was written"
    assert Outcome.from_record(json.loads(json.dumps(outcome.record()))) == outcome


def test_a_narrow_interval_ends_a_trial_that_has_validated(config: Config, trials: Path) -> None:
    options = RunnerOptions(least_steps=20, most_steps=5000, half_width=0.9)
    outcome = SubprocessRunner(config, trials, options).run(trial_of(config))
    assert outcome.ended == "ok"
    assert outcome.measured is not None
    assert outcome.measured.narrow
    assert "validation" in kinds(trials / "000")
    assert read_records(trials / "000" / "metrics.jsonl")[-1]["exit_code"] == 75


def test_readers_of_ray_are_measured_and_end_with_the_trial(config: Config, trials: Path) -> None:
    options = RunnerOptions(least_steps=20, most_steps=24, half_width=0.5, task_samples=16)
    outcome = SubprocessRunner(config, trials, options).run(trial_of(config, 1, workers=1))
    assert outcome.ended == "ok", outcome.cause
    assert outcome.measured is not None
    assert outcome.measured.reader_s
    assert no_process_of(trials)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """The run directory of a trial of some forty steps that ended well; not to be changed."""
    root = tmp_path_factory.mktemp("finished")
    voxels = write_array(root / "volume.zarr", textured((96, 128, 128)))
    text = TEXT.format(volume=voxels, model=json.dumps(TINY_MODEL))
    config = parse_config(text)
    outcome = SubprocessRunner(config, root / "trials", RunnerOptions(least_steps=20, most_steps=30)).run(
        trial_of(config)
    )
    assert outcome.ended == "ok", outcome.cause
    return config, root / "trials"


@pytest.fixture
def watched(finished: tuple[Config, Path], tmp_path: Path) -> TrialWatch:
    """A watch over a copy of it."""
    config, trials = finished
    shutil.copytree(trials, tmp_path / "trials")
    files = TrialFiles(*(tmp_path / "trials" / f"000{suffix}" for suffix in ("", ".yaml", ".log")))
    course = Course(warmup_steps=5, pause_every=25, drain_steps=2, last_step=10_000)
    return TrialWatch(files, trial_of(config).setting, course, LONG, validates=True, task=TaskSize(16, 4))


@pytest.mark.parametrize(
    ("blocks", "steps", "expected"), [(0, 30, None), (4, 30, "enough"), (0, 45, "enough"), (0, 4, None)]
)
def test_a_narrow_interval_is_not_enough_while_nothing_is_known_of_the_readers(
    config: Config, tmp_path: Path, blocks: int, steps: int, expected: str | None
) -> None:
    (tmp_path / "000").mkdir()
    figures = {"blocks": blocks, "decode_s": 0.1 * blocks, "read_s": None}
    with (tmp_path / "000" / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            metrics.write(json.dumps(step_record(step, readers=figures)) + "\n")
    files = TrialFiles(*(tmp_path / f"000{suffix}" for suffix in ("", ".yaml", ".log")))
    course = Course(warmup_steps=5, pause_every=1000, drain_steps=2, last_step=10_000)
    options = RunnerOptions(least_steps=20, most_steps=40, half_width=0.1)
    setting = trial_of(config, workers=2).setting
    watch = TrialWatch(files, setting, course, options, False, TaskSize(16, 4))
    watch.look(1.0)
    assert watch.look(1.0 + steps) == expected


def test_short_steps_are_measured_for_as_long_as_the_start_took(config: Config, tmp_path: Path) -> None:
    """10 s, and its first step compiles for 30 s.  The others take 0.1 or 0.15 s: no interval gets narrow."""
    (tmp_path / "000").mkdir()
    files = TrialFiles(*(tmp_path / f"000{suffix}" for suffix in ("", ".yaml", ".log")))
    course = Course(warmup_steps=5, pause_every=1000, drain_steps=2, last_step=10_000)
    options = RunnerOptions(least_steps=20, most_steps=40, half_width=0.001)
    watch = TrialWatch(files, trial_of(config, workers=0).setting, course, options, False, None)
    with (tmp_path / "000" / "metrics.jsonl").open("w") as metrics:
        for step in range(1, 200):
            figures = {"step_s": 0.1 + 0.05 * (step // 7 % 2), "data_s": 0.0, "gpu_s": 30.0 if step == 1 else 0.1}
            metrics.write(json.dumps(step_record(step, **figures)) + "\n")
            metrics.flush()
            enough = watch.look(40.0 + 0.125 * step)
            if enough:
                break
    assert enough == "enough"
    assert 10.0 / 0.13 < step - course.warmup_steps < 10.0 / 0.12, "10 s of steps, though 40 steps take 5 s"


@pytest.mark.long
def test_a_trial_that_lives_on_its_first_task_is_as_fast_as_its_reader(
    tiny_config: Callable[..., Path], tmp_path: Path, volume: Path, trials: Path
) -> None:
    """A task of 24 samples needs a dozen chunks, which take 0.2 s each: 0.1 s a sample, which the tiny network computes
    in some 0.02 s.  All steps are cut from the first task."""
    training = {
        "steps_per_epoch": 20,
        "epochs": 1,
        "train_batch_size": 1,
        "accumulate_steps": 1,
        "workers": 1,
        "warmup_steps": 0,
    }
    with ChunkServer(tmp_path) as server:
        volumes = [{"path": server.url_of(volume)}]
        data = {"volumes": volumes, "store": {"requests": 1}, "patches_per_region": 6, "regions_per_task": 4}
        config = read_config(tiny_config(data=data, training=training))
        server.set_faults([{"path": r"\.zarr/\d", "kind": "delay", "delay_s": 0.2}])
        options = RunnerOptions(least_steps=6, most_steps=8, half_width=0.5, warmup_steps=3, task_samples=24)
        outcome = SubprocessRunner(config, trials, options).run(trial_of(config))
    assert outcome.ended == "ok", outcome.cause
    figures = outcome.measured
    assert figures is not None
    assert figures.reader_s is not None
    assert figures.samples_s == pytest.approx(1 / figures.reader_s)
    assert figures.bound == "data-bound"
    assert "lived on what readers had read ahead" in figures.verdict


def test_the_time_limit_ends_a_trial_and_what_it_has_measured_counts(watched: TrialWatch) -> None:
    assert watched.look(299.0) is None
    assert watched.look(300.0) == "seconds"
    ended, cause, figures = watched.outcome(EXIT_STOPPED, "seconds", killed=False)
    assert (ended, cause) == ("ok", "")
    assert figures is not None
    assert figures.steps >= 30


def test_a_trial_that_the_guard_makes_smaller_is_ended(watched: TrialWatch, tmp_path: Path) -> None:
    assert watched.look(1.0) is None
    with (tmp_path / "trials" / "000" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "event", "time": 1.0, "event": "guard", "rung": "worker", "text": "near the limit"}\n')
    assert watched.look(1.5) == "guard"
    assert watched.outcome(EXIT_STOPPED, "guard", killed=False) == ("guard", "near the limit", None)


def test_a_trial_that_dies_of_our_own_signal_while_it_ends_has_measured_all_the_same(watched: TrialWatch) -> None:
    assert watched.outcome(-signal.SIGTERM, "enough", killed=False)[0] == "ok"
    assert watched.outcome(-signal.SIGTERM, None, killed=False)[0] == "killed", "that of somebody else"


def test_a_trial_that_does_not_end_when_asked_has_failed(watched: TrialWatch) -> None:
    ended, cause, _ = watched.outcome(-signal.SIGKILL, "enough", killed=True)
    assert ended == "failed"
    assert "had to be killed 60 s after" in cause


def test_one_that_waits_in_the_kernel_has_failed_though_it_lives(watched: TrialWatch) -> None:
    ended, cause, _ = watched.outcome(None, "enough", killed=True)
    assert ended == "failed"
    assert cause == "it could not even be killed 60 s after it was asked to end: it waits for a disk or a driver"


def test_slow_steps_have_longer_to_end(watched: TrialWatch, tmp_path: Path) -> None:
    assert watched.grace_s == 60.0
    with (tmp_path / "trials" / "000" / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(step_record(60, step_s=50.0)) + "\n")
    watched.look(1.0)
    assert watched.grace_s == 180.0


def test_a_signal_without_a_name_is_a_number(watched: TrialWatch) -> None:
    ended, cause, _ = watched.outcome(-40, None, killed=False)
    assert ended == "killed"
    assert cause.startswith("killed by signal 40")


def test_steps_without_a_verdict_are_not_called_too_few(watched: TrialWatch, tmp_path: Path) -> None:
    metrics = tmp_path / "trials" / "000" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["kind"] != "verdict"))
    ended, cause, _ = watched.outcome(-signal.SIGTERM, "enough", killed=False)
    assert ended == "failed"
    assert cause.startswith("a trial must end with its own verdict; got none behind ")


@pytest.mark.parametrize(
    "text",
    [
        "one checkpoint must fit on the disk; got 9.00 GiB needed and 1.00 GiB free for runs; free some space",
        "the run directory must be writable; got [Errno 28] No space left on device; free some space",
    ],
)
def test_a_full_disk_is_no_fault_of_a_setting(watched: TrialWatch, tmp_path: Path, text: str) -> None:
    with (tmp_path / "trials" / "000.log").open("a") as log:
        log.write(f"2026-11-22 00:00:00 ERROR {text}\n")
    with pytest.raises(StorageError, match=r"000\.log.*go on with --resume"):
        watched.outcome(EXIT_DATA, None, killed=False)


def test_data_that_cannot_be_read_are_no_full_disk(watched: TrialWatch, tmp_path: Path) -> None:
    with (tmp_path / "trials" / "000.log").open("a") as log:
        log.write("2026-11-22 00:00:00 ERROR a volume must be readable; got nothing at x\n")
    assert watched.outcome(EXIT_DATA, None, killed=False)[0] == "failed"


def test_a_gpu_that_is_full_is_named_by_the_trials_own_words(watched: TrialWatch, tmp_path: Path) -> None:
    with (tmp_path / "trials" / "000.log").open("a") as log:
        log.write(
            "2026-11-22 00:00:00 ERROR a step must fit the GPU's memory; got train_batch_size 9\n  allocated  1\n"
        )
    assert watched.outcome(EXIT_GPU_MEMORY, None, killed=False) == (
        "gpu_memory",
        "a step must fit the GPU's memory; got train_batch_size 9",
        None,
    )


def test_a_trial_that_has_no_time_for_its_steps_is_a_timeout(config: Config, trials: Path) -> None:
    outcome = SubprocessRunner(config, trials, RunnerOptions(seconds=0.3)).run(trial_of(config))
    assert outcome.ended == "timeout"
    assert "at least 8 steps are needed; got 0 in 0.6 s" in outcome.cause, "the baseline has twice as long"
    assert outcome.cause.endswith("a larger --budget gives each trial more")
    assert no_process_of(trials)


def test_the_baseline_and_the_first_that_compiles_have_twice_as_long(config: Config, trials: Path) -> None:
    trials.parent.mkdir(parents=True)
    runner = SubprocessRunner(config, trials, RunnerOptions(seconds=0.3))
    kinds_of_trial: list[tuple[Stage, bool]] = [
        ("baseline", False), ("workers", False), ("switches", True), ("switches", True), ("baseline", False)
    ]  # fmt: skip
    causes = [
        runner.run(replace(trial_of(config, number, compile=compiles), stage=stage)).cause
        for number, (stage, compiles) in enumerate(kinds_of_trial)
    ]
    assert [cause.partition(" in ")[2].partition(" s;")[0] for cause in causes] == ["0.6", "0.3", "0.6", "0.3", "0.6"]


def test_a_setting_that_no_config_can_have_is_a_failed_trial(config: Config, trials: Path) -> None:
    outcome = SubprocessRunner(config, trials, LONG).run(trial_of(config, train_batch_size=0))
    assert outcome.ended == "failed"
    assert "training.train_batch_size: Input should be greater than or equal to 1" in outcome.cause
    assert "\n" not in outcome.cause


def test_a_disk_that_is_full_ends_the_tune_and_not_a_setting(tiny_config: Callable[..., Path], trials: Path) -> None:
    config = read_config(tiny_config(training=ENDLESS))
    (trials / "000.yaml").parent.mkdir(parents=True)
    (trials / "000").symlink_to("/proc/no-such-place")
    with pytest.raises(StorageError, match="go on with --resume"):
        SubprocessRunner(config, trials, LONG).run(trial_of(config))


def test_one_that_cannot_be_killed_is_given_up(
    config: Config, trials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = tmp_path / "deaf"
    deaf.write_text("#!/bin/sh\ntrap '' TERM\necho $$ > {}\nexec sleep 600\n".format(tmp_path / "pid"))
    deaf.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(deaf))
    # As if it were in the kernel, where no signal is taken.
    monkeypatch.setattr(trial_process, "_living_in_session", lambda session: [])
    monkeypatch.setattr(trial_process, "GONE_WITHIN_S", 0.1)
    monkeypatch.setattr(runner_module, "GONE_WITHIN_S", 0.1)
    monkeypatch.setattr(TrialWatch, "grace_s", 0.1)
    try:
        outcome = SubprocessRunner(config, trials, RunnerOptions(seconds=0.2)).run(trial_of(config))
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert outcome.ended == "timeout"
    assert "could not even be killed" in outcome.cause


def test_a_run_that_is_too_short_to_measure_says_so(tiny_config: Callable[..., Path], trials: Path) -> None:
    config = read_config(tiny_config(training={"steps_per_epoch": 3}))
    outcome = SubprocessRunner(config, trials, LONG).run(trial_of(config))
    assert outcome.ended == "failed"
    assert outcome.cause == "at least 8 steps are needed; got 6, and then it ended by itself"


def test_the_guard_ends_a_trial_that_does_not_fit(tiny_config: Callable[..., Path], trials: Path) -> None:
    config = read_config(tiny_config(training=ENDLESS, monitor={"ram_limit_gib": 0.2}))
    outcome = SubprocessRunner(config, trials, LONG).run(trial_of(config))
    assert outcome.ended == "guard"
    assert "monitor.ram_limit_gib counts" in outcome.cause
    assert outcome.measured is None
    assert not (trials / "000" / "checkpoints").exists()


def test_a_trial_that_is_killed_costs_itself_only(config: Config, trials: Path) -> None:
    def kill() -> None:
        session = read_session(trials / "000" / "session.json")
        assert session is not None
        os.kill(session.pid, signal.SIGKILL)

    with meanwhile(when_it_trains(trials / "000", kill)):
        outcome = SubprocessRunner(config, trials, LONG).run(trial_of(config, workers=1))
    assert outcome.ended == "killed"
    assert "the run (pid" in outcome.cause
    assert "\n" not in outcome.cause
    assert len(read_deaths(trials / "000" / "post_mortem.jsonl")) == 1
    assert no_process_of(trials), "Ray's daemons would outlive it by a minute"


def test_a_trial_that_fails_says_why_in_its_own_words(tiny_config: Callable[..., Path], trials: Path) -> None:
    config = read_config(tiny_config(data={"volumes": [{"path": "nowhere.zarr"}]}))
    outcome = SubprocessRunner(config, trials, LONG).run(trial_of(config))
    assert outcome.ended == "failed"
    assert "nowhere.zarr" in outcome.cause
    assert outcome.cause.endswith("(exit code 6)")
    assert "ERROR" not in outcome.cause


def test_a_trial_that_dies_without_a_word_is_described_by_the_last_line_of_its_log(
    config: Config, trials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("sys.executable", "/bin/false")
    outcome = SubprocessRunner(config, trials, LONG).run(trial_of(config))
    assert (outcome.ended, outcome.cause) == ("failed", "it has printed nothing (exit code 1)")


def test_stop_ends_the_trial_in_hand_and_leaves_no_process(config: Config, trials: Path) -> None:
    runner = SubprocessRunner(config, trials, LONG)
    with meanwhile(when_it_trains(trials / "000", runner.stop)), pytest.raises(TuneInterrupted):
        runner.run(trial_of(config, workers=1))
    assert no_process_of(trials)
    assert not (trials / "000" / "checkpoints").exists()
    assert (trials / "000" / "metrics.jsonl").exists()


def test_a_second_stop_kills_a_trial_that_does_not_end(config: Config, trials: Path) -> None:
    runner = SubprocessRunner(config, trials, LONG)

    def stop() -> None:
        session = read_session(trials / "000" / "session.json")
        assert session is not None
        os.kill(session.pid, signal.SIGSTOP)  # it will hear no SIGTERM
        runner.stop()
        runner.stop()

    with meanwhile(when_it_trains(trials / "000", stop)), pytest.raises(TuneInterrupted):
        runner.run(trial_of(config))
    assert no_process_of(trials)


def test_what_an_interrupted_trial_has_left_is_removed(config: Config, trials: Path) -> None:
    (trials / "000" / "checkpoints").mkdir(parents=True)
    (trials / "000" / "old").touch()
    options = RunnerOptions(least_steps=3, most_steps=3)
    assert SubprocessRunner(config, trials, options).run(trial_of(config)).ended == "ok"
    assert not (trials / "000" / "old").exists()


def test_a_trial_is_what_the_kernel_takes_first_and_keeps_the_tunes_lock(config: Config, trials: Path) -> None:
    trials.mkdir(parents=True)
    seen: dict[str, str | bool] = {}
    runner: SubprocessRunner

    def look() -> None:
        session = read_session(trials / "000" / "session.json")
        assert session is not None
        seen["score"] = Path(f"/proc/{session.pid}/oom_score_adj").read_text().strip()
        os.close(lock)  # as if the tune had been killed
        with (trials / ".lock").open("w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                seen["locked"] = True
        runner.stop()

    lock = os.open(trials / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    runner = SubprocessRunner(config, trials, replace(LONG, lock_fd=lock))
    with meanwhile(when_it_trains(trials / "000", look)), pytest.raises(TuneInterrupted):
        runner.run(trial_of(config))
    assert seen == {"score": "500", "locked": True}
    with (trials / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again
