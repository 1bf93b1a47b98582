"""A copy equals the box even after kills, and fetches nothing twice without need."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numcodecs import Blosc

from tests.conftest import textured, write_array
from tests.support import fork_server
from tests.support.chunk_server import ChunkServer
from tests.support.odd_server import objects_of, serving
from tests.support.small_disk import with_small_files
from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import ConfigError, DataError
from vesuvius.volume_tools.copy import CopyRequest, CopyStats, copy_box
from vesuvius.volume_tools.pyramid import downsample_mean
from vesuvius.volumes.volume import open_volume

Voxels = np.ndarray[Any, Any]
QUICK = StoreConfig(requests=4, outage_minutes=0)
START, SIZE = (5, 16, 21), (61, 50, 64)


def copied(out: Path, level: int = 0) -> Voxels:
    return np.asarray(zarr.open_group(out, mode="r")[str(level)][:])


def cut(voxels: Voxels, start: Triple, size: Triple) -> Voxels:
    return voxels[tuple(slice(lo, lo + n) for lo, n in zip(start, size, strict=True))]


def chunk_files(out: Path) -> dict[str, bytes]:
    """All files of a finished copy."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ChunkServer]:
    (tmp_path / "served").mkdir()
    with ChunkServer(tmp_path / "served") as running:
        yield running


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("dtype", "start", "layout"),
    [
        ("uint8", START, {}),
        (">u2", (0, 16, 32), {"chunk_key_encoding": {"name": "v2", "separator": "."}, "compressors": None}),
        ("float32", START, {"zarr_format": 3}),
        ("uint8", START, {"zarr_format": 3, "shards": (64, 64, 64)}),
    ],
    ids=["v2", "v2-dots-raw", "v3", "v3-sharded"],
)
def test_a_copy_equals_its_box(tmp_path: Path, dtype: str, start: Triple, layout: Any) -> None:
    voxels = textured((96, 80, 96)).astype(dtype)
    source = write_array(tmp_path / "v.zarr", voxels, chunk=16, **layout)
    figures = copy_box(CopyRequest(ArrayConfig(path=str(source)), tmp_path / "c.zarr", start, SIZE), QUICK)
    array = zarr.open_group(tmp_path / "c.zarr", mode="r")["0"]
    np.testing.assert_array_equal(array[:], cut(voxels, start, SIZE))
    assert array.dtype == np.dtype(dtype).newbyteorder("<")
    assert array.chunks == (16, 16, 16)
    assert figures.done == figures.chunks == 4 * 4 * 4
    assert not (tmp_path / "c.zarr.partial").exists()


