"""The end of a stream: whatever ends the trainer, no process and no shared memory of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import textured, wait_until_gone, write_array
from tests.support import fork_server

IMPORTS = """
import itertools, os, signal, sys, threading, time
import psutil
from vesuvius.config import ClusterConfig, DataConfig, VolumeConfig
from vesuvius.stream import source as stream_module
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.stream import PatchStream
from vesuvius.stream.options import StreamOptions
"""
TRAINER = f"""{IMPORTS}
path, end, store_gib = sys.argv[1], sys.argv[2], float(sys.argv[3])
large = dict(patches_per_region=20000) if end == "spill" else dict()
data = DataConfig(volumes=(VolumeConfig(path=path),), patch_size=(16, 16, 16), regions_in_flight=8, **large)
options = StreamOptions(batch_size=4, num_workers=2, processes=True)
stream_module.store_bytes = lambda job, options: int(store_gib * 2**30)
until = time.monotonic() + 90
with PatchStream(prepare_data(0, data).job, options) as stream:
    for batch in itertools.islice(stream, 8):
        pass
    print("reading", *stream.readers, flush=True)
    sys.stdin.readline()  # until the test has seen them
    while end == "signal" and time.monotonic() < until:
        next(stream)
    while end == "spill" and time.monotonic() < until and not any(event.kind == "spill" for event in stream.events):
        next(stream)
        time.sleep(0.2)  # slower than the readers, which run as far ahead as they may
    print("seen", *(event.kind + ": " + event.text for event in stream.events), flush=True)
print("closed", flush=True)
"""


@contextmanager
def trainer(tmp_path: Path, end: str, size: int = 96, store_gib: float = 0.25) -> Iterator[subprocess.Popen[str]]:
    path = write_array(tmp_path / "volume.zarr", textured((size, size, size)), chunk=size // 3)
    arguments = [sys.executable, "-c", TRAINER, str(path), end, str(store_gib)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = fork_server.Popen(arguments, text=True, start_new_session=True, **pipes)
    try:
        yield process
    finally:
        with_children = descendants(process.pid)
        for each in with_children:
            each.kill()
        process.kill()
        process.wait()


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def shared_memory() -> set[str]:
    """Names in /dev/shm, but for semaphores of multiprocessing, which we do not use and other programs here may."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.mp-")}


