"""The stand-in for a GPU has a GPU's laws, and all tests for a GPU pass on it, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fork_server, sim_device
from tests.support.gpu import GPU, no_waiting, sleep

REPOSITORY = Path(__file__).parents[2]
FAST = "lags_behind or split_into or snapshot or at_most_two or outcome or equals_one_on or laws"
on_the_stand_in = pytest.mark.skipif(GPU.type != "sim", reason="a law of the stand-in: needs SIM_GPU=1")


# In a forked process, which has imported the tests without a GPU.
AS_IF_NEW = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
    del sys.modules[name]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def run_gpu_tests(*options: str, python: Sequence[str] = ("-m", "pytest"), run: Any = subprocess.run) -> str:
    """Run the tests for a GPU on the stand-in; returns pytest's last line."""
    if problem := sim_device.missing():
        pytest.skip(f"the stand-in {problem}")
    files = sorted(str(path) for path in (REPOSITORY / "tests").rglob("test_*.py") if "needs_gpu" in path.read_text())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"SIM_GPU": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take half a second
    own = ("-q", "-p", "no:cacheprovider", "-p", "pytest_timeout")
    command = [sys.executable, *python, *own, *options, *files, __file__]
    done = run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.timeout(1800)  # compiles once, which a loaded machine makes slow
def test_the_quick_tests_for_a_gpu_pass_on_the_stand_in() -> None:
    chosen = ("-m", "gpu and not long", "-k", FAST)
    with fork_server.of_stand_in():
        found = re.search(r"(\d+) passed", run_gpu_tests(*chosen, python=("-c", AS_IF_NEW), run=fork_server.run))
    assert found, "none ran"
    assert int(found[1]) >= 10


@pytest.mark.long
def test_all_tests_for_a_gpu_pass_on_the_stand_in() -> None:
    run_gpu_tests("-m", "gpu")


@pytest.mark.gpu
@on_the_stand_in
def test_laws_host_and_device_memory_do_not_mix() -> None:
    x, on_host = torch.ones(3, device=GPU), torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        x + on_host
    with pytest.raises(RuntimeError, match="one device"):
        torch.nn.functional.conv1d(x.view(1, 1, 3), on_host.view(1, 1, 3))
    with pytest.raises(TypeError, match="to numpy"):
        x.numpy()
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 3, "but a number is one of any device"
    assert torch.empty(2, pin_memory=True)[1:].is_pinned()
    assert not on_host.is_pinned()


@pytest.mark.gpu
@on_the_stand_in
def test_laws_work_is_asynchronous_and_ordered_by_streams_and_events_alone() -> None:
    main, other = torch.accelerator.current_stream(GPU), torch.Stream(GPU)
    begin, end = (torch.Event(GPU, enable_timing=True) for _ in range(2))
    host = torch.zeros(2, pin_memory=True)
    with no_waiting():
        begin.record()
        sleep(1.0)
        x = torch.ones(2, device=GPU)
        host.copy_(x, non_blocking=True)
        end.record()
        with other:  # nothing makes it wait
            early = torch.empty(2, pin_memory=True).copy_(torch.zeros(2, device=GPU), non_blocking=True)
            done = other.record_event()
        assert host.tolist() == [0, 0]
        assert not end.query()
        while not done.query():
            time.sleep(0.001)
        assert early.tolist() == [0, 0]
        assert not end.query(), "the other stream was faster"
    end.synchronize()
    assert host.tolist() == [1, 1]
    assert 995 < begin.elapsed_time(end) < 100_000, "milliseconds"
    assert main.query()
    pageable = torch.ones(2)
    with no_waiting(), pytest.raises(RuntimeError, match="host waits"):
        pageable.to(GPU, non_blocking=True)


@pytest.mark.gpu
@on_the_stand_in
def test_laws_freed_memory_is_reused_at_once_unless_another_stream_is_recorded() -> None:
    other, torch_sim = torch.Stream(GPU), torch.accelerator
    torch_sim.empty_cache()
    for is_recorded in (False, True):
        x = torch.full((1000,), 1.0, device=GPU)
        torch_sim.synchronize()
        with other:
            sleep(0.5)
            late = x + 0
        if is_recorded:
            x.record_stream(other)
        del x
        torch.full((1000,), 2.0, device=GPU)
        torch_sim.synchronize()
        assert late.unique().tolist() == [1.0 if is_recorded else 2.0]
    reserved = torch_sim.memory_reserved(GPU)
    sim_device.set_total_bytes(reserved + 2**20)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**21, dtype=torch.uint8, device=GPU)
    finally:
        sim_device.set_total_bytes(sim_device.TOTAL_BYTES)
    assert torch_sim.memory_stats(GPU)["num_ooms"] >= 1


@pytest.mark.long
def test_each_line_that_only_a_gpu_executes_is_named_in_the_documentation() -> None:
    if problem := sim_device.missing():
        pytest.skip(f"the stand-in {problem}")
    done = subprocess.run([sys.executable, str(REPOSITORY / "tools/gpu_lines.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
