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
    meaning: str
    source: str  # kind of the record, and where the figure stands in it; of events, which are counted
    label: str | None = None
    counts: tuple[str, ...] | None = None  # all values of its label, where it counts from 0 on; one empty = no label
    adds: bool = False  # it counts not records, but adds up the figure of each
    is_histogram: bool = False


METRICS: dict[str, _Metric] = {
    "vesuvius_session_start_timestamp_seconds": _Metric("when this session began", "run_start.time"),
    "vesuvius_steps_total": _Metric("optimizer steps done, the last step's number", "step.step"),
    "vesuvius_target_steps": _Metric("optimizer step at which the run is done", "step.steps"),
    "vesuvius_samples_total": _Metric("samples trained on", "step.samples_total"),
    "vesuvius_last_step_timestamp_seconds": _Metric("when the last step was logged", "step.time"),
    "vesuvius_mfu_ratio": _Metric(
        "share of the GPU's dense peak in the last step; absent for GPUs without a known peak", "step.mfu"
    ),
    "vesuvius_step_seconds": _Metric("time of each step", "step.step_s", is_histogram=True),
    "vesuvius_step_part_seconds_total": _Metric(
        "time spent in each part of the steps; they add up to vesuvius_step_seconds_sum", "step", "part", _PARTS, True
    ),
    "vesuvius_step_pause_seconds_total": _Metric(
        "time spent in validation, previews and checkpoint copies, within part other", "step.pause_s", None, _ONCE, True
    ),
    "vesuvius_remaining_seconds": _Metric("time until the session ends, as the step line's eta", "step.eta_s"),
    "vesuvius_loss": _Metric("loss of the last step", "step.loss"),
    "vesuvius_gradient_norm": _Metric("norm of the gradient in the last step, before clipping", "step.grad_norm"),
    "vesuvius_learning_rate": _Metric("learning rate of the last step", "step.lr"),
    "vesuvius_readers": _Metric("reader processes", "step.workers"),
    "vesuvius_validation_loss": _Metric("loss of the last validation", "validation", "weights"),
    "vesuvius_validation_relative_error": _Metric(
        "error of the last validation against the best linear denoiser", "validation.relative_error"
    ),
    "vesuvius_last_validation_timestamp_seconds": _Metric("when the last validation ended", "validation.time"),
    "vesuvius_best_step": _Metric("step with the best validation", "validation.best_step"),
    "vesuvius_last_checkpoint_step": _Metric("step of the last checkpoint that this session saved", "checkpoint.step"),
    "vesuvius_last_checkpoint_timestamp_seconds": _Metric("when that checkpoint was complete", "checkpoint.saved_time"),
    "vesuvius_last_checkpoint_bytes": _Metric("its size", "checkpoint.bytes"),
    "vesuvius_hung": _Metric("1 while the watchdog reports the run as hung, else 0", ""),
    "vesuvius_checkpoint_failures_total": _Metric(
        "checkpoints that could not be saved", "event.save_failed", counts=_ONCE
    ),
    "vesuvius_nonfinite_steps_total": _Metric(
        "steps not applied: loss or gradient not finite", "event.nonfinite", counts=_ONCE
    ),
    "vesuvius_quarantined_boxes_total": _Metric(
        "damaged boxes of voxels put in quarantine", "event.quarantine", counts=_ONCE
    ),
    "vesuvius_reader_deaths_total": _Metric("readers that died and were replaced", "event.reader_died", counts=_ONCE),
    "vesuvius_hangs_total": _Metric("times the watchdog reported the run as hung", "event.hung", counts=_ONCE),
    "vesuvius_guard_actions_total": _Metric(
        "actions of the memory guard", "event", "action", ("save", "restart", "prefetch", "worker", "exit")
    ),
    "vesuvius_verdicts_total": _Metric(
        "verdicts by what limits the run",
        "verdict",
        "bound",
        ("compute-bound", "data-bound", "transfer-bound", "host-bound", "comm-bound", "hung"),
    ),
    "vesuvius_ram_used_bytes": _Metric(
        "memory of the run, shared memory counted once; maximum of the last window", "system.used_bytes"
    ),
    "vesuvius_ram_anon_bytes": _Metric(
        "private memory of all processes; maximum of the last window", "system.anon_bytes"
    ),
    "vesuvius_ram_shared_bytes": _Metric(
        "shared memory, such as Ray's object store; maximum of the last window", "system.shared_bytes"
    ),
    "vesuvius_ram_trainer_bytes": _Metric(
        "private memory of the trainer; maximum of the last window", "system.trainer_bytes"
    ),
    "vesuvius_ram_limit_bytes": _Metric("memory that the run may use", "system.limit_bytes"),
    "vesuvius_memory_risk": _Metric("0 low, 1 warn, 2 critical", "system.risk"),
    "vesuvius_reader_max_bytes": _Metric("private memory of the largest reader", "system.reader_max_bytes"),
    "vesuvius_vram_reserved_bytes": _Metric(
        "GPU memory that torch holds in the trainer; maximum of the last window", "system.vram.reserved_bytes"
    ),
    "vesuvius_vram_peak_bytes": _Metric("GPU memory in tensors; maximum of the last window", "system.vram.peak_bytes"),
    "vesuvius_gpu_memory_used_bytes": _Metric("memory in use, by all processes", "system.used_bytes", "gpu"),
    "vesuvius_gpu_memory_total_bytes": _Metric("memory of the GPU", "system.total_bytes", "gpu"),
    "vesuvius_gpu_busy_ratio": _Metric("share of time in which a kernel ran", "system.busy", "gpu"),
    "vesuvius_gpu_power_watts": _Metric("power draw, mean of the last window", "system.power_w", "gpu"),
    "vesuvius_gpu_temperature_celsius": _Metric("temperature", "system.temperature_c", "gpu"),
    "vesuvius_gpu_slowed_ratio": _Metric(
        "share of the last window slowed down by heat or the power supply", "system.slowed_share", "gpu"
    ),
    "vesuvius_gpu_power_capped_ratio": _Metric(
        "share of the last window at the power limit", "system.power_capped_share", "gpu"
    ),
    "vesuvius_gpu_ecc_uncorrected_errors_total": _Metric(
        "memory errors since the driver was loaded", "system.ecc_uncorrected", "gpu"
    ),
    "vesuvius_gpu_xids_total": _Metric("errors reported by the driver (XID), all GPUs", "event.gpu_xid", counts=_ONCE),
    "vesuvius_disk_free_bytes": _Metric("free on the disk of the run directory", "system.disk.free_bytes"),
    "vesuvius_disk_run_bytes": _Metric("size of the run directory", "system.disk.run_bytes"),
    "vesuvius_cpu_throttled_ratio": _Metric(
        "share of quota periods in which the cgroup's processor quota was used up", "verdict.throttled_share"
    ),
}
"""By name, in the order in which they are served.  Each also has the label `run`."""


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
                if metric.is_histogram or metric.adds:
                    for part, value in _values(metric, place, record).items():
                        if value is not None:
                            self._add(name, metric, part, float(value))
                    continue
                if metric.counts is None:
                    if kind != "verdict" or place in record:  # the watchdog's has no figures
                        values = _values(metric, place, record)
                        self._values[name] = {label: float(v) for label, v in values.items() if v is not None}
                    continue
                label = "" if place else record.get("bound" if kind == "verdict" else "rung")
                if place in ("", event) and label in metric.counts:
                    self._values[name][label] += 1
            if kind in {"run_start", "step"} or event in {"hung", "recovered"}:
                self._values["vesuvius_hung"] = {"": float(event == "hung")}

    def _add(self, name: str, metric: _Metric, label: str, value: float) -> None:
        if not metric.is_histogram:
            self._values[name][label] += max(
                value, 0.0
            )  # a difference of clocks may be below 0, a counter must not fall
            return
        self._values[name][_SUM] += value
        for bound in _BUCKETS_S:  # each counts what is at or below it, as Prometheus has them
            self._values[name][_le(bound)] += value <= bound

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
