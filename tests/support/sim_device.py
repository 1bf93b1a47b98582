"""The stand-in for a GPU: a private-use device of torch, "sim", with streams, events and memory of its own.

`register` builds it from sim_device.cpp (10 s, once for each torch; needs g++ and the headers of torch's wheel) and
makes it the accelerator of this process until its end.  With SIM_GPU=1 pytest does so: SIM_GPU=1 pytest -m gpu.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SOURCES = tuple(Path(__file__).with_name(name) for name in ("sim_device.cpp", "sim_kernels.cpp"))
_TORCH = Path(torch.__file__).parent
_INCLUDE = Path(os.environ.get("TORCH_INCLUDE", _TORCH / "include"))
TOTAL_BYTES = 2**32  # at first
_registered: list[ctypes.CDLL] = []


def missing() -> str:
    """Why the device cannot be built here; '' if it can."""
    if shutil.which("g++") is None:
        return "needs g++"
    return "" if (_INCLUDE / "torch" / "library.h").exists() else f"needs the headers of torch in {_INCLUDE}"


def build() -> Path:
    """Compile the device, unless that was done before; returns the library."""
    text = "".join(source.read_text() for source in SOURCES)
    name = hashlib.sha256(f"{torch.__version__} {text}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"vesuvius-sim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            options = ["-O0", "-std=c++20", "-shared", "-fPIC", "-w", f"-I{_INCLUDE}"]
            made, link = library.with_suffix(f".{os.getpid()}"), [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
            subprocess.run(["g++", *options, str(SOURCES[0]), "-o", str(made), *link], check=True, timeout=600)
            made.rename(library)
    return library


def register() -> None:
    """Make "sim" the accelerator of this process.  Idempotent."""
    if _registered:
        return
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    library.sim_sleep.argtypes = [ctypes.c_double]
    library.sim_forbid_waiting.argtypes = [ctypes.c_bool]
    library.sim_set_total_bytes.argtypes = [ctypes.c_int64]
    _registered.append(library)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _Module())  # type: ignore[no-untyped-call]
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def sleep(seconds: float) -> None:
    """Queue work that takes as long on the current stream."""
    _registered[0].sim_sleep(seconds)


def set_total_bytes(size: int) -> None:
    """Set the memory of the device; 4 GiB by default."""
    _registered[0].sim_set_total_bytes(size)


def forbid_waiting(is_forbidden: bool) -> None:
    """Whether a host that would wait for the device gets an error."""
    _registered[0].sim_forbid_waiting(is_forbidden)


class _Module:
    """`torch.sim`: what torch, and code for any accelerator, ask the module of a device type for."""

    memory_stats = staticmethod(torch.accelerator.memory_stats)
    memory_reserved = staticmethod(torch.accelerator.memory_reserved)
    reset_peak_memory_stats = staticmethod(torch.accelerator.reset_peak_memory_stats)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return torch._C._accelerator_getMemoryInfo(0)  # type: ignore[no-any-return, attr-defined]

    def get_per_process_memory_fraction(self, device: object = None) -> float:
        return 1.0

    def get_device_properties(self, device: object = None) -> Any:
        return SimpleNamespace(name="simulated", total_memory=self.mem_get_info()[1], uuid="sim-0")
