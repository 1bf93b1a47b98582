"""Every stored chunk is read once, even across interruptions; broken chunks are listed even if they kill a process."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import textured, write_array
from tests.support import fork_server
from tests.support.chunk_server import ChunkServer
from tests.support.poison import poison, write_volume
from tests.volumes.test_volume import LAYOUTS
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import DataError
from vesuvius.volume_tools import verify
from vesuvius.volume_tools.info import make_sidecar
from vesuvius.volume_tools.verify import VerifyStats, verify_volume

SHAPE = (96, 128, 128)
CHUNKS = 3 * 4 * 4
QUICK = StoreConfig(requests=4, outage_minutes=0.01)


def verified(path: Path | str, **options: Any) -> VerifyStats:
    return verify_volume(ArrayConfig(path=str(path)), QUICK, **options)


def causes(stats: VerifyStats) -> dict[tuple[int, int, int], str]:
    return {broken.chunk: broken.cause for broken in stats.broken}


@pytest.mark.parametrize("layout", ["v2-dots", "v3-sharded"])
def test_an_intact_volume_is_read_once_and_verified(server: ChunkServer, tmp_path: Path, layout: str) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS[layout])
    for address in (path, server.url_of(path)):
        found = verified(address, processes=2)
        assert (found.chunks, found.broken) == (CHUNKS, [])
        assert found.done == found.objects == (8 if layout == "v3-sharded" else CHUNKS)
    if "sharded" not in layout:
        asked = {key: count for key, count in server.reads_of(path).items() if key[-1].isdigit() and key[0] in "0123c"}
        assert set(asked.values()) == {1}
        assert len(asked) == CHUNKS


@pytest.mark.parametrize("place", ["disk", "http"])
def test_broken_chunks_are_listed_with_key_box_and_cause(server: ChunkServer, tmp_path: Path, place: str) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    (path / "1/1/1").write_bytes(b"torn")
    (path / "2/3/3").write_bytes((path / "2/3/3").read_bytes()[:-50])
    (path / "0/0/2").unlink()
    found = verified(server.url_of(path) if place == "http" else path)
    assert [broken.chunk for broken in found.broken] == [(1, 1, 1), (2, 3, 3)]
    assert [broken.key for broken in found.broken] == ["1/1/1", "2/3/3"]
    assert found.broken[0].box == ((32, 32, 32), (64, 64, 64))
    assert all("Error" in broken.cause for broken in found.broken)
    assert found.chunks == (CHUNKS if place == "http" else CHUNKS - 1), "a web server is asked for all places"


def test_a_folder_a_broken_link_and_an_absent_listed_chunk_are_broken(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    make_sidecar(ArrayConfig(path=str(path)), None)
    for key in ("0/1/1", "1/1/1", "2/1/1"):
        (path / key).unlink()
    (path / "0/1/1").mkdir()
    (path / "1/1/1").symlink_to("elsewhere")
    found = causes(verified(path))
    assert "is a folder, not a file" in found[0, 1, 1]
    assert "a broken link" in found[1, 1, 1]
    assert found[2, 1, 1] == "it is listed, but is now missing"
    assert len(found) == 3
    (path / ".chunk_occupancy.npz").unlink()
    assert set(causes(verified(path))) == {(0, 1, 1), (1, 1, 1)}, "without a listing the third is air"


def test_a_damaged_shard_index_is_reported_once(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS["v3-sharded"])
    shard = path / "c/1/1/1"
    shard.write_bytes(shard.read_bytes()[:-3])
    (broken,) = verified(path).broken
    assert broken.key == "c/1/1/1"
    assert broken.box == ((64, 64, 64), (96, 128, 128)), "cut at the end of the array"


def test_a_chunk_that_kills_its_process_is_listed(tmp_path: Path) -> None:
    path = write_volume(tmp_path / "v.zarr", textured(SHAPE))
    poison(path, (1, 0, 1))
    found = verified(path, processes=2)
    (broken,) = found.broken
    assert broken.chunk == (1, 0, 1)
    assert broken.key == "1/0/1"
    assert broken.cause.startswith("decoding it killed the process")
    assert found.chunks == CHUNKS


def test_an_outage_ends_a_verification_and_the_next_one_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(verify, "_CHUNKS_PER_TASK", 4)
    (tmp_path / "served").mkdir()
    path = write_array(tmp_path / "served" / "v.zarr", textured(SHAPE))
    sound = (path / "0/0/0").read_bytes()
    (path / "0/0/0").write_bytes(b"torn")
    (path / "0/0/3").write_bytes(b"torn")
    with ChunkServer(tmp_path / "served") as server:
        address = server.url_of(path)
        with pytest.raises(DataError, match="Cannot reach the store"):
            verified(address, on_progress=lambda stats: server.stop() if stats.done == 12 else None)
        server.start()
        (path / "0/0/0").write_bytes(sound)
        assert "continuing" not in caplog.text
        found = verified(address)
    assert f"resuming the verification started on {found.since}: {found.before} of {CHUNKS}" in caplog.text
    assert 8 <= found.before < CHUNKS, "all but the task with the torn chunks"
    assert found.before + found.chunks == found.done == CHUNKS
    assert set(causes(found)) == {(0, 0, 3)}, "it is torn still, and the other one was restored"


DOOR = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from vesuvius.volume_tools import verify; verify._CHUNKS_PER_TASK = 2\n"
    "from vesuvius.commands.volume import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_verification_resumes_and_leaves_no_process(
    server: ChunkServer, tmp_path: Path, number: int, cache_home: Path
) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    (path / "0/0/0").write_bytes(b"torn")
    server.set_faults([{"path": r"v\.zarr/\d", "kind": "delay", "delay_s": 0.1}])
    command = [sys.executable, "-c", DOOR, "verify", server.url_of(path), "--processes=2", "--requests=2", "--json"]
    with fork_server.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not any(len(file.read_text().splitlines()) > 4 for file in cache_home.glob("vesuvius/verify/*")):
            assert process.poll() is None
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, error = process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), error
    assert number == signal.SIGKILL or "run the same command again to continue" in error
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    (journal,) = cache_home.glob("vesuvius/verify/*")
    with journal.open("a") as file:
        file.write("<2")  # as left by a kill in the middle of a number
    server.reset()
    done = fork_server.run(command, capture_output=True, text=True)
    assert done.returncode == 6, done.stderr
    found = json.loads(done.stdout)
    assert 8 <= found["before"] < found["done"] == CHUNKS
    assert [broken["chunk"] for broken in found["broken"]] == [[0, 0, 0]]
    again = [key for key in server.reads_of(path) if key[0].isdigit()]
    assert len(again) == CHUNKS - found["before"], "what was read is not read again"
    assert not journal.exists()


@pytest.mark.long
def test_the_command_ends_without_a_traceback(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))  # of blosc, for which numcodecs makes a lock
    command = [
        sys.executable,
        "-c",
        "from vesuvius.commands.cli import main; main()",
        "volume",
        "verify",
        str(path),
        "--processes=3",
    ]
    done = fork_server.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
