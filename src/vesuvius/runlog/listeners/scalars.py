"""The figures of a record under the tags that TensorBoard, Weights & Biases and MLflow show.

The tags never change: runs are compared by them.
"""

from __future__ import annotations

from typing import Any

from vesuvius.runlog.records import Record
from vesuvius.runlog.units import GIB

_SYSTEM_EVERY_S = 60.0
_TIMES = ("step", "data", "h2d", "gpu", "forward", "backward", "optimizer", "other", "step_p95")


class Scalars:
    """Figures of one record after the other.

    The monitor's records come every ten seconds, more than a month's curve needs: one a minute is taken.
    """

    def __init__(self) -> None:
        self._due = 0.0

    def of(self, record: Record) -> dict[str, float]:
        """Tag -> figure; what is not known is left out, and so is a record that is not shown."""
        if record["kind"] == "run_start":
            self._due = 0.0
        if record["kind"] == "system":
            # More than that before it is due: the clock was set back.
            if 0 < self._due - record["time"] <= _SYSTEM_EVERY_S:
                return {}
            self._due = record["time"] + _SYSTEM_EVERY_S
        return {tag: value for tag, value in _table(record).items() if value is not None}


def _table(record: Record) -> dict[str, float | None]:
    """The table: tag -> figure of a record, None where it is not known."""
    get = record.get
    match record["kind"]:
        case "step":
            return {
                **{f"train/{name}": get(name) for name in ("loss", "grad_norm", "lr")},
                **{f"time/{name}_s": get(f"{name}_s") for name in _TIMES},
                "time/comm_s": get("comm_s") or None,
                "time/samples_per_s": _quotient(get("samples"), get("step_s")),
                "time/mfu": get("mfu"),
                "memory/ram_gib": _gib(get("ram_used_bytes")),
                "memory/vram_gib": _gib(get("vram_used_bytes")),
                "memory/worker_max_gib": _gib(get("worker_max_bytes")),
            }
        case "validation":
            found: dict[str, float | None] = {}
            for name, figures in record["weights"].items():
                found[f"validation/loss_{name}"] = figures["loss"]
                found[f"validation/relative_error_{name}"] = figures.get("relative_error")
                found |= {f"validation/{name}_bin_{number}": loss for number, loss in enumerate(figures["bins"])}
            return found
        case "preview":
            distances = "histogram_distance", "spectrum_distance_db", "correlation_distance"
            return {f"preview/{name}": get(name) for name in distances}
        case "system":  # the most in its window for memory, the mean for what was busy
            vram, gpus = get("vram") or {}, get("gpus") or []
            return {
                "system/ram_gib": _gib(get("used_bytes")),
                "system/trainer_gib": _gib(get("trainer_bytes")),
                "system/store_gib": _gib(get("shared_bytes")),
                "system/reader_max_gib": _gib(max((get("readers") or {}).values(), default=None)),
                "system/vram_reserved_gib": _gib(vram.get("reserved_bytes")),
                "system/vram_peak_gib": _gib(vram.get("peak_bytes")),
                "system/cores_busy": get("cores_busy"),
                **{f"system/gpu_{gpu['index']}_busy": gpu["busy"][1] if gpu.get("busy") else None for gpu in gpus},
            }
    return {}


def _gib(found: Any) -> float | None:
    """Of a figure, or the most of a window's [min, mean, max]."""
    return _quotient((found[-1] if found else None) if isinstance(found, list) else found, GIB)


def _quotient(value: float | None, divisor: float | None) -> float | None:
    return None if value is None or not divisor else value / divisor
