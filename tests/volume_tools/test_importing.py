"""An import equals its source voxel by voxel in every format, a kill changes no byte, and truncated or mixed-up files
are refused.

Voxels are random and the axes of three lengths, so that a transposed, mirrored or shifted result differs.  Chunks and
shards are small here, so that there are many, with odd ends; one test has the real ones.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import nibabel
import nrrd as pynrrd
import numpy as np
import pytest
import tensorstore
import tifffile
import zarr
from PIL import Image

from tests.support import fork_server
from tests.volume_tools.test_copy import DOOR, chunk_files
from vesuvius.commands import volume
from vesuvius.config import ArrayConfig
from vesuvius.errors import ConfigError, DataError, StorageError
from vesuvius.volume_tools import importing
from vesuvius.volume_tools.copy import CopyStats
from vesuvius.volume_tools.importing import ImportRequest, import_volume
from vesuvius.volume_tools.pyramid import downsample_mean
from vesuvius.volume_tools.sources.files import Stored
from vesuvius.volume_tools.sources.slices import open_folder
from vesuvius.volume_tools.sources.source import open_source
from vesuvius.volumes.box import chunk_box
from vesuvius.volumes.box import slices as box_slices
from vesuvius.volumes.volume import open_volume

Voxels = np.ndarray[Any, Any]
SHAPE = (37, 52, 71)
UM, MM = "micrometer", "millimeter"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16^3 in shards of 32^3; layers of 32 slices."""
    for name, value in (("_CHUNK", 16), ("_PER_SHARD", 2), ("_LAYER", 32)):
        monkeypatch.setattr(importing, name, value)


def scan(dtype: str = "uint16", shape: tuple[int, ...] = SHAPE) -> Voxels:
    rng = np.random.default_rng(len(shape))
    return (rng.random(shape) < 0.5) if dtype == "bool" else rng.integers(0, 120, shape).astype(dtype)


def imported(out: Path, level: int = 0) -> Voxels:
    return np.asarray(zarr.open_group(out, mode="r")[str(level)][...])


# ---- formats.  Each writer gives the source, and maybe what differs from the defaults of `expected`.


def tiff(name: str = "v.tif", like: Callable[[Voxels], Voxels] = lambda voxels: voxels, **options: Any) -> Any:
    def write(folder: Path, voxels: Voxels) -> str:
        tifffile.imwrite(folder / name, like(voxels), **options)
        return str(folder / name)

    return write


def tiff_pages(**options: Any) -> Any:
    """Pages with their headers in between, as most programs write them."""

    def write(folder: Path, voxels: Voxels) -> str:
        with tifffile.TiffWriter(folder / "v.tif") as writer:
            for page in voxels:
                writer.write(page, contiguous=False, metadata=None, **options)
        return str(folder / "v.tif")

    return write


def tiff_series(metadata: Any = None, *starts: int, **options: Any) -> Any:
    """Slices, or blocks of slices that begin at `starts`, each appended to the file as an image of its own."""

    def write(folder: Path, voxels: Voxels) -> str:
        for block in np.split(voxels, starts) if starts else voxels:
            tifffile.imwrite(folder / "v.tif", block, append=True, metadata=metadata, **options)
        return str(folder / "v.tif")

    return write


def color_slices(planarconfig: str) -> Any:
    def write(folder: Path, voxels: Voxels) -> str:
        (folder / "scan").mkdir()
        for z, page in enumerate(map(others(2 if planarconfig == "contig" else 0), voxels)):
            tifffile.imwrite(folder / f"scan/s_{z}.tif", page, photometric="rgb", planarconfig=planarconfig)
        return str(folder / "scan")

    return write