def run_to_reading(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until batches come; the processes that belong to the stream then."""
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    while lines[-1] and not lines[-1].startswith("reading"):
        lines.append(process.stdout.readline())
    line = lines[-1]
    assert line, "".join(lines)
    found = descendants(process.pid)
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert {int(pid) for pid in line.split()[1:]} <= {p.pid for p in found}, "readers are among them"
    return found


def read_to_end(process: subprocess.Popen[str]) -> str:
    """What the process prints from here on; `communicate` would miss lines that `readline` has read ahead."""
    assert process.stdout is not None
    output = process.stdout.read()
    process.wait(timeout=180)
    return output


INTERRUPTED = f"""{IMPORTS}
data = DataConfig(volumes=(VolumeConfig(path=sys.argv[1]),), patch_size=(16, 16, 16))
job = prepare_data(0, data).job

def interrupt_at(instruction):
    left = itertools.count(instruction, -1)
    def trace(frame, event, argument):
        frame.f_trace_opcodes = True
        if event == "opcode" and next(left) == 0:
            raise KeyboardInterrupt
        return trace
    return trace

for instruction in itertools.count(0, int(sys.argv[2])):
    with PatchStream(job, StreamOptions(batch_size=1, num_workers=0)) as stream:
        for _ in range(3):  # from the third on, places become free again
            next(stream)
        sys._getframe().f_trace_opcodes = True  # where no frame asks for them before, Python 3.12 has no opcode events
        sys.settrace(interrupt_at(instruction))
        try:
            next(stream)
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(None)
    print("closed after each of", instruction, flush=True)
    break
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_stream_closes_after_an_interrupt_at_any_instruction_of_next(tmp_path: Path, stride: int) -> None:
    """One that came while the trainer held a lock of the feeder's would leave it held, and close waited for ever."""
    path = write_array(tmp_path / "volume.zarr", textured((96, 96, 96)), chunk=32)
    ended = fork_server.run(
        [sys.executable, "-c", INTERRUPTED, str(path), str(stride)], capture_output=True, text=True, timeout=800
    )
    assert ended.stdout.startswith("closed after each of"), ended.stderr
    assert int(ended.stdout.split()[-1]) > 50, "instructions of Python in one next"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_to_the_trainer_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C unwinds the loop.  SIGTERM, where the loop has no handler for it, and SIGKILL end the process on the spot:
    then Ray's own processes notice, its agents last, within two minutes."""
    before = shared_memory()
    with trainer(tmp_path, "signal") as process:
        children = run_to_reading(process)
        process.send_signal(number)
        process.wait(timeout=180)
        assert wait_until_gone(children, 30 if number == signal.SIGINT else 120) == []
    assert shared_memory() <= before


TERMINATED = f"""{IMPORTS}
from vesuvius.stream.ray.session import Session

received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(time.monotonic()))
session = Session(ClusterConfig(), workers=1, ranks=1, store_bytes=2**28)
ended = threading.Event()

def terminate():
    while not ended.wait(0.02):
        os.kill(os.getpid(), signal.SIGTERM)

closing = time.monotonic()
threading.Thread(target=terminate).start()
session.close()
ended.set()
assert "RAY_AUTH_MODE" not in os.environ, "it would be that of the next cluster too"
print("closed after", sum(time > closing for time in received), flush=True)
"""


@pytest.mark.long
def test_sigterm_during_rays_shutdown_reaches_the_trainer(tmp_path: Path) -> None:
    """Ray's core resets the handler early in its shutdown, which then takes seconds."""
    ended = fork_server.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) > 2, ended.stdout


@pytest.mark.long
def test_a_spill_of_the_object_store_is_an_event(tmp_path: Path) -> None:
    """Regions of 5 MiB, of which some 30 are under way, in a store of 80 MB (Ray's least)."""
    with trainer(tmp_path, "spill", size=512, store_gib=0.08) as process:
        run_to_reading(process)
        output = read_to_end(process)
    assert "seen spill: " in output, output
    assert "lower data.regions_in_flight or training.workers" in output, "the largest part first"


HEAD_STOPPED = f"""{IMPORTS}
path, when = sys.argv[1:]
job = prepare_data(0, DataConfig(volumes=(VolumeConfig(path=path),), patch_size=(16, 16, 16))).job
stream = PatchStream(job, StreamOptions(batch_size=4, num_workers=1, processes=True))
heads = []
while not heads or (when == "reading" and not stream.readers):
    if when == "reading":
        next(stream)
    children = psutil.Process().children(recursive=True)
    heads = [child for child in children if child.name() == "gcs_server"]
os.kill(heads[0].pid, signal.SIGSTOP)
stream.close()
print("closed", *(child.pid for child in children), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("when", ["starting", "reading"])
def test_a_stream_closes_even_if_its_ray_head_hangs(tmp_path: Path, when: str) -> None:
    """Ray itself waits for it for ever: in its shutdown, and while it starts."""
    before = shared_memory()
    path = write_array(tmp_path / "volume.zarr", textured((96, 96, 96)), chunk=32)
    with fork_server.Popen(
        [sys.executable, "-c", HEAD_STOPPED, str(path), when],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        children: list[psutil.Process] = []
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            children = descendants(process.pid)
            for child in children:
                child.kill()
            process.kill()
    assert process.returncode == 0, errors
    assert output.startswith("closed"), errors
    assert when == "starting" or "Ray did not shut down within 5 s" in errors
    left = [psutil.Process(pid) for pid in map(int, output.split()[1:]) if psutil.pid_exists(pid)]
    assert wait_until_gone(left, 30) == []
    assert shared_memory() <= before