@pytest.mark.parametrize("start", [(0, 16, 32), START], ids=["aligned", "amid chunks"])
def test_remote_chunks_are_fetched_once_and_a_finished_copy_is_unchanged(
    tmp_path: Path, server: ChunkServer, start: Triple
) -> None:
    voxels = textured((96, 80, 96))
    write_array(tmp_path / "served" / "v.zarr", voxels, chunk=16)
    request = CopyRequest(ArrayConfig(path=f"{server.url}/v.zarr"), tmp_path / "c.zarr", start, SIZE)
    figures = copy_box(request, QUICK)
    np.testing.assert_array_equal(copied(tmp_path / "c.zarr"), cut(voxels, start, SIZE))
    fetched = chunks_fetched(server)
    needed = np.prod([-(-(lo + n) // 16) - lo // 16 for lo, n in zip(start, SIZE, strict=True)])
    assert len(fetched) == needed
    assert set(fetched.values()) == {1}
    assert figures.fetched_bytes is not None
    assert 0 < figures.fetched_bytes <= server.stats()["bytes_sent"]
    before = chunk_files(tmp_path / "c.zarr")
    server.reset()
    again = copy_box(request, QUICK)
    assert again.before == again.chunks == figures.chunks
    assert not chunks_fetched(server)
    assert chunk_files(tmp_path / "c.zarr") == before


def chunks_fetched(server: ChunkServer) -> Counter[str]:
    """Number of requests per chunk, without metadata and existence checks."""
    stats = server.stats()
    paths = Counter(stats["paths"]) - Counter(stats["looks"])
    return Counter({path: count for path, count in paths.items() if path.rpartition("/")[2].isdecimal()})


def test_absent_and_empty_chunks_are_not_written(tmp_path: Path) -> None:
    voxels = textured((48, 48, 48))
    source = write_array(tmp_path / "v.zarr", voxels, chunk=16)
    (source / "0" / "0" / "1").unlink()
    (source / "1" / "1" / "1").write_bytes(Blosc().encode(np.zeros((16, 16, 16), np.uint8)))
    figures = copy_box(CopyRequest(ArrayConfig(path=str(source)), tmp_path / "c.zarr"), QUICK)
    assert not (tmp_path / "c.zarr/0/1/1/1").exists()
    assert not (tmp_path / "c.zarr/0/0/0/1").exists()
    assert (figures.written, figures.air) == (25, 2)
    voxels[:16, :16, 16:32] = voxels[16:32, 16:32, 16:32] = 0
    np.testing.assert_array_equal(copied(tmp_path / "c.zarr"), voxels)


def write_level(path: Path, transforms: list[dict[str, Any]], of_all: list[dict[str, Any]], unit: str | None) -> None:
    axes = [{"name": name, "type": "space"} | ({"unit": unit} if unit else {}) for name in "zyx"]
    dataset = {"path": "fine", "coordinateTransformations": transforms}
    multiscale = {"version": "0.4", "axes": axes, "datasets": [dataset], "coordinateTransformations": of_all}
    zarr.create_group(str(path), zarr_format=2, attributes={"multiscales": [multiscale]})
    write_array(path / "fine", textured((32, 32, 32)), chunk=16)


@pytest.mark.parametrize(
    ("transforms", "of_all", "unit", "scale", "corner"),
    [
        ([{"type": "scale", "scale": [4.0, 2.0, 2.5]}], [], "micrometer", [4, 2, 2.5], [20, 32, 40]),
        (
            [{"type": "scale", "scale": [4.0, 2.0, 2.5]}, {"type": "translation", "translation": [1.0, 2.0, 3.0]}],
            [{"type": "scale", "scale": [10.0, 10.0, 10.0]}],
            None,
            [40, 20, 25],
            [210, 340, 430],
        ),
    ],
)
def test_a_copy_keeps_the_position_of_its_box(
    tmp_path: Path, transforms: Any, of_all: Any, unit: str | None, scale: list[float], corner: list[float]
) -> None:
    write_level(tmp_path / "v.zarr", transforms, of_all, unit)
    source = ArrayConfig(path=str(tmp_path / "v.zarr"))
    copy_box(CopyRequest(source, tmp_path / "c.zarr", (5, 16, 16), (16, 16, 16), levels=2), QUICK)
    multiscale = zarr.open_group(tmp_path / "c.zarr", mode="r").attrs["multiscales"][0]
    assert [axis.get("unit") for axis in multiscale["axes"]] == [unit] * 3
    for level, dataset in enumerate(multiscale["datasets"]):
        assert dataset["coordinateTransformations"] == [
            {"type": "scale", "scale": [size * 2**level for size in scale]},
            {"type": "translation", "translation": corner},
        ]
    if unit:
        assert open_volume(ArrayConfig(path=str(tmp_path / "c.zarr"), level=1)).voxel_size_um == (8, 4, 5)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("bool", True), ("int16", -1024), ("int64", -(2**62) - 1), ("uint64", 2**64 - 1), ("float16", 0.5)],
)
def test_a_copy_keeps_dtype_fill_value_and_air(tmp_path: Path, dtype: str, fill: Any) -> None:
    scan = textured((48, 37, 33))
    voxels = (scan > 100) if dtype == "bool" else (scan // 2).astype(dtype)
    voxels[16:32] = fill
    source = write_array(tmp_path / "v.zarr", voxels, chunk=16, fill_value=fill)
    figures = copy_box(CopyRequest(ArrayConfig(path=str(source)), tmp_path / "c.zarr", levels=3), QUICK)
    assert figures.air >= 4
    group = zarr.open_group(tmp_path / "c.zarr", mode="r")
    for level, expected in enumerate((voxels, downsample_mean(voxels), downsample_mean(downsample_mean(voxels)))):
        array = group[str(level)]
        assert isinstance(array, zarr.Array)
        assert array.dtype == np.dtype(dtype)
        assert array.fill_value == fill
        np.testing.assert_array_equal(np.asarray(array[:]), expected)


class Interrupted(Exception):  # noqa: N818 - it stands for a kill, which is no error
    """Interrupt a copy in this process."""


def interrupt(figures: CopyStats) -> None:
    if figures.done >= 9:
        raise Interrupted


def copy_command(url: str, out: Path, start: Triple) -> list[str]:
    triples = [f"--{name}={','.join(map(str, value))}" for name, value in (("start", start), ("size", (80, 80, 80)))]
    return [sys.executable, "-c", DOOR, "copy", url, str(out), *triples, "--levels=2", "--requests=4"]


# Python's own handler is set by hand: a shell that runs the tests in the background has SIGINT ignored.
DOOR = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from vesuvius.commands.volume import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize(
    ("number", "start"),
    [(signal.SIGKILL, (16, 0, 32)), pytest.param(signal.SIGINT, (5, 9, 21), marks=pytest.mark.long)],
)
def test_an_interrupted_copy_resumes_and_equals_an_uninterrupted_one(
    tmp_path: Path, number: int, start: Triple
) -> None:
    served = tmp_path / "served"
    write_array(served / "v.zarr", textured((96, 96, 112)), chunk=16)
    for chunk in ("1/2/3", "3/3/3", "4/4/4", "5/5/4"):
        (served / "v.zarr" / chunk).unlink()
    with ChunkServer(served, latency_ms=5) as server:
        command = copy_command(f"{server.url}/v.zarr", tmp_path / "c.zarr", start)
        with fork_server.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while len(list((tmp_path / "c.zarr.partial").glob("volume.zarr/0/*/*/*"))) < 40:
                assert process.poll() is None
                time.sleep(0.002)
            process.send_signal(number)
            _, err = process.communicate(timeout=30)
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
        assert number == signal.SIGKILL or "run the same command again to continue" in err
        assert not (tmp_path / "c.zarr").exists()
        for unfinished in ("volume.zarr", "volume.zarr/0", ""):
            with pytest.raises(DataError):
                open_volume(tmp_path / "c.zarr.partial" / unfinished)

        done = fork_server.run(command, capture_output=True, text=True, check=True)
        fetched = chunks_fetched(server).items()
        twice = [path for path, count in fetched if count > 1 and (served / path.lstrip("/")).exists()]
        (before,) = re.findall(r"^before +(\d+)$", done.stdout, re.M)
        assert 0 < int(before) < 125 + 27, "the second process found what was done"
        # In flight at the kill: the chunks that were being written, and those that were being fetched.
        assert len(twice) <= 3 * 4 * (1 if start[0] == 16 else 8)

        whole = CopyRequest(
            ArrayConfig(path=f"{server.url}/v.zarr"), tmp_path / "whole" / "c.zarr", start, (80, 80, 80), 2
        )
        copy_box(whole, QUICK)
    assert chunk_files(tmp_path / "c.zarr") == chunk_files(tmp_path / "whole" / "c.zarr")


def test_a_kill_just_before_or_after_the_rename_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_array(tmp_path / "v.zarr", textured((32, 32, 32)), chunk=16)
    request = CopyRequest(ArrayConfig(path=str(source)), tmp_path / "c.zarr")

    def end(*_: object) -> None:
        raise Interrupted

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, to: end() if to == tmp_path / "c.zarr" else rename(path, to))
    with pytest.raises(Interrupted):
        copy_box(request, QUICK)
    assert not (tmp_path / "c.zarr").exists()
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "rmtree", end)
    with pytest.raises(Interrupted):
        copy_box(request, QUICK)
    monkeypatch.undo()
    assert (tmp_path / "c.zarr.partial").exists()
    assert copied(tmp_path / "c.zarr").shape == (32, 32, 32)
    figures = copy_box(request, QUICK)
    assert figures.before == figures.chunks == 8
    assert not (tmp_path / "c.zarr.partial").exists()


