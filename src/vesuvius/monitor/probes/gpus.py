"""NVIDIA GPUs through NVML: one handle for the life of the process, no subprocess."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vesuvius.monitor.probes.bounded import BoundedCall

_UNCORRECTED_SINCE_LOAD = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
_XIDS_A_SAMPLE = 16
# Bits of NVML's reasons for clocks below the maximum (nvml.h: nvmlClocksEventReasons), under the names for people.
_POWER_CAP = 0x4
_SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "heat (software limit)",
    0x40: "heat (hardware limit)",
    0x80: "power brake (of the power supply)",
}


@dataclass(frozen=True)
class GpuUse:
    """One GPU, all processes on it together; None = it does not tell."""

    # index, uuid, name: which it is; index is NVML's, not that of CUDA_VISIBLE_DEVICES
    index: int
    uuid: str
    name: str
    # used_bytes, total_bytes: memory
    used_bytes: int
    total_bytes: int
    busy: float | None  # share of the last sampling period in which a kernel ran, 0 to 1
    power_w: float | None
    temperature_c: float | None
    # what holds the clocks down that should not: heat, a power brake; empty = nothing
    slowed_by: tuple[str, ...] | None = None
    power_capped: bool | None = None  # whether the power limit holds them down, as it often does under full load
    ecc_uncorrected: int | None = None  # errors of memory that ECC could not correct, since the driver was loaded
    xids: tuple[int, ...] = ()  # numbers of the errors that the driver has reported since the last sample


class Gpus:
    """Open NVML.  A context manager.

    Args:
        nvml: the module `pynvml`, or what stands for it in a test; None imports it.
        with_xids: also ask for the driver's errors (XID), which NVML has to be registered for.
        own: uuid of the GPU that this process uses; of one that is divided (MIG), memory and `busy` are its part's.
        within_s: how long `sample` waits.  Usually it takes milliseconds; of a GPU that has failed the driver may never
            answer.

    Attributes:
        reason: why no GPU is seen, None where some are.
        silent_s: for how many seconds NVML has not answered the last question; 0 where it has.
    """

    def __init__(
        self,
        nvml: ModuleType | None = None,
        *,
        with_xids: bool = False,
        own: str | None = None,
        within_s: float = 0.5,
    ) -> None:
        self._xid_events: dict[int, Any] = {}  # a set of events for each GPU that can tell
        self.reason: str | None = None
        self._sample_all = BoundedCall(
            lambda: [use for gpu in self._gpus if (use := self._sample_one(*gpu)) is not None], within_s
        )
        self._gpus: list[tuple[int, str, str, Any, Any]] = []  # index, uuid, name, handles of the GPU and of our part
        try:
            # Here, because a machine without GPUs need not have it.
            self._nvml: Any = nvml or importlib.import_module("pynvml")
        except ImportError:
            self.reason = "nvidia-ml-py is not installed"
            return
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            self.reason = f"NVML does not answer: {error}"
            return
        for index in range(count):
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            part = self._part(handle, own) or handle
            uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", part)
            if uuid is not None:  # one that does not even say who it is has fallen off the bus
                name = self._ask("nvmlDeviceGetName", part) or "GPU"
                self._gpus.append((index, uuid, name, handle, part))
                if with_xids:
                    self._register(index, handle)
        if not self._gpus:
            self.reason = f"none of {count} GPUs answers NVML" if count else "NVML sees no GPU"

    def __enter__(self) -> Gpus:
        return self

    def __exit__(self, *_: object) -> None:
        """Let NVML go, unless it hangs."""
        if self._gpus:
            self._gpus = []
            if self._sample_all.is_running:
                return
            while self._xid_events:
                self._ask("nvmlEventSetFree", self._xid_events.popitem()[1])
            self._ask("nvmlShutdown")

    def sample(self) -> list[GpuUse]:
        """Each GPU once, without those that fail to answer.  Empty once closed, and while NVML hangs."""
        return (self._sample_all() or []) if self._gpus else []

    @property
    def silent_s(self) -> float:
        return self._sample_all.silent_s

    def _part(self, handle: Any, own: str | None) -> Any:
        """The instance of a GPU that is divided (MIG) which has this uuid; None where it has none."""
        if own is None or handle is None:
            return None
        count = self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        parts = (self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place) for place in range(count))
        for part in parts:
            if part is not None and own in (self._ask("nvmlDeviceGetUUID", part) or ""):
                return part
        return None

    def _sample_one(self, index: int, uuid: str, name: str, handle: Any, part: Any) -> GpuUse | None:
        memory = self._ask("nvmlDeviceGetMemoryInfo", part)
        if memory is None:
            return None
        rates = self._ask("nvmlDeviceGetUtilizationRates", part)  # of a part not with all drivers
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        celsius = self._ask("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU)
        reasons = self._slow_reasons(handle)
        ecc = self._ask("nvmlDeviceGetTotalEccErrors", handle, *_UNCORRECTED_SINCE_LOAD)
        return GpuUse(
            index=index,
            uuid=uuid,
            name=name,
            used_bytes=int(memory.used),
            total_bytes=int(memory.total),
            busy=None if rates is None else rates.gpu / 100,
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=None if celsius is None else float(celsius),
            slowed_by=None if reasons is None else tuple(name for bit, name in _SLOWDOWNS.items() if reasons & bit),
            power_capped=None if reasons is None else bool(reasons & _POWER_CAP),
            ecc_uncorrected=None if ecc is None else int(ecc),
            xids=tuple(self._xids(index)),
        )

    def _slow_reasons(self, handle: Any) -> int | None:
        """Bits; drivers before 535 know the question by its old name."""
        for function in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            if (reasons := self._ask(function, handle)) is not None:
                return int(reasons)
        return None

    def _register(self, index: int, handle: Any) -> None:
        """Have the driver keep a GPU's XIDs for `_xids`; one that cannot has none."""
        try:
            events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError, events)
        except (self._nvml.NVMLError, AttributeError):
            return
        self._xid_events[index] = events

    def _xids(self, index: int) -> Iterator[int]:
        """Those that came since it was last asked; waits for none."""
        for _ in range(_XIDS_A_SAMPLE if index in self._xid_events else 0):
            event = self._ask("nvmlEventSetWait_v2", self._xid_events[index], 0)
            if event is None:  # a time-out: there is no other
                return
            yield int(event.eventData)

    def _ask(self, function: str, *arguments: object) -> Any:
        """What NVML answers; None where the GPU does not support the question or has failed."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except (self._nvml.NVMLError, AttributeError):  # also a question that this version of nvidia-ml-py lacks
            return None
