"""What the monitor writes of some looks: a record of `system.jsonl` and a line of `monitor.log`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vesuvius.monitor.memory.risk import Risk
from vesuvius.monitor.probes.gpus import GpuUse
from vesuvius.monitor.probes.system_sample import Rates, SystemSample
from vesuvius.monitor.probes.vram import VramUse
from vesuvius.runlog.units import DATE_FORMAT, GIB


@dataclass(frozen=True)
class SystemWindow:
    """What was seen between two records."""

    step: int  # optimizer steps done
    samples: Sequence[SystemSample]  # at least one, in order
    vrams: Sequence[VramUse]  # of the trainer's GPU, as many or none
    limit_bytes: int  # what the run may use
    readers: Mapping[int, int]  # private memory of each reader, by pid
    risk: Risk  # of the last sample
    rates: Rates | None  # of the last ten seconds; None at the beginning


def system_figures(window: SystemWindow) -> dict[str, Any]:
    """The fields of the record: [min, mean, max] where a figure moves within the window; null is not known.  Pure."""
    gpus: dict[str, list[GpuUse]] = {}
    for gpu in (gpu for sample in window.samples for gpu in sample.gpus):  # one that fails to answer is left out
        gpus.setdefault(gpu.uuid, []).append(gpu)
    return {
        "step": window.step,
        "samples": len(window.samples),
        **_memory_figures(window),
        **_risk_figures(window.risk),
        **_rates_figures(window),
        "vram": _vram_figures(window.vrams),
        "gpus": [_gpu_figures(gpus[uuid]) for uuid in sorted(gpus, key=lambda uuid: gpus[uuid][-1].index)],
    }


def _memory_figures(window: SystemWindow) -> dict[str, Any]:
    samples, last = window.samples, window.samples[-1]
    return {
        "limit_bytes": window.limit_bytes,
        "used_bytes": _bytes_min_mean_max([sample.used_bytes for sample in samples]),
        "anon_bytes": _bytes_min_mean_max([sample.anon_bytes for sample in samples]),
        "shared_bytes": _bytes_min_mean_max([sample.shared_bytes for sample in samples]),
        "trainer_bytes": _bytes_min_mean_max([sample.processes[0].anon_bytes for sample in samples]),
        "readers": {str(pid): size for pid, size in window.readers.items()},
        "page_cache_bytes": last.cgroup.file_bytes if last.cgroup else last.machine.page_cache_bytes,
        "machine_available_bytes": min(sample.machine.available_bytes for sample in samples),
        "swap_used_bytes": last.machine.swap_used_bytes,
        "oom_kills": {
            "cgroup": last.cgroup.oom_kills if last.cgroup else None,
            "machine": last.machine.oom_kills,
        },
    }


def _risk_figures(risk: Risk) -> dict[str, Any]:
    first = risk.killers[0]
    return {
        "risk": risk.level.name,
        "killer": {"name": first.name, "used_bytes": first.used_bytes, "kills_at_bytes": first.kills_at_bytes},
        "growth_bytes_s": asdict(risk.trend) if risk.trend else None,
        "exhaustion_s": asdict(risk.exhaustion) if risk.exhaustion else None,
    }


def _rates_figures(window: SystemWindow) -> dict[str, Any]:
    rates = window.rates
    if rates is None:
        return {}
    trainer = window.samples[-1].processes[0].pid
    return {
        "cores_busy": round(sum(rates.core_busy), 2),
        "core_busy": _min_mean_max(rates.core_busy),  # over the cores: each one would be too much on large machines
        "reader_cores": {
            str(pid): round(rates.process_cores[pid], 2) for pid in window.readers if pid in rates.process_cores
        },
        "trainer_cores": round(rates.process_cores.get(trainer, 0.0), 2),
    }


def _vram_figures(vrams: Sequence[VramUse]) -> dict[str, Any] | None:
    if not vrams:
        return None
    return asdict(vrams[-1]) | {
        "allocated_bytes": _bytes_min_mean_max([vram.allocated_bytes for vram in vrams]),
        "reserved_bytes": _bytes_min_mean_max([vram.reserved_bytes for vram in vrams]),
        "peak_bytes": max(vram.peak_bytes for vram in vrams),
        "free_bytes": min(vram.free_bytes for vram in vrams),
    }


def _gpu_figures(seen: Sequence[GpuUse]) -> dict[str, Any]:
    last = seen[-1]
    return {
        "index": last.index,
        "used_bytes": last.used_bytes,
        "total_bytes": last.total_bytes,
        "busy": _min_mean_max([gpu.busy for gpu in seen if gpu.busy is not None]),
        "power_w": _min_mean_max([gpu.power_w for gpu in seen if gpu.power_w is not None]),
        "temperature_c": last.temperature_c,
        "slowed_share": _share([None if gpu.slowed_by is None else bool(gpu.slowed_by) for gpu in seen]),
        "power_capped_share": _share([gpu.power_capped for gpu in seen]),
        "ecc_uncorrected": last.ecc_uncorrected,
    }


def monitor_line(window: SystemWindow) -> str:
    """The line of monitor.log; '-' is not known.  Pure but for the time of day."""
    last, first, rates, vrams = window.samples[-1], window.risk.killers[0], window.rates, window.vrams
    used = max(sample.used_bytes for sample in window.samples) / GIB
    each = " ".join(f"{pid}:{size / GIB:.2f}" for pid, size in sorted(window.readers.items())) or "-"
    vram = f"{vrams[-1].reserved_bytes / GIB:.1f}/{vrams[-1].total_bytes / GIB:.1f}" if vrams else "-"
    busy = "-" if rates is None else f"{sum(rates.core_busy):.1f}/{len(rates.core_busy)}"
    gpu = " ".join("-" if g.busy is None else f"{100 * g.busy:.0f}" for g in last.gpus) or "-"
    return (
        f"{time.strftime(DATE_FORMAT)} INFO ram_gib {used:.2f}/{window.limit_bytes / GIB:.1f} "
        f"store_gib {last.shared_bytes / GIB:.2f} readers_gib {each} vram_gib {vram} gpu_pct {gpu} cores {busy} "
        f"swap_gib {last.machine.swap_used_bytes / GIB:.2f} "
        f"risk {window.risk.level.name} left_gib {first.left_bytes / GIB:.2f}"
    )


def _bytes_min_mean_max(sizes: Sequence[int]) -> list[int]:
    return [min(sizes), sum(sizes) // len(sizes), max(sizes)]


def _share(seen: Sequence[bool | None]) -> float | None:
    """Of the samples that tell, those that say yes."""
    known = [value for value in seen if value is not None]
    return round(sum(known) / len(known), 2) if known else None


def _min_mean_max(values: Sequence[float]) -> list[float] | None:
    """Rounded to what compresses well: a month of these must stay below 100 MB."""
    if not values:
        return None
    return [round(value, 2) for value in (min(values), sum(values) / len(values), max(values))]
