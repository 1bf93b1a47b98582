"""What a sample of a run gives cause to say at once: kills, stopped processes, GPUs in trouble, others' memory.

Pure.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vesuvius.monitor.probes.gpus import GpuUse
from vesuvius.monitor.probes.processes import ProcessUse
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.runlog.units import size_text

_Key = TypeVar("_Key", bound=Hashable)

_OTHERS_NAMED = 3
_GROWS_BYTES_S = 1e6
_STOPPED_S = 10.0
_SLOWED_S = 10.0
_SILENT_S = 10.0
# The common ones of NVIDIA's list; the rest are said by number.
_XIDS = {
    13: "an exception in a kernel",
    31: "a kernel has accessed memory that is not its own",
    43: "the GPU has stopped a program",
    45: "the GPU has cleaned up after a program",
    48: "a memory error that ECC could not correct",
    63: "a damaged row of memory will be replaced at the next reset",
    64: "a damaged row of memory could not be replaced",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error: its program ends",
    95: "an uncontained memory error: the GPU needs a reset",
    119: "the GPU's own processor does not answer",
}


@dataclass(frozen=True)
class Notice:
    """Something to say at once."""

    # level, text: for the log
    level: int
    text: str
    event: str = ""  # its name in `metrics.jsonl`; empty = for the log alone
    fields: dict[str, Any] = field(default_factory=dict)  # of the record, beside `text`


class Notices:
    """Remembers what it has said.

    Args:
        gpu_uuid: of the run's GPU; None = not known, and then each may be.
    """

    def __init__(self, gpu_uuid: str | None = None) -> None:
        self._gpu_uuid = gpu_uuid
        self._stopped_since_s: dict[tuple[int, float], float] = {}  # by pid and start
        self._slowed_since_s: dict[str, float] = {}
        self._silent = False
        self._ecc: dict[str, int] = {}  # errors that ECC could not correct, of each GPU when it last told

    def of(self, before: SystemSample, sample: SystemSample) -> list[Notice]:
        """What two samples, one after the other, give cause to say."""
        self._ecc |= _ecc_counts(before)
        errors = list(_gpu_errors(sample, self._ecc, self._gpu_uuid))
        self._ecc |= _ecc_counts(sample)
        # While NVML does not answer, nothing is known: not that a GPU is no longer slowed down, either.
        of_gpus = self._slowed(sample) if sample.gpus_silent_s == 0 else []
        return [*_kills(before, sample), *self._stopped(sample), *errors, *of_gpus, *self._driver_silent(sample)]

    def _stopped(self, sample: SystemSample) -> list[Notice]:
        """Once for each process that a signal has stopped and that stays so."""
        stopped = [(process.pid, process.started_s) for process in sample.processes if process.is_stopped]
        self._stopped_since_s, late = _lasting(self._stopped_since_s, stopped, sample.clock_s, _STOPPED_S)
        return [
            Notice(
                logging.WARNING,
                f"process {pid} of this run has been stopped (SIGSTOP, or a debugger) for {_STOPPED_S:.0f} s; "
                f"kill -CONT {pid} resumes it",
            )
            for pid, _ in late
        ]

    def _slowed(self, sample: SystemSample) -> list[Notice]:
        """Once for each GPU that heat or its power supply slows down for long."""
        slowed = {gpu.uuid: gpu for gpu in sample.gpus if gpu.slowed_by}
        self._slowed_since_s, late = _lasting(self._slowed_since_s, list(slowed), sample.clock_s, _SLOWED_S)
        return [_slowed_notice(slowed[uuid]) for uuid in late]

    def _driver_silent(self, sample: SystemSample) -> list[Notice]:
        """Once each time that NVML stops answering."""
        was, self._silent = self._silent, sample.gpus_silent_s >= _SILENT_S
        if was or not self._silent:
            return []
        text = (
            f"the GPU driver has not answered NVML for {sample.gpus_silent_s:.0f} s, so NVML's figures are missing; if "
            "steps hang too, a GPU has probably failed: see `sudo dmesg | grep -i xid`"
        )
        return [Notice(logging.WARNING, text, "gpu_silent", {"silent_s": round(sample.gpus_silent_s, 1)})]


def _lasting(
    since_s: dict[_Key, float], now_so: Sequence[_Key], now_s: float, least_s: float
) -> tuple[dict[_Key, float], list[_Key]]:
    """Since when each of these is so, and which have newly been so for long enough.  Pure."""
    since_s = {key: since_s.get(key, now_s) for key in now_so}
    late = [key for key, began_s in since_s.items() if now_s - began_s >= least_s]
    return since_s | dict.fromkeys(late, math.inf), late


def _slowed_notice(gpu: GpuUse) -> Notice:
    reasons = list(gpu.slowed_by or ())
    temperature = "" if gpu.temperature_c is None else f" at {gpu.temperature_c:.0f} degrees"
    return Notice(
        logging.WARNING,
        f"GPU {gpu.index} ({gpu.name}) has been slowed down for {_SLOWED_S:.0f} s{temperature} by "
        f"{', '.join(reasons)}; check its cooling and power supply (nvidia-smi -q -d PERFORMANCE)",
        "gpu_slowed",
        {"gpu": gpu.index, "reasons": reasons, "temperature_c": gpu.temperature_c},
    )


def _ecc_counts(sample: SystemSample) -> dict[str, int]:
    return {gpu.uuid: gpu.ecc_uncorrected for gpu in sample.gpus if gpu.ecc_uncorrected is not None}


def _gpu_errors(sample: SystemSample, ecc_before: Mapping[str, int], gpu_uuid: str | None) -> Iterator[Notice]:
    """XIDs, and errors of memory that ECC could not correct.  Another GPU's are no reason to stop this run."""
    for gpu in sample.gpus:
        ours = gpu_uuid is None or gpu_uuid in gpu.uuid
        level, foreign = (logging.ERROR, "") if ours else (logging.WARNING, "; this run does not use that GPU")
        for xid in gpu.xids:
            meaning = _XIDS.get(xid, "see NVIDIA's list of XIDs")
            text = f"GPU {gpu.index} ({gpu.name}): XID {xid}: {meaning}"
            yield Notice(level, text + foreign, "gpu_xid", {"gpu": gpu.index, "xid": xid})
        counted = ecc_before.get(gpu.uuid)
        if counted is not None and gpu.ecc_uncorrected is not None and gpu.ecc_uncorrected > counted:
            text = (
                f"GPU {gpu.index} ({gpu.name}): {gpu.ecc_uncorrected - counted} new memory error(s) that "
                "ECC could not correct"
            )
            remedy = "; results since may be wrong: stop, have the GPU checked, continue from an earlier checkpoint"
            fields = {"gpu": gpu.index, "errors": gpu.ecc_uncorrected - counted}
            yield Notice(level, text + (remedy if ours else foreign), "gpu_ecc", fields)


