"""Reads NVIDIA GPUs through NVML, without subprocesses."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self

from vesuvius.errors import one_line
from vesuvius.threads import BoundedCall

_OPEN_S = 5.0  # without a driver that stays loaded, NVML starts each GPU


@dataclass(frozen=True)
class GpuUse:
    """Use of one GPU by all processes; None = unknown, e.g. on a GPU that shares the machine's memory."""

    index: int  # NVML's, not that of CUDA_VISIBLE_DEVICES
    uuid: str
    name: str
    # used_bytes, total_bytes: memory
    used_bytes: int | None
    total_bytes: int | None
    busy: float | None  # share of the last sampling period in which a kernel ran, 0 to 1
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True)
class VramUse:
    """Memory of one GPU, as seen by this process (`vram.py`, which needs torch)."""

    allocated_bytes: int  # in tensors
    reserved_bytes: int  # held by torch for tensors
    peak_bytes: int  # peak of allocated_bytes in the window or in the process, see `read_vram`
    # free_bytes, total_bytes: of the device, for all processes
    free_bytes: int
    total_bytes: int
    retries: int  # allocations that succeeded only after torch released unused memory, which synchronizes
    failures: int  # failed allocations

    @property
    def foreign_bytes(self) -> int:
        """Memory in use outside of torch: CUDA, its libraries, and other processes."""
        return max(self.total_bytes - self.free_bytes - self.reserved_bytes, 0)


class Gpus:
    """Open NVML.  A context manager.  Raises no errors: a query that fails, in whatever way, is an unknown figure.

    Args:
        nvml: the module `pynvml`, or a fake in tests; None imports it.
        within_s: timeout of `sample`, which takes milliseconds unless a GPU has failed.

    Attributes:
        reason: why there are no GPUs; None if there are some.
    """

    def __init__(self, nvml: ModuleType | None = None, within_s: float = 0.5) -> None:
        self._nvml: Any = nvml
        self._gpus: list[tuple[int, str, str, Any]] = []  # index, uuid, name, handle
        self._is_closed = False
        self._sample_all = BoundedCall(lambda: [use for gpu in self._gpus if (use := self._sample_one(*gpu))], within_s)
        self.reason: str | None = f"NVML has not responded within {_OPEN_S:.0f} s"
        BoundedCall(self._open, _OPEN_S)()  # what comes late is used by later samples

    def _open(self) -> None:
        try:
            # Imported here: machines without GPUs need not have it.
            self._nvml = self._nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = int(self._nvml.nvmlDeviceGetCount())
            self.reason = f"none of {count} GPUs responds to NVML" if count else "NVML finds no GPU"
        except ImportError:
            count, self.reason = 0, "nvidia-ml-py is not installed"
        except Exception as error:
            count, self.reason = 0, f"NVML does not respond: {one_line(error)}"
        gpus = []
        for index in range(count):
            if (handle := self._ask("nvmlDeviceGetHandleByIndex", index)) is not None:
                uuid = self._ask("nvmlDeviceGetUUID", handle) or f"unknown-{index}"
                gpus.append((index, uuid, self._ask("nvmlDeviceGetName", handle) or "GPU", handle))
                self.reason = None
        self._gpus = gpus

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Shut NVML down, unless it hangs."""
        if not self._is_closed and self._gpus and not self._sample_all.is_running:
            BoundedCall(lambda: self._ask("nvmlShutdown"), _OPEN_S)()
        self._is_closed = True

    def sample(self) -> list[GpuUse]:
        """Sample each GPU that responds.  Empty once closed, and while NVML hangs."""
        return [] if self._is_closed or not self._gpus else self._sample_all() or []

    def _sample_one(self, index: int, uuid: str, name: str, handle: Any) -> GpuUse | None:
        sensor = getattr(self._nvml, "NVML_TEMPERATURE_GPU", 0)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle, read=lambda found: (int(found.used), int(found.total)))
        figures = (
            *(memory or (None, None)),
            self._ask("nvmlDeviceGetUtilizationRates", handle, read=lambda found: found.gpu / 100),
            self._ask("nvmlDeviceGetPowerUsage", handle, read=lambda found: found / 1000),
            self._ask("nvmlDeviceGetTemperature", handle, sensor, read=float),
        )
        if all(figure is None for figure in figures):  # it has fallen off the bus
            return None
        return GpuUse(index, uuid, name, *figures)

    def _ask(self, function: str, *arguments: object, read: Callable[[Any], Any] = lambda found: found) -> Any:
        """Query NVML; None if that fails in any way: unsupported, broken text, no value."""
        try:
            return read(getattr(self._nvml, function)(*arguments))
        except Exception:
            return None
