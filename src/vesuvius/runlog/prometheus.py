"""Exports the latest figures of a run to Prometheus at `http://HOST:PORT/metrics`.

Base units, counters that only grow within a session, labels with few values.  Unknown figures have no sample.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Self

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vesuvius.runlog.records import Record

log = logging.getLogger(__name__)

_PARTS = ("data", "h2d", "forward", "backward", "optimizer", "comm", "other")
_RISKS = {"LOW": 0, "WARN": 1, "CRITICAL": 2}
_ACTIONS = ("drop", "restart", "shrink", "exit")
_BOUNDS = ("compute-bound", "data-bound", "transfer-bound", "host-bound", "comm-bound", "hung")
_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 300.0, 900.0)
LATEST = {
    "session_start_timestamp_seconds": ("run_start.time", "start time of this session"),
    "steps_total": ("step.step", "optimizer steps done"),
    "samples_total": ("step.samples_total", "samples trained on"),
    "last_step_timestamp_seconds": ("step.time", "time of the last logged step"),
    "mfu_ratio": ("step.mfu", "model FLOPs utilization of the last step; absent if unknown"),
    "remaining_seconds": ("step.eta_s", "time until the session ends, as eta in the step line"),
    "loss": ("step.loss", "loss of the last step"),
    "gradient_norm": ("step.grad_norm", "norm of the gradient in the last step, before clipping"),
    "learning_rate": ("step.lr", "learning rate of the last step"),
    "workers": ("step.workers", "worker processes"),
    "validation_loss": ("validation.weights.loss", "loss of the last validation"),
    "validation_relative_error": ("validation.relative_error", "error against the stationary Wiener filter"),
    "last_checkpoint_timestamp_seconds": ("checkpoint.saved_time", "time of the last complete checkpoint"),
    "last_checkpoint_bytes": ("checkpoint.bytes", "size of the last checkpoint"),
    "hung": ("event.hung", "1 while the watchdog reports the run as hung, else 0"),
    "ram_used_bytes": ("system.used_bytes", "memory of the run, counting shared memory once; maximum of the window"),
    "ram_shared_bytes": ("system.shared_bytes", "Ray's object store and volumes kept in memory; maximum of the window"),
    "ram_trainer_bytes": ("system.trainer_bytes", "private memory of the trainer; maximum of the window"),
    "ram_limit_bytes": ("system.limit_bytes", "memory that the run may use"),
    "memory_risk": ("system.risk", "0 low, 1 warn, 2 critical"),
    "worker_max_bytes": ("system.readers", "private memory of the largest worker"),
    "vram_reserved_bytes": ("system.vram.reserved_bytes", "GPU memory that torch holds; maximum of the window"),
    "gpu_memory_used_bytes": ("system.gpus.used_bytes", "memory in use, by all processes"),
    "gpu_memory_total_bytes": ("system.gpus.total_bytes", "memory of the GPU"),
    "gpu_busy_ratio": ("system.gpus.busy", "share of time a kernel was running"),
    "gpu_power_watts": ("system.gpus.power_w", "power draw, mean of the window"),
    "gpu_temperature_celsius": ("system.gpus.temperature_c", "temperature"),
    "disk_free_bytes": ("system.disk.free_bytes", "free on the disk of the run directory"),
    "disk_run_bytes": ("system.disk.run_bytes", "size of the run directory"),
    "cpu_throttled_ratio": ("verdict.throttled_share", "share of CPU quota periods in which the quota was used up"),
}
"""By name, without `vesuvius_`: kind of record and path of the figure in it, and the meaning."""
COUNTED = {
    "step_part_seconds_total": ("part", _PARTS, "time in each part; the parts add up to the time of all steps"),
    "step_pause_seconds_total": ("part", ("pause",), "time of pauses, also counted in the part other"),
    "checkpoint_failures_total": ("event", ("save_failed",), "checkpoints not saved"),
    "nonfinite_steps_total": ("event", ("nonfinite",), "steps skipped because the loss or gradient was not finite"),
    "quarantined_boxes_total": ("event", ("quarantine",), "damaged regions put in quarantine"),
    "worker_deaths_total": ("event", ("worker_died",), "workers that died and were replaced"),
    "hangs_total": ("event", ("hung",), "number of times the watchdog reported the run as hung"),
    "guard_actions_total": ("action", _ACTIONS, "actions of the memory guard"),
    "verdicts_total": ("bound", _BOUNDS, "verdicts by bottleneck"),
}
"""By name: what is counted, its values, and the meaning.  Several values become a label."""


class Exporter:
    """Serves the latest figures.  A context manager, thread-safe.

    `address`: a port, for this machine only, or HOST:PORT, readable by all who can reach it; port 0 = any free one.  If
    it is not available, the run continues with a warning and `port` is None.
    """

    def __init__(self, address: int | str, name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._run, registry = name, CollectorRegistry()
        # By name and value of the label, without unknown figures.
        self._figures = {name: dict.fromkeys(values, 0.0) for name, (_, values, _) in COUNTED.items()}
        times = Histogram("vesuvius_step_seconds", "time of each step", ["run"], registry=registry, buckets=_BUCKETS_S)
        self._step_seconds = times.labels(name)
        registry.register(self)
        self._server: Any = None
        self.port: int | None = None
        host, _, port = str(address).rpartition(":")
        try:
            self._server, _ = start_http_server(int(port), addr=host.strip("[]") or "127.0.0.1", registry=registry)
            self.port = self._server.server_port
        except (OSError, OverflowError) as error:
            log.warning(
                "monitor.prometheus_port %s cannot be opened: %s; choose a free port or a host of this machine; the "
                "run continues without it",
                *(address, error),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def take(self, record: Record) -> None:
        """Update the figures from a record of `metrics.jsonl` or `system.jsonl`."""
        kind, event = record["kind"], record.get("event")
        if kind in {"run_start", "step"} or event in {"hung", "recovered"}:
            self._figures["hung"] = {"": float(event == "hung")}
        for name, (source, _) in LATEST.items():
            of, key, *below = source.split(".")
            if of == kind and key in record:  # the watchdog's verdict has no figures
                self._figures[name] = {k: float(v) for k, v in _latest(key, record[key], *below) if v is not None}
        match kind:
            case "step":
                if (seconds := record.get("step_s")) is not None:
                    self._step_seconds.observe(seconds)
                self._count("part", {part: record.get(f"{part}_s") for part in (*_PARTS, "pause")})
            case "verdict":
                self._count("bound", {record["bound"]: 1.0})
            case "event":
                self._count("event", {event: 1.0})
                if event == "guard":
                    self._count("action", {record.get("action"): 1.0})

    def _count(self, what: str, amounts: Mapping[str | None, float | None]) -> None:
        for name, (counted, values, _) in COUNTED.items():
            for value in values if counted == what else ():
                self._figures[name][value] += max(amounts.get(value) or 0.0, 0.0)  # clock differences may be below 0

    def collect(self) -> Iterator[Metric]:
        labels = {name: (label_of(source), meaning) for name, (source, meaning) in LATEST.items()}
        labels |= {name: (what if len(values) > 1 else None, text) for name, (what, values, text) in COUNTED.items()}
        for name, (label, meaning) in labels.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(f"vesuvius_{name}", meaning, labels=["run", label] if label else ["run"])
            for value, figure in self._figures.get(name, {}).items():
                metric.add_metric([self._run, value] if label else [self._run], figure)
            yield metric


def label_of(source: str) -> str | None:
    """The label of a latest figure in addition to `run`."""
    return {"gpus": "gpu", "weights": "weights"}.get(source.split(".")[1])


def _latest(key: str, value: Any, *below: str) -> Iterator[tuple[str, float | None]]:
    match key:
        case "gpus":
            for gpu in value or []:
                figure = gpu.get(below[0])
                yield str(gpu["index"]), figure[1] if isinstance(figure, list) else figure
        case "weights":
            yield from ((name, each.get(below[0])) for name, each in (value or {}).items())
        case "readers":
            yield "", max((value or {}).values(), default=None)
        case "risk":
            yield "", _RISKS.get(value)
        case _:
            for word in below:
                value = (value or {}).get(word)
            yield "", value[-1] if isinstance(value, list) and value else value
