"""Summarises the monitor's samples as a record of `system.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vesuvius.monitor.memory.risk import Risk
from vesuvius.monitor.probes.gpus import GpuUse
from vesuvius.monitor.probes.system_sample import Rates, SystemSample
from vesuvius.monitor.probes.vram import VramUse


def system_figures(
    step: int,
    samples: Sequence[SystemSample],
    vrams: Sequence[VramUse],
    limit_bytes: int,
    readers: Mapping[int, int],
    risk: Risk,
    rates: Rates | None,
) -> dict[str, Any]:
    """Return the fields of the record: [min, mean, max] for figures that vary, null for unknown ones.  Pure.

    Args:
        samples: those since the last record, at least one.
        vrams: of the trainer's GPU; one per sample, or none.
        limit_bytes: memory that the run may use.
        readers: private memory of each reader, by pid.
        risk: of the last sample.
        rates: of the last ten seconds; None at the beginning.
    """
    last = samples[-1]
    gpus: dict[str, list[GpuUse]] = {}
    for gpu in (gpu for sample in samples for gpu in sample.gpus):  # without GPUs that fail to answer
        gpus.setdefault(gpu.uuid, []).append(gpu)
    figures: dict[str, Any] = {
        "step": step,
        "samples": len(samples),
        "limit_bytes": limit_bytes,
        "used_bytes": _sizes([sample.used_bytes for sample in samples]),
        "anon_bytes": _sizes([sample.anon_bytes for sample in samples]),
        "shared_bytes": _sizes([sample.shared_bytes for sample in samples]),
        "trainer_bytes": _sizes([sample.processes[0].anon_bytes for sample in samples]),
        "readers": {str(pid): size for pid, size in readers.items()},
        "page_cache_bytes": last.cgroup.file_bytes if last.cgroup else last.machine.page_cache_bytes,
        "machine_available_bytes": min(sample.machine.available_bytes for sample in samples),
        "swap_used_bytes": last.machine.swap_used_bytes,
        "oom_kills": {"cgroup": last.cgroup and last.cgroup.oom_kills, "machine": last.machine.oom_kills},
        "risk": risk.level.name,
        "binding_limit": {name: getattr(risk.limits[0], name) for name in ("name", "used_bytes", "limit_bytes")},
        "growth_bytes_s": asdict(risk.trend) if risk.trend else None,
        "exhaustion_s": asdict(risk.exhaustion) if risk.exhaustion else None,
        "vram": _vram_figures(vrams) if vrams else None,
        "gpus": [_gpu_figures(gpus[uuid]) for uuid in sorted(gpus, key=lambda uuid: gpus[uuid][-1].index)],
    }
    if rates is not None:
        own = rates.process_cores
        figures["cores_busy"] = round(sum(rates.core_busy), 2)
        figures["core_busy"] = _shares(rates.core_busy)  # over all cores: one figure per core would be too long
        figures["reader_cores"] = {str(pid): round(own[pid], 2) for pid in readers if pid in own}
        figures["trainer_cores"] = round(own.get(last.processes[0].pid, 0.0), 2)
    return figures


def _vram_figures(vrams: Sequence[VramUse]) -> dict[str, Any]:
    return asdict(vrams[-1]) | {
        "allocated_bytes": _sizes([vram.allocated_bytes for vram in vrams]),
        "reserved_bytes": _sizes([vram.reserved_bytes for vram in vrams]),
        "peak_bytes": max(vram.peak_bytes for vram in vrams),
        "free_bytes": min(vram.free_bytes for vram in vrams),
    }


def _gpu_figures(seen: Sequence[GpuUse]) -> dict[str, Any]:
    same = ("index", "used_bytes", "total_bytes", "temperature_c")
    return {name: getattr(seen[-1], name) for name in same} | {
        "busy": _shares([gpu.busy for gpu in seen if gpu.busy is not None]),
        "power_w": _shares([gpu.power_w for gpu in seen if gpu.power_w is not None]),
    }


def _sizes(sizes: Sequence[int]) -> list[int]:
    return [min(sizes), sum(sizes) // len(sizes), max(sizes)]


def _shares(values: Sequence[float]) -> list[float] | None:
    """Return min, mean and max, rounded: a month of records must stay below 100 MB."""
    return [round(value, 2) for value in (min(values), sum(values) / len(values), max(values))] if values else None
