"""Processes forked from one that has imported the tests."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import REPOSITORY
from tests.support import fork_server

MADE_UP_GPU = """
import os, sys, torch
from tests.support import fork_server

def poison():
    raise SystemExit("CUDA is initialized, and no forked process can use it")

torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
torch._C._cuda_getDeviceCount = poison
torch.cuda._is_compiled, torch.cuda._device_count_nvml = lambda: True, lambda: 1
sys.modules.pop("tests.support.gpu", None)
fork_server._import_all(["tests.support.gpu"])
from tests.support.gpu import GPU
print(GPU, [name for name in os.environ if "NVML" in name])
"""


def test_tests_are_imported_without_cuda_which_a_forked_process_could_not_use_then() -> None:
    command, out = [sys.executable, "-c", MADE_UP_GPU], subprocess.PIPE
    done = fork_server.run(command, cwd=REPOSITORY, stdout=out, stderr=subprocess.STDOUT, text=True)
    assert done.stdout.splitlines()[-1] == "cuda []", done.stdout
