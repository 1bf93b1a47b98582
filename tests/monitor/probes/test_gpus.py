"""GPU figures from a fake NVML, and without NVML."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vesuvius.monitor.probes import gpus as gpus_module
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.runlog.units import GIB


class NVMLError(Exception):
    pass


def refuse(*arguments: int) -> Any:
    raise NVMLError("Not Supported")


ANSWERS: dict[str, Callable[..., Any]] = {
    "Init": lambda: None,
    "Shutdown": lambda: None,
    "DeviceGetCount": lambda: 2,
    "DeviceGetHandleByIndex": lambda index: index,
    "DeviceGetUUID": lambda handle: f"GPU-{handle}A",
    "DeviceGetName": lambda handle: ("NVIDIA H200", "NVIDIA A100")[handle],
    "DeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=GIB * (handle + 1), total=80 * GIB),
    "DeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=75, memory=1),
    "DeviceGetPowerUsage": lambda handle: refuse() if handle else 350_500,
    "DeviceGetTemperature": lambda handle, sensor: {0: 61}[sensor],
}


class FakeNvml(ModuleType):
    """Two GPUs; the second does not report its power.  Other results may be given by name."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, **answers: Callable[..., Any]) -> None:
        super().__init__("pynvml")
        self.asked: Counter[str] = Counter()
        for name, answer in (ANSWERS | answers).items():
            setattr(self, f"nvml{name}", partial(self._answer, name, answer))

    def _answer(self, name: str, answer: Callable[..., Any], *arguments: int) -> Any:
        self.asked[name] += 1
        return answer(*arguments)


def test_each_gpu_is_sampled_and_unsupported_figures_are_none() -> None:
    first, second = Gpus(FakeNvml()).sample()
    assert (first.index, first.uuid, first.name) == (0, "GPU-0A", "NVIDIA H200")
    assert (first.used_bytes, first.total_bytes, first.busy) == (GIB, 80 * GIB, 0.75)
    assert (first.power_w, first.temperature_c) == (350.5, 61.0)
    assert (second.name, second.used_bytes, second.power_w) == ("NVIDIA A100", 2 * GIB, None)


def test_a_hung_driver_is_waited_for_briefly_and_not_called_again_until_it_responds() -> None:
    answer = threading.Event()

    def hang(handle: int) -> Any:
        assert answer.wait(60)
        return ANSWERS["DeviceGetMemoryInfo"](handle)

    nvml = FakeNvml(DeviceGetMemoryInfo=hang)
    with Gpus(nvml, within_s=0.05) as gpus:
        assert [gpus.sample() for _ in range(3)] == [[], [], []]
        assert nvml.asked["DeviceGetMemoryInfo"] == 1
        answer.set()
        deadline = time.monotonic() + 30
        while not (late := gpus.sample()):
            assert time.monotonic() < deadline
        assert [gpu.index for gpu in late] == [0, 1]
        assert nvml.asked["DeviceGetMemoryInfo"] == 2, "what came late is not asked for again"
    assert nvml.asked["Shutdown"] == 1


def test_a_hung_driver_does_not_delay_the_end() -> None:
    nvml = FakeNvml(DeviceGetMemoryInfo=lambda handle: threading.Event().wait())
    with Gpus(nvml, within_s=0.05) as gpus:
        assert gpus.sample() == []
    assert nvml.asked["Shutdown"] == 0, "it would wait for the call that hangs"
    assert gpus.sample() == []


def _broken_text(*arguments: int) -> Any:
    return b"NVIDIA \xff".decode()


def _lost(*arguments: int) -> Any:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


def _nothing(*arguments: int) -> Any:
    return None


@pytest.mark.parametrize("answer", [refuse, _broken_text, _lost, _nothing])
@pytest.mark.parametrize("query", ANSWERS)
def test_a_query_that_fails_in_any_way_is_unknown_and_the_other_figures_remain(
    query: str, answer: Callable[..., Any]
) -> None:
    """WSL2 and drivers 555 return text that is no UTF-8; a GB10 has no memory of its own."""
    with Gpus(FakeNvml(**{query: answer})) as gpus:
        seen = gpus.sample()
    match query:
        case "Init" if answer is not _nothing:  # a success
            assert (seen, gpus.reason is None) == ([], False)
        case "DeviceGetCount" | "DeviceGetHandleByIndex":
            assert (seen, gpus.reason is None) == ([], False)
        case "DeviceGetMemoryInfo":
            assert [(gpu.used_bytes, gpu.busy) for gpu in seen] == [(None, 0.75)] * 2
        case "DeviceGetUtilizationRates":
            assert [(gpu.used_bytes, gpu.busy) for gpu in seen] == [(GIB, None), (2 * GIB, None)]
        case _:
            assert [(gpu.used_bytes, gpu.busy) for gpu in seen] == [(GIB, 0.75), (2 * GIB, 0.75)]


def test_gpus_that_hide_their_uuid_remain_apart() -> None:
    first, second = Gpus(FakeNvml(DeviceGetUUID=_broken_text)).sample()
    assert first.uuid != second.uuid


def test_a_driver_that_hangs_when_nvml_is_opened_is_given_up_and_used_once_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus_module, "_OPEN_S", 0.05)
    answer = threading.Event()
    with Gpus(FakeNvml(Init=lambda: answer.wait(60))) as gpus:
        assert (gpus.sample(), gpus.reason) == ([], "NVML has not responded within 0 s")
        answer.set()
        deadline = time.monotonic() + 30
        while not gpus.sample():
            assert time.monotonic() < deadline
        assert gpus.reason is None
    with Gpus(FakeNvml(Init=lambda: threading.Event().wait())):
        pass


def test_without_driver_or_nvidia_ml_py_there_are_no_gpus_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for gpus, reason in (
        (Gpus(FakeNvml(Init=refuse)), "NVML does not respond: Not Supported"),
        (Gpus(), "nvidia-ml-py is not installed"),
    ):
        with gpus:
            assert (gpus.sample(), gpus.reason) == ([], reason)
