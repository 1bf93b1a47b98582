"""A stream that fails says so: nothing of it looks like the end of the data, and it can be asked where it stands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import textured, write_array
from tests.stream.test_stream import collect, make_job, open_stream
from vesuvius.errors import ConfigError
from vesuvius.stream import at_exit
from vesuvius.stream import stream as stream_module
from vesuvius.stream.ray import blocks as ray_blocks
from vesuvius.stream.ray import session as ray_session
from vesuvius.stream.stream import PatchStream


def test_a_reconfigure_that_fails_does_not_look_like_the_end(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_stream(make_job(volume)) as stream:
        next(stream)
        with monkeypatch.context() as broken:
            broken.setattr(stream_module, "_LocalBlocks", refuse)
            with pytest.raises(ConfigError, match="no readers today"):
                stream.reconfigure(prefetch_factor=3)
        for _ in range(2):
            with pytest.raises(ConfigError, match="no readers today"):
                next(stream)
        stream.reconfigure(prefetch_factor=4)
        assert next(stream).indices.tolist() == [4, 5, 6, 7], "it goes on where it was"


def refuse(*_: Any) -> None:
    raise ConfigError("no readers today")


@pytest.mark.usefixtures("ray_cluster")
def test_the_watch_for_spills_says_once_that_it_is_blind_and_once_that_it_sees(
    volume: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(ray_blocks, "_WATCH_S", 0.05)
    real = ray_blocks.private.store_stats
    answers: Iterator[bool] = iter([True, False, False, False])

    def moody(*arguments: Any, **settings: Any) -> Any:
        if not next(answers, True):
            raise ConnectionError("no answer")
        return real(*arguments, **settings)

    monkeypatch.setattr(ray_blocks.private, "store_stats", moody)
    with open_stream(make_job(volume), workers=1) as stream:
        deadline = time.monotonic() + 60
        while "watched for spills again" not in caplog.text and time.monotonic() < deadline:
            next(stream)
        assert stream.store_peak_bytes
    said = [record.getMessage() for record in caplog.records if "spills" in record.getMessage()]
    assert said == [
        "Ray's object store cannot be watched for spills, and is asked again every second: no answer",
        "Ray's object store is watched for spills again",
    ]


def test_only_the_announcement_of_ray_s_core_is_hidden(capfd: pytest.CaptureFixture[str]) -> None:
    with ray_session._without_announcement():
        os.write(2, b"[x] logging.cc: Set ray log level from environment variable RAY_BACKEND_LOG_LEVEL to 4\n")
        os.write(2, b"a reason to look at\n")
    os.write(2, b"and on\n")
    assert capfd.readouterr().err == "a reason to look at\nand on\n"


@pytest.mark.usefixtures("ray_cluster")
def test_the_stacks_of_readers_are_written_and_those_that_do_not_answer_are_named(volume: Path, tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt"
    path.write_text("before\n")
    with open_stream(make_job(volume), workers=2) as stream:
        collect(stream, 40)
        answering, stopped = sorted(pid for pid in stream.readers if psutil.pid_exists(pid))
        os.kill(stopped, signal.SIGSTOP)
        try:
            stream.dump_reader_stacks(path)
        finally:
            os.kill(stopped, signal.SIGCONT)
        collect(stream, 40)
        assert stream.reader_deaths == 0, "the signal ends nobody"
        stream.reconfigure(workers=0)
        stream.dump_reader_stacks(tmp_path / "none.txt")
    before, *parts = path.read_text().split("---- reader ")
    assert before == "before\n"
    found = {int(part.split()[0]): part for part in parts}
    assert found.keys() == {answering, stopped}
    assert "most recent call first" in found[answering]
    assert "reading nothing" in found[answering] or f"volume {volume}" in found[answering]
    assert "no answer in 2 s" in found[stopped]
    assert not (tmp_path / "none.txt").exists()


LEFT_OPEN = """
import sys, time
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.prepare import prepare_data
from vesuvius.stream.stream import PatchStream

path, workers, streams, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
job = prepare_data(0, DataConfig(volumes=(VolumeConfig(path=path),), patch_size=(8, 16, 16))).job
left = [PatchStream(job, StreamOptions(4, workers)) for _ in range(streams)]
for stream in left:
    next(stream)
import psutil
print(time.time(), *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
if end == "error":
    raise RuntimeError("the loop broke")
sys.exit(3)
"""


@pytest.mark.parametrize(("workers", "streams", "end"), [(0, 1, "exit"), (1, 1, "exit"), (1, 3, "error")])
def test_a_stream_that_nobody_closes_does_not_keep_the_interpreter(
    tmp_path: Path, workers: int, streams: int, end: str
) -> None:
    path = write_array(tmp_path / "v.zarr", textured((96, 128, 128)))
    command = [sys.executable, "-c", LEFT_OPEN, str(path), str(workers), str(streams), end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    ended = time.time()
    assert done.returncode == {"exit": 3, "error": 1}[end], done.stderr
    began, *children = done.stdout.split()
    assert ended - float(began) < 30, "two seconds where nobody else computes; it was 30 to 40, or for ever"
    deadline = time.monotonic() + 30
    while (left := [pid for pid in map(int, children) if not is_gone(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_closed_stream_is_not_closed_again_at_exit(volume: Path) -> None:
    with open_stream(make_job(volume)) as stream:
        assert stream in at_exit._open
    assert not at_exit._open
    assert isinstance(stream, PatchStream)
