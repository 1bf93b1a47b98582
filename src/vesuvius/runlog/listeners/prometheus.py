"""The latest figures of a run where Prometheus may fetch them: `http://<address>:<port>/metrics`.

Base units, counters that only grow within a session, labels with few values.  What is not known has no sample.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from vesuvius.runlog.records import Record

log = logging.getLogger(__name__)


_PARTS = ("data", "h2d", "forward", "backward", "optimizer", "comm", "other")
_RISKS = {"LOW": 0, "WARN": 1, "CRITICAL": 2}
_ONCE = ("",)
_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 300.0, 900.0, math.inf)
_SUM = "sum"


@dataclass(frozen=True)
class _Metric:
    source: str  # kind of the record, and where the figure stands in it; of events, which are counted
    meaning: str
    label: str | None = None
    counts: tuple[str, ...] | None = None  # all values of its label, where it counts from 0 on; one empty = no label
    adds: bool = False  # it counts not records, but adds up the figure of each
    is_histogram: bool = False


_RUNGS = ("save", "restart", "shrink", "exit")
_BOUNDS = ("compute-bound", "data-bound", "transfer-bound", "host-bound", "comm-bound", "hung")
_TABLE: tuple[tuple[str, _Metric], ...] = (
    ("session_start_timestamp_seconds", _Metric("run_start.time", "when this session began")),
    ("steps_total", _Metric("step.step", "optimizer steps done, the last step's number")),
    ("target_steps", _Metric("step.steps", "optimizer step at which the run is done")),
    ("samples_total", _Metric("step.samples_total", "samples trained on")),
    ("last_step_timestamp_seconds", _Metric("step.time", "when the last step was logged")),
    ("mfu_ratio", _Metric("step.mfu", "share of the GPU's dense peak in the last step; absent if that is not known")),
    ("step_seconds", _Metric("step.step_s", "time of each step", is_histogram=True)),
    ("step_part_seconds_total", _Metric("step", "time in each part; they add up to all steps", "part", _PARTS, True)),
    ("step_pause_seconds_total", _Metric("step.pause_s", "time of pauses, within part other", None, _ONCE, True)),
    ("remaining_seconds", _Metric("step.eta_s", "time until the session ends, as the step line's eta")),
    ("loss", _Metric("step.loss", "loss of the last step")),
    ("gradient_norm", _Metric("step.grad_norm", "norm of the gradient in the last step, before clipping")),
    ("learning_rate", _Metric("step.lr", "learning rate of the last step")),
    ("readers", _Metric("step.workers", "reader processes")),
    ("validation_loss", _Metric("validation", "loss of the last validation", "weights")),
    ("validation_relative_error", _Metric("validation.relative_error", "error against the best linear denoiser")),
    ("last_validation_timestamp_seconds", _Metric("validation.time", "when the last validation ended")),
    ("best_step", _Metric("validation.best_step", "step with the best validation")),
    ("last_checkpoint_step", _Metric("checkpoint.step", "step of the last checkpoint that this session saved")),
    ("last_checkpoint_timestamp_seconds", _Metric("checkpoint.saved_time", "when that checkpoint was complete")),
    ("last_checkpoint_bytes", _Metric("checkpoint.bytes", "its size")),
    ("hung", _Metric("", "1 while the watchdog reports the run as hung, else 0")),
    ("checkpoint_failures_total", _Metric("event.save_failed", "checkpoints not saved", counts=_ONCE)),
    (
        "nonfinite_steps_total",
        _Metric("event.nonfinite", "steps not applied: loss or gradient not finite", counts=_ONCE),
    ),
    ("quarantined_boxes_total", _Metric("event.quarantine", "damaged boxes put in quarantine", counts=_ONCE)),
    ("reader_deaths_total", _Metric("event.reader_died", "readers that died and were replaced", counts=_ONCE)),
    ("hangs_total", _Metric("event.hung", "times the watchdog reported the run as hung", counts=_ONCE)),
    ("guard_actions_total", _Metric("event", "actions of the memory guard", "action", _RUNGS)),
    ("verdicts_total", _Metric("verdict", "verdicts by what limits the run", "bound", _BOUNDS)),
    ("ram_used_bytes", _Metric("system.used_bytes", "memory of the run, shared memory once; maximum of the window")),
    ("ram_anon_bytes", _Metric("system.anon_bytes", "private memory of all processes; maximum of the window")),
    ("ram_shared_bytes", _Metric("system.shared_bytes", "shared memory, as Ray's object store; maximum of the window")),
    ("ram_trainer_bytes", _Metric("system.trainer_bytes", "private memory of the trainer; maximum of the window")),
    ("ram_limit_bytes", _Metric("system.limit_bytes", "memory that the run may use")),
    ("memory_risk", _Metric("system.risk", "0 low, 1 warn, 2 critical")),
    ("reader_max_bytes", _Metric("system.reader_max_bytes", "private memory of the largest reader")),
    (
        "vram_reserved_bytes",
        _Metric("system.vram.reserved_bytes", "GPU memory that torch holds; maximum of the window"),
    ),
    ("vram_peak_bytes", _Metric("system.vram.peak_bytes", "GPU memory in tensors; maximum of the window")),
    ("gpu_memory_used_bytes", _Metric("system.used_bytes", "memory in use, by all processes", "gpu")),
    ("gpu_memory_total_bytes", _Metric("system.total_bytes", "memory of the GPU", "gpu")),
    ("gpu_busy_ratio", _Metric("system.busy", "share of time in which a kernel ran", "gpu")),
    ("gpu_power_watts", _Metric("system.power_w", "power draw, mean of the window", "gpu")),
    ("gpu_temperature_celsius", _Metric("system.temperature_c", "temperature", "gpu")),
    ("gpu_slowed_ratio", _Metric("system.slowed_share", "share of the window slowed down by heat or power", "gpu")),
    ("gpu_power_capped_ratio", _Metric("system.power_capped_share", "share of the window at the power limit", "gpu")),
    ("gpu_ecc_uncorrected_errors_total", _Metric("system.ecc_uncorrected", "errors since the driver loaded", "gpu")),
    ("disk_free_bytes", _Metric("system.disk.free_bytes", "free on the disk of the run directory")),
    ("disk_run_bytes", _Metric("system.disk.run_bytes", "size of the run directory")),
    ("cpu_throttled_ratio", _Metric("verdict.throttled_share", "share of quota periods with the quota used up")),
)
METRICS = {f"vesuvius_{name}": metric for name, metric in _TABLE}
"""By name, in the order in which they are served.  Each also has the label `run`; windows are those of system.jsonl."""


class Exporter:
    """Serves what it has been told.  A context manager.  Any thread may call.

    An address that cannot be had is no reason to end a run: the log says so.

    Args:
        port: to listen on; 0 = any free one.
        name: of the run, the label `run`.
        address: of this machine, to listen on.  Whoever reaches it may read.

    Attributes:
        port: that it listens on; None where it could not.
    """

    def __init__(self, port: int, name: str, address: str = "127.0.0.1") -> None:
        self._run = name
        self._lock = threading.Lock()
        self._values = {name: dict.fromkeys(metric.counts or (), 0.0) for name, metric in METRICS.items()}
        for name in (name for name, metric in METRICS.items() if metric.is_histogram):
            self._values[name] = dict.fromkeys((*map(_le, _BUCKETS_S), _SUM), 0.0)
        self._server: Any = None
        self.port: int | None = None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, addr=address, registry=registry)
            self.port = self._server.server_port
        except OSError as error:
            log.warning(
                "monitor.prometheus_port must be free, and monitor.prometheus_address one of this machine; got %s for "
                "%s:%d; choose others; the run continues without",
                *(error, address, port),
            )

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def take(self, record: Record) -> None:
        """Learn from a record of `metrics.jsonl` or `system.jsonl`."""
        kind, event = record["kind"], record.get("event")
        with self._lock:
            for name, metric in METRICS.items():
                source, _, place = metric.source.partition(".")
                if source != kind:
                    continue
                held = self._values[name]
                if metric.is_histogram or metric.adds:
                    for part, value in _values(metric, place, record).items():
                        if value is None:
                            continue
                        if metric.is_histogram:
                            held[_SUM] += value
                            for bound in _BUCKETS_S:  # each counts what is at or below it, as Prometheus has them
                                held[_le(bound)] += value <= bound
                        else:  # a difference of clocks may be below 0, a counter must not fall
                            held[part] += max(value, 0.0)
                elif metric.counts is not None:
                    label = "" if place else record.get("bound" if kind == "verdict" else "rung")
                    if place in ("", event) and label in metric.counts:
                        held[label] += 1
                elif kind != "verdict" or place in record:  # the watchdog's has no figures
                    values = _values(metric, place, record)
                    self._values[name] = {label: float(v) for label, v in values.items() if v is not None}
            if kind in {"run_start", "step"} or event in {"hung", "recovered"}:
                self._values["vesuvius_hung"] = {"": float(event == "hung")}

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now, as prometheus_client asks for them."""
        with self._lock:
            values = {name: dict(samples) for name, samples in self._values.items()}
        for name, metric in METRICS.items():
            if metric.is_histogram:
                total = values[name].pop(_SUM)
                histogram = HistogramMetricFamily(name, metric.meaning, labels=["run"])
                histogram.add_metric([self._run], list(values[name].items()), total)
                yield histogram
                continue
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, metric.meaning, labels=["run", *([metric.label] if metric.label else [])])
            for label, value in values[name].items():
                family.add_metric([self._run, *([label] if metric.label else [])], value)
            yield family


def _values(metric: _Metric, place: str, record: Record) -> Mapping[str, float | None]:
    """Of each label: of [min, mean, max] in a window the most, of a GPU the mean."""
    match metric.label:
        case "gpu":
            return {str(gpu["index"]): _figure(gpu.get(place), 1) for gpu in record.get("gpus") or []}
        case "part":
            return {part: record.get(f"{part}_s") for part in _PARTS}
        case "weights":
            return {name: found.get("loss") for name, found in (record.get("weights") or {}).items()}
    if place == "reader_max_bytes":
        return {"": max((record.get("readers") or {}).values(), default=None)}
    value: Any = record
    for word in place.split("."):
        value = (value or {}).get(word)
    return {"": _RISKS.get(value) if place == "risk" else _figure(value, -1)}


def _le(bound: float) -> str:
    return "+Inf" if math.isinf(bound) else str(bound)


def _figure(value: Any, place: int) -> float | None:
    return (value[place] if value else None) if isinstance(value, list) else value
