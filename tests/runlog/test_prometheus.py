"""Prometheus gets the run's figures over real HTTP, only at the requested address; the docs name each metric."""

from __future__ import annotations

import json
import logging
import math
import random
import re
import socket
import urllib.request
from typing import Any, get_args

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import REPOSITORY
from tests.support import recorded_runs
from vesuvius.monitor.memory.guard import Action
from vesuvius.monitor.memory.risk import Level
from vesuvius.monitor.verdict import Kind
from vesuvius.runlog.prometheus import _ACTIONS, _BOUNDS, _RISKS, COUNTED, LATEST, Exporter, label_of

DOCS = REPOSITORY / "docs" / "prometheus"
STEP = recorded_runs.step(7, time=1_700_000_000.0, samples_total=56, loss=0.25, grad_norm=1.5, eta_s=186.0, mfu=0.4)
GPUS = [
    {"index": 0, "busy": [0.1, 0.5, 0.9], "used_bytes": 7, "total_bytes": 9, "power_w": [1.0, 250.0, 300.0]},
    {"index": 1, "busy": None, "used_bytes": 1, "total_bytes": 9, "power_w": None, "temperature_c": 45.0},
]
DISK = {"free_bytes": 10, "run_bytes": 5}
SYSTEM = recorded_runs.system(7, used_bytes=[1, 2, 3], readers={"11": 5, "12": 6}, risk="WARN", disk=DISK, gpus=GPUS)
# One of each kind used by a metric.
RECORDS: list[dict[str, Any]] = [
    {"kind": "run_start", "time": 1.0, "step": 0},
    STEP,
    SYSTEM | {"vram": {"reserved_bytes": [1, 2, 3], "peak_bytes": 2}},
    {"kind": "validation", "relative_error": 1.1, "weights": {"raw": {"loss": 0.6}, "ema": {"loss": 0.5}}},
    {"kind": "verdict", "bound": "data-bound", "throttled_share": 0.0},
    {"kind": "checkpoint", "time": 9.0, "step": 7, "seconds": 1.0, "bytes": 1000, "saved_time": 8.0},
]


