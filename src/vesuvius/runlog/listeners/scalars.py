"""The figures of a record under the tags that TensorBoard and trackers show.  Pure.

The tags never change: runs are compared by them.
"""

from __future__ import annotations

from vesuvius.runlog.records import Record
from vesuvius.runlog.units import GIB

_SYSTEM_EVERY_S = 60.0


class SystemPace:
    """The monitor's records come every ten seconds, more than a month's curve needs: one a minute is taken."""

    def __init__(self) -> None:
        self._due = 0.0

    def takes(self, record: Record) -> bool:
        """Whether a record is one to show."""
        if record["kind"] == "run_start":
            self._due = 0.0
        if record["kind"] != "system":
            return True
        # More than that before it is due: the clock was set back.
        due: bool = not 0 < self._due - record["time"] <= _SYSTEM_EVERY_S
        if due:
            self._due = record["time"] + _SYSTEM_EVERY_S
        return due


def scalars_of(record: Record) -> dict[str, float | None]:
    """The table: tag -> figure of a record, None where it is not known."""
    match record["kind"]:
        case "step":
            times = "step", "data", "h2d", "gpu", "forward", "backward", "optimizer", "other", "step_p95"
            return {
                **{f"train/{name}": record.get(name) for name in ("loss", "grad_norm", "lr")},
                **{f"time/{name}_s": record.get(f"{name}_s") for name in times},
                "time/comm_s": record.get("comm_s") or None,
                "time/samples_per_s": _quotient(record.get("samples"), record.get("step_s")),
                "time/mfu": record.get("mfu"),
                "memory/ram_gib": _quotient(record.get("ram_used_bytes"), GIB),
                "memory/vram_gib": _quotient(record.get("vram_used_bytes"), GIB),
                "memory/worker_max_gib": _quotient(record.get("worker_max_bytes"), GIB),
            }
        case "validation":
            weights = record["weights"].items()
            losses = {f"validation/loss_{name}": figures["loss"] for name, figures in weights}
            bins = {
                f"validation/{name}_bin_{number}": loss
                for name, figures in weights
                for number, loss in enumerate(figures["bins"])
            }
            relative = {f"validation/relative_error_{name}": figures.get("relative_error") for name, figures in weights}
            return losses | bins | relative
        case "system":
            return _system_scalars(record)
        case "preview":
            distances = "histogram_distance", "spectrum_distance_db", "correlation_distance"
            return {f"preview/{name}": record.get(name) for name in distances}
    return {}


def _system_scalars(record: Record) -> dict[str, float | None]:
    """Figures of the monitor: the most in its window for memory, the mean for what was busy."""
    vram, gpus = record.get("vram") or {}, record.get("gpus") or []
    scalars = {
        "system/ram_gib": _quotient(_most(record.get("used_bytes")), GIB),
        "system/trainer_gib": _quotient(_most(record.get("trainer_bytes")), GIB),
        "system/store_gib": _quotient(_most(record.get("shared_bytes")), GIB),
        "system/reader_max_gib": _quotient(max((record.get("readers") or {}).values(), default=None), GIB),
        "system/vram_reserved_gib": _quotient(_most(vram.get("reserved_bytes")), GIB),
        "system/vram_peak_gib": _quotient(vram.get("peak_bytes"), GIB),
        "system/cores_busy": record.get("cores_busy"),
    }
    for gpu in gpus:
        scalars[f"system/gpu_{gpu['index']}_busy"] = gpu["busy"][1] if gpu.get("busy") else None
    return scalars


def _most(min_mean_max: list[float] | None) -> float | None:
    return min_mean_max[-1] if min_mean_max else None


def _quotient(value: float | None, divisor: float | None) -> float | None:
    return None if value is None or not divisor else value / divisor
