"""Consumers of a run's records, as configured."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from pathlib import Path

import pytest

from tests.support.runs import WriteConfig
from vesuvius.config.load import read_config
from vesuvius.runlog.run_dir import RunDir
from vesuvius.runlog.trackers import TRACKERS, TensorBoard
from vesuvius.training.reporting.monitoring import open_metrics


def test_a_hanging_disk_under_tensorboard_blocks_neither_the_run_nor_other_listeners(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, written = threading.Event(), list[object]()

    def hang(board: TensorBoard, record: dict[str, object], figures: object) -> None:
        answers.wait(60)
        written.append(record["kind"])

    monkeypatch.setattr(TensorBoard, "write", hang)
    run = tmp_path / "run"
    run.mkdir()
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    config = read_config(tiny_config(monitor={"prometheus_port": f"127.0.0.2:{port}", "tensorboard": True}), ())
    with open_metrics(config, RunDir(run)) as metrics:
        metrics.write("run_start", step=0)
        metrics.write("checkpoint", step=3, seconds=1.0, bytes=1000, saved_time=5.0)
        metrics.write("event", event="hung", step=3, text="no batch")
        assert written == []
        with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=10) as answer:
            served = answer.read().decode()
        assert 'vesuvius_last_checkpoint_timestamp_seconds{run="tiny"} 5.0' in served
        assert 'vesuvius_hung{run="tiny"} 1.0' in served
        answers.set()
    assert written == ["run_start", "checkpoint", "event"], "the end waits for them"


def test_tracker_settings_contain_no_secrets(
    tiny_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[str]()
    monkeypatch.setitem(TRACKERS, "wandb", lambda name, folder, settings: given.append(str(settings)))
    path = tiny_config(monitor={"trackers": ["wandb"]})
    config = read_config(path, ['data.volumes=[{path: "https://me:pw1@h.org/a.zarr?X-Amz-Signature=5ecre7"}]'])
    with open_metrics(config, RunDir(tmp_path)):
        pass
    (settings,) = given
    assert "h.org/a.zarr" in settings
    assert not {"pw1", "5ecre7"} & set(re.split(r"\W", settings))