def _kills(before: SystemSample, sample: SystemSample) -> list[Notice]:
    """The kernel may have killed a process of which nobody else hears, such as one of Ray's own."""
    if before.cgroup is None or sample.cgroup is None or before.cgroup.path != sample.cgroup.path:
        return []
    kills = (sample.cgroup.oom_kills or 0) - (before.cgroup.oom_kills or 0)
    text = (
        f"out of memory: the kernel has killed {kills} process(es) of cgroup {sample.cgroup.path}; see "
        "`vesuvius memcheck`, lower training.workers or monitor.ram_limit_gib"
    )
    return [Notice(logging.ERROR, text)] if kills > 0 else []


def others_text(run_bytes: int, ranks_here: int, others: Sequence[tuple[ProcessUse, float]]) -> str:
    """What follows the warning where others bring a kill near: who holds the memory, and who grows.

    Args:
        others: processes beside the run, each with the bytes by which it grows a second.
    """
    largest = sorted(others, key=lambda each: -each[0].anon_bytes)[:_OTHERS_NAMED]
    fastest = max(others, key=lambda each: each[1], default=None)
    if fastest is not None and fastest[1] >= _GROWS_BYTES_S:
        largest = [fastest, *(each for each in largest if each[0] is not fastest[0])][:_OTHERS_NAMED]
    named = ", ".join(
        f"{_short(use.name)} (pid {use.pid}) {size_text(use.anon_bytes)}"
        + (f", which grows {rate / 1e6:.0f} MB/s" if rate >= _GROWS_BYTES_S else "")
        for use, rate in largest
    )
    held = size_text(run_bytes) if ranks_here == 1 else f"about {size_text(run_bytes)} in {ranks_here} ranks"
    return (
        f"this run holds {held} of the memory in use, and the rest brings the risk: the guard does not make the run "
        f"smaller, but saves a checkpoint before a kill; beside {'it' if ranks_here == 1 else 'this rank'}: "
        f"{named or 'no process that can be seen from here'}"
    )


def _short(title: str) -> str:
    """The program and its first argument, without their directories."""
    return " ".join(word.rpartition("/")[2] for word in title.split()[:2])
