"""Memory samples of a growing run, as in `recent.jsonl`."""

from __future__ import annotations

from dataclasses import replace

from vesuvius.monitor.memory.limits import MemoryLimit
from vesuvius.monitor.samples import MemorySample
from vesuvius.runlog.units import GIB


def memory_samples(
    end: float, count: int = 90, growth: int = 50 * 10**6, in_use: int | None = None, **fields: object
) -> list[MemorySample]:
    """One sample per second up to `end`; reader 11 grows.  `in_use`: of the first limit, 16 GiB."""
    samples = []
    for index in range(count):
        used = 9 * GIB + growth * index if in_use is None else in_use
        sample = MemorySample(
            time=end - (count - 1 - index),
            step=100 + index // 2,
            used_bytes=8 * GIB + growth * index,
            shared_bytes=GIB,
            trainer_bytes=4 * GIB,
            readers={11: 2 * GIB + growth * index, 12: GIB},
            limits=(MemoryLimit("memory.max of cgroup /job", used, 16 * GIB, 16 * GIB),),
            cgroup_oom_kills=3,
            machine_oom_kills=7,
        )
        samples.append(replace(sample, **fields))  # type: ignore[arg-type]
    return samples
