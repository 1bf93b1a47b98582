"""What NVML says of GPUs, with a hand-written NVML and without any."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.runlog.units import GIB


class NVMLError(Exception):
    pass


class NotSupportedError(NVMLError):
    pass


class FakeNvml(ModuleType):
    """Two GPUs; the second does not tell its power, and answers nothing once it is `lost`."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.inits = self.shutdowns = self.handles = 0
        self.lost = False

    def nvmlInit(self) -> None:  # noqa: N802
        self.inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self.handles += 1
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}A"

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "NVIDIA A100" if handle else "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        if handle == 1 and self.lost:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(used=GIB * (handle + 1), total=80 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=75, memory=1)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        if handle == 1:
            raise NotSupportedError("Not Supported")
        return 350_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61


def test_each_gpu_is_looked_at_and_what_one_does_not_tell_is_none() -> None:
    first, second = Gpus(FakeNvml()).sample()
    assert (first.index, first.uuid, first.name) == (0, "GPU-0A", "NVIDIA H200")
    assert (first.used_bytes, first.total_bytes, first.busy) == (GIB, 80 * GIB, 0.75)
    assert (first.power_w, first.temperature_c) == (350.5, 61.0)
    assert (second.name, second.used_bytes, second.power_w) == ("NVIDIA A100", 2 * GIB, None)


class HealthNvml(FakeNvml):
    """Both GPUs tell what slows them down and count errors of memory."""

    reasons = 0x1 | 0x4 | 0x20 | 0x40  # idle and capped are no trouble

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:  # noqa: N802
        return self.reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:  # noqa: N802
        assert (kind, counter) == (1, 0)  # uncorrected, since the driver was loaded
        return 3 + handle


def test_what_slows_a_gpu_down_and_its_errors_are_told_and_what_it_does_not_know_is_none() -> None:
    nvml = HealthNvml()
    with Gpus(nvml) as gpus:
        first, second = gpus.sample()
        assert first.slowed_by == ("heat (software limit)", "heat (hardware limit)")
        assert (first.power_capped, first.ecc_uncorrected, second.ecc_uncorrected) == (True, 3, 4)
        nvml.reasons = 0x1
        assert (gpus.sample()[0].slowed_by, gpus.sample()[0].power_capped) == ((), False)
    first, _ = Gpus(FakeNvml()).sample()
    assert (first.slowed_by, first.power_capped, first.ecc_uncorrected) == (None, None, None)


def test_a_driver_that_hangs_is_waited_for_briefly_and_not_asked_again_until_it_answers() -> None:
    class Hanging(FakeNvml):
        asked = 0
        answer = threading.Event()

        def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
            self.asked += 1
            assert self.answer.wait(60)
            return super().nvmlDeviceGetMemoryInfo(handle)

    nvml = Hanging()
    gpus = Gpus(nvml, within_s=0.05)
    assert [gpus.sample() for _ in range(3)] == [[], [], []]
    assert nvml.asked == 1
    nvml.answer.set()
    deadline = time.monotonic() + 30
    while not (late := gpus.sample()):
        assert time.monotonic() < deadline
    assert [gpu.index for gpu in late] == [0, 1]
    assert nvml.asked == 2, "what came late is not asked for again"


def test_a_driver_that_hangs_does_not_hold_up_the_end() -> None:
    class Hanging(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
            threading.Event().wait()

    nvml = Hanging()
    with Gpus(nvml, within_s=0.05) as gpus:
        assert gpus.sample() == []
    assert nvml.shutdowns == 0, "it would wait for the call that hangs"
    assert gpus.sample() == []


def test_a_machine_without_a_driver_or_nvidia_ml_py_has_no_gpus_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise NVMLError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    for gpus, reason in (
        (Gpus(NoDriver()), "NVML does not answer: NVML Shared Library Not Found"),
        (Gpus(), "nvidia-ml-py is not installed"),
    ):
        with gpus:
            assert (gpus.sample(), gpus.reason) == ([], reason)


def test_the_real_nvml_says_what_it_sees_or_why_not() -> None:
    with Gpus() as gpus:
        uses = gpus.sample()
        assert bool(uses) == (gpus.reason is None)
        assert all(0 <= gpu.used_bytes <= gpu.total_bytes for gpu in uses)
