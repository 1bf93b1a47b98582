"""The monitor: a record per window, the rest at the end, orders of the guard; it never ends the run."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.monitor.memory.simulated import process
from tests.support.small_disk import fill, small_disk
from vesuvius.monitor import monitor as monitor_module
from vesuvius.monitor.memory.guard import LoopStatus, Order
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.memory.risk import Level
from vesuvius.monitor.monitor import Monitor, kills_text
from vesuvius.monitor.probes import system_sample
from vesuvius.monitor.probes.cgroup import CgroupUse
from vesuvius.monitor.probes.gpus import GpuUse, VramUse
from vesuvius.monitor.probes.system_sample import SystemSample, Watcher, read_machine
from vesuvius.monitor.probes.vram import gpu_uuid
from vesuvius.runlog.records import read_records
from vesuvius.runlog.run_dir import RunDir

GIB = 2**30


@pytest.fixture(autouse=True)
def roomy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs may fill the memory of this machine; no test here is about that."""

    def roomy() -> system_sample.MachineUse:
        machine = read_machine()
        return replace(machine, available_bytes=machine.total_bytes)

    monkeypatch.setattr(system_sample, "read_machine", roomy)


class ScriptedWatcher(Watcher):
    """Samples this process, with its memory given by a function of the number of the sample."""

    def __init__(self, anon_bytes: Callable[[int], int]) -> None:
        super().__init__(os.getpid())
        self._anon_bytes = anon_bytes
        self.samples = 0

    def sample(self) -> SystemSample:
        self.samples += 1
        real = super().sample()
        return replace(real, processes=(process(os.getpid(), self._anon_bytes(self.samples)),), shared_bytes=GIB // 4)


def in_dir(place: Path) -> RunDir:
    directory = RunDir(place)
    directory.make_folders()
    return directory


def wait_until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in 30 s"
        time.sleep(0.01)


def test_each_window_becomes_a_record_including_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = ScriptedWatcher(lambda sample: sample * 2**20)
    shared: list[dict[str, Any]] = []
    reads = itertools.count(1)

    def read() -> VramUse:
        n = next(reads)
        return VramUse(n, 10 * n, 100 - n, 1000 - n, 2000, retries=0, failures=0)

    monkeypatch.setattr(monitor_module, "RECORD_S", 0.2)
    monkeypatch.setattr(monitor_module, "SINGLE_RECORDS", 1)
    with Monitor(
        in_dir(tmp_path), MemoryPolicy(), watcher, read, sample_every_s=0.05, on_record=shared.append
    ) as monitor:
        monitor.loop_status = LoopStatus(step=7, readers={123: GIB})
        wait_until(lambda: len(shared) > 2)
    records = read_records(tmp_path / "system.jsonl")
    assert shared == records
    assert [record["samples"] for record in records[:3]] == [1, 4, 4], "short runs have a course, too"
    assert 1 <= records[-1]["samples"] <= 4
    assert sum(record["samples"] for record in records) == watcher.samples - 1, "the first look is that of the start"
    for record in records[2:]:
        low, mean, high = record["trainer_bytes"]
        assert high - low == (record["samples"] - 1) * 2**20
        assert low <= mean <= high
        assert record["used_bytes"][0] == low + GIB // 4 < record["limit_bytes"]
        assert record["readers"] == {"123": GIB}
        assert record["step"] == 7
        low, _, high = record["vram"]["reserved_bytes"]
        assert high - low == 10 * (record["samples"] - 1)
        assert record["vram"]["free_bytes"] == 1000 - high // 10
        assert record["vram"]["peak_bytes"] == 100 - low // 10
        assert record["disk"]["run_bytes"] < record["disk"]["free_bytes"]


def test_an_exit_order_is_passed_on_at_once_and_only_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run exceeds its own limit at once, so only an exit is left."""
    orders: list[Order] = []
    caplog.set_level(logging.INFO, "vesuvius")
    limits = MemoryPolicy(configured_bytes=4 * GIB)
    watcher = ScriptedWatcher(lambda sample: GIB if sample < 4 else 4 * GIB - GIB // 4 - 1)
    with Monitor(in_dir(tmp_path), limits, watcher, sample_every_s=0.02, on_exit=orders.append) as monitor:
        wait_until(lambda: orders and watcher.samples > 10)
        assert monitor.order == orders[0]
        assert monitor.risk.level == Level.CRITICAL
        assert monitor.memory_is_short()
    assert [order.action for order in orders] == ["exit"]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1, warnings
    assert "out of memory" in warnings[0]
    assert "monitor.ram_limit_gib" in warnings[0]
    assert read_records(tmp_path / "system.jsonl")[-1]["risk"] == "CRITICAL"


def test_memory_of_other_programs_causes_a_warning_but_no_exit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Crowded(ScriptedWatcher):
        """A machine with 1 % left, on which this run uses almost nothing."""

        def sample(self) -> SystemSample:
            sample = super().sample()
            return replace(sample, machine=replace(sample.machine, available_bytes=sample.machine.total_bytes // 100))

    orders: list[Order] = []
    watcher = Crowded(lambda sample: 2**20)
    with Monitor(in_dir(tmp_path), MemoryPolicy(), watcher, sample_every_s=0.02, on_exit=orders.append):
        wait_until(lambda: watcher.samples > 5 and "other programs the rest" in caplog.text)
    assert orders == []
    (risk,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert risk.startswith("risk of an out of memory kill is CRITICAL")
    assert "this run uses " in risk


def test_a_hung_disk_or_gpu_driver_does_not_blind_the_guard(tmp_path: Path) -> None:
    """The limit is exceeded while the first record waits for the disk, and torch for the driver."""
    answers = threading.Event()
    orders: list[Order] = []

    def read() -> None:
        answers.wait(60)

    def hang(record: dict[str, Any]) -> None:
        answers.wait(60)

    watcher = ScriptedWatcher(lambda sample: GIB if sample < 10 else 4 * GIB)
    limits, often = MemoryPolicy(configured_bytes=4 * GIB), {"sample_every_s": 0.02}
    with Monitor(in_dir(tmp_path), limits, watcher, read, on_exit=orders.append, on_record=hang, **often):
        wait_until(lambda: orders)
        answers.set()
    assert sum(r["samples"] for r in read_records(tmp_path / "system.jsonl")) == watcher.samples - 1, "nothing is lost"


@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_our_gpu_is_identified_by_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of two GPUs, the first fails every other time, and ours is the idle one.  torch's UUID lacks the prefix."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="5-f"))
    monkeypatch.setattr(monitor_module, "SINGLE_RECORDS", 0)
    ours = gpu_uuid(torch.device("cuda"))

    class Two(ScriptedWatcher):
        def sample(self) -> SystemSample:
            gpus = [GpuUse(i, f"{kind}-{i}-f", "H200", i, 80, busy, None, None) for i, busy in ((3, 1.0), (5, 0.1))]
            return replace(super().sample(), gpus=tuple(gpus[self.samples % 2 :]))

    watcher = Two(lambda n: n)
    with Monitor(in_dir(tmp_path), MemoryPolicy(), watcher, gpu_uuid=ours, sample_every_s=0.02) as monitor:
        wait_until(lambda: monitor.gpu_busy() is not None and watcher.samples > 4)
        assert monitor.gpu_busy() == pytest.approx(0.1)
    first, second = read_records(tmp_path / "system.jsonl")[0]["gpus"]
    assert (first["index"], first["busy"]) == (3, [1.0, 1.0, 1.0])
    assert (second["index"], second["busy"]) == (5, [0.1, 0.1, 0.1])


def test_stopped_and_ended_local_readers_are_recognized(tmp_path: Path) -> None:
    """Readers on other machines count as they report."""
    with (
        subprocess.Popen(["sleep", "60"]) as reader,
        Monitor(in_dir(tmp_path), MemoryPolicy(), Watcher(os.getpid()), sample_every_s=0.02) as monitor,
    ):
        monitor.loop_status = LoopStatus(readers={reader.pid: 7 * GIB, 2**22 + 5: GIB})
        wait_until(lambda: monitor.recent_samples()[-1].readers.get(reader.pid, 7 * GIB) < GIB)
        assert monitor.stopped_readers() == 0
        reader.send_signal(signal.SIGSTOP)
        wait_until(lambda: monitor.stopped_readers() == 1)
        reader.send_signal(signal.SIGCONT)
        wait_until(lambda: monitor.stopped_readers() == 0)
        reader.kill()
        reader.wait()
        wait_until(lambda: monitor.recent_samples()[-1].readers == {2**22 + 5: GIB})


def test_readers_of_a_shared_ray_count_towards_the_run(tmp_path: Path) -> None:
    """As under Ray Train, where readers are children of a raylet: they count towards `monitor.ram_limit_gib`."""
    with (
        subprocess.Popen(["sleep", "60"]) as trainer,
        subprocess.Popen(["sleep", "60"]) as reader,
        Monitor(in_dir(tmp_path), MemoryPolicy(), Watcher(trainer.pid), sample_every_s=0.02) as monitor,
    ):
        assert [process.pid for process in monitor.sample.processes] == [trainer.pid]
        alone = monitor.sample.used_bytes
        monitor.loop_status = LoopStatus(readers={reader.pid: 1}, local_readers=frozenset({reader.pid}))
        wait_until(lambda: len(monitor.sample.processes) > 1)
        assert [process.pid for process in monitor.sample.processes] == [trainer.pid, reader.pid]
        wait_until(lambda: monitor.recent_samples()[-1].used_bytes > alone)
        reader.kill()
        reader.wait()
        wait_until(lambda: len(monitor.sample.processes) == 1)
        trainer.kill()


def test_growth_before_a_change_of_readers_is_forgotten(tmp_path: Path) -> None:
    """Each sample counts as a second; memory grows by 1 MiB per sample, before and after."""

    class Hurried(ScriptedWatcher):
        def sample(self) -> SystemSample:
            return replace(super().sample(), time=1000.0 + self.samples)

    watcher = Hurried(lambda sample: GIB + sample * 2**20)
    with Monitor(in_dir(tmp_path), MemoryPolicy(configured_bytes=4 * GIB), watcher, sample_every_s=0.02) as monitor:
        wait_until(lambda: monitor.risk.trend is not None)
        monitor.readers_changed()
        wait_until(lambda: monitor.risk.trend is None)
        assert not monitor.memory_is_short()
        wait_until(lambda: monitor.risk.trend is not None)


@pytest.mark.parametrize(("mode", "warnings"), [("warn", 1), ("off", 0)])
def test_a_guard_in_warn_mode_gives_no_orders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: Any, warnings: int
) -> None:
    orders: list[Order] = []
    watcher = ScriptedWatcher(lambda sample: 4 * GIB)
    limits = MemoryPolicy(configured_bytes=4 * GIB)
    with Monitor(in_dir(tmp_path), limits, watcher, sample_every_s=0.02, guard=mode, on_exit=orders.append):
        wait_until(lambda: watcher.samples > 5)
    assert orders == []
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == warnings


def test_failing_listeners_and_samples_neither_end_the_monitor_nor_flood_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails_once(sample: int) -> int:
        if sample == 2:
            raise RuntimeError("changed size during iteration")
        return sample

    def fails(record: dict[str, Any]) -> None:
        raise RuntimeError("no")

    watcher = ScriptedWatcher(fails_once)
    with Monitor(in_dir(tmp_path), MemoryPolicy(), watcher, sample_every_s=0.02, on_record=fails):
        wait_until(lambda: watcher.samples > 15)
    records = read_records(tmp_path / "system.jsonl")
    assert sum(record["samples"] for record in records) == watcher.samples - 2, "that of the start, and the one"
    assert [r.getMessage() for r in caplog.records if r.exc_info] == ["sampling failed; retrying"]


def test_a_full_disk_is_logged_once_per_file_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vesuvius")
    watcher = ScriptedWatcher(lambda sample: sample)
    with small_disk(tmp_path, kib=512) as disk:
        with Monitor(in_dir(disk), MemoryPolicy(), watcher, sample_every_s=0.02):
            ballast = fill(disk)
            wait_until(lambda: len(caplog.records) >= 1)
            more = watcher.samples + 5
            wait_until(lambda: watcher.samples > more)
            ballast.unlink()
        assert len(read_records(disk / "system.jsonl")) == watcher.samples - 1
    messages = [record.getMessage() for record in caplog.records]
    failing = [text for text in messages if "cannot write " in text and "[Errno 28]" in text]
    working = [text for text in messages if " is writable again; 0 lines were lost" in text]
    assert len(set(failing)) == len(set(working)) == len(messages) / 2 >= 1  # also of recent.jsonl if it takes long
    assert not any(record.exc_info for record in caplog.records)


def test_a_hung_monitor_does_not_delay_the_end_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hangs like a driver that no longer responds."""
    answers = threading.Event()

    class HungWatcher(ScriptedWatcher):
        def sample(self) -> SystemSample:
            if self.samples > 0:
                answers.wait(60)
            return super().sample()

    started = time.monotonic()
    with Monitor(in_dir(tmp_path), MemoryPolicy(), HungWatcher(lambda sample: sample), sample_every_s=0.02):
        time.sleep(0.1)
    assert time.monotonic() - started < 30
    assert "its files stay open" in caplog.text
    answers.set()


def test_a_kill_in_the_cgroup_of_the_run_is_logged() -> None:
    """So that a grep of the log finds it."""
    looks = [CgroupUse("/job", 0, 0, 0, (), kills) for kills in (3, 3, 5)]
    assert kills_text(looks[0], looks[1]) == ""
    text = kills_text(looks[1], looks[2])
    assert "out of memory: the kernel killed 2 processes of cgroup /job" in text
    assert kills_text(looks[1], CgroupUse("/other", 0, 0, 0, (), 9)) == "", "another count"