def ome_files(count: int) -> Any:
    """An OME-TIFF of `count` files, opened by the last one, or by the folder if each file is one slice."""

    def write(folder: Path, voxels: Voxels) -> str:
        parts, (z, y, x) = np.array_split(voxels, count), voxels.shape
        firsts = np.cumsum([0, *map(len, parts)])
        data = "".join(
            f'<TiffData FirstZ="{first}" IFD="0" PlaneCount="{len(part)}"><UUID FileName="s_{number}.ome.tif">'
            f"urn:uuid:{number}</UUID></TiffData>"
            for number, (first, part) in enumerate(zip(firsts, parts, strict=False))
        )
        (folder / "scan").mkdir()
        for number, part in enumerate(parts):
            xml = (
                '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" '
                f'UUID="urn:uuid:{number}"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" '
                f'Type="uint16" SizeX="{x}" SizeY="{y}" SizeZ="{z}" SizeC="1" SizeT="1"><Channel ID="Channel:0:0" '
                f'SamplesPerPixel="1"/>{data}</Pixels></Image></OME>'
            )
            with tifffile.TiffWriter(folder / f"scan/s_{number}.ome.tif") as writer:
                for place, page in enumerate(part):
                    writer.write(page, description=None if place else xml, metadata=None, compression="zlib")
        return str(folder / "scan" if count == z else folder / f"scan/s_{count - 1}.ome.tif")

    return write


def slices(ending: str, **options: Any) -> Any:
    """s_8, s_9, s_10, ...: sorted as text, s_10 would come first."""

    def write(folder: Path, voxels: Voxels) -> str:
        (folder / "scan").mkdir()
        for number, page in enumerate(voxels, 8):
            file = folder / "scan" / f"s_{number}{ending}"
            Image.fromarray(page).save(file) if ending == ".png" else tifffile.imwrite(file, page, **options)
        (folder / "scan" / "notes.txt").write_text("")
        (folder / "scan" / f"._s_1{ending}").write_text("of a file manager")
        return str(folder / "scan")

    return write


def hdf5(
    key: str = "entry/data", size: Any = None, like: Callable[[Voxels], Voxels] = lambda v: v, **options: Any
) -> Any:
    def write(folder: Path, voxels: Voxels) -> str:
        with h5py.File(folder / "v.h5", "w") as file:
            data = file.create_dataset(key, data=like(voxels), **options)
            file["angles"] = np.arange(9)
            if size:
                data.attrs["element_size_um"] = size
        return f"{folder}/v.h5:/{key}"

    return write


def nifti(name: str = "v.nii", order: str = "<") -> Any:
    def write(folder: Path, voxels: Voxels) -> str:
        header = nibabel.Nifti1Header(endianness=order)
        header.set_data_dtype(voxels.dtype.newbyteorder(order))
        image = nibabel.Nifti1Image(voxels.T, np.diag([0.5, -0.25, 2.0, 1.0]), header)
        image.header.set_xyzt_units("mm")
        nibabel.save(image, folder / name)
        return str(folder / name)

    return write


def nifti_pair(folder: Path, voxels: Voxels) -> str:
    nibabel.save(nibabel.Nifti1Pair(voxels.T, np.eye(4)), folder / "v.img")
    (folder / "v.img").unlink()
    return str(folder / "v.hdr")


def nrrd(name: str = "v.nrrd", like: Callable[[Voxels], Voxels] = lambda voxels: voxels, **header: Any) -> Any:
    def write(folder: Path, voxels: Voxels) -> str:
        array = np.asfortranarray(like(voxels).T)
        pynrrd.write(str(folder / name), array, {"encoding": "raw"} | header, detached_header=name.endswith("nhdr"))
        return str(folder / name)

    return write


def npy(like: Callable[[Voxels], Voxels]) -> Any:
    def write(folder: Path, voxels: Voxels) -> str:
        np.save(folder / "v.npy", like(voxels))
        return str(folder / "v.npy")

    return write


def n5(folder: Path, voxels: Voxels) -> str:
    about = {"dimensions": SHAPE[::-1], "blockSize": [16, 8, 10], "dataType": "uint16", "compression": {"type": "gzip"}}
    store = {"driver": "file", "path": str(folder / "v.n5/setup0/s0")}
    array = tensorstore.open({"driver": "n5", "kvstore": store, "metadata": about}, create=True).result()
    array[...] = voxels.T
    about = json.loads((folder / "v.n5/setup0/s0/attributes.json").read_text())
    pixel = {"pixelResolution": {"dimensions": [4, 3, 2], "unit": "um"}}
    (folder / "v.n5/setup0/s0/attributes.json").write_text(json.dumps(about | pixel))
    (folder / "v.n5/attributes.json").write_text('{"n5": "2.0.0"}')
    return f"{folder}/v.n5:/setup0/s0"


