"""Looks at a process, all of Ray or the machine from outside, and says what was found.  Reads only."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Protocol

from vesuvius.errors import NoRunError
from vesuvius.monitor.memcheck.inspection import Inspection
from vesuvius.monitor.memcheck.live_history import LiveHistory
from vesuvius.monitor.memcheck.parts import Labels
from vesuvius.monitor.memcheck.ray_processes import find_ray_tops, is_ray, is_raylet, is_reader
from vesuvius.monitor.memory.limits import Limits, ray_share_from_environment
from vesuvius.monitor.probes.files import read_text
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.probes.machine import read_machine
from vesuvius.monitor.probes.processes import ProcessTree, ProcessUse
from vesuvius.monitor.probes.roots import Roots
from vesuvius.monitor.probes.system_sample import SystemSample, Watcher, sample_system
from vesuvius.runlog.units import format_time

_PROCESS = Labels(root="process", singles="processes below it", single="process", others="Ray's", store="shared memory")
_RAY = Labels(singles="readers", single="reader", others="Ray's own", store="object store")
_LONG_AGO_S = 3600.0
_NAME_LENGTH = 24


class Inspector(Protocol):
    """Inspects the same thing again and again."""

    def inspect(self) -> Inspection:
        """What there is now.  Raises NoRunError: it is not there, and never was."""
        ...


@dataclass(frozen=True)
class Viewpoint:
    """Where one looks from: the system's files, and NVML if there is one."""

    roots: Roots = Roots()
    gpus: Gpus | None = None

    @property
    def no_gpus(self) -> str | None:
        """Why no GPU is seen; None where some are."""
        return self.gpus.reason if self.gpus else "not looked for"


class ProcessInspector:
    """Any process and those below it."""

    def __init__(self, pid: int, viewpoint: Viewpoint) -> None:
        self._pid = pid
        self._viewpoint = viewpoint
        self._watcher = Watcher(pid, viewpoint.roots, viewpoint.gpus)
        self._history: LiveHistory | None = None
        self._name = f"process {pid}"
        self._ray: dict[int, bool] = {}

    def inspect(self) -> Inspection:
        """What it holds now.  Raises NoRunError: there is no such process."""
        now = time.time()
        try:
            sample = self._watcher.sample()
        except ProcessLookupError:
            if self._history is None:
                raise NoRunError(
                    f"--pid must be a living process; got {self._pid}, and there is none; see `ps aux`"
                ) from None
            return Inspection(now, "process", self._name, "ended", f"ended before {format_time(now)}")
        if self._history is None:
            self._name = f"process {self._pid} {short_name(sample.processes[0])}"
            age_s = uptime_s(self._viewpoint.roots) - sample.processes[0].started_s
            has_ray = any(self._is_ray(process) for process in sample.processes)
            ray_share = ray_share_from_environment(os.environ, sample.machine.total_bytes) if has_ray else None
            limits = Limits(ray_share=ray_share)
            self._history = LiveHistory(limits, _PROCESS, self._pid, age_s, self._is_single)
        found = Inspection(now, "process", self._name, "running", "running", no_gpus=self._viewpoint.no_gpus)
        names = {process.pid: short_name(process) for process in sample.processes}
        return self._history.add(found, sample, names=names)

    def _is_single(self, process: ProcessUse) -> bool:
        return is_reader(process) or not self._is_ray(process)

    def _is_ray(self, process: ProcessUse) -> bool:
        if process.pid not in self._ray:
            self._ray[process.pid] = is_ray(process.pid, self._viewpoint.roots)
        return self._ray[process.pid]


class RayInspector:
    """All of Ray on this machine, whoever has started it."""

    def __init__(self, viewpoint: Viewpoint) -> None:
        self._viewpoint = viewpoint
        self._trees: dict[int, ProcessTree] = {}
        total_bytes = read_machine(viewpoint.roots).total_bytes
        limits = Limits(ray_share=ray_share_from_environment(os.environ, total_bytes))
        self._history = LiveHistory(limits, _RAY, None, _LONG_AGO_S)
        self._seen = False

    def inspect(self) -> Inspection:
        """What its processes hold now.  Raises NoRunError: there are none."""
        now, sample = time.time(), self._look()
        if not sample.processes:
            if not self._seen:
                raise NoRunError("--ray needs a Ray at work on this machine; got none; a run without readers has none")
            return Inspection(now, "ray", "Ray on this machine", "ended", f"ended before {format_time(now)}")
        self._seen = True
        raylets = sum(is_raylet(pid, self._viewpoint.roots) for pid in self._trees)
        found = Inspection(
            now,
            "ray",
            "Ray on this machine",
            "running",
            f"{raylets} running, {len(sample.processes)} processes",
            no_gpus=self._viewpoint.no_gpus,
        )
        return self._history.add(found, sample)

    def _look(self) -> SystemSample:
        """Each Ray that is up, its drivers not among them."""
        roots = self._viewpoint.roots
        tops = find_ray_tops(roots)
        self._trees = {pid: self._trees.get(pid) or ProcessTree(pid, roots) for pid in tops}
        processes: dict[int, ProcessUse] = {}
        shared = 0
        for tree in self._trees.values():
            try:
                processes |= {process.pid: process for process in tree.sample()}
            except ProcessLookupError:
                continue
            shared += tree.shared_bytes()
        top = next(iter(tops), os.getpid())  # whose cgroup is looked at
        return sample_system(top, roots, self._viewpoint.gpus, tuple(processes.values()), shared)


class MachineInspector:
    """The machine itself, and the limits that hold for what is started from here.

    Args:
        remarks: what else is to be said of it.
    """

    def __init__(self, viewpoint: Viewpoint, remarks: tuple[str, ...] = ()) -> None:
        self._viewpoint = viewpoint
        self._remarks = remarks
        self._history = LiveHistory(Limits(), Labels(), None, _LONG_AGO_S)

    def inspect(self) -> Inspection:
        """Its state now."""
        found = Inspection(
            time.time(),
            "machine",
            f"machine {os.uname().nodename}",
            "running",
            "",
            no_gpus=self._viewpoint.no_gpus,
            remarks=self._remarks,
        )
        sample = sample_system(os.getpid(), self._viewpoint.roots, self._viewpoint.gpus)
        return replace(self._history.add(found, sample), rows=(), page_cache_bytes=sample.machine.page_cache_bytes)


def short_name(process: ProcessUse) -> str:
    """The beginning of its title, without the directory of the program."""
    command, _, rest = process.name.partition(" ")
    return f"{command.rsplit('/', 1)[-1]} {rest}".rstrip()[:_NAME_LENGTH]


def uptime_s(roots: Roots) -> float:
    """Seconds since boot; 0 where the system does not tell."""
    try:
        return float((read_text(roots.proc / "uptime") or "0").split()[0])
    except (ValueError, IndexError):
        return 0.0
