"""NVIDIA GPUs through NVML: one handle for the life of the process, no subprocess."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class GpuUse:
    """One GPU, all processes on it together; None = it does not tell.

    Attributes:
        index, uuid, name: which it is; index is NVML's, not that of CUDA_VISIBLE_DEVICES.
        used_bytes, total_bytes: memory.
        busy: share of the last sampling period in which a kernel ran, 0 to 1.
        power_w, temperature_c: as they say.
    """

    index: int
    uuid: str
    name: str
    used_bytes: int
    total_bytes: int
    busy: float | None
    power_w: float | None
    temperature_c: float | None


class Gpus:
    """Open NVML.  A context manager.

    Args:
        nvml: the module `pynvml`, or what stands for it in a test; None imports it.

    Attributes:
        reason: why no GPU is seen, None where some are.
    """

    def __init__(self, nvml: ModuleType | None = None) -> None:
        self.reason: str | None = None
        self._nvml: Any = nvml
        self._gpus: list[_Gpu] = []
        self._open = False
        try:
            # Here, because a machine without GPUs need not have it.
            self._nvml = nvml or importlib.import_module("pynvml")
        except ImportError:
            self.reason = "nvidia-ml-py is not installed"
            return
        try:
            self._nvml.nvmlInit()
            self._open = True
            found = [self._find(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        except self._nvml.NVMLError as error:
            self.reason = f"NVML does not answer: {error}"
            self.close()
            return
        self._gpus = [gpu for gpu in found if gpu is not None]
        if not self._gpus:
            self.reason = f"none of {len(found)} GPUs answers NVML" if found else "NVML sees no GPU"

    def __enter__(self) -> Gpus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self) -> list[GpuUse]:
        """Each GPU once; one that fails to answer is left out of this look.  Empty once closed."""
        return [use for gpu in self._gpus if (use := self._look_at(gpu)) is not None]

    def close(self) -> None:
        """Let NVML go.  Safe to call again."""
        self._gpus = []
        if self._open:
            self._open = False
            self._ask("nvmlShutdown")

    def _find(self, index: int) -> _Gpu | None:
        """A GPU that does not even say who it is (fallen off the bus) is none."""
        handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        uuid = None if handle is None else self._ask("nvmlDeviceGetUUID", handle)
        if uuid is None:
            return None
        return _Gpu(index, _text(uuid), _text(self._ask("nvmlDeviceGetName", handle) or "GPU"), handle)

    def _look_at(self, gpu: _Gpu) -> GpuUse | None:
        memory = self._ask("nvmlDeviceGetMemoryInfo", gpu.handle)
        if memory is None:
            return None
        rates = self._ask("nvmlDeviceGetUtilizationRates", gpu.handle)
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", gpu.handle)
        celsius = self._ask("nvmlDeviceGetTemperature", gpu.handle, self._nvml.NVML_TEMPERATURE_GPU)
        return GpuUse(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            used_bytes=int(memory.used),
            total_bytes=int(memory.total),
            busy=None if rates is None else rates.gpu / 100,
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=None if celsius is None else float(celsius),
        )

    def _ask(self, function: str, *arguments: object) -> Any:
        """What NVML answers; None where the GPU does not support the question or has failed."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError:
            return None


@dataclass(frozen=True)
class _Gpu:
    index: int
    uuid: str
    name: str
    handle: Any


def _text(name: str | bytes) -> str:
    """Old versions of nvidia-ml-py answer in bytes."""
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name
