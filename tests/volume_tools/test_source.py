"""A source that cannot be imported is named, with its cause and what to do about it, before anything is written."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from vesuvius.commands import volume
from vesuvius.errors import DataError
from vesuvius.volume_tools.importing import ImportRequest, import_volume
from vesuvius.volume_tools.sources.source import open_source


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    try:
        code = volume.main(["import", *map(str, arguments)])
    except SystemExit as end:
        code = int(end.code or 0)
    return code, capsys.readouterr().err.strip().splitlines()[-1]


def touch(name: str, content: bytes = b"{}") -> Any:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    return write


def zipped(folder: Path) -> None:
    with zipfile.ZipFile(folder / "v.zarr.ZIP", "w") as file:
        file.writestr("zarr.json", "{}")


OTHERS: dict[str, tuple[Any, str, str]] = {
    "address": (None, "https://host/scans/x.tif?a=b:c", "it is an address, .*; download it first"),
    "missing folder": (None, "slices/", "there is no .*slices; correct the path"),
    "missing disk": (None, "mount/scans/slices", r"the folder \S+ has no such path; correct the path"),
    "dead link": (lambda folder: (folder / "l.tif").symlink_to("/nowhere/s"), "l.tif", "it is a link to /nowhere/s,"),
    "zarr": (touch("v.zarr/zarr.json"), "v.zarr", "it is a zarr; it needs no import"),
    "zip": (zipped, "v.zarr.ZIP", r"\.ZIP files cannot be imported; unpack it first"),
    "icechunk": (touch("repo/snapshots/A"), "repo", "it is an icechunk repository; export"),
    "kerchunk": (touch("refs.json"), "refs.json", "if it is a kerchunk reference, export"),
    "precomputed": (touch("em/info"), "em", "it is a precomputed volume of Neuroglancer; export"),
    "n5 with lz4": (
        touch("v.n5/attributes.json", b'{"dimensions": [1, 2, 3], "compression": {"type": "lz4"}}'), "v.n5", "with lz4"
    ),
    "empty folder": (lambda folder: (folder / "none").mkdir(), "none", "it has no .tif"),
    "no array at all": (touch("v.npy", b""), "v.npy", r"v\.npy: EOFError: No data left"),
    "0 slices, npy": (lambda folder: np.save(folder / "v.npy", np.zeros((0, 3, 4))), "v.npy", "its shape is 0x3x4"),
    "objects, npy": (lambda folder: np.save(folder / "v.npy", np.array([None])), "v.npy", "Python objects in dtype"),
    "a single number, npy": (lambda folder: np.save(folder / "v.npy", 3), "v.npy", "not Z, Y, X once each"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_what_cannot_be_imported_is_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    write, source, words = OTHERS[case]
    monkeypatch.chdir(tmp_path)
    if write:
        write(tmp_path)
    code, error = error_of(capsys, source, "out.zarr")
    assert code == 6
    with pytest.raises(DataError, match=words):
        open_source(source)
    assert f"Cannot import {source.partition(':/')[0].rstrip('/')}" in error
    assert not list(tmp_path.glob("out.zarr*"))


@pytest.mark.parametrize("name", ["q", "longlong", "Q", "ulonglong", "l", "uintp", ">i8"])
def test_every_name_of_a_dtype_is_read(tmp_path: Path, name: str) -> None:
    voxels = np.arange(24, dtype=name).reshape(2, 3, 4)
    (tmp_path / "v.raw").write_bytes(voxels.tobytes())
    out = tmp_path / "out.zarr"
    assert volume.main(["import", f"{tmp_path}/v.raw", str(out), "--shape=2,3,4", f"--dtype={name}"]) == 0
    found = zarr.open_group(out, mode="r")["0"]
    assert isinstance(found, zarr.Array)
    np.testing.assert_array_equal(found[...], voxels)
    import_volume(ImportRequest(f"{tmp_path}/v.raw", tmp_path / "b.zarr", (), (2, 3, 4), np.dtype(name)))


@pytest.mark.parametrize("name", ["pixels", "", "object", "c8", "f16", "S3", "M8[s]", "i4,i4", "(2,2)u1", "{'a': 1}"])
def test_other_dtypes_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "v.raw").write_bytes(bytes(24))
    code, error = error_of(capsys, f"{tmp_path}/v.raw", f"{tmp_path}/out.zarr", "--shape=2,3,4", f"--dtype={name}")
    assert code == 2
    assert f"argument --dtype: {name!r} is not bool, an integer or a float of up to 8 bytes; try uint8" in error


def test_a_folder_that_cannot_be_read_is_no_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    if os.access(tmp_path / "locked", os.R_OK):
        pytest.skip("needs a user other than root, who may read everything")
    code, error = error_of(capsys, f"{tmp_path}/locked", f"{tmp_path}/out.zarr")
    assert code == 6
    assert "PermissionError" in error
