"""What a sample of a run gives cause to say at once: kills, GPUs in trouble, others' memory.  Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vesuvius.monitor.probes.processes import ProcessUse
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.runlog.units import size_text

_OTHERS_NAMED = 3
_GROWS_BYTES_S = 1e6
_LASTS_S = 10.0


@dataclass(frozen=True)
class Notice:
    """Something to say at once."""

    # level, text: for the log
    level: int
    text: str
    event: str = ""  # its name in `metrics.jsonl`; empty = for the log alone
    fields: dict[str, Any] = field(default_factory=dict)  # of the record, beside `text`


class Notices:
    """Kills, GPUs in trouble.  Remembers what it has said.

    Args:
        gpu_uuid: of the run's GPU; None = not known, and then each may be.
    """

    def __init__(self, gpu_uuid: str | None = None) -> None:
        self._gpu_uuid = gpu_uuid
        self._slowed_since_s: dict[str, float] = {}  # by uuid; infinite = said
        self._ecc: dict[str, int] = {}  # errors that ECC could not correct, of each GPU when it last told

    def of(self, before: SystemSample, sample: SystemSample) -> list[Notice]:
        """What two samples, one after the other, give cause to say.  Pure but for what it remembers."""
        return [*_kills(before, sample), *self._memory_errors(before, sample), *self._slowed(sample)]

    def _memory_errors(self, before: SystemSample, sample: SystemSample) -> Iterator[Notice]:
        """Errors of memory that ECC could not correct.  Another GPU's are no reason to stop this run."""
        counts = [
            {g.uuid: g.ecc_uncorrected for g in s.gpus if g.ecc_uncorrected is not None} for s in (before, sample)
        ]
        known, now = self._ecc | counts[0], counts[1]
        self._ecc = known | now
        # The name of a part of a GPU (MIG) is in that of no GPU: then each may be ours.
        ours = self._gpu_uuid if any(self._gpu_uuid in gpu.uuid for gpu in sample.gpus if self._gpu_uuid) else None
        for gpu in sample.gpus:
            errors = now.get(gpu.uuid, 0) - known.get(gpu.uuid, now.get(gpu.uuid, 0))
            if errors <= 0:
                continue
            text = f"GPU {gpu.index} ({gpu.name}): {errors} new memory error(s) that ECC could not correct; "
            level, rest = logging.WARNING, "this run does not use that GPU"
            if ours is None or ours in gpu.uuid:
                level = logging.ERROR
                rest = "results since may be wrong: stop, have the GPU checked, continue from an earlier checkpoint"
            yield Notice(level, text + rest, "gpu_ecc", {"gpu": gpu.index, "errors": errors})

    def _slowed(self, sample: SystemSample) -> Iterator[Notice]:
        """Once for each GPU that heat or its power supply slows down for long."""
        if not sample.gpus:  # NVML does not answer: nothing is known, not that one is no longer slowed down, either
            return
        slowed = {gpu.uuid: gpu for gpu in sample.gpus if gpu.slowed_by}
        self._slowed_since_s = {uuid: self._slowed_since_s.get(uuid, sample.clock_s) for uuid in slowed}
        for uuid, gpu in slowed.items():
            if sample.clock_s - self._slowed_since_s[uuid] < _LASTS_S:
                continue
            self._slowed_since_s[uuid] = math.inf
            temperature = "" if gpu.temperature_c is None else f" at {gpu.temperature_c:.0f} degrees"
            reasons = list(gpu.slowed_by or ())
            text = (
                f"GPU {gpu.index} ({gpu.name}) has been slowed down for {_LASTS_S:.0f} s{temperature} by "
                f"{', '.join(reasons)}; check its cooling and power supply (nvidia-smi -q -d PERFORMANCE)"
            )
            fields = {"gpu": gpu.index, "reasons": reasons, "temperature_c": gpu.temperature_c}
            yield Notice(logging.WARNING, text, "gpu_slowed", fields)


def _kills(before: SystemSample, sample: SystemSample) -> Iterator[Notice]:
    """The kernel may have killed a process of which nobody else hears, such as one of Ray's own."""
    was, now = before.cgroup, sample.cgroup
    if was is None or now is None or was.path != now.path:
        return
    if (kills := (now.oom_kills or 0) - (was.oom_kills or 0)) > 0:
        text = (
            f"out of memory: the kernel has killed {kills} process(es) of cgroup {now.path}; see `vesuvius memcheck`, "
            "lower training.workers or monitor.ram_limit_gib"
        )
        yield Notice(logging.ERROR, text)


def others_text(run_bytes: int, ranks_here: int, others: Sequence[tuple[ProcessUse, float]]) -> str:
    """What follows the warning where others bring a kill near: who holds the memory, and who grows.

    Args:
        others: processes beside the run, each with the bytes by which it grows a second.
    """
    growing = max(others, key=lambda each: each[1], default=None)
    first = [growing] if growing is not None and growing[1] >= _GROWS_BYTES_S else []
    largest = sorted(others, key=lambda each: -each[0].anon_bytes)
    named = ", ".join(
        f"{' '.join(word.rpartition('/')[2] for word in use.name.split()[:2])} (pid {use.pid}) "
        f"{size_text(use.anon_bytes)}" + (f", which grows {rate / 1e6:.0f} MB/s" if rate >= _GROWS_BYTES_S else "")
        for use, rate in [*first, *(each for each in largest if each not in first)][:_OTHERS_NAMED]
    )
    held = size_text(run_bytes) if ranks_here == 1 else f"about {size_text(run_bytes)} in {ranks_here} ranks"
    return (
        f"this run holds {held} of the memory in use, and the rest brings the risk: the guard does not make the run "
        f"smaller, but saves a checkpoint before a kill; beside {'it' if ranks_here == 1 else 'this rank'}: "
        f"{named or 'no process that can be seen from here'}"
    )
