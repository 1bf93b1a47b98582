"""HDF5 and N5 are read as their metadata say, and nothing that is missing is read as zeros."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorstore
import zarr

from tests.support import fork_server
from vesuvius.commands import volume
from vesuvius.errors import ConfigError, DataError
from vesuvius.volume_tools.importing import ImportRequest, import_volume
from vesuvius.volume_tools.sources.files import Stored
from vesuvius.volume_tools.sources.source import open_source

Voxels = np.ndarray[Any, Any]
SCAN = np.random.default_rng(0).integers(1, 60000, (9, 20, 30), dtype="u2")


def read(stored: Stored) -> Voxels:
    """The whole scan, slice by slice."""
    return np.concatenate([stored.get((slice(z, z + 1), slice(None), slice(None))) for z in range(stored.shape[0])])


def opened(source: object, *select: int) -> Voxels:
    return read(open_source(str(source), select))


@pytest.mark.parametrize(("name", "block"), [("scan.mat", 512), ("scan.nc", 0), ("SCAN.HDF5", 0), ("scan", 0)])
def test_hdf5_is_recognized_by_its_content(tmp_path: Path, name: str, block: int) -> None:
    with h5py.File(tmp_path / name, "w", userblock_size=block) as file:
        file["data"] = SCAN
    np.testing.assert_array_equal(opened(tmp_path / name), SCAN)
    (tmp_path / name).rename(tmp_path / "scan.ims")
    with pytest.raises(DataError, match="Imaris pads its arrays"):
        opened(tmp_path / "scan.ims")


# ---- what HDF5 itself would read as zeros


def virtual(folder: Path, name: str = "part{}.h5", count: int = 3, inside: str = "data", near: str = "") -> str:
    """A virtual dataset of `count` files in `folder`, named in the master with `near` before them."""
    depth = 9 // count
    layout = h5py.VirtualLayout(SCAN.shape, SCAN.dtype)
    for part in range(count):
        box = slice(depth * part, depth * (part + 1))
        with h5py.File(folder / name.format(part), "w") as file:
            file[inside] = SCAN[box]
        layout[box] = h5py.VirtualSource(near + name.format(part), inside, (depth, 20, 30))
    with h5py.File(folder / "master.h5", "w") as file:
        file.create_virtual_dataset("entry/data", layout)
    return f"{folder}/master.h5:/entry/data"


def without(path: Path, key: str) -> None:
    with h5py.File(path, "a") as file:
        del file[key]


def shorter(path: Path) -> None:
    path.unlink()
    with h5py.File(path, "w") as file:
        file["data"] = SCAN[:2]


def unwritten(path: Path) -> None:
    path.unlink()
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (3, 20, 30), "u2", chunks=(1, 20, 30))


PARTS = {
    "missing": (Path.unlink, "part1.h5, which holds a part of it, is missing; restore it in "),
    "cut": (lambda path: os.truncate(path, 900), r"part1\.h5: OSError"),
    "another file": (lambda path: path.write_text("text"), r"part1\.h5: OSError"),
    "without the dataset": (lambda path: without(path, "data"), r"part1\.h5: it has no dataset data"),
    "shorter": (shorter, r"part1\.h5: data has only \(2, 20, 30\) voxels"),
    "never written": (unwritten, r"part1\.h5:/data: nothing was ever written"),
}


def test_a_prefix_that_hides_the_parts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 would read the parts in that folder, not those that were checked."""
    source = virtual(tmp_path)
    monkeypatch.setenv("HDF5_VDS_PREFIX", str(tmp_path / "other"))
    with pytest.raises(DataError, match=r"HDF5_VDS_PREFIX hides its parts.*unset it"):
        open_source(source)


@pytest.mark.parametrize("case", PARTS)
def test_a_virtual_dataset_is_complete_or_refused(tmp_path: Path, case: str) -> None:
    source = virtual(tmp_path)
    np.testing.assert_array_equal(opened(source), SCAN)
    damage, words = PARTS[case]
    damage(tmp_path / "part1.h5")
    with pytest.raises(DataError, match=words):
        open_source(source)


