"""Memory samples of a run that grows, as `recent.jsonl` keeps them."""

from __future__ import annotations

from dataclasses import replace

from vesuvius.monitor.recent import MemorySample
from vesuvius.runlog.units import GIB


def moments(end: float, count: int = 90, growth: int = 50 * 10**6, **fields: object) -> list[MemorySample]:
    """One a second up to `end`; reader 11 grows."""
    made = []
    for number in range(count):
        moment = MemorySample(
            time=end - (count - 1 - number),
            step=100 + number // 2,
            used_bytes=8 * GIB + growth * number,
            shared_bytes=GIB,
            trainer_bytes=4 * GIB,
            reader_bytes={11: 2 * GIB + growth * number, 12: GIB},
            killer="memory.max of cgroup /job",
            killer_used_bytes=9 * GIB + growth * number,
            kills_at_bytes=16 * GIB,
            cgroup_oom_kills=3,
            machine_oom_kills=7,
        )
        made.append(replace(moment, **fields))  # type: ignore[arg-type]
    return made
