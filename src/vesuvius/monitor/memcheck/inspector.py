"""Looks at a process with those below it, or at the machine, from outside, and says what was found.  Reads only."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Protocol

import psutil

from vesuvius.errors import NoRunError
from vesuvius.monitor.memcheck.history import LiveHistory
from vesuvius.monitor.memcheck.inspection import Inspection
from vesuvius.monitor.memory.limits import Limits, ray_memory, ray_share_from_environment
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.probes.processes import ProcessUse
from vesuvius.monitor.probes.system_sample import Watcher, sample_system
from vesuvius.runlog.units import format_time

_LONG_AGO_S = 3600.0
_NAME_LENGTH = 24


class Inspector(Protocol):
    """Inspects the same thing again and again."""

    def inspect(self) -> Inspection:
        """What there is now.  Raises NoRunError: it is not there, and never was."""
        ...


class ProcessInspector:
    """Any process and those below it."""

    def __init__(self, pid: int, gpus: Gpus) -> None:
        self._pid = pid
        self._gpus = gpus
        self._watcher = Watcher(pid, gpus)
        self._history: LiveHistory | None = None
        self._name = f"process {pid}"

    def inspect(self) -> Inspection:
        """What it holds now.  Raises NoRunError: there is no such process."""
        now = time.time()
        try:
            sample = self._watcher.sample()
        except ProcessLookupError:
            if self._history is None:
                raise NoRunError(
                    f"--pid must be a live process; got {self._pid}, which does not exist; see `ps aux`"
                ) from None
            return Inspection(now, "process", self._name, "ended", f"ended before {format_time(now)}")
        if self._history is None:
            self._name = f"process {self._pid} {short_name(sample.processes[0])}"
            age_s = now - psutil.boot_time() - sample.processes[0].started_s
            has_ray = any(process.name.startswith("ray::") for process in sample.processes)
            ray_share = ray_share_from_environment(os.environ, ray_memory(sample)[1]) if has_ray else None
            labels = ("process", "process", "others")
            self._history = LiveHistory(Limits(ray_share=ray_share), self._pid, age_s, labels)
        found = Inspection(now, "process", self._name, "running", "running", no_gpus=self._gpus.reason)
        names = {process.pid: short_name(process) for process in sample.processes[1:]}
        return self._history.add(found, sample, names, names=names)


class MachineInspector:
    """The machine itself, and the limits that hold for what is started from here.

    Args:
        remarks: what else is to be said of it.
    """

    def __init__(self, gpus: Gpus, remarks: tuple[str, ...] = ()) -> None:
        self._gpus = gpus
        self._remarks = remarks
        self._history = LiveHistory(Limits(), None, _LONG_AGO_S)

    def inspect(self) -> Inspection:
        """Its state now."""
        name = f"machine {os.uname().nodename}"
        found = Inspection(
            time.time(), "machine", name, "running", "", no_gpus=self._gpus.reason, remarks=self._remarks
        )
        sample = sample_system(os.getpid(), self._gpus)
        return replace(self._history.add(found, sample, ()), rows=(), page_cache_bytes=sample.machine.page_cache_bytes)


def short_name(process: ProcessUse) -> str:
    """The beginning of its title, without the directory of the program."""
    command, _, rest = process.name.partition(" ")
    return f"{command.rsplit('/', 1)[-1]} {rest}".rstrip()[:_NAME_LENGTH]