def test_voxels_of_no_part_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """HDF5 reads the fill value where a master maps no part, as between the modules of a detector."""
    opened(virtual(tmp_path))
    assert "belong to no part" not in caplog.text
    layout = h5py.VirtualLayout(SCAN.shape, SCAN.dtype)
    layout[3:9, :, 4:] = h5py.VirtualSource("master.h5", "entry/data", SCAN.shape)[3:9, :, 4:]
    with h5py.File(tmp_path / "gaps.h5", "w") as file:
        file.create_virtual_dataset("data", layout, fillvalue=7)
    assert (opened(tmp_path / "gaps.h5")[:3] == 7).all()
    assert "gaps.h5:/data: 2280 of 5400 voxels belong to no part, and are read as 7" in caplog.text


def test_parts_of_parts_are_checked_too(tmp_path: Path) -> None:
    """A master of a master; also one whose parts are in the same file, and one that refers to itself."""
    virtual(tmp_path)
    layout = h5py.VirtualLayout(SCAN.shape, SCAN.dtype)
    layout[...] = h5py.VirtualSource("master.h5", "entry/data", SCAN.shape)
    with h5py.File(tmp_path / "outer.h5", "w") as file:
        file.create_virtual_dataset("data", layout)
        own = h5py.VirtualLayout(SCAN.shape, SCAN.dtype)
        own[...] = h5py.VirtualSource(".", "data", SCAN.shape)
        file.create_virtual_dataset("own", own)
    for name in ("data", "own"):
        np.testing.assert_array_equal(opened(f"{tmp_path}/outer.h5:/{name}"), SCAN)
    (tmp_path / "part2.h5").unlink()
    for name in ("data", "own"):
        with pytest.raises(DataError, match=r"part2\.h5, which"):
            open_source(f"{tmp_path}/outer.h5:/{name}")


