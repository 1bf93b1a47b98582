"""Prometheus gets the run's figures over real HTTP, on this machine only."""

from __future__ import annotations

import logging
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vesuvius.observe.prometheus import _RISKS, Exporter
from vesuvius.observe.risk.risk import Level

STEP = {"kind": "step", "step": 7, "samples_total": 56, "loss": 0.25, "step_s": 2.0, "data_s": 0.5, "gpu_s": 1.5}
SYSTEM = {
    "kind": "system",
    "used_bytes": [1, 2, 3],
    "limit_bytes": 100,
    "readers": {"11": 5, "12": 6},
    "risk": "WARN",
    "vram": None,
    "gpus": [{"index": 0, "busy": [0.1, 0.5, 0.9]}],
}


def fetched(port: int | None) -> dict[tuple[str, str], float]:
    """Samples by name and the label beside `run`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels["run"] == "exp" for sample in samples)
    return {(s.name, "".join(v for k, v in s.labels.items() if k != "run")): s.value for s in samples}


def test_the_last_step_and_look_are_served() -> None:
    with Exporter(0, "exp") as exporter:
        exporter.take(STEP | {"step": 6})
        exporter.take(STEP)
        exporter.take(SYSTEM)
        samples = fetched(exporter.port)
    assert samples["vesuvius_steps_total", ""] == 7
    assert samples["vesuvius_step_part_seconds", "data"] == 0.5
    assert samples["vesuvius_ram_used_bytes", ""] == 3, "the most in the window"
    assert samples["vesuvius_reader_bytes", "12"] == 6
    assert samples["vesuvius_memory_risk", ""] == 1
    assert samples["vesuvius_gpu_busy_ratio", "0"] == 0.5
    assert ("vesuvius_step_part_seconds", "h2d") not in samples, "missing is not 0"
    assert not [name for name, _ in samples if "vram" in name]


def test_nothing_is_served_before_the_first_step_and_nobody_else_is_asked() -> None:
    with Exporter(0, "exp") as exporter:
        assert fetched(exporter.port) == {}
        assert exporter._server.server_address[0] == "127.0.0.1"


def test_a_port_that_is_taken_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        port = taken.getsockname()[1]
        with Exporter(port, "exp") as exporter:
            exporter.take(STEP)
            assert exporter.port is None
    assert f"127.0.0.1:{port}" in caplog.text


def test_the_port_is_free_again_afterwards() -> None:
    with Exporter(0, "exp") as exporter:
        port = exporter.port
    assert port is not None
    with Exporter(port, "exp") as again:
        assert again.port == port


def test_the_risks_are_numbered_as_their_levels() -> None:
    assert {level.name: level.value for level in Level} == _RISKS
