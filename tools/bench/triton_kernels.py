"""Compile Triton's kernels to machine code for a GPU that is not there: `assembled`.

Triton's own compiler and `ptxas` do the work; only the driver, which would load the code, is replaced.  Each
configuration that inductor's autotuner would measure is compiled.  Checked with triton 3.7.1, torch 2.13.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch._inductor.config
import triton
from cuda_kernels import CARDS, MOST_THREADS, REGISTERS
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import Placeholder
from triton import knobs
from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Assembled:
    """A kernel as machine code, in one configuration."""

    kernel: str
    registers: int  # of a thread
    spilled_bytes: int  # of a thread, in local memory
    shared_bytes: int  # of a block


class _Driver:
    """Triton's driver of a card: loading a kernel only reads what it needs."""

    def __init__(self, arch: str) -> None:
        self.utils = self
        _, self._capability, _, self._shared_bytes = CARDS[arch]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._shared_bytes}

    def load_binary(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[int, int, int, int, int]:
        """(module, function, registers, words spilled, most threads), as Triton's own."""
        registers, local_bytes = _resources(binary)
        of_a_warp = -(-32 * registers // 256) * 256
        return 0, 0, registers, -(-local_bytes // 4), min(MOST_THREADS, 32 * (REGISTERS // of_a_warp))


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    [(registers, stack, local)] = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    return int(registers), int(stack) + int(local)


@contextmanager
def card(arch: str) -> Iterator[None]:
    """Context in which Triton compiles for this card."""
    triton.compiler.compiler.max_shared_mem.cache_clear()
    with (
        patch.object(triton.runtime.driver, "_active", _Driver(arch)),
        patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu"),
        patch("torch._dynamo.device_interface.DeviceGuard"),
        torch._inductor.config.patch(use_static_triton_launcher=False),
    ):
        yield


def assembled(sources: Mapping[str, str], arch: str) -> list[Assembled]:
    """Compile inductor's kernels, code and name, for a card.

    Raises Triton's or ptxas's error if a configuration fails, and OutOfResources if it needs too much shared memory.
    """
    folder = tempfile.TemporaryDirectory()
    caches = patch.dict("os.environ", TRITON_CACHE_DIR=folder.name, TORCHINDUCTOR_CACHE_DIR=folder.name)
    with folder, caches, card(arch):
        named = ((source, f"{name}.{number}") for number, (source, name) in enumerate(sources.items()))
        return [each for source, name in named for each in _assembled(source, name)]


def spilling(kernels: Sequence[Assembled]) -> set[str]:
    """Kernels all of whose configurations spill; the autotuner discards a configuration that spills 16 words."""
    return {each.kernel for each in kernels} - {each.kernel for each in kernels if not each.spilled_bytes}


def _assembled(source: str, name: str) -> Iterator[Assembled]:
    source = source.replace(str(Placeholder.KERNEL_NAME), "triton_").replace(str(Placeholder.DESCRIPTIVE_NAME), name)
    kernel: CachingAutotuner = PyCodeCache.load(source).triton_
    kernel.compile_results = []
    smaller = kernel._iter_rblock_scale_candidates() if kernel._could_rblock_scale else ()
    for config in chain(kernel.configs, smaller):  # the latter look at the results of the former
        kernel.compile_results.append(kernel._precompile_config(config))
        kernel.compile_results[-1].make_launcher()  # loads it
        binary = kernel.compile_results[-1].kernel
        yield Assembled(name, binary.n_regs, 4 * binary.n_spills, binary.metadata.shared)


def table(kernels: Sequence[Assembled]) -> str:
    """A row for each kernel: its configurations, and the most that those without a spill take."""
    rows = ["| kernel | configurations | that spill | registers | shared bytes |", "| --- | --- | --- | --- | --- |"]
    for name in (*dict.fromkeys(each.kernel for each in kernels), "all"):
        group = [each for each in kernels if name in ("all", each.kernel)]
        good = [each for each in group if not each.spilled_bytes]
        registers, shared = (
            max((getattr(e, figure) for e in good), default=0) for figure in ("registers", "shared_bytes")
        )
        rows.append(f"| {name} | {len(group)} | {len(group) - len(good)} | {registers} | {shared} |")
    return "\n".join(rows)
