"""The Triton kernels of norm and SiLU: in Triton's interpreter, and compiled for GPUs that are not here.

What is not seen here: their speed, and how a GPU rounds `exp`.  A GPU compares them with float64 before every run
(`training/step/self_test.py`) and in tools/gpu_check.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


@pytest.mark.parametrize("cases", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_the_kernels_agree_with_fp64_in_the_interpreter(cases: str) -> None:
    file = Path(__file__).with_name("interpreted_norm_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", cases, str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vesuvius.diffusion.network import norm_kernels as kernels

ONE_VOXEL = ("voxels", "chunk", "stride_c", "stride_v")  # Triton makes a constant of each argument of 1
for capability, ones in ((80, ()), (90, ()), (90, ONE_VOXEL)):
    for name in ("_moments", "_combined", "_applied", "_summed", "_pulled_back"):
        kernel = getattr(kernels, name)
        large = ("x", "y", "grad", "grad_x")
        numbers = ("channels", "voxels", "width", "row", "chunk", "stride_c", "stride_v")
        tiles = {"tile_v": 32, "tile_k": 32, "tile_c": 128}
        signature = {
            argument: "*bf16" if argument in large
            else "constexpr" if argument in tiles or argument in ones
            else "i32" if argument in numbers
            else "fp32" if argument == "eps"
            else "*fp32"
            for argument in kernel.arg_names
        }
        known = tiles | dict.fromkeys(ones, 1)
        constants = {(place,): known[argument] for place, argument in enumerate(kernel.arg_names) if argument in known}
        source = ASTSource(kernel, signature, constants)
        done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        assert len(done.asm["cubin"]) > 0
        print(capability, name, done.metadata.shared)
"""


@pytest.mark.long
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 15