def fetched(port: int | None, host: str = "127.0.0.1") -> dict[tuple[str, str], float]:
    """Samples by name and the label other than `run`."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels["run"] == "exp" for sample in samples)
    return {(s.name, "".join(v for k, v in s.labels.items() if k != "run")): s.value for s in samples}


def test_the_latest_figures_are_served_and_unknown_ones_disappear() -> None:
    with Exporter(0, "exp") as exporter:
        for record in (STEP | {"step": 6}, STEP, SYSTEM):
            exporter.take(record)
        samples = fetched(exporter.port)
        for record in (STEP | {"loss": None}, SYSTEM | {"readers": {}}):
            exporter.take(record)
        assert not {("vesuvius_loss", ""), ("vesuvius_worker_max_bytes", "")} & fetched(exporter.port).keys()
    assert samples["vesuvius_loss", ""] == 0.25
    assert samples["vesuvius_steps_total", ""] == 7
    assert samples["vesuvius_last_step_timestamp_seconds", ""] == 1_700_000_000
    assert samples["vesuvius_ram_used_bytes", ""] == 3, "the most in the window"
    assert samples["vesuvius_worker_max_bytes", ""] == 6
    assert samples["vesuvius_memory_risk", ""] == 1
    assert samples["vesuvius_gpu_busy_ratio", "0"] == 0.5
    assert samples["vesuvius_gpu_power_watts", "0"] == 250
    assert samples["vesuvius_gpu_temperature_celsius", "1"] == 45
    assert ("vesuvius_gpu_power_watts", "1") not in samples, "missing is not 0"
    assert not [name for name, _ in samples if "vram" in name]


def test_sums_between_scrapes_include_all_steps() -> None:
    """150 steps, two scrapes: the differences are the sums over the steps in between, per part and in total."""
    rng = random.Random(0)
    kinds = ("data", "h2d", "forward", "backward", "optimizer", "comm", "other")
    steps = [{f"{kind}_s": rng.expovariate(20) for kind in kinds} for _ in range(150)]
    with Exporter(0, "exp") as exporter:
        scrapes = [fetched(exporter.port)]
        exporter.take({"kind": "step", "time": 1.0, "step": 0, "other_s": -1e-9})  # clock difference; no counter falls
        for number, parts in enumerate(steps):
            whole = {"step_s": math.fsum(parts.values()), "pause_s": parts["other_s"] / 2}
            exporter.take({"kind": "step", "time": 1.0, "step": number + 1, **parts, **whole})
            if number == 70:
                scrapes.append(fetched(exporter.port))
        scrapes.append(fetched(exporter.port))
    spent = [{kind: scrape["vesuvius_step_part_seconds_total", kind] for kind in kinds} for scrape in scrapes]
    for earlier, later, between in ((0, 1, steps[:71]), (1, 2, steps[71:])):
        for kind in kinds:
            expected = math.fsum(parts[f"{kind}_s"] for parts in between)
            assert spent[later][kind] - spent[earlier][kind] == pytest.approx(expected)
        sums = [scrape["vesuvius_step_seconds_sum", ""] for scrape in scrapes]
        assert sums[later] - sums[earlier] == pytest.approx(math.fsum(math.fsum(parts.values()) for parts in between))
    last, times = scrapes[-1], [math.fsum(parts.values()) for parts in steps]
    assert last["vesuvius_step_seconds_count", ""] == 150
    assert last["vesuvius_step_pause_seconds_total", ""] == pytest.approx(spent[-1]["other"] / 2)
    bounds = {label: count for (name, label), count in last.items() if name == "vesuvius_step_seconds_bucket"}
    assert bounds == {label: sum(seconds <= float(label) for seconds in times) for label in bounds}
    assert 0 < bounds["0.25"] < 150, "the buckets tell the steps apart"
    assert set(scrapes[0]) >= {name for name in last if name[0].endswith("_total")} - {("vesuvius_steps_total", "")}


def test_events_and_verdicts_are_counted_with_labels_known_from_the_start() -> None:
    with Exporter(0, "exp") as exporter:
        before = fetched(exporter.port)
        assert set(before.values()) == {0}, "counters exist before the first event, or rate() misses it"
        for action in ("restart", "restart", "exit"):
            exporter.take({"kind": "event", "event": "guard", "action": action})
        for event in ("nonfinite", "quarantine", "quarantine", "worker_died", "save_failed", "hung"):
            exporter.take({"kind": "event", "event": event})
        for bound in ("data-bound", "data-bound", "hung", "never heard of"):
            exporter.take({"kind": "verdict", "bound": bound})
        samples = fetched(exporter.port)
        exporter.take({"kind": "event", "event": "recovered"})
        assert fetched(exporter.port)["vesuvius_hung", ""] == 0
    assert samples["vesuvius_guard_actions_total", "restart"] == 2
    assert samples["vesuvius_guard_actions_total", "exit"] == 1
    assert samples["vesuvius_verdicts_total", "data-bound"] == 2
    assert samples["vesuvius_quarantined_boxes_total", ""] == 2
    for name in ("nonfinite_steps", "worker_deaths", "checkpoint_failures", "hangs"):
        assert samples[f"vesuvius_{name}_total", ""] == 1
    assert samples["vesuvius_hung", ""] == 1
    assert samples.keys() - before.keys() == {("vesuvius_hung", "")}, "no label beyond those"


def test_labels_are_those_of_guard_and_verdict_and_name_no_process() -> None:
    """Otherwise each replaced reader would add a time series."""
    assert get_args(Action) == _ACTIONS
    assert (*get_args(Kind), "hung") == _BOUNDS
    assert {level.name: level.value for level in Level} == _RISKS
    assert set(LABELS.values()) == {"", "weights", "part", "action", "bound", "gpu"}


LABELS = {f"vesuvius_{name}": label_of(source) or "" for name, (source, _) in LATEST.items()}
LABELS |= {f"vesuvius_{name}": what if len(values) > 1 else "" for name, (what, values, _) in COUNTED.items()}
LABELS["vesuvius_step_seconds"] = ""


def test_only_the_requested_address_is_opened_and_an_unavailable_one_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Exporter("127.0.0.2:0", "exp") as exporter:
        assert fetched(exporter.port, "127.0.0.2")
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", exporter.port or 0), timeout=10)
    with Exporter(0, "exp") as exporter:
        assert exporter._server.server_address[0] == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        for where in ("192.0.2.1:0", "no such address:0", taken.getsockname()[1], "127.0.0.1:99999"):
            caplog.clear()
            with Exporter(where, "exp") as nowhere:
                nowhere.take(STEP)
                assert nowhere.port is None
            assert f"monitor.prometheus_port {where} cannot be opened" in caplog.text
    with Exporter(exporter.port or 0, "exp") as again:
        assert again.port == exporter.port, "it is free again afterwards"


def served_by_a_run_that_has_had_everything() -> dict[tuple[str, str], float]:
    with Exporter(0, "exp") as exporter:
        for record in RECORDS:
            exporter.take(record)
        return fetched(exporter.port)


def metrics_named_in(text: str) -> set[str]:
    return set(re.findall(r"\bvesuvius_\w+", text))


def test_the_documented_metrics_are_those_served() -> None:
    rows = re.findall(r"^\| `(vesuvius_\w+)` \| (\w+) \| (.*?) \|", (DOCS / "README.md").read_text(), re.M)
    kinds = {name: "counter" if name.endswith("_total") else "gauge" for name in LABELS}
    kinds["vesuvius_step_seconds"] = "histogram"
    assert sorted(rows) == sorted((name, kinds[name], f"`{label}`" if label else "") for name, label in LABELS.items())
    served = {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in served_by_a_run_that_has_had_everything()}
    assert served == LABELS.keys()


def test_rules_and_dashboard_use_served_metrics() -> None:
    served = {name for name, _ in served_by_a_run_that_has_had_everything()}
    rules = yaml.safe_load((DOCS / "alerts.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) > 8
    for alert in alerts:
        assert {"alert", "expr", "annotations"} <= alert.keys()
        named = metrics_named_in(alert["expr"])
        assert named, alert["alert"]
        assert named <= served, alert["alert"]
    targets = [
        t["expr"] for panel in json.loads((DOCS / "grafana.json").read_text())["panels"] for t in panel["targets"]
    ]
    assert len(targets) > 15
    for expression in targets:
        assert metrics_named_in(expression), expression
        assert metrics_named_in(expression) <= served


def test_rules_and_dashboard_select_existing_labels() -> None:
    """A selector such as `{action="exit"}` with an unserved label or value would never match."""
    text = (DOCS / "alerts.yaml").read_text() + (DOCS / "grafana.json").read_text().replace('\\"', '"')
    samples = served_by_a_run_that_has_had_everything()
    selected = re.findall(r"(vesuvius_\w+)\{([^}]*)\}", text)
    assert selected
    for name, matchers in selected:
        for label, operator, value in re.findall(r'(\w+)(=~|!=|!~|=)"([^"]*)"', matchers):
            assert label in {"run", LABELS[name.removesuffix("_bucket")]}
            if label != "run":
                assert any(re.fullmatch(value, found) for metric, found in samples if metric == name), (name, operator)