OTHERS: list[dict[str, Any]] = [{"start_zyx": (16, 0, 0)}, {"size_zyx": (16, 48, 48)}, {"levels": 2}]


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "begun"])
def test_a_different_box_or_a_changed_source_is_refused(tmp_path: Path, finished: bool) -> None:
    source = write_array(tmp_path / "v.zarr", textured((64, 48, 48)), chunk=16)
    request: dict[str, Any] = {"source": ArrayConfig(path=str(source)), "out": tmp_path / "c.zarr"}
    request |= {"size_zyx": (48, 48, 48)}
    if finished:
        copy_box(CopyRequest(**request), QUICK)
    else:
        with pytest.raises(Interrupted):
            copy_box(CopyRequest(**request), QUICK, interrupt)
    for other in OTHERS:
        words = rf"started with other arguments: {next(iter(other))} .* \(was .*choose another name"
        with pytest.raises(ConfigError, match=words):
            copy_box(CopyRequest(**request | other), QUICK)
    aside = source.rename(tmp_path / "aside.zarr")
    write_array(source, textured((64, 48, 48)), chunk=16, compressors=None)
    with pytest.raises(ConfigError, match="source_metadata"):
        copy_box(CopyRequest(**request), QUICK)
    shutil.rmtree(source)
    aside.rename(source)
    copy_box(CopyRequest(**request), QUICK)  # which is not hindered by the refused ones


