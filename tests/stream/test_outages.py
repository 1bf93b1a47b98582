"""A run over a server that goes away and comes back, or over a volume that does not come back."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import textured, write_array
from tests.stream.test_stream import collect, make_job, open_stream
from tests.support import fork_server
from tests.support.chunk_server import ChunkServer
from vesuvius.config import StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.store import source as store_source

SHAPE = (96, 128, 128)
BATCHES = 60
WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ChunkServer]:
    """A server that a test may stop."""
    with ChunkServer(tmp_path) as server:
        yield server


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("workers", "gone_s"),
    [(0, 3), *(pytest.param(*case, marks=pytest.mark.long) for case in itertools.product((0, 2), (8, 180, 600)))],
)
def test_an_outage_only_costs_time(
    own_server: ChunkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, gone_s: float
) -> None:
    """A limited number of tries ends after seconds, whatever the pauses between them: 10 end after 2 s here."""
    monkeypatch.setattr(store_source, "_LONGEST_PAUSE_S", 0.2)
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    with open_stream(make_job(path)) as stream:
        expected, _ = collect(stream, BATCHES)
    with open_stream(make_job(own_server.url_of(path)), processes=workers, stop=4 * BATCHES) as stream:
        first, _ = collect(stream, 4)
        own_server.stop()
        stopped = time.monotonic()
        back = threading.Timer(gone_s, own_server.start)
        back.start()
        told: list[str] = []
        asked = threading.Timer(gone_s / 2, lambda: told.append(stream.waiting_for()))
        asked.start()
        rest, _ = collect(stream, BATCHES - 4)
        took_s = time.monotonic() - stopped
        back.join()
        asked.join()
        assert not stream.quarantined
        assert not stream.events
        source, deadline = stream._source, time.monotonic() + 5
        assert source is not None
        while source.outages and time.monotonic() < deadline:  # readers tell it every second
            time.sleep(0.1)
        assert not source.outages
    told_as = r"regions to be read, for sample \d+ on \(http://\S+ has not answered since 20.*: Connection refused\) "
    assert re.match(told_as, told[0])
    assert first.tobytes() + rest.tobytes() == expected.tobytes()
    assert gone_s <= took_s < gone_s + 20, "the outage was met, and not outlasted by long"


@pytest.mark.usefixtures("ray_cluster")
@WORKERS
def test_a_long_outage_ends_the_stream_without_quarantine(
    own_server: ChunkServer, tmp_path: Path, workers: int
) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    job = make_job(own_server.url_of(path), store=StoreConfig(outage_minutes=0.03))
    with open_stream(job, processes=workers) as stream:
        collect(stream, 4)
        own_server.stop()
        with pytest.raises(
            DataError, match=r"Connection refused .* since 20.*outage_minutes=0.03; .* --resume"
        ) as caught:
            collect(stream, 500)
        assert caught.value.exit_code == 6
        assert not stream.quarantined
    own_server.start()


@pytest.mark.parametrize(
    ("min_foreground", "workers"),
    [(0, 0), *(pytest.param(*case, marks=pytest.mark.long) for case in ((0.5, 0), (0, 1)))],
)
def test_deleting_the_volume_ends_the_run_with_exit_code_6(
    tiny_config: Callable[..., Path], volume: Path, tmp_path: Path, min_foreground: float, workers: int
) -> None:
    """`rm -rf`, the metadata last, as a file system may have it."""
    command = [sys.executable, "-m", "vesuvius.train", "--config", str(tiny_config()), "training.epochs=100000"]
    command += [f"data.min_foreground={min_foreground}", f"training.workers={workers}"]
    log = tmp_path / "runs" / "tiny" / "logs" / "train_full.log"
    with fork_server.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while not log.exists() or "Train step 3" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        for chunk in volume.glob("[0-9]/*/*"):
            chunk.unlink()
        shutil.rmtree(volume)
        began = time.monotonic()
        _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 15, "of which saving and the end of the process take most"
    assert process.returncode == 6, error
    assert "the volume is gone" in error
