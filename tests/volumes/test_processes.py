"""Open volumes in forked and spawned processes: read there as here, whatever other threads did at the fork."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from tests.conftest import textured, write_array
from tests.support.chunk_server import ChunkServer
from tests.support.forked import in_child
from tests.volumes.test_volume import LAYOUTS
from vesuvius import DataError, StoreConfig, Volume, open_volume
from vesuvius.errors import VesuviusError

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
SHAPE = (96, 128, 128)
VOXELS = textured(SHAPE)


class Slabs(Dataset[Any]):
    def __init__(self, volume: Volume) -> None:
        self.volume = volume

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return np.asarray(self.volume[16 * index : 16 * index + 16])


def check(volume: Volume) -> None:
    """In a child: within a minute it reads what is stored."""
    signal.alarm(60)
    np.testing.assert_array_equal(volume[:], VOXELS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_open_volume_reads_in_a_forked_child(tmp_path: Path, layout: str) -> None:
    volume = open_volume(write_array(tmp_path / "scan.zarr", VOXELS, **LAYOUTS[layout]))
    assert in_child(lambda: check(volume)) == 0, "before the parent has read"
    np.testing.assert_array_equal(volume[:], VOXELS)
    assert in_child(lambda: check(volume)) == 0
    assert in_child(lambda: in_child(lambda: check(volume)) and os._exit(3)) == 0, "the child of a child"
    volume.close()

    def closed() -> None:
        with pytest.raises(VesuviusError, match="closed"):
            volume[0]

    assert in_child(closed) == 0


def test_a_fork_while_other_threads_read_leaves_no_lock_held(tmp_path: Path) -> None:
    volume = open_volume(write_array(tmp_path / "scan.zarr", VOXELS))
    stopped = threading.Event()

    def read() -> None:
        while not stopped.is_set():
            volume[:64]

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            assert in_child(lambda: check(volume)) == 0
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    "how", ["fork", *(pytest.param(how, marks=pytest.mark.long) for how in ("spawn", "forkserver"))]
)
def test_a_data_loader_with_workers_reads_an_open_volume(tmp_path: Path, how: str) -> None:
    volume = open_volume(write_array(tmp_path / "scan.zarr", VOXELS))
    volume[0]
    batches: Any = DataLoader(Slabs(volume), batch_size=None, num_workers=1, timeout=120, multiprocessing_context=how)
    np.testing.assert_array_equal(np.concatenate([np.asarray(batch) for batch in batches]), VOXELS)


def test_a_pickled_volume_keeps_its_settings_and_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it was opened by a relative path and the copy is made elsewhere."""
    path = write_array(tmp_path / "a/scan.zarr", textured((16, 16, 16)).astype(np.float32) * np.nan, chunk=8)
    (path / "0/0/0").unlink()
    monkeypatch.chdir(path.parent)
    volume = open_volume("scan.zarr", StoreConfig(requests=3), "error", 7.0)
    data = pickle.dumps(volume)
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    for other in (pickle.loads(data), copy.copy(volume), copy.deepcopy(volume)):
        assert (other.source.config, other.shape_zyx, other.dtype) == (volume.source.config, (16, 16, 16), np.float32)
        assert (other.read(((8, 8, 8), (16, 16, 16))) == 7).all()
        with pytest.raises(DataError, match="absent"):
            other[0]
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="does not exist"):
        pickle.loads(data)


# ---- remote volumes


@pytest.mark.long
def test_a_remote_volume_works_in_spawned_workers_and_is_refused_in_forked_ones(
    server: ChunkServer, tmp_path: Path
) -> None:
    """obstore waits for threads that a fork does not copy, for ever."""
    volume = open_volume(server.url_of(write_array(tmp_path / "scan.zarr", VOXELS)))
    volume.stage(((0, 0, 0), (32, 32, 32)))

    def refused() -> None:
        signal.alarm(60)
        for read in (
            lambda: volume[0],
            lambda: volume.read(((0, 0, 0), (32, 32, 32))),
            lambda: open_volume(volume.source.address),
            lambda: pickle.loads(pickle.dumps(volume)),
        ):
            with pytest.raises(DataError, match=r"forked from process .*multiprocessing_context='spawn'"):
                read()

    assert in_child(refused) == 0
    batches: Any = DataLoader(Slabs(volume), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    np.testing.assert_array_equal(np.concatenate([np.asarray(batch) for batch in batches]), VOXELS)
    np.testing.assert_array_equal(volume[:], VOXELS)


FIRST_IN_CHILD = """
import os, sys, signal, vesuvius
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(60)
vesuvius.open_volume(sys.argv[1])[0]
os._exit(0)
"""


def test_a_child_may_be_the_first_to_read_from_the_network(server: ChunkServer, tmp_path: Path) -> None:
    address = server.url_of(write_array(tmp_path / "scan.zarr", VOXELS))
    command = [sys.executable, "-c", FIRST_IN_CHILD, address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
