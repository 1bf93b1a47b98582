"""Memory samples of a growing run, as in `recent.jsonl`."""

from __future__ import annotations

from dataclasses import replace

from vesuvius.monitor.recent import MemorySample
from vesuvius.runlog.units import GIB


def memory_samples(end: float, count: int = 90, growth: int = 50 * 10**6, **fields: object) -> list[MemorySample]:
    """One sample per second up to `end`; reader 11 grows."""
    samples = []
    for index in range(count):
        sample = MemorySample(
            time=end - (count - 1 - index),
            step=100 + index // 2,
            used_bytes=8 * GIB + growth * index,
            shared_bytes=GIB,
            trainer_bytes=4 * GIB,
            reader_bytes={11: 2 * GIB + growth * index, 12: GIB},
            binding_limit="memory.max of cgroup /job",
            binding_used_bytes=9 * GIB + growth * index,
            limit_bytes=16 * GIB,
            cgroup_oom_kills=3,
            machine_oom_kills=7,
        )
        samples.append(replace(sample, **fields))  # type: ignore[arg-type]
    return samples