def test_anything_but_a_copy_is_never_replaced(tmp_path: Path) -> None:
    source = write_array(tmp_path / "v.zarr", textured((16, 16, 16)), chunk=16)
    other = write_array(tmp_path / "c.zarr", textured((16, 16, 16), seed=1), chunk=16)
    before = chunk_files(other)
    with pytest.raises(ConfigError, match=r"was not made by this command; choose another name or remove it"):
        copy_box(CopyRequest(ArrayConfig(path=str(source)), other), QUICK)
    assert chunk_files(other) == before
    (tmp_path / "d.zarr.partial").mkdir()
    (tmp_path / "d.zarr.partial" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"d\.zarr\.partial exists and was not made by this command"):
        copy_box(CopyRequest(ArrayConfig(path=str(source)), tmp_path / "d.zarr"), QUICK)
    assert {path.name for path in (tmp_path / "d.zarr.partial").iterdir()} == {"lock", "thesis.tex"}


BAD_BOXES: list[tuple[dict[str, Any], str]] = [
    (
        {"start_zyx": (0, 0, 41), "size_zyx": (8, 8, 8)},
        r"start \[0, 0, 41\], size \[8, 8, 8\]\) .* 48x48x48 voxels; change",
    ),
    ({"start_zyx": (48, 0, 0)}, "is not inside"),
    ({"levels": 0}, "--levels 0 is impossible for .* voxels; choose 1 to 7"),
    ({"out": Path("c.tif")}, "c.tif does not end in .zarr"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_BOXES)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    source = write_array(tmp_path / "v.zarr", textured((48, 48, 48)), chunk=16)
    request: dict[str, Any] = {"source": ArrayConfig(path=str(source)), "out": tmp_path / "new" / "c.zarr"}
    with pytest.raises(ConfigError, match=message):
        copy_box(CopyRequest(**request | changes), QUICK)
    assert not (tmp_path / "new").exists()


def test_an_unreadable_chunk_is_named_the_rest_is_copied_and_a_rerun_retries_it(
    tmp_path: Path, server: ChunkServer
) -> None:
    voxels = textured((48, 48, 48))
    (write_array(tmp_path / "served" / "v.zarr", voxels, chunk=16) / "2" / "2" / "2").unlink()
    voxels[32:, 32:, 32:] = 0
    request = CopyRequest(ArrayConfig(path=f"{server.url}/v.zarr"), tmp_path / "c.zarr", levels=2)
    server.set_faults([{"path": "/1/0/2$", "kind": "corrupt"}])
    with pytest.raises(DataError, match=r"Cannot read chunk \[1, 0, 2\] of .*; 26 of 35 chunks are finished"):
        copy_box(request, QUICK)
    assert not (tmp_path / "c.zarr").exists()
    server.set_faults([])
    server.reset()
    figures = copy_box(request, QUICK)
    assert chunks_fetched(server) == {"/v.zarr/1/0/2": 1, "/v.zarr/2/2/2": 1}, "what is not there, and air"
    assert (figures.before, figures.written, figures.air, len(figures.failures)) == (25, 1 + 7, 2, 0)
    np.testing.assert_array_equal(copied(tmp_path / "c.zarr"), voxels)


@pytest.mark.long
def test_a_lost_network_ends_the_copy_early(tmp_path: Path, server: ChunkServer) -> None:
    voxels = textured((96, 96, 96))
    write_array(tmp_path / "served" / "v.zarr", voxels, chunk=16)
    request = CopyRequest(ArrayConfig(path=f"{server.url}/v.zarr"), tmp_path / "c.zarr")

    seen: list[CopyStats] = []

    def cut_the_cable(figures: CopyStats) -> None:
        seen.append(figures)
        if figures.done == 40:
            server.set_faults([{"path": r"/v.zarr/\d", "kind": "reset"}])

    words = (
        r"Cannot reach the store: .* data.store.outage_minutes=0; .*chunks are finished and kept in .*c\.zarr\.partial"
    )
    with pytest.raises(DataError, match=words):
        copy_box(request, QUICK, cut_the_cable)
    assert not seen[-1].failures, "no chunk is damaged"
    assert 40 <= seen[-1].done <= 40 + 3 * 4
    server.set_faults([])
    copy_box(request, QUICK)
    np.testing.assert_array_equal(copied(tmp_path / "c.zarr"), voxels)


def test_only_one_process_writes_a_copy(tmp_path: Path) -> None:
    source = write_array(tmp_path / "v.zarr", textured((48, 48, 48)), chunk=16)
    request = CopyRequest(ArrayConfig(path=str(source)), tmp_path / "c.zarr")

    def meddle(figures: CopyStats) -> None:
        with pytest.raises(ConfigError, match="another process is writing it"):
            copy_box(request, QUICK)
        raise Interrupted

    with pytest.raises(Interrupted):
        copy_box(request, QUICK, meddle)
    copy_box(request, QUICK)


def test_a_full_disk_ends_the_copy_with_exit_code_6_and_intact_files(tmp_path: Path) -> None:
    # No file may grow above 3000 bytes, as if the disk were full: copy.json can be written, chunks cannot.
    source = write_array(tmp_path / "v.zarr", textured((48, 48, 48)), chunk=16)
    arguments = ["copy", str(source), str(tmp_path / "c.zarr")]
    limited = fork_server.run([*with_small_files("volume", 3000), *arguments], capture_output=True, text=True)
    assert limited.returncode == 6, limited.stderr
    assert "c.zarr: [Errno 27] File too large" in limited.stderr
    assert "Traceback" not in limited.stderr
    assert not list((tmp_path / "c.zarr.partial").glob("volume.zarr/0/*/*/*"))
    assert fork_server.run([sys.executable, "-c", DOOR, *arguments], capture_output=True).returncode == 0


def test_a_copy_records_no_password_of_its_source(tmp_path: Path) -> None:
    """A copy may be shared."""
    path = write_array(tmp_path / "v.zarr", textured((32, 32, 32)), chunk=16)
    with serving(objects_of(path, "/v")) as web:
        address = web.replace("//", "//user:secret@") + "/v?signature=hidden"
        copy_box(CopyRequest(ArrayConfig(path=address), tmp_path / "out.zarr"), QUICK)
    text = b"".join(file.read_bytes() for file in (tmp_path / "out.zarr").rglob(".z*"))
    assert b"127.0.0.1" in text
    assert not any(word in text for word in (b"secret", b"hidden"))
