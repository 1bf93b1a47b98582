"""Reads NVIDIA GPUs through NVML, without subprocesses."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vesuvius.threads import BoundedCall


@dataclass(frozen=True)
class GpuUse:
    """Use of one GPU by all processes; None = unknown."""

    index: int  # NVML's, not that of CUDA_VISIBLE_DEVICES
    uuid: str
    name: str
    # used_bytes, total_bytes: memory
    used_bytes: int
    total_bytes: int
    busy: float | None  # share of the last sampling period in which a kernel ran, 0 to 1
    power_w: float | None
    temperature_c: float | None


class Gpus:
    """Open NVML.  A context manager.

    Args:
        nvml: the module `pynvml`, or a fake in tests; None imports it.
        within_s: timeout of `sample`, which takes milliseconds unless a GPU has failed.

    Attributes:
        reason: why there are no GPUs; None if there are some.
    """

    def __init__(self, nvml: ModuleType | None = None, within_s: float = 0.5) -> None:
        self._gpus: list[tuple[int, str, str, Any]] = []  # index, uuid, name, handle
        self._sample_all = BoundedCall(lambda: [use for gpu in self._gpus if (use := self._sample_one(*gpu))], within_s)
        self.reason = self._open(nvml)

    def _open(self, nvml: ModuleType | None) -> str | None:
        """Find the GPUs; return why there are none, or None."""
        try:
            # Imported here: machines without GPUs need not have it.
            self._nvml: Any = nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
        except ImportError:
            return "nvidia-ml-py is not installed"
        except self._nvml.NVMLError as error:
            return f"NVML does not respond: {error}"
        for index in range(count):
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", handle)
            if uuid is not None:  # a GPU without a UUID has fallen off the bus
                self._gpus.append((index, uuid, self._ask("nvmlDeviceGetName", handle) or "GPU", handle))
        return None if self._gpus else f"none of {count} GPUs responds to NVML" if count else "NVML finds no GPU"

    def __enter__(self) -> Gpus:
        return self

    def __exit__(self, *_: object) -> None:
        """Shut NVML down, unless it hangs."""
        if self._gpus:
            self._gpus = []
            if not self._sample_all.is_running:
                self._ask("nvmlShutdown")

    def sample(self) -> list[GpuUse]:
        """Sample each GPU that responds.  Empty once closed, and while NVML hangs."""
        return (self._sample_all() or []) if self._gpus else []

    def _sample_one(self, index: int, uuid: str, name: str, handle: Any) -> GpuUse | None:
        if (memory := self._ask("nvmlDeviceGetMemoryInfo", handle)) is None:
            return None
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        celsius = self._ask("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU)
        return GpuUse(
            index=index,
            uuid=uuid,
            name=name,
            used_bytes=int(memory.used),
            total_bytes=int(memory.total),
            busy=None if rates is None else rates.gpu / 100,
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=None if celsius is None else float(celsius),
        )

    def _ask(self, function: str, *arguments: object) -> Any:
        """Query NVML; None if the GPU does not support the query or has failed."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except (self._nvml.NVMLError, AttributeError):  # AttributeError: this version of nvidia-ml-py lacks the query
            return None