def others(*axes: int) -> Callable[[Voxels], Voxels]:
    """Insert an axis of 3 channels, with the voxels in channel 1, for each given axis."""

    def like(voxels: Voxels) -> Voxels:
        for axis in axes:
            voxels = np.stack([voxels // 2, voxels, voxels // 3], axis)
        return voxels

    return like


OME = {"ome": True, "metadata": {"axes": "ZYX", "PhysicalSizeX": 2.5, "PhysicalSizeY": 3.0, "PhysicalSizeZ": 4.0}}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tiff, big-endian": (tiff(byteorder=">"), {}),
    "tiff, pages of int16": (tiff_pages(), {"dtype": "int16"}),
    "tiff, big-endian pages, lzw, float32": (tiff("v.tif", byteorder=">", compression="lzw"), {"dtype": "float32"}),
    "tiff, bool": (tiff_pages(), {"dtype": "bool"}),
    "ome-tiff": (tiff("v.ome.tif", **OME), {"scale": (4, 3, 2.5), "units": [UM] * 3}),
    "ome-tiff, channels": (
        tiff("v.ome.tif", others(0), ome=True, compression="zlib", metadata={"axes": "CZYX"}),
        {"select": (1,)},
    ),
    "ome-tiff, times and channels": (
        tiff("v.ome.tif", others(1, 0), ome=True, metadata={"axes": "TZCYX"}),
        {"select": (1, 1)},
    ),
    "ome-tiff, a file a slice": (ome_files(len(scan())), {}),
    "ome-tiff, slices as times": (tiff("v.ome.tif", ome=True, metadata={"axes": "TYX"}), {}),
    "imagej": (
        tiff(imagej=True, metadata={"axes": "ZYX", "spacing": 3.0, "unit": "\\u00B5m"}, resolution=(2.0, 4.0)),
        {"scale": (3, 0.25, 0.5), "units": [UM] * 3},
    ),
    "tiff, colors": (
        tiff("v.tif", others(3), photometric="rgb", compression="lzw"),
        {"dtype": "uint8", "select": (1,)},
    ),
    "slices as channels of ome-tiff": (tiff("v.ome.tif", ome=True, metadata={"axes": "CYX"}), {}),
    "slices as channels of imagej": (tiff(imagej=True, metadata={"axes": "CYX"}), {}),
    "slices as planes": (tiff(photometric="minisblack", planarconfig="separate", compression="lzw"), {}),
    "slices as samples": (
        tiff(like=lambda v: np.moveaxis(v, 0, -1).copy(), photometric="minisblack", planarconfig="contig"),
        {},
    ),
    "channels of ome-tiff with one time": (
        tiff("v.ome.tif", lambda v: v[None], ome=True, metadata={"axes": "TCYX"}),
        {},
    ),
    "4D, first axis 1": (tiff(like=lambda v: v[None]), {}),
    "4D": (tiff(like=others(0)), {"select": (1,)}),
    "slices, appended": (tiff_series(), {}),
    "blocks, appended": (tiff_series(None, 10, 30), {}),
    "named axes": (tiff(like=lambda v: v.T.copy(), metadata={"axes": "XYZ"}, compression="zlib"), {}),
    "color slices": (color_slices("contig"), {"dtype": "uint8", "select": (1,)}),
    "slices, lzw": (slices(".TIFF", compression="lzw"), {}),
    "png": (slices(".png"), {}),
    "png, uint8": (slices(".png"), {"dtype": "uint8"}),
    "png, bool": (slices(".png"), {"dtype": "bool"}),
    "hdf5": (hdf5(), {"dtype": ">i4"}),
    "hdf5, chunks, size": (
        hdf5(size=[2.0, 3.0, 4.0], chunks=(10, 20, 9), compression="gzip"),
        {"scale": (2, 3, 4), "units": [UM] * 3},
    ),
    "hdf5, channels last": (hdf5(like=others(3)), {"select": (1,)}),
    "nifti": (nifti(), {"scale": (2, 0.25, 0.5), "units": [MM] * 3, "turned": "x"}),
    "nifti, gzip, big-endian, int16": (
        nifti("v.nii.gz", ">"),
        {"dtype": "int16", "scale": (2, 0.25, 0.5), "units": [MM] * 3, "turned": "x"},
    ),
    "nrrd": (nrrd(spacings=[1.0, 2.0, 3.0], units=["mm", "mm", "um"]), {"scale": (3, 2, 1), "units": [UM, MM, MM]}),
    "nrrd, gzip, directions": (
        nrrd(
            **{
                "encoding": "gzip",
                "space directions": np.diag([1.0, -2.0, 3.0]),
                "space units": ["mm"] * 3,
                "space": "left-posterior-superior",
            }
        ),
        {"dtype": "float64", "scale": (3, 2, 1), "units": [MM] * 3, "turned": "y"},
    ),
    "nrrd, detached": (nrrd("v.nhdr"), {"dtype": ">u4"}),
    "nrrd, colors first": (nrrd(like=others(3), kinds=["vector", "domain", "domain", "domain"]), {"select": (1,)}),
    "npy": (npy(lambda voxels: voxels), {"dtype": ">u2"}),
    "npy, Fortran order": (npy(np.asfortranarray), {"dtype": "int8"}),
    "n5": (n5, {"scale": (2, 3, 4), "units": [UM] * 3}),
}


def read(stored: Stored) -> Voxels:
    """All voxels of an opened scan, unit by unit as an import decodes them."""
    found = np.empty(stored.shape, stored.dtype)
    units = list(np.ndindex(*(-(-size // step) for size, step in zip(stored.shape, stored.unit, strict=True))))
    for unit in reversed(units) if stored.backwards else units:
        part = box_slices(chunk_box(unit, stored.unit, stored.shape))
        found[part] = stored.get(part)
    stored.finish()
    return found


def turned(voxels: Voxels, axes: str) -> Voxels:
    return np.flip(voxels, ["zyx".index(axis) for axis in axes])


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", CASES)
def test_an_opened_scan_equals_its_source(tmp_path: Path, case: str) -> None:
    write, expected = CASES[case]
    voxels = scan(expected.get("dtype", "uint16"))
    stored = open_source(write(tmp_path, voxels), expected.get("select", ()))
    assert (stored.shape, stored.dtype) == (voxels.shape, voxels.dtype.newbyteorder("="))
    found = read(stored)
    np.testing.assert_array_equal(found, turned(voxels, expected.get("turned", "")))
    assert list(stored.geometry.units_zyx) == expected.get("units", [None] * 3)
    np.testing.assert_allclose(stored.geometry.scale_zyx, expected.get("scale", (1, 1, 1)), rtol=1e-6)  # NIfTI: float32


@pytest.mark.usefixtures("small")
@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ["imagej", "slices, lzw", "hdf5, channels last", "nifti, gzip, big-endian, int16"])
def test_an_import_equals_its_source(tmp_path: Path, case: str) -> None:
    write, expected = CASES[case]
    voxels = scan(expected.get("dtype", "uint16"))
    request = ImportRequest(write(tmp_path, voxels), tmp_path / "out.zarr", expected.get("select", ()), levels=2)
    import_volume(request)
    voxels = turned(voxels, expected.get("turned", ""))
    np.testing.assert_array_equal(imported(tmp_path / "out.zarr"), voxels)
    np.testing.assert_array_equal(
        imported(tmp_path / "out.zarr", 1), downsample_mean(voxels.astype(voxels.dtype.newbyteorder("=")))
    )
    (entry,) = zarr.open_group(tmp_path / "out.zarr", mode="r").attrs["ome"]["multiscales"]
    assert [axis["name"] for axis in entry["axes"]] == ["z", "y", "x"]
    assert [axis.get("unit") for axis in entry["axes"]] == expected.get("units", [None] * 3)
    scales = [each["coordinateTransformations"][0]["scale"] for each in entry["datasets"]]
    scale = expected.get("scale", (1, 1, 1))
    np.testing.assert_allclose(scales, [scale, [2 * size for size in scale]], rtol=1e-6)


@pytest.mark.usefixtures("small")
def test_raw_voxels_need_a_matching_shape_and_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    voxels = scan(">i2")
    (tmp_path / "v.raw").write_bytes(voxels.tobytes())
    command = ["import", f"{tmp_path}/v.raw", f"{tmp_path}/out.zarr", "--shape=37,52,71", "--voxel-size-um=8,7.5,7"]
    assert volume.main(command) == 2
    with pytest.raises(SystemExit, match="2"):
        volume.main([*command, "--dtype=pixels"])
    assert volume.main([*command, "--dtype=uint8"]) == 6
    assert volume.main([*command, "--dtype=>i4"]) == 6
    errors = capsys.readouterr().err
    assert "--shape and --dtype describe a file without a header together" in errors
    assert "argument --dtype: 'pixels' is not bool" in errors
    assert f"v.raw: it has {voxels.nbytes} bytes, but 37x52x71 uint8 needs {voxels.size}; correct --shape" in errors
    assert volume.main([*command, "--dtype=>i2"]) == 0
    np.testing.assert_array_equal(imported(tmp_path / "out.zarr"), voxels)
    assert open_volume(ArrayConfig(path=f"{tmp_path}/out.zarr", level=1)).voxel_size_um == (16, 15, 14)


def test_the_output_has_the_documented_format_and_three_readers_agree(tmp_path: Path) -> None:
    """With chunks and shards of the real size, partial ones included, and with air, which is not stored."""
    voxels = scan("uint8", (140, 130, 520))
    voxels[128:, :128, 256:384] = voxels[:, :, 512:] = 0
    np.save(tmp_path / "v.npy", voxels)
    out = tmp_path / "out.zarr"
    _, figures = import_volume(ImportRequest(f"{tmp_path}/v.npy", out))
    levels = zarr.open_group(out, mode="r")
    assert [levels[str(level)].shape for level in range(len(list(levels)))] == [
        (140, 130, 520),
        (70, 65, 260),
        (35, 33, 130),
        (18, 17, 65),
    ]
    assert (figures.air, figures.voxel_bytes) == (5 + 1 + 1, voxels.nbytes)
    array = zarr.open_group(out, mode="r", zarr_format=3)["0"]
    assert isinstance(array, zarr.Array)
    assert array.chunks == (128, 128, 128)
    assert array.shards == (512, 512, 512)
    files = {str(path.relative_to(out / "0")) for path in (out / "0").rglob("[0-9]*") if path.is_file()}
    assert files == {"c/0/0/0"}, "of air alone there is no shard"
    assert array.metadata.dimension_names == ("z", "y", "x")
    np.testing.assert_array_equal(np.asarray(array[...]), voxels)
    np.testing.assert_array_equal(open_volume(out).read(((0, 0, 0), voxels.shape)), voxels)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(out / "0")}}
    np.testing.assert_array_equal(tensorstore.open(spec, read=True).result().read().result(), voxels)


# ---- kills


SMALL = (
    "from vesuvius.volume_tools import importing\n"
    "importing._CHUNK, importing._PER_SHARD, importing._LAYER = 16, 2, 32\n"
)


def commands_of(tmp_path: Path, source: str) -> list[list[str]]:
    """The same import twice: one to interrupt, one as a reference."""
    outs = [str(tmp_path / folder / "v.zarr") for folder in ("killed", "whole")]
    return [[sys.executable, "-c", SMALL + DOOR, "import", source, out] for out in outs]


def kill_when(command: list[str], reached: Callable[[], bool]) -> bool:
    """Run a command and kill it; False if it finished before."""
    with fork_server.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not reached():
            if process.poll() is not None:
                return False
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    return process.returncode == -signal.SIGKILL


@pytest.mark.long
def test_a_killed_import_resumes_and_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Killed early, late, and in a coarser level; test_copy.py covers chunks without shards."""
    voxels = scan("uint16", (40, 120, 130))
    source = slices(".tif", compression="lzw")(tmp_path, voxels)
    killed, whole = commands_of(tmp_path, source)
    unfinished = tmp_path / "killed/v.zarr.partial/volume.zarr"
    for level, count in ((0, 3), (0, 20), (1, 2)):
        files = (unfinished / str(level)).rglob
        assert kill_when(killed, lambda: sum(file.is_file() for file in files("[0-9]")) > count)  # noqa: B023
        assert not (tmp_path / "killed/v.zarr").exists()
        with pytest.raises(DataError, match=r"neither|group"):
            open_volume(unfinished)
    assert b"before         0" not in fork_server.run(killed, capture_output=True, check=True).stdout
    fork_server.run(whole, capture_output=True, check=True)
    assert chunk_files(tmp_path / "killed/v.zarr") == chunk_files(tmp_path / "whole/v.zarr")
    np.testing.assert_array_equal(imported(tmp_path / "killed/v.zarr"), voxels)


@pytest.mark.usefixtures("small")
def test_a_source_that_changed_is_not_mixed_with_its_old_version(tmp_path: Path) -> None:
    source = slices(".tif")(tmp_path, scan())

    class Stop(Exception):  # noqa: N818
        pass

    def stop(figures: CopyStats, doing: str) -> None:
        if figures.written > 40:
            raise Stop

    request = ImportRequest(source, tmp_path / "out.zarr")
    with pytest.raises(Stop):
        import_volume(request, stop)
    with pytest.raises(ConfigError, match=r"partial was started with other arguments: labels true \(was false\); use"):
        import_volume(replace(request, labels=True))
    (tmp_path / "scan/s_20.tif").touch()
    with pytest.raises(ConfigError, match="other arguments: source_files "):
        import_volume(request)


@pytest.mark.usefixtures("small")
def test_a_file_that_reads_back_differently_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one chunk flips between write and verification."""
    source = slices(".tif")(tmp_path, scan())
    flush, damaged = os.fsync, list[str]()

    def flip(descriptor: int) -> None:
        flush(descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.fstat(descriptor).st_size > 3000 and not damaged:
            damaged.append(name)
            (byte,) = os.pread(descriptor, 1, 1500)
            os.pwrite(descriptor, bytes([byte ^ 4]), 1500)

    monkeypatch.setattr(os, "fsync", flip)
    request = ImportRequest(source, tmp_path / "out.zarr")
    with pytest.raises(StorageError, match=r"The file reads back differently than written.*out\.zarr"):
        import_volume(request)
    assert damaged
    assert not (tmp_path / "out.zarr").exists()
    import_volume(request)
    np.testing.assert_array_equal(imported(tmp_path / "out.zarr"), scan())


# ---- what is no volume


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        os.truncate(folder / name, int((folder / name).stat().st_size * share))

    return damage


def flip(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 8
        (folder / name).write_bytes(content)

    return damage


def over(writer: Any) -> Callable[[Path], None]:
    """Replace one of the slices."""

    def damage(folder: Path) -> None:
        (folder / "other").mkdir()
        writer(folder / "other/s_20.png" if (folder / "scan/s_20.png").exists() else folder / "other/s_20.tif")
        (file,) = (folder / "other").iterdir()
        file.replace(folder / "scan" / file.name)

    return damage


def png_of_4_bits(file: Path) -> None:
    """A 4-bit PNG, which Pillow scales to 8 bits: labels 0, 1, 2 become 0, 17, 34."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header, rows = struct.pack(">IIBBBBB", 71, 52, 4, 0, 0, 0, 0), bytes(52 * (1 + 36))
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def save(page: Voxels, **options: Any) -> Any:
    def write(file: Path) -> None:
        Image.fromarray(page).save(file) if file.suffix == ".png" else tifffile.imwrite(file, page, **options)

    return write


def two_images(folder: Path, voxels: Voxels) -> str:
    with tifffile.TiffWriter(folder / "v.tif") as writer:
        for page in voxels:
            writer.write(page, contiguous=False, metadata=None)
        writer.write(voxels[0][:9], contiguous=False, metadata=None)
    return str(folder / "v.tif")


PAGE = scan()[0]
CUT = "it is truncated"
WRONG: dict[str, tuple[Any, Any, str]] = {
    "tiff cut": (tiff(), cut("v.tif", 0.5), CUT),
    "tiff pages cut": (tiff_pages(), cut("v.tif", 0.5), CUT),
    "tiff cut in its last page": (tiff_pages(), cut("v.tif", 0.99), CUT),
    "ome-tiff cut": (tiff("v.ome.tif", compression="zlib", **OME), cut("v.ome.tif", 0.7), "corrupted.*; copy it again"),
    "ome-tiff, a file missing": (ome_files(2), lambda folder: (folder / "scan/s_0.ome.tif").unlink(), "19 .* missing"),
    "nifti cut": (nifti(), cut("v.nii", 0.9), CUT),
    "no nifti": (nifti(), lambda folder: (folder / "v.nii").write_text("no"), "it is no NIfTI file"),
    "half a pair": (nifti_pair, None, "there is no .img file with its voxels; copy it"),
    "nrrd gzip cut": (nrrd(encoding="gzip"), cut("v.nrrd", 0.9), "EOFError|Error -"),
    "hdf5 cut": (hdf5(), cut("v.h5", 0.9), "OSError: .*truncated file.*; copy it again"),
    "a png without its end": (slices(".png"), cut("scan/s_20.png", 0.997), r"scan/s_20.png: \w+Error"),
    "a bit of a png": (slices(".png"), flip("scan/s_20.png"), r"scan/s_20.png: SyntaxError: .*checksum"),
    "a bit of a slice": (slices(".tif", compression="zlib"), flip("scan/s_20.tif"), r"scan/s_20.tif: .*BAD_DATA"),
    "an empty slice": (slices(".png"), cut("scan/s_20.png", 0), r"scan/s_20.png: it is empty"),
    "a slice of another shape": (
        slices(".tif"), over(save(PAGE[:50])), r"s_20.tif: it has 50x71 uint16, but s_8.tif has 52x71 uint16"
    ),
    "a color slice": (slices(".png"), over(save(np.stack([PAGE.astype("u1")] * 3, -1))), "are RGB, not gray"),
    "a slice of 4 bits": (slices(".png"), over(png_of_4_bits), "are L;4, not gray"),
    "a slice of two pages": (slices(".tif"), over(save(np.stack([PAGE] * 2))), "it has 2 pages"),
    "two kinds": (
        slices(".tif"), lambda folder: (folder / "scan/s_20.tif").rename(folder / "scan/s_20.png"), "has .png and .tif"
    ),
    "no slices": (slices(".jp2", photometric="minisblack"), None, "it has no .tif, .tiff, .png files"),
    "images of two shapes": (two_images, None, r"several images \(IYX 37x52x71 uint16, YX 9x71 uint16\), not slices"),
    "two stacks with names": (
        tiff_series({"axes": "ZYX"}, 20), None, r"several images \(ZYX 20x52x71 uint16, ZYX 17x52x71 uint16\), not"
    ),
    "channels": (tiff("v.ome.tif", others(0), ome=True, metadata={"axes": "CZYX"}), None, "CZYX .*, e.g. --select 0$"),
    "colors as one": (npy(lambda v: v.astype([("r", "u1"), ("g", "u1")])), None, "floats of up to 8 bytes"),
    "two axes": (npy(lambda voxels: voxels[0]), None, "it has axes YX of shape 52x71, not Z, Y, X"),
    "no such dataset": (hdf5(), "v.h5:/other", r"v.h5: it has no dataset /other .*; choose one: \S+v.h5:/entry/data"),
    "nrrd as text": (nrrd(encoding="ascii"), None, "encoding is ascii .*; convert it"),
    "another format": (slices(".tif"), "scan/notes.txt", "its name does not end in"),
    "nothing": (slices(".tif"), "nothing.tif", r"there is no \S*nothing.tif; correct the path"),
}  # fmt: skip


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", WRONG)
def test_bad_sources_are_refused_and_leave_no_volume(tmp_path: Path, case: str) -> None:
    write, change, words = WRONG[case]
    source = write(tmp_path, scan("uint8" if case == "colors" else "uint16"))
    if isinstance(change, str):
        source = str(tmp_path / change)
    elif change is not None:
        change(tmp_path)
    with pytest.raises((DataError, ConfigError), match=words):
        import_volume(ImportRequest(source, tmp_path / "out.zarr"))
    assert not (tmp_path / "out.zarr").exists()


@pytest.mark.parametrize("package", ["tifffile", "imagecodecs"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    source = tiff(compression="lzw")(tmp_path, scan())
    for module in [name for name in sys.modules if name.partition(".")[0] in ("tifffile", "imagecodecs")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    words = rf"v\.tif.*{package}.*[:;] pip install 'vesuvius-diffusion\[import\]'"
    with pytest.raises((ConfigError, DataError), match=words):
        import_volume(ImportRequest(source, tmp_path / "out.zarr"))


PEAK = "import atexit; atexit.register(lambda: print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]))\n"


@pytest.mark.long
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_the_memory_of_an_import_is_bounded(tmp_path: Path, compression: str | None) -> None:
    """1.5 GiB: a program that keeps a slab of 128 full slices, or a shard, exceeds 512 MiB."""
    page = np.tile(scan("uint16", (1, 256, 256))[0], (8, 12))
    tiff_pages(compression=compression)(tmp_path, (np.roll(page, z) for z in range(128)))
    command = [sys.executable, "-c", PEAK + DOOR, "import", f"{tmp_path}/v.tif", f"{tmp_path}/out.zarr"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 512 * 1024
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "out.zarr")["0"][127], np.roll(page, 127))


IRREGULAR = {
    # names: the error about the first fault
    ("s1", "s2", "s4"): "slice 3 is missing between s2.tif and s4.tif",
    ("s2", "s4", "s6", "s10"): "slice 8 is missing between s6.tif and s10.tif",
    ("s01", "s1", "s2"): "slice 1 occurs twice: s01.tif and s1.tif",
    ("s01", "s1"): "slice 1 occurs twice: s01.tif and s1.tif",
    ("a1", "a2", "b2"): "b2.tif is not named like the other slices, 2 of them like a1.tif",
    ("s1", "s2", "s2_mask", "s3"): "s2_mask.tif is not named like the other slices, 3 of them like s1.tif",
    ("a_preview", "s1", "s2"): "a_preview.tif is not named like the other slices, 2 of them like s1.tif",
    ("s10", "s20", "s30", "s35"): "s30.tif and s35.tif differ by 5, other slices by 10",
}


@pytest.mark.parametrize("names", IRREGULAR, ids="-".join)
def test_irregular_slice_numbers_name_the_missing_or_duplicate_slice(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / f"{name}.tif").touch()
    with pytest.raises(DataError) as error:
        open_folder(tmp_path)
    assert f": {IRREGULAR[names]}; " in str(error.value)


BAD_SIZES: dict[str, Any] = {
    **{f"ome {size!r}": tiff("v.ome.tif", ome=True, metadata=OME["metadata"] | {"PhysicalSizeX": size})
       for size in ("", "0", "NaN", "-1", "list")},
    **{f"imagej {spacing!r}": tiff(
        imagej=True, metadata={"axes": "ZYX", "unit": "um", "spacing": spacing}, resolution=(2.0, 4.0))
       for spacing in ("", 0.0, float("nan"), [1.0, 2.0], -1.0)},
    "imagej, resolution 0": tiff(imagej=True, metadata={"axes": "ZYX", "unit": "um"}, resolution=(0, 4.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SIZES)
def test_a_voxel_size_of_a_tiff_that_cannot_be_used_is_a_warning(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    stored = open_source(BAD_SIZES[case](tmp_path, scan()))
    assert (stored.shape, stored.geometry.voxel_size_um) == (SHAPE, None)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "cannot be used" in warning


def test_units_per_axis_are_kept(tmp_path: Path) -> None:
    about = {"axes": "ZYX", "unit": "um", "yunit": "mm", "zunit": "nm", "spacing": 3.0}
    geometry = open_source(tiff(imagej=True, metadata=about, resolution=(2.0, 4.0))(tmp_path, scan())).geometry
    assert (geometry.scale_zyx, geometry.units_zyx) == ((3, 0.25, 0.5), ("nanometer", MM, UM))
