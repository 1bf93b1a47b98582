"""The run's latest figures where Prometheus may fetch them: `http://127.0.0.1:<port>/metrics`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

log = logging.getLogger(__name__)

Record = dict[str, Any]

_PARTS = ("data", "h2d", "forward", "backward", "optimizer", "other")
_RISKS = {"LOW": 0, "WARN": 1, "CRITICAL": 2}


class Exporter:
    """Serves what `take` was last given, on this machine only.  A context manager.

    A port that is taken is no reason to end a run: the log says so.

    Args:
        port: to listen on; 0 = any free one.
        name: of the run, the label `run`.

    Attributes:
        port: that it listens on; None where it could not.
    """

    def __init__(self, port: int, name: str) -> None:
        self._name = name
        self._last: dict[str, Record] = {}
        self._server: Any = None
        self.port: int | None = None
        registry = CollectorRegistry()
        registry.register(_Collector(self))
        try:
            self._server, _ = start_http_server(port, addr="127.0.0.1", registry=registry)
            self.port = self._server.server_port
        except OSError as error:
            log.warning(
                "monitor.prometheus_port must be free; got %s for 127.0.0.1:%d; choose another port; the run goes on "
                "without",
                error,
                port,
            )

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def take(self, record: Record) -> None:
        """Keep the last record of each kind."""
        self._last[record["kind"]] = record

    def metrics(self) -> Iterator[Metric]:
        """What the last records say, as Prometheus has it: base units, counters that only grow."""
        label = {"run": self._name}
        if step := self._last.get("step"):
            yield _counter("vesuvius_steps", "optimizer steps done", step.get("step"), label)
            yield _counter("vesuvius_samples", "samples trained on", step.get("samples_total"), label)
            yield _gauge("vesuvius_loss", "loss of the last step", step.get("loss"), label)
            yield _gauge("vesuvius_step_seconds", "seconds of the last step", step.get("step_s"), label)
            parts = GaugeMetricFamily(
                "vesuvius_step_part_seconds", "seconds of each part of the last step", labels=["run", "part"]
            )
            for part in _PARTS:
                if (value := step.get(f"{part}_s")) is not None:
                    parts.add_metric([self._name, part], value)
            yield parts
        if validation := self._last.get("validation"):
            yield _gauge("vesuvius_best_step", "step with the best validation", validation.get("best_step"), label)
        if system := self._last.get("system"):
            yield from _system(system, self._name)


class _Collector:
    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def collect(self) -> Iterator[Metric]:
        yield from self._exporter.metrics()


def _system(record: Record, name: str) -> Iterator[Metric]:
    label = {"run": name}
    for key, meaning in {
        "used_bytes": "memory of the run, shared memory once",
        "anon_bytes": "private memory of all processes",
        "shared_bytes": "shared memory, such as Ray's object store",
        "trainer_bytes": "private memory of the trainer",
    }.items():
        if (values := record.get(key)) is not None:
            yield _gauge(f"vesuvius_ram_{key}", f"{meaning}, most in the last window", values[-1], label)
    yield _gauge("vesuvius_ram_limit_bytes", "memory that the run may use", record.get("limit_bytes"), label)
    yield _gauge("vesuvius_memory_risk", "0 low, 1 warn, 2 critical", _RISKS.get(record.get("risk", "")), label)
    readers = GaugeMetricFamily("vesuvius_reader_bytes", "private memory of each reader", labels=["run", "pid"])
    for pid, size in (record.get("readers") or {}).items():
        readers.add_metric([name, pid], size)
    yield readers
    if vram := record.get("vram"):
        yield _gauge("vesuvius_vram_reserved_bytes", "GPU memory of the trainer", vram["reserved_bytes"][-1], label)
        yield _gauge("vesuvius_vram_peak_bytes", "most allocated in the last window", vram["peak_bytes"], label)
    busy = GaugeMetricFamily("vesuvius_gpu_busy_ratio", "time in which a kernel ran", labels=["run", "gpu"])
    for gpu in record.get("gpus") or []:
        if gpu.get("busy"):
            busy.add_metric([name, str(gpu["index"])], gpu["busy"][1])
    yield busy


def _gauge(metric: str, meaning: str, value: float | None, label: dict[str, str]) -> GaugeMetricFamily:
    """Without a sample where the value is not known: missing is not 0."""
    family = GaugeMetricFamily(metric, meaning, labels=list(label))
    if value is not None:
        family.add_metric(list(label.values()), value)
    return family


def _counter(metric: str, meaning: str, value: float | None, label: dict[str, str]) -> CounterMetricFamily:
    family = CounterMetricFamily(metric, meaning, labels=list(label))
    if value is not None:
        family.add_metric(list(label.values()), value)
    return family
