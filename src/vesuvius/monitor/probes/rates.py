"""From two looks: how busy processors, disks, network and each process were between them.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from vesuvius.monitor.probes.system_sample import SystemSample


@dataclass(frozen=True)
class Rates:
    """What happened between two looks."""

    core_busy: tuple[float, ...]  # share of the time that each core worked, 0 to 1
    # by pid, processor seconds per second: 1.0 = one core; processes that were there at both looks
    process_cores: Mapping[int, float]
    # disk_read_bytes_s, disk_written_bytes_s, net_received_bytes_s, net_sent_bytes_s: of the machine
    disk_read_bytes_s: float
    disk_written_bytes_s: float
    net_received_bytes_s: float
    net_sent_bytes_s: float

    def idle_cores(self, among: Collection[int]) -> float:
        """How many of some processors had nothing to do, on average; of all where their numbers are unknown."""
        busy = [self.core_busy[core] for core in among if core < len(self.core_busy)]
        return sum(1 - share for share in (busy if len(busy) == len(among) else self.core_busy))


def rates_between(before: SystemSample, after: SystemSample) -> Rates | None:
    """None where no time has passed or a counter ran backwards (the machine was suspended or restored).  Pure."""
    seconds = after.clock_s - before.clock_s
    cores = _differences(before.machine.core_total_s, after.machine.core_total_s)
    busy = _differences(before.machine.core_busy_s, after.machine.core_busy_s)
    flows = _differences(_flows(before), _flows(after))
    if seconds <= 0 or cores is None or busy is None or flows is None:
        return None
    disk_read, disk_written, received, sent = (flow / seconds for flow in flows)
    return Rates(
        # A look may come sooner than the next tick of the clock that counts them.
        core_busy=tuple(min(work / whole, 1.0) if whole > 0 else 0.0 for work, whole in zip(busy, cores, strict=True)),
        process_cores=_process_cores(before, after, seconds),
        disk_read_bytes_s=disk_read,
        disk_written_bytes_s=disk_written,
        net_received_bytes_s=received,
        net_sent_bytes_s=sent,
    )


def _flows(sample: SystemSample) -> tuple[int, int, int, int]:
    machine = sample.machine
    return (
        machine.disk_read_bytes,
        machine.disk_written_bytes,
        machine.net_received_bytes,
        machine.net_sent_bytes,
    )


def _differences(before: Sequence[float], after: Sequence[float]) -> list[float] | None:
    """None where one fell, or where there are more or fewer than before: a core was switched on or off."""
    if len(before) != len(after):
        return None
    differences = [late - early for early, late in zip(before, after, strict=True)]
    return None if any(difference < 0 for difference in differences) else differences


def _process_cores(before: SystemSample, after: SystemSample, seconds: float) -> dict[int, float]:
    early = {(process.pid, process.started_s): process.cpu_s for process in before.processes}
    return {
        process.pid: max(process.cpu_s - early[process.pid, process.started_s], 0.0) / seconds
        for process in after.processes
        if (process.pid, process.started_s) in early
    }