@pytest.mark.parametrize("place", ["next to it", "working directory", "link", "absolute", "moved"])
def test_parts_are_found_where_hdf5_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """If HDF5 reads them, they are accepted; if not, refused.  Absolute names fall back to the last component."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "elsewhere").mkdir()
    virtual(tmp_path / "parts", near=f"{tmp_path}/parts/" if place == "absolute" else "")
    master = tmp_path / "elsewhere/master.h5"
    if place == "link":
        master.symlink_to(tmp_path / "parts/master.h5")
    elif place == "next to it":
        master = tmp_path / "parts/master.h5"
    else:
        (tmp_path / "parts/master.h5").rename(master)
    if place == "working directory":
        monkeypatch.chdir(tmp_path / "parts")
    with h5py.File(master) as file:
        assert np.array_equal(file["entry/data"][...], SCAN) == (place != "moved")
    if place == "moved":
        with pytest.raises(DataError, match="which holds a part of it, is missing"):
            open_source(f"{master}:/entry/data")
    else:
        np.testing.assert_array_equal(opened(f"{master}:/entry/data"), SCAN)


def test_a_limit_of_open_files_makes_no_zeros(tmp_path: Path) -> None:
    """HDF5 keeps each part open, and reads zeros if it cannot open more."""
    depth = 150
    layout = h5py.VirtualLayout((depth, 4, 5), "u2")
    for part in range(depth):
        with h5py.File(tmp_path / f"{part}.h5", "w") as file:
            file["d"] = np.full((1, 4, 5), part + 1, "u2")
        layout[part : part + 1] = h5py.VirtualSource(f"{part}.h5", "d", (1, 4, 5))
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.create_virtual_dataset("d", layout)
    body = (
        "import resource; from tests.volume_tools.test_containers import *\n"
        "for limit in (300, 100):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limit))\n"
        f"    try: print((opened('{tmp_path}/m.h5')[:, 0, 0] == np.arange(1, {depth + 1})).all())\n"
        "    except DataError as error: print(error)"
    )
    done = fork_server.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "True"
    assert "it has 151 files, but only 100 may be open; raise ulimit -n" in second


def test_a_part_that_changes_is_noticed_by_a_resumed_and_a_running_import(tmp_path: Path) -> None:
    source, out = virtual(tmp_path), tmp_path / "out.zarr"

    def touch(*_: object) -> None:
        os.utime(tmp_path / "part1.h5")

    with pytest.raises(DataError, match=r"changed while it was read; remove .*partial and import it again"):
        import_volume(ImportRequest(source, out), touch)
    with pytest.raises(ConfigError, match="other arguments: source_files"):
        import_volume(ImportRequest(source, out))


def test_a_dataset_in_raw_files_is_refused(tmp_path: Path) -> None:
    """HDF5 would read zeros beyond their ends."""
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("d", data=SCAN, external=[(str(tmp_path / "raw.bin"), 0, h5py.h5s.UNLIMITED)])
    with pytest.raises(DataError, match=r"its voxels are in other files \(\S+raw.bin.*; import these with --shape"):
        open_source(f"{tmp_path}/v.h5")


@pytest.mark.parametrize("options", [{}, {"chunks": (1, 20, 30)}])
def test_a_dataset_that_was_never_written_is_refused(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("d", (9, 20, 30), "u2", **options)
        file.create_dataset("part", (9, 20, 30), "u2", chunks=(1, 20, 30))[4] = 1
    with pytest.raises(DataError, match="nothing was ever written to it"):
        open_source(f"{tmp_path}/v.h5:/d")
    assert opened(f"{tmp_path}/v.h5:/part").any(axis=(1, 2)).tolist() == [z == 4 for z in range(9)]
    assert "v.h5:/part: 8 of 9 blocks were never written, and are read as 0" in caplog.text


@pytest.mark.parametrize("mode", ["w", "swmr"])
def test_a_file_that_is_being_written_is_named_as_such(tmp_path: Path, mode: str) -> None:
    body = (
        f"import h5py; f = h5py.File('{tmp_path}/v.h5', 'w', libver='latest'); f['d'] = [[[1]]]; "
        f"{'f.swmr_mode = True; ' * (mode == 'swmr')}f.flush(); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(DataError, match=r"v\.h5: another program is writing it, or was killed .*; wait, or"):
            open_source(f"{tmp_path}/v.h5")
        writer.communicate(b"\n")
    assert opened(f"{tmp_path}/v.h5").item() == 1


# ---- names of datasets


def linked(folder: Path) -> Path:
    with h5py.File(folder / "raw.h5", "w") as file:
        file["entry/data/data"] = SCAN
        file["back"] = h5py.ExternalLink("m.h5", "/")
    with h5py.File(folder / "m.h5", "w") as file:
        file["a/data"] = SCAN
        file["a/hard"] = file["a/data"]
        file["a/group:of/daten \u00e4"] = h5py.SoftLink("/a/data")
        file["external"] = h5py.ExternalLink("raw.h5", "/entry/data/data")
        file["other"] = h5py.ExternalLink("raw.h5", "/")
        file["a/up"], file["loop"], file["pool"] = (h5py.SoftLink(to) for to in ("/", "/pool", "/loop"))
        file["gone"], file["away"] = h5py.ExternalLink("gone.h5", "/d"), h5py.SoftLink("/a/lost")
        file["null"], file["number"], file["text"] = h5py.Empty("f4"), 3, "text"
    return folder / "m.h5"


@pytest.mark.parametrize(
    "name",
    ["a/data", "a/hard", "a/group:of/daten \u00e4", "external", "a/up/a/up/a/data", "a/group:of", "other/back/a/data"],
)
def test_any_path_that_hdf5_resolves_is_read(tmp_path: Path, name: str) -> None:
    np.testing.assert_array_equal(opened(f"{linked(tmp_path)}:/{name}"), SCAN)


def test_a_dataset_is_listed_once_however_many_links_lead_to_it(tmp_path: Path) -> None:
    file = linked(tmp_path)
    with pytest.raises(DataError, match="/ has 2 datasets of three axes or more; choose one: ") as error:
        open_source(str(file))
    assert str(error.value).count(f"{file}:/") == 2
    with h5py.File(tmp_path / "only.h5", "w") as only:
        only["entry/data"] = h5py.ExternalLink("raw.h5", "/entry/data")
    np.testing.assert_array_equal(opened(f"{tmp_path}/only.h5"), SCAN)


LOST = {"gone": "it has no dataset /gone .*, but a link to gone.h5", "away": "/away .*component not found"}


@pytest.mark.parametrize("name", [*LOST, "loop", "away/deeper", "nothing", "a/data/deeper", "null", "number", "text"])
def test_a_name_that_leads_nowhere_is_explained(tmp_path: Path, name: str) -> None:
    words = LOST.get(name, "it has no (dataset|voxels)|not Z, Y, X once each|its voxels are")
    with pytest.raises(DataError, match=words):
        open_source(f"{linked(tmp_path)}:/{name}")


# ---- axes

XYZ: dict[str, Any] = {
    "axistags": json.dumps({"axes": [{"key": key, "typeFlags": 2, "resolution": 0} for key in "xyz"]}),
    "axes": ["X", "Y", "Z"],
    "axis_order": b"xyz",
    "axis_names": "image_x:image_y:image_z",
    "dims": json.dumps(["width", "height", "depth"]),
}


@pytest.mark.parametrize("key", [*XYZ, "labels", "scales", "nexus", "unlike, then named"])
def test_names_of_axes_in_hdf5_decide(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), h5py.File(tmp_path / "v.h5", "w") as file:
        data = file.create_dataset("g/d", data=SCAN.T, chunks=(7, 20, 4))
        if key in XYZ:
            data.attrs[key] = XYZ[key]
        for axis, letter in enumerate("xyz"):
            if key == "labels":
                data.dims[axis].label = letter.upper()
            elif key == "scales":
                file[letter] = np.arange(SCAN.T.shape[axis])
                file[letter].make_scale(letter)
                data.dims[axis].attach_scale(file[letter])
        if key == "nexus":
            file["g"].attrs["axes"] = ["x_pixel", "y_pixel", "z_pixel"]
        if key == "unlike, then named":
            data.attrs["axistags"], data.attrs["axes"] = 7, "x, y, z"
    np.testing.assert_array_equal(opened(f"{tmp_path}/v.h5:/g/d"), SCAN)
    assert "no names" not in caplog.text


def test_channels_are_where_the_names_say_and_guesses_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    channels = np.stack([SCAN, SCAN + 1], 1)  # by its shape: 9 channels
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["named"], file["unnamed"], file["frames"] = channels, channels, SCAN
        file["named"].attrs["axes"] = list("zcyx")
        file["frames"].attrs["axes"] = ["frame", "y", "x"]
    with caplog.at_level("INFO"):
        np.testing.assert_array_equal(opened(f"{tmp_path}/v.h5:/named", 1), SCAN + 1)
        assert caplog.text == ""
        np.testing.assert_array_equal(opened(f"{tmp_path}/v.h5:/frames"), SCAN)
        assert "no axis is named z; slices are taken along frame" in caplog.text
        assert opened(f"{tmp_path}/v.h5:/unnamed", 8).shape == (2, 20, 30)
        assert "the axes have no names in the file; 9x2x20x30 voxels are read as C, Z, Y, X" in caplog.text


def n5(folder: Path, voxels: Voxels, attributes: dict[str, Any], level: str = "s0", groups: Any = ()) -> str:
    path = folder / "v.n5/setup0" / level
    about = {"dimensions": voxels.T.shape, "blockSize": [7] * voxels.ndim, "dataType": "uint16"}
    about |= {"compression": {"type": "gzip"}}
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": str(path)}, "metadata": about}
    tensorstore.open(spec, create=True).result()[...] = voxels.T
    file = path / "attributes.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | attributes))
    for place, content in dict(groups).items():
        (folder / "v.n5" / place / "attributes.json").write_text(json.dumps(content))
    return f"{folder}/v.n5:/setup0/{level}"


COSEM = {"axes": ["z", "c", "y", "x"], "scale": [1, 1, 1, 1], "units": ["nm"] * 4, "translate": [0] * 4}


@pytest.mark.parametrize(
    "attributes",
    [
        {"axes": ["x", "y", "c", "z"]},
        {"axes": [{"name": name.upper()} for name in "xycz"]},
        {"transform": COSEM},
        {"transform": COSEM | {"ordering": "F", "axes": COSEM["axes"][::-1]}},
        {"axes": 7, "transform": COSEM},
    ],
)
def test_names_of_axes_in_n5_decide(tmp_path: Path, attributes: dict[str, Any]) -> None:
    source = n5(tmp_path, np.stack([SCAN, SCAN + 1], 1), attributes)
    np.testing.assert_array_equal(opened(source, 1), SCAN + 1)


PIXEL = {"pixelResolution": {"unit": "um", "dimensions": [0.5, 0.7, 2.0]}}
SIZES: dict[str, tuple[dict[str, Any], str, dict[str, Any], tuple[float, ...] | None]] = {
    "of the dataset": (PIXEL, "s0", {}, (2, 0.7, 0.5)),
    "with factors": (PIXEL | {"downsamplingFactors": [2, 2, 4]}, "s1", {}, (8, 1.4, 1)),
    "a plain list": ({"resolution": [500, 700, 2000], "units": ["nm"] * 3}, "s0", {}, (2, 0.7, 0.5)),
    "of another group": ({"downsamplingFactors": [2, 2, 2]}, "s1", {"setup0": PIXEL}, None),
    "none": ({}, "s0", {}, None),
}


@pytest.mark.parametrize("case", SIZES)
def test_the_voxel_size_of_n5_counts_downsampling_once(tmp_path: Path, case: str) -> None:
    attributes, level, groups, size = SIZES[case]
    (tmp_path / "v.n5/setup0").mkdir(parents=True)
    found = open_source(n5(tmp_path, SCAN, attributes, level, groups)).geometry.voxel_size_um
    assert found == (None if size is None else pytest.approx(size))


@pytest.mark.parametrize(
    "value", [0, "", "wide", [], [1, 2], [0, 1, 1], [1, float("nan"), 1], {"a": 1}, [None] * 3, [{}] * 3]
)
def test_an_unusable_voxel_size_refuses_nothing(tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = n5(tmp_path, SCAN, {"pixelResolution": value, "downsamplingFactors": value, "resolution": value})
    stored = open_source(source)
    np.testing.assert_array_equal(read(stored), SCAN)
    assert stored.geometry.voxel_size_um is None
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["d"] = SCAN
        plain = (
            value
            if "f" not in np.asarray(value).dtype.kind + "f" * (np.asarray(value).dtype.kind == "O") or 0
            else h5py.Empty("f4")
        )
        file["d"].attrs["element_size_um"] = plain
    caplog.clear()
    stored = open_source(f"{tmp_path}/v.h5")
    assert (stored.shape, stored.geometry.voxel_size_um) == (SCAN.shape, None)
    assert "voxel size" in caplog.text
    out = tmp_path / "out.zarr"
    assert volume.main(["import", f"{tmp_path}/v.h5", str(out), "--voxel-size-um=3,2,1"]) == 0
    assert zarr.open_group(out).attrs["ome"]["multiscales"][0]["datasets"][0]["coordinateTransformations"][0][
        "scale"
    ] == [3, 2, 1]


# ---- N5 folders


def test_n5_without_blocks_is_refused_and_with_some_is_read(tmp_path: Path) -> None:
    source = n5(tmp_path, SCAN, {})
    path = tmp_path / "v.n5/setup0/s0"
    blocks = sorted(each for each in path.rglob("*") if each.is_file() and each.name != "attributes.json")
    blocks.pop().unlink()
    assert 0 < (opened(source) == 0).mean() < 0.5
    for block in blocks:
        block.unlink()
    with pytest.raises(DataError, match=r"v\.n5/setup0/s0: no block of it is stored"):
        open_source(source)


def test_n5_needs_no_attributes_above_the_dataset(tmp_path: Path) -> None:
    source = n5(tmp_path, SCAN, {})
    assert not (tmp_path / "v.n5/attributes.json").exists()
    for name in (source, source.partition(":")[0], f"{tmp_path}/v.n5/setup0", f"{tmp_path}/v.n5/setup0/s0"):
        np.testing.assert_array_equal(opened(name), SCAN)
    n5(tmp_path, SCAN, {}, "s1")
    for wrong, words in (
        ("", r"is a group of several datasets; choose one: \S+v.n5:/setup0/s0, \S+v.n5:/setup0/s1$"),
        (":/setup0", "is a group of several"),
        (":/setup1/s0", r"it has no dataset /setup1/s0; choose one: \S+v.n5:/setup0/s0"),
    ):
        with pytest.raises(DataError, match=words):
            open_source(f"{tmp_path}/v.n5{wrong}")
    (tmp_path / "v.n5/setup0/s0/attributes.json").write_text("{")
    with pytest.raises(DataError, match=r"setup0/s0/attributes.json: it is no JSON"):
        open_source(source)
