"""The monitor thread: a line per window, the rest at the end, and it never ends a run."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from tests.small_disk import fill, small_disk
from vesuvius.config import MonitorConfig
from vesuvius.observe.monitor import Monitor
from vesuvius.observe.records import read_records


def test_a_window_becomes_one_record_and_the_last_one_is_not_lost(tmp_path: Path) -> None:
    config = MonitorConfig(sample_every_s=0.05, write_every_s=0.2)
    with Monitor(config, tmp_path / "system.jsonl", tmp_path / "monitor.log", lambda: {123: 2**30}):
        deadline = time.monotonic() + 30
        while not (tmp_path / "monitor.log").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
    records = read_records(tmp_path / "system.jsonl")
    assert records[0]["samples"] == 4
    assert 1 <= records[-1]["samples"] <= 4
    for record in records:
        used = record["used_bytes"]
        assert 0 < used["min"] <= used["mean"] <= used["max"] < record["limit_bytes"]
        assert record["reader_anon_bytes"] == {"123": 2**30}
    for line in (tmp_path / "monitor.log").read_text().splitlines():
        assert re.fullmatch(r"[\d-]{10} [\d:]{8} INFO ram_gib [\d.]+/[\d.]+ readers_gib 123:1\.00", line), line


def test_a_reader_table_that_fails_blinds_the_monitor_but_does_not_end_it(tmp_path: Path) -> None:
    calls = []

    def readers() -> dict[int, int]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("changed size during iteration")
        return {}

    config = MonitorConfig(sample_every_s=0.02, write_every_s=0.04)
    with Monitor(config, tmp_path / "system.jsonl", tmp_path / "monitor.log", readers):
        deadline = time.monotonic() + 30
        while len(calls) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert read_records(tmp_path / "system.jsonl")


def test_a_full_disk_is_said_once_for_each_file_and_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vesuvius")
    config = MonitorConfig(sample_every_s=0.02, write_every_s=0.02)
    calls = []

    def readers() -> dict[int, int]:
        calls.append(1)
        return {}

    with small_disk(tmp_path, kib=64) as disk:
        with Monitor(config, disk / "system.jsonl", disk / "monitor.log", readers):
            ballast = fill(disk)
            deadline = time.monotonic() + 60
            while len(caplog.records) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            more = len(calls) + 5
            while len(calls) < more and time.monotonic() < deadline:
                time.sleep(0.01)
            ballast.unlink()
        assert len(read_records(disk / "system.jsonl")) == len(calls)
        assert len((disk / "monitor.log").read_text().splitlines()) == len(calls)
    failing, working = caplog.records[:2], caplog.records[2:]
    assert all(" must be writable; got [Errno 28]" in record.getMessage() for record in failing)
    assert all(" is written again; 0 lines were lost" in record.getMessage() for record in working)
    assert len(working) == 2
    assert not any(record.exc_info for record in caplog.records)
