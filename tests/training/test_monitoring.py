"""What a run's records reach: the config decides, and each listener gets what it understands."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

from tests.support.runs import WriteConfig
from tests.support.webhook_server import WebhookServer
from vesuvius.config.load import read_config
from vesuvius.runlog.run_dir import RunDir
from vesuvius.training.monitoring import open_metrics


def test_records_reach_prometheus_at_its_address_and_the_webhook(tiny_config: WriteConfig, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    run = tmp_path / "run"
    run.mkdir()
    with WebhookServer() as server:
        monitor = {"prometheus_port": port, "prometheus_address": "127.0.0.2", "webhook": server.url}
        with open_metrics(read_config(tiny_config(monitor=monitor), ()), RunDir(run)) as metrics:
            metrics.write("run_start", step=0)
            metrics.write("checkpoint", step=3, seconds=1.0, bytes=1000, saved_time=5.0)
            with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=10) as answer:
                served = answer.read().decode()
            metrics.write("run_end", exit_code=75, cause="SIGTERM", step=3)
        assert [(post["event"], post["exit_code"], post["cause"]) for post in server.posts] == [
            ("run_end", 75, "SIGTERM")
        ]
    assert 'vesuvius_last_checkpoint_step{run="tiny"} 3.0' in served
    assert 'vesuvius_last_checkpoint_timestamp_seconds{run="tiny"} 5.0' in served
