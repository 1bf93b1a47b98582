"""The start's reads: the same voxels as in the trainer, and a codec that aborts takes another process along."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.conftest import textured, write_array
from tests.support import fork_server
from tests.support.chunk_server import ChunkServer
from tests.support.poison import poison, write_volume
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.runlog import progress
from vesuvius.stream.start.fixed_patches import read_fixed_patches
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.stream.start.start_reads import StartReads
from vesuvius.volumes.errors import UnreadableChunkError

SHAPE = (128, 128, 128)
BOX = ((8, 8, 8), (50, 50, 50))


def config_of(path: Path, **settings: object) -> DataConfig:
    return DataConfig(volumes=(VolumeConfig(path=str(path)),), patch_size=(8, 16, 16), **settings)  # type: ignore[arg-type]


def process_id(reads: StartReads) -> int:
    """Of the process that reads; this one may have others, those of a Ray."""
    assert reads._process is not None
    return reads._process.pid


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    path = write_volume(tmp_path / "poisoned.zarr", textured(SHAPE))
    poison(path, (1, 1, 1))
    return path


def test_a_start_reads_the_same_in_a_process_of_its_own(tmp_path: Path) -> None:
    voxels = textured(SHAPE)
    condition = write_array(tmp_path / "condition.zarr", voxels[::-1].copy())
    path = write_array(tmp_path / "v.zarr", voxels)
    spec = VolumeConfig(path=str(path), condition={"path": str(condition)})  # type: ignore[arg-type]
    config = DataConfig(volumes=(spec,), patch_size=(8, 16, 16))
    data = prepare_data(0, config)
    with StartReads(config) as reads:
        assert data.grey_ranges(config, reads.read) == data.grey_ranges(config)
        apart, here = read_fixed_patches(data, config, 6, reads.read, reads.expect), read_fixed_patches(data, config, 6)
        child = psutil.Process(process_id(reads))
    assert apart.starts_zyx == here.starts_zyx
    np.testing.assert_array_equal(apart.patches, here.patches)
    assert apart.conditions is not None
    np.testing.assert_array_equal(apart.conditions, here.conditions)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("paired", [False, True])
def test_a_start_fetches_what_it_reads_next_meanwhile_and_says_how_far_it_is(
    server: ChunkServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, paired: bool
) -> None:
    """A patch touches eight chunks at most: where more are asked for at once, they are those of other patches too."""
    monkeypatch.setattr(progress, "_EVERY_S", 0.02)
    caplog.set_level(logging.INFO)
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), chunk=16)
    spec = VolumeConfig(path=server.url_of(path))
    if paired:
        write_array(tmp_path / "c.zarr", textured(SHAPE), chunk=16)
        spec = spec.model_copy(update={"condition": VolumeConfig(path=server.url_of(tmp_path / "c.zarr"))})
    config = DataConfig(volumes=(spec,), patch_size=(8, 16, 16))
    data = prepare_data(0, config)
    expected = read_fixed_patches(data, config, 12)
    server.set_faults([{"path": r"\.zarr/\d", "kind": "delay", "delay_s": 0.05}])
    server.reset()
    with StartReads(config) as reads:
        found = read_fixed_patches(data, config, 12, reads.read, reads.expect)
    np.testing.assert_array_equal(found.patches, expected.patches)
    stats = server.stats()
    assert stats["max_in_flight"] > 8
    assert sum(count for key, count in stats["paths"].items() if "zarr/." not in key) <= 12 * 8 * (1 + paired)
    total = 12 * (1 + paired)
    said = [line for line in caplog.messages if line.startswith("reading the patches of validation and previews: ")]
    assert said[0].endswith(f": 0 of {total}"), "also before anything has come"
    counts = [re.search(rf": (\d+) of {total}, .* MiB, about .* left$", line) for line in said]
    assert len(found_counts := [int(match[1]) for match in counts if match]) > 1
    assert found_counts == sorted(found_counts)
    assert re.search(rf": done, {total}, .* MiB in ", said[-1])


def test_what_is_expected_and_never_read_does_no_harm_to_what_is(server: ChunkServer, tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), chunk=16)
    config = config_of(path).model_copy(update={"volumes": (VolumeConfig(path=server.url_of(path)),)})
    boxes = [((z, 0, 0), (z + 8, 16, 16)) for z in range(0, 128, 8)]
    with StartReads(config) as reads:
        reads.expect("reading", [("volume", 0, box) for box in boxes])
        reads.read("volume", 0, boxes[0])
        reads.expect("reading others", [])
        for box in (boxes[5], boxes[3], boxes[15]):
            np.testing.assert_array_equal(
                reads.read("volume", 0, box), textured(SHAPE)[box[0][0] : box[1][0], :16, :16]
            )
    assert set(server.asked_for(path)) >= {"0/0/0", "1/0/0"}


def test_an_abort_ends_the_other_process_and_its_chunk_is_passed_over(
    poisoned: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with StartReads(config_of(poisoned)) as reads:
        for _ in range(2):
            with pytest.raises(UnreadableChunkError, match=r"killed its reader \(SIGABRT\)") as raised:
                reads.read("volume", 0, BOX)
            assert (raised.value.volume, raised.value.chunk) == (str(poisoned), (1, 1, 1))
        sound = ((64, 64, 64), (80, 80, 80))
        np.testing.assert_array_equal(reads.read("volume", 0, sound), textured(SHAPE)[64:80, 64:80, 64:80])
    first, second = [r.getMessage() for r in caplog.records if "reads at the start" in r.getMessage()]
    assert f"was ended by SIGABRT while it read volume {poisoned}, region z 8:50, y 8:50, x 8:50" in first
    assert "chunk [1, 1, 1]" in second, "it was read with care"
    assert first.endswith("; another one reads that with care")


def test_grey_range_and_held_out_patches_come_from_what_can_be_read(poisoned: Path) -> None:
    for chunk in [(0, 0, 0), (0, 3, 3), (3, 1, 0), (3, 3, 2)]:  # also in the slab that is held out
        poison(poisoned, chunk)
    config = config_of(poisoned)
    data = prepare_data(0, config)
    with StartReads(config) as reads:
        assert data.grey_ranges(config, reads.read).volumes[0].low >= 0
        found = read_fixed_patches(data, config, 8, reads.read)
    for patch, (z, y, x) in zip(found.patches, found.starts_zyx, strict=True):
        np.testing.assert_array_equal(patch, textured(SHAPE)[z : z + 8, y : y + 16, x : x + 16])


def test_a_kill_is_tried_again_and_bounded(poisoned: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with StartReads(config_of(poisoned, max_reader_deaths=1)) as reads:
        sound = ((64, 64, 64), (80, 80, 80))
        reads.read("volume", 0, sound)
        for _ in range(2):
            os.kill(process_id(reads), signal.SIGKILL)
            if "SIGKILL" not in caplog.text:
                reads.read("volume", 0, sound)
        with pytest.raises(DataError, match=r"max_reader_deaths=1 .*; got 2 at the start, the last by SIGKILL"):
            reads.read("volume", 0, sound)


def test_a_mask_that_aborts_is_an_error_and_a_sound_one_gives_the_same_map(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    mask = write_volume(tmp_path / "mask.zarr", (textured(SHAPE) > 120).astype(np.uint8))
    spec = VolumeConfig(path=str(path), mask={"path": str(mask)})  # type: ignore[arg-type]
    config = DataConfig(volumes=(spec,), patch_size=(8, 16, 16), min_foreground=0.1)
    with StartReads(config) as reads:
        apart = prepare_data(0, config, foreground=reads.foreground_map)
        assert apart.plan.hash == prepare_data(0, config).plan.hash
        coarser = write_volume(tmp_path / "half.zarr", np.ones((96, 96, 96), np.uint8))
        poison(coarser, (0, 0, 2))
        odd = write_array(tmp_path / "odd.zarr", textured((96, 96, 96)))
        spec = VolumeConfig(path=str(odd), mask={"path": str(coarser)})  # type: ignore[arg-type]
    config = DataConfig(volumes=(spec,), patch_size=(8, 16, 16), min_foreground=0.1)
    with (
        StartReads(config) as reads,
        pytest.raises(DataError, match=r"got SIGABRT while the mask .*half\.zarr was read"),
    ):
        prepare_data(0, config, foreground=reads.foreground_map)


def test_an_error_of_the_other_process_is_the_same_here(tmp_path: Path) -> None:
    missing = config_of(tmp_path / "none.zarr")
    with StartReads(missing) as reads, pytest.raises(DataError, match="a volume must exist"):
        reads.read("volume", 0, BOX)


LEAVING = """
import os, subprocess, sys, threading, time
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.stream.start.start_reads import StartReads

folder, busy = sys.argv[1], sys.argv[2] == "busy"
server = subprocess.Popen(
    [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
    cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
)
port = server.stdout.readline().split("port ")[1].split()[0]
config = DataConfig(volumes=(VolumeConfig(path=f"http://127.0.0.1:{port}/v.zarr"),), patch_size=(8, 16, 16))
reads = StartReads(config)
reads.read("volume", 0, ((0, 0, 0), (8, 8, 8)))
server.kill()
server.wait()
if busy:
    threading.Thread(target=reads.read, args=("volume", 0, ((60, 60, 60), (90, 90, 90))), daemon=True).start()
    time.sleep(2)
print(reads._process.pid, flush=True)
os._exit(75)
"""


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_a_trainer_that_leaves_in_the_middle_of_a_read_leaves_nothing(tmp_path: Path, state: str) -> None:
    """The store has gone as well: the read would be tried again for `data.store.outage_minutes`."""
    write_array(tmp_path / "v.zarr", textured((96, 128, 128)))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    left = fork_server.run(
        [sys.executable, "-c", LEAVING, str(tmp_path), state],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert left.returncode == 75
    child = int(left.stdout)
    deadline = time.monotonic() + 30
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(child)
    assert list(temporary.iterdir()) == []


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
