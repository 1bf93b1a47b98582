"""The memory sample, and the two files that keep it.

`recent.jsonl` has each sample of the last two minutes, for memcheck and post-mortems; once it is full, it replaces
`recent.before.jsonl`.  `system.jsonl` has a record for each window of samples.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from vesuvius.monitor.memory.limits import MemoryLimit
from vesuvius.monitor.memory.risk import Exhaustion, Risk, Trend
from vesuvius.monitor.probes.gpus import GpuUse, VramUse
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.runlog.files import AppendFile
from vesuvius.runlog.held import where
from vesuvius.runlog.records import Record, read_dataclasses

log = logging.getLogger(__name__)

KEPT = 120


@dataclass(frozen=True)
class MemorySample:
    time: float  # seconds since 1970
    step: int  # optimizer steps done
    # used_bytes, shared_bytes: of the run, as in `SystemSample`
    used_bytes: int
    shared_bytes: int
    trainer_bytes: int  # private memory of the trainer
    readers: Mapping[int, int] = field(default_factory=dict)  # private memory of each reader, by pid
    limits: tuple[MemoryLimit, ...] = ()  # first the one that is reached first
    risk: str = "LOW"  # name of the level
    reason: str = ""
    growth_bytes_s: Trend | None = None  # of the first limit
    exhaustion_s: Exhaustion | None = None
    page_cache_bytes: int | None = None
    machine_available_bytes: int | None = None
    swap_used_bytes: int | None = None
    # cgroup_oom_kills, machine_oom_kills: the kernel's counters; None if it does not count
    cgroup_oom_kills: int | None = None
    machine_oom_kills: int | None = None
    gpus: tuple[GpuUse, ...] = ()
    vram: VramUse | None = None  # None without a GPU
    workers: int | None = None  # number of readers; None = unknown
    # awaits, silent_s: what the loop waited for ("batch", "checkpoint"), and seconds since its last sign of life
    awaits: str = ""
    silent_s: float | None = None

    @classmethod
    def of(cls, system: SystemSample, risk: Risk, readers: Mapping[int, int], step: int = 0, **more: Any) -> Self:
        """Sum up what the probes read; `more`: fields that only the run itself knows."""
        cgroup, machine = system.cgroup, system.machine
        return cls(
            *(system.time, step, system.used_bytes, system.shared_bytes, system.processes[0].anon_bytes, readers),
            *(risk.limits, risk.level.name, risk.reason, risk.trend, risk.exhaustion),
            page_cache_bytes=cgroup.file_bytes if cgroup else machine.page_cache_bytes,
            machine_available_bytes=machine.available_bytes,
            swap_used_bytes=machine.swap_used_bytes,
            cgroup_oom_kills=cgroup.oom_kills if cgroup else None,
            machine_oom_kills=machine.oom_kills,
            gpus=system.gpus,
            **more,
        )

    @property
    def limit_bytes(self) -> int | None:
        return min((limit.total_bytes for limit in self.limits), default=None)

    @property
    def limit_share(self) -> float | None:
        """Use of the first limit as a share of the point where it kills."""
        return self.limits[0].used_bytes / self.limits[0].limit_bytes if self.limits else None


def summarize(samples: Sequence[MemorySample]) -> Record:
    """Return the fields of a record of `system.jsonl`: those of the last sample, and [min, mean, max] of what varies.

    GPUs that failed to answer in some samples are summed up from the others.
    """
    last, vrams = samples[-1], [sample.vram for sample in samples if sample.vram]
    record = asdict(last) | {"samples": len(samples), "limit_bytes": last.limit_bytes}
    record["limits"] = record["limits"][:1]  # the names of a pod's cgroups are long
    for name in ("time", "awaits", "silent_s"):
        del record[name]
    for name in ("used_bytes", "shared_bytes", "trainer_bytes"):
        record[name] = _sizes([getattr(sample, name) for sample in samples])
    available = [sample.machine_available_bytes for sample in samples if sample.machine_available_bytes is not None]
    record["machine_available_bytes"] = min(available, default=None)
    if vrams:
        spread = {name: _sizes([getattr(v, name) for v in vrams]) for name in ("allocated_bytes", "reserved_bytes")}
        peak, free = max(vram.peak_bytes for vram in vrams), min(vram.free_bytes for vram in vrams)
        record["vram"] = asdict(vrams[-1]) | spread | {"peak_bytes": peak, "free_bytes": free}
    gpus: dict[str, list[GpuUse]] = {}
    for gpu in (gpu for sample in samples for gpu in sample.gpus):
        gpus.setdefault(gpu.uuid, []).append(gpu)
    record["gpus"] = [
        {name: value for name, value in asdict(seen[-1]).items() if name not in ("uuid", "name")}
        | {
            name: _shares([value for gpu in seen if (value := getattr(gpu, name)) is not None])
            for name in ("busy", "power_w")
        }
        for seen in sorted(gpus.values(), key=lambda seen: seen[-1].index)
    ]
    return record


def _sizes(sizes: Sequence[int]) -> list[int]:
    return [min(sizes), sum(sizes) // len(sizes), max(sizes)]


def _shares(values: Sequence[float]) -> list[float] | None:
    """Return min, mean and max, rounded: a month of records must stay below 100 MB."""
    return [round(value, 2) for value in (min(values), sum(values) / len(values), max(values))] if values else None


def spreads(record: Record) -> dict[str, list[Any]]:
    """Return [min, mean, max] of each figure in a record of `system.jsonl`, as it was written: `used_bytes`, ...,
    `cores`, `vram`, `worker PID` and `GPU INDEX`; unknown ones are empty or hold None."""
    names = ("used_bytes", "trainer_bytes", "shared_bytes")
    return {
        **{name: record.get(name) or [] for name in names},
        "cores": 3 * [record.get("cores_busy")],
        "vram": (record.get("vram") or {}).get("reserved_bytes") or [],
        **{f"worker {pid}": 3 * [size] for pid, size in (record.get("readers") or {}).items()},
        **{f"GPU {gpu.get('index')}": gpu.get("busy") or [] for gpu in record.get("gpus") or []},
    }


class RecentFile:
    """Writes samples, after those of earlier sessions; survives a full disk, see `AppendFile`.  For one thread."""

    def __init__(self, path: Path, kept: int = KEPT) -> None:
        self._path, self._kept = path, kept
        self._file = AppendFile(path)
        self._lines = path.read_bytes().count(b"\n")

    def write(self, sample: MemorySample) -> None:
        if self._lines >= self._kept:
            self._rotate()
        self._file.write_line(json.dumps(asdict(sample), separators=(",", ":")))
        self._lines += 1

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        self._lines, full = 0, self._file
        try:
            path = where(self._path)
            os.replace(path, _before(path))  # also frees space on a full disk
            self._file = AppendFile(self._path)
            full.close()
        except OSError as error:
            log.warning("cannot rotate %s: %s; it grows until the folder is writable", self._path, error)


def read_recent(path: Path, kept: int = KEPT) -> list[MemorySample]:
    """Return the last samples, oldest first, without torn lines; empty without a file."""
    return [*read_dataclasses(MemorySample, _before(path)), *read_dataclasses(MemorySample, path)][-kept:]


def _before(path: Path) -> Path:
    return path.with_name(f"{path.stem}.before{path.suffix}")
