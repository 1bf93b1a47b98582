"""What Prometheus is told of a run: the table of metrics, and their values from the records of the run.  No I/O.

Base units, counters that only grow within a session, labels with few values.  What is not known has no sample.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Record = dict[str, Any]

_PARTS = ("data", "h2d", "forward", "backward", "optimizer", "other")
_RISKS = {"LOW": 0, "WARN": 1, "CRITICAL": 2}


@dataclass(frozen=True)
class _Family:
    """A metric.  `counts`: all values of its label, where it counts from 0 on; one empty value = no label."""

    meaning: str
    label: str | None = None
    counts: tuple[str, ...] | None = None


_ONCE = ("",)

METRICS: dict[str, _Family] = {
    "vesuvius_session_start_timestamp_seconds": _Family("when this session began"),
    "vesuvius_steps_total": _Family("optimizer steps done, the last step's number"),
    "vesuvius_target_steps": _Family("optimizer step at which the run is done"),
    "vesuvius_samples_total": _Family("samples trained on"),
    "vesuvius_last_step_timestamp_seconds": _Family("when the last step was logged"),
    "vesuvius_samples_per_second": _Family("samples a second in the last step"),
    "vesuvius_mfu_ratio": _Family(
        "share of the GPU's dense peak in the last step; absent for GPUs without a known peak"
    ),
    "vesuvius_step_seconds": _Family("time of the last step"),
    "vesuvius_step_part_seconds": _Family("time of each part of the last step; they add up to it", "part"),
    "vesuvius_step_pause_seconds": _Family("validation, previews and checkpoint copies within part other"),
    "vesuvius_remaining_seconds": _Family("time until the session ends, as the step line's eta"),
    "vesuvius_loss": _Family("loss of the last step"),
    "vesuvius_gradient_norm": _Family("norm of the gradient in the last step, before clipping"),
    "vesuvius_learning_rate": _Family("learning rate of the last step"),
    "vesuvius_readers": _Family("reader processes"),
    "vesuvius_validation_loss": _Family("loss of the last validation", "weights"),
    "vesuvius_validation_relative_error": _Family("error of the last validation against the best linear denoiser"),
    "vesuvius_last_validation_timestamp_seconds": _Family("when the last validation ended"),
    "vesuvius_best_step": _Family("step with the best validation"),
    "vesuvius_last_checkpoint_step": _Family("step of the last checkpoint that this session saved"),
    "vesuvius_last_checkpoint_timestamp_seconds": _Family("when that checkpoint was complete"),
    "vesuvius_last_checkpoint_bytes": _Family("its size"),
    "vesuvius_hung": _Family("1 while the watchdog reports the run as hung, else 0"),
    "vesuvius_checkpoint_failures_total": _Family("checkpoints that could not be saved", counts=_ONCE),
    "vesuvius_nonfinite_steps_total": _Family("steps not applied: loss or gradient not finite", counts=_ONCE),
    "vesuvius_quarantined_boxes_total": _Family("damaged boxes of voxels put into quarantine", counts=_ONCE),
    "vesuvius_reader_deaths_total": _Family("readers that died and were replaced", counts=_ONCE),
    "vesuvius_hangs_total": _Family("times the watchdog reported the run as hung", counts=_ONCE),
    "vesuvius_guard_actions_total": _Family(
        "actions of the memory guard", "action", counts=("prefetch", "worker", "exit")
    ),
    "vesuvius_verdicts_total": _Family(
        "verdicts by what bounds the run",
        "bound",
        counts=("compute-bound", "data-bound", "transfer-bound", "host-bound", "comm-bound", "hung"),
    ),
    "vesuvius_ram_used_bytes": _Family("memory of the run, shared memory once; most in the last window"),
    "vesuvius_ram_anon_bytes": _Family("private memory of all processes; most in the last window"),
    "vesuvius_ram_shared_bytes": _Family("shared memory, such as Ray's object store; most in the last window"),
    "vesuvius_ram_trainer_bytes": _Family("private memory of the trainer; most in the last window"),
    "vesuvius_ram_limit_bytes": _Family("memory that the run may use"),
    "vesuvius_memory_risk": _Family("0 low, 1 warn, 2 critical"),
    "vesuvius_reader_bytes": _Family("private memory of each reader", "pid"),
    "vesuvius_vram_reserved_bytes": _Family("GPU memory that torch holds in the trainer; most in the last window"),
    "vesuvius_vram_peak_bytes": _Family("GPU memory in tensors; most in the last window"),
    "vesuvius_gpu_memory_used_bytes": _Family("memory in use, by all processes", "gpu"),
    "vesuvius_gpu_memory_total_bytes": _Family("memory of the GPU", "gpu"),
    "vesuvius_gpu_busy_ratio": _Family("share of time in which a kernel ran", "gpu"),
    "vesuvius_gpu_power_watts": _Family("power draw, mean of the last window", "gpu"),
    "vesuvius_gpu_temperature_celsius": _Family("temperature", "gpu"),
    "vesuvius_gpu_slowed_ratio": _Family("share of the last window slowed down by heat or the power supply", "gpu"),
    "vesuvius_gpu_power_capped_ratio": _Family("share of the last window at the power limit", "gpu"),
    "vesuvius_gpu_ecc_uncorrected_errors_total": _Family("memory errors since the driver was loaded", "gpu"),
    "vesuvius_gpu_xids_total": _Family("errors that the driver has reported (XID), of all GPUs", counts=_ONCE),
    "vesuvius_disk_free_bytes": _Family("free on the disk of the run directory"),
    "vesuvius_disk_run_bytes": _Family("size of the run directory"),
    "vesuvius_cpu_throttled_ratio": _Family("share of quota periods in which the cgroup's processor quota was used up"),
}
"""By name, in the order in which they are served.  Each also has the label `run`."""

_EVENT_COUNTS = {
    "save_failed": "vesuvius_checkpoint_failures_total",
    "nonfinite": "vesuvius_nonfinite_steps_total",
    "quarantine": "vesuvius_quarantined_boxes_total",
    "reader_died": "vesuvius_reader_deaths_total",
    "hung": "vesuvius_hangs_total",
    "gpu_xid": "vesuvius_gpu_xids_total",
}


class Exposition:
    """The metrics of one session.  Any thread may call.

    Args:
        run: its name, a label of every metric.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = {
            name: dict.fromkeys(family.counts or (), 0.0) for name, family in METRICS.items()
        }

    def take(self, record: Record) -> None:
        """Learn from a record of `metrics.jsonl` or `system.jsonl`."""
        with self._lock:
            match record["kind"]:
                case "run_start":
                    self._set("vesuvius_session_start_timestamp_seconds", record.get("time"))
                    self._set("vesuvius_hung", 0)
                case "step":
                    self._take_step(record)
                case "validation":
                    weights = record.get("weights") or {}
                    self._set_each("vesuvius_validation_loss", {name: w.get("loss") for name, w in weights.items()})
                    self._set("vesuvius_validation_relative_error", record.get("relative_error"))
                    self._set("vesuvius_last_validation_timestamp_seconds", record.get("time"))
                    self._set("vesuvius_best_step", record.get("best_step"))
                case "checkpoint":
                    self._set("vesuvius_last_checkpoint_step", record.get("step"))
                    self._set("vesuvius_last_checkpoint_timestamp_seconds", record.get("saved_time"))
                    self._set("vesuvius_last_checkpoint_bytes", record.get("bytes"))
                case "verdict":
                    self._count("vesuvius_verdicts_total", record.get("bound"))
                    if "throttled_share" in record:  # not in the watchdog's
                        self._set("vesuvius_cpu_throttled_ratio", record["throttled_share"])
                case "event":
                    self._take_event(record)
                case "system":
                    self._take_system(record)

    def metrics(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        with self._lock:
            values = {name: dict(samples) for name, samples in self._values.items()}
        for name, family in METRICS.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = kind(name, family.meaning, labels=["run", *([family.label] if family.label else [])])
            for label, value in values[name].items():
                metric.add_metric([self._run, *([label] if family.label else [])], value)
            yield metric

    def _take_step(self, record: Record) -> None:
        step_s, samples = record.get("step_s"), record.get("samples")
        self._set("vesuvius_steps_total", record.get("step"))
        self._set("vesuvius_target_steps", record.get("steps"))
        self._set("vesuvius_samples_total", record.get("samples_total"))
        self._set("vesuvius_last_step_timestamp_seconds", record.get("time"))
        self._set("vesuvius_samples_per_second", samples / step_s if step_s and samples is not None else None)
        self._set("vesuvius_mfu_ratio", record.get("mfu"))
        self._set("vesuvius_step_seconds", step_s)
        self._set_each("vesuvius_step_part_seconds", {part: record.get(f"{part}_s") for part in _PARTS})
        self._set("vesuvius_step_pause_seconds", record.get("pause_s"))
        self._set("vesuvius_remaining_seconds", record.get("eta_s"))
        self._set("vesuvius_loss", record.get("loss"))
        self._set("vesuvius_gradient_norm", record.get("grad_norm"))
        self._set("vesuvius_learning_rate", record.get("lr"))
        self._set("vesuvius_readers", record.get("workers"))
        self._set("vesuvius_hung", 0)

    def _take_event(self, record: Record) -> None:
        event = record.get("event", "")
        if event in _EVENT_COUNTS:
            self._count(_EVENT_COUNTS[event])
        if event == "guard":
            self._count("vesuvius_guard_actions_total", record.get("rung"))
        if event in {"hung", "recovered"}:
            self._set("vesuvius_hung", event == "hung")

    def _take_system(self, record: Record) -> None:
        for part in ("used", "anon", "shared", "trainer"):
            self._set(f"vesuvius_ram_{part}_bytes", _most(record.get(f"{part}_bytes")))
        self._set("vesuvius_ram_limit_bytes", record.get("limit_bytes"))
        self._set("vesuvius_memory_risk", _RISKS.get(record.get("risk", "")))
        self._set_each("vesuvius_reader_bytes", record.get("readers") or {})
        vram = record.get("vram") or {}
        self._set("vesuvius_vram_reserved_bytes", _most(vram.get("reserved_bytes")))
        self._set("vesuvius_vram_peak_bytes", vram.get("peak_bytes"))
        disk = record.get("disk") or {}
        self._set("vesuvius_disk_free_bytes", disk.get("free_bytes"))
        self._set("vesuvius_disk_run_bytes", disk.get("run_bytes"))
        gpus = {str(gpu["index"]): gpu for gpu in record.get("gpus") or []}
        for name, figure in {
            "vesuvius_gpu_memory_used_bytes": "used_bytes",
            "vesuvius_gpu_memory_total_bytes": "total_bytes",
            "vesuvius_gpu_busy_ratio": "busy",
            "vesuvius_gpu_power_watts": "power_w",
            "vesuvius_gpu_temperature_celsius": "temperature_c",
            "vesuvius_gpu_slowed_ratio": "slowed_share",
            "vesuvius_gpu_power_capped_ratio": "power_capped_share",
            "vesuvius_gpu_ecc_uncorrected_errors_total": "ecc_uncorrected",
        }.items():
            self._set_each(name, {index: _mean(gpu.get(figure)) for index, gpu in gpus.items()})

    def _set(self, name: str, value: float | None) -> None:
        self._set_each(name, {"": value})

    def _set_each(self, name: str, values: Mapping[str, float | None]) -> None:
        self._values[name] = {label: float(value) for label, value in values.items() if value is not None}

    def _count(self, name: str, label: str | None = "") -> None:
        if label in self._values[name]:  # another value would be one that METRICS does not name
            self._values[name][label] += 1


def _most(min_mean_max: list[float] | None) -> float | None:
    return min_mean_max[-1] if min_mean_max else None


def _mean(figure: float | list[float] | None) -> float | None:
    """Of [min, mean, max]; a figure alone is itself."""
    return figure[1] if isinstance(figure, list) else figure
