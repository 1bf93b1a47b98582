"""NIfTI and NRRD: files of one grid align however they are stored, values are those that the header means, and a
flipped bit or surplus byte is refused.

A wrong program that would pass: one that drops orientation if only files stored alike are compared, hence all 48
orders of axes; one that checks a stream only when it happens to read its end, hence a resumed import.
"""

from __future__ import annotations

import gzip
import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import nrrd
import numpy as np
import pytest

from tests.volume_tools.test_importing import Voxels, imported, read, scan
from vesuvius.commands import volume
from vesuvius.errors import DataError
from vesuvius.volume_tools import importing
from vesuvius.volume_tools.copy import CopyStats
from vesuvius.volume_tools.importing import ImportRequest, import_volume
from vesuvius.volume_tools.sources.source import open_source
from vesuvius.volumes.volume import open_volume

SHAPE = (9, 14, 11)
SCALE, CORNER = np.array([0.5, 0.75, 2.0]), np.array([10.0, 20.0, -30.0])  # x, y, z in LPS
TO_RAS = np.diag([-1.0, -1.0, 1.0])
UNORIENTED = "kept in stored order"


def run(source: Path, *select: int) -> tuple[Voxels, Any]:
    """Voxels and geometry of a scan."""
    stored = open_source(str(source), select)
    return read(stored), stored.geometry


def stored(voxels: Voxels, order: tuple[int, ...], flips: tuple[int, ...]) -> tuple[Voxels, Voxels]:
    """The array (i, j, k) and the LPS affine (3, 4) of voxels (z, y, x) stored in another order."""
    array, corner, steps = voxels.T, CORNER.copy(), np.diag(SCALE)
    for axis in np.flatnonzero(flips):
        array = np.flip(array, axis)
        corner[axis] += (array.shape[axis] - 1) * SCALE[axis]
        steps[axis, axis] *= -1
    return array.transpose(order), np.column_stack([steps[:, list(order)], corner])


def save_nifti(file: Path, array: Voxels, lps: Voxels, **header: Any) -> Path:
    image = nibabel.Nifti1Image(array, np.vstack([TO_RAS @ lps, [0, 0, 0, 1]]))
    image.header.set_xyzt_units("mm")
    nibabel.save(image, file)
    return file


def save_nrrd(file: Path, array: Voxels, affine: Voxels, space: str) -> Path:
    about = {"space": space, "space directions": affine[:, :3].T, "space origin": affine[:, 3], "encoding": "gzip"}
    nrrd.write(str(file), np.asfortranarray(array), about)
    return file


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_reversed_axes_are_imported_across_layers(
    tmp_path: Path, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 slices."""
    for name, value in (("_CHUNK", 8), ("_PER_SHARD", 1), ("_LAYER", 8)):
        monkeypatch.setattr(importing, name, value)
    voxels, out = scan("uint16", SHAPE), tmp_path / "out.zarr"
    source = save_nifti(tmp_path / "v.nii.gz", *stored(voxels, order, (1, 1, 1)))
    import_volume(ImportRequest(str(source), out, levels=1))
    np.testing.assert_array_equal(imported(out), voxels)
    geometry = open_volume(out).geometry
    assert geometry is not None
    np.testing.assert_allclose(geometry.translation_zyx, CORNER[::-1], atol=1e-4)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_files_of_one_patient_align_however_they_are_stored(tmp_path: Path, order: tuple[int, ...]) -> None:
    voxels = scan("uint16", SHAPE)
    for number, flips in enumerate(itertools.product((0, 1), repeat=3)):
        array, lps = stored(voxels, order, flips)
        for source in (
            save_nifti(tmp_path / f"{number}.nii.gz", array, lps),
            save_nrrd(tmp_path / f"{number}.nrrd", array, TO_RAS @ lps, "right-anterior-superior"),
        ):
            found, geometry = run(source)
            np.testing.assert_array_equal(found, voxels)
            np.testing.assert_allclose(geometry.scale_zyx, SCALE[::-1], rtol=1e-6)
            np.testing.assert_allclose(geometry.translation_zyx, CORNER[::-1], atol=1e-4)


@pytest.mark.usefixtures("tmp_path")
def test_a_rotation_is_dropped_with_a_warning_and_its_scans_still_align(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A crop that is stored reversed, on the same rotated grid, lies at its place in the full scan."""
    turn = np.array([[0.96, -0.28, 0], [0.28, 0.96, 0], [0, 0, 1]])
    voxels = scan("uint16", SHAPE)
    array, lps = stored(voxels, (0, 1, 2), (0, 0, 0))
    full, here = run(save_nifti(tmp_path / "full.nii", array, turn @ lps))
    assert "full.nii is rotated by 16.26 degrees" in caplog.text
    crop = voxels[2:, 3:, 4:]
    steps, corner = lps[:, :3] * [-1, 1, 1], lps[:, 3] + lps[:, :3] @ [10, 3, 2]
    found, there = run(
        save_nrrd(tmp_path / "crop.nrrd", crop[:, :, ::-1].T, turn @ np.column_stack([steps, corner]), "LPS")
    )
    np.testing.assert_array_equal(full, voxels)
    np.testing.assert_array_equal(found, crop)
    shift = np.subtract(there.translation_zyx, here.translation_zyx) / SCALE[::-1]
    np.testing.assert_allclose(shift, [2, 3, 4], atol=1e-4)


@pytest.mark.parametrize("space", ["LPS", "right-anterior-superior", "scanner-xyz"])
def test_lengths_without_a_unit_are_millimeters_in_the_space_of_a_patient(tmp_path: Path, space: str) -> None:
    """Without one, voxels of 1 mm could not be told from voxels of unknown size, and labels would not align."""
    fields = {"space": space, "space directions": "(1,0,0) (0,1,0) (0,0,1)"}
    _, geometry = run(save_raw_nrrd(tmp_path / "v.nrrd", fields, scan("uint16", SHAPE)))
    assert geometry.voxel_size_um == (None if "xyz" in space else (1000, 1000, 1000))
    image = nibabel.Nifti1Image(scan("uint16", SHAPE), np.eye(4))
    nibabel.save(image, tmp_path / "v.nii")
    assert run(tmp_path / "v.nii")[1].voxel_size_um == (1000, 1000, 1000)


def test_a_grid_without_right_angles_is_refused(tmp_path: Path) -> None:
    array, lps = stored(scan("uint16", SHAPE), (0, 1, 2), (0, 0, 0))
    lps[1, 2] = 0.5
    with pytest.raises(DataError, match=r"v\.nii: its axes are not at right angles.*; resample it"):
        run(save_nifti(tmp_path / "v.nii", array, lps))


def patched(file: Path, offset: int, values: bytes) -> Path:
    content = bytearray(file.read_bytes())
    content[offset : offset + len(values)] = values
    file.write_bytes(content)
    return file


NO_CODES = (252, bytes(4))
UNUSABLE: dict[str, tuple[tuple[int, bytes], str, tuple[float, ...]]] = {
    # what is overwritten in a NIfTI header, a warning, and the voxel size
    "no codes": (NO_CODES, UNORIENTED, (2, 0.75, 0.5)),
    "sform NaN": ((280, struct.pack("<f", np.nan)), UNORIENTED, (2, 0.75, 0.5)),
    "sform 0": ((280, bytes(48)), UNORIENTED, (2, 0.75, 0.5)),
    "qform no quaternion": ((252, struct.pack("<hh3f", 1, 0, 9, 9, 9)), UNORIENTED, (2, 0.75, 0.5)),
    "voxel size 0": ((80, bytes(4)), "", (2, 0.75, 0.5)),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_orientation_is_a_warning(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    change, warning, scale = UNUSABLE[case]
    voxels = scan("uint16", SHAPE)
    found, geometry = run(patched(save_nifti(tmp_path / "v.nii", *stored(voxels, (0, 1, 2), (0, 0, 0))), *change))
    np.testing.assert_array_equal(found, voxels)
    np.testing.assert_allclose(geometry.scale_zyx, scale)
    assert warning in caplog.text
    assert geometry.translated == (not warning)


def test_a_voxel_size_that_is_given_keeps_the_offset_in_voxels(tmp_path: Path) -> None:
    source = save_nifti(tmp_path / "v.nii", *stored(scan("uint16", SHAPE), (0, 1, 2), (0, 0, 0)))
    assert volume.main(["import", str(source), f"{tmp_path}/v.zarr", "--voxel-size-um=8,7,6"]) == 0
    geometry = open_volume(f"{tmp_path}/v.zarr").geometry
    assert geometry is not None
    assert geometry.voxel_size_um == (8, 7, 6)
    np.testing.assert_allclose(geometry.translation_zyx, CORNER[::-1] / SCALE[::-1] * [8, 7, 6])


VALUES: dict[str, tuple[str, float, float, str]] = {
    # stored dtype, slope, intercept, dtype of the result
    "no scale": ("uint16", 1, 0, "uint16"),
    "slope 0": ("uint16", 0, 5, "uint16"),
    "slope NaN": ("int16", np.nan, np.nan, "int16"),
    "Hounsfield units": ("int16", 1, -1024, "int32"),
    "bytes to 16 bits": ("uint8", 2, -100, "int16"),
    "a fraction": ("uint8", 0.25, 0, "float32"),
    "32 bits": ("int32", 0.25, 0, "float64"),
    "floats": ("float32", 2, 1, "float32"),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_are_those_that_the_header_means(tmp_path: Path, case: str) -> None:
    dtype, slope, inter, result = VALUES[case]
    voxels = scan(dtype, SHAPE)
    voxels.flat[:2] = [0, 120] if dtype == "float32" else [np.iinfo(dtype).min, np.iinfo(dtype).max]
    source = save_nifti(tmp_path / "v.nii", *stored(voxels, (0, 1, 2), (0, 0, 0)))
    found, _ = run(patched(source, 112, struct.pack("<ff", slope, inter)))
    assert found.dtype == result
    scaled = voxels.astype(float) * slope + inter if slope and np.isfinite(slope) else voxels
    np.testing.assert_array_equal(found, scaled)


def test_labels_that_a_writer_scaled_to_bytes_come_out_as_they_were(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).integers(0, 4, SHAPE).astype(float)
    image = nibabel.Nifti1Image(labels.T, np.diag([-1, -1, 1, 1]))
    image.set_data_dtype("u1")
    nibabel.save(image, tmp_path / "v.nii.gz")
    assert set(np.unique(nibabel.load(tmp_path / "v.nii.gz").dataobj.get_unscaled())) == {0, 85, 170, 255}
    np.testing.assert_array_equal(run(tmp_path / "v.nii.gz")[0], labels)


# ---- streams


def packed(folder: Path, content: Callable[[bytes], bytes] = gzip.compress, kind: str = "nii") -> Path:
    """A file of noise, compressed by `content`."""
    voxels = scan("uint16", SHAPE)
    if kind == "nii":
        raw = save_nifti(folder / "v.nii", *stored(voxels, (0, 1, 2), (0, 0, 1))).read_bytes()
        (folder / "v.nii").write_bytes(content(raw))  # under a wrong name
        return folder / "v.nii"
    header = "NRRD0004\ntype: uint16\ndimension: 3\nsizes: 11 14 9\nencoding: GZIP\nendian: little\n\n"
    (folder / "v.nrrd").write_bytes(header.encode() + content(voxels.tobytes()))
    return folder / "v.nrrd"


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "crc": lambda raw: gzip.compress(raw)[:-8] + bytes(4) + gzip.compress(raw)[-4:],
    "length": lambda raw: gzip.compress(raw)[:-4] + bytes(4),
    "surplus inside": lambda raw: gzip.compress(raw + b"\0"),
    "surplus after": lambda raw: gzip.compress(raw) + b"more",
    "a second member": lambda raw: gzip.compress(raw) + gzip.compress(b"more"),
    "no trailer": lambda raw: gzip.compress(raw)[:-8],
    "cut": lambda raw: gzip.compress(raw)[:-50],
    "too few voxels": lambda raw: gzip.compress(raw[:-1]),
}


@pytest.mark.parametrize("kind", ["nii", "nrrd"])
@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_stream_is_refused_also_if_the_import_is_resumed(tmp_path: Path, case: str, kind: str) -> None:
    source = packed(tmp_path, DAMAGE[case], kind)
    for _ in range(2):
        with pytest.raises(DataError, match=rf"v\.{kind}"):
            import_volume(ImportRequest(str(source), tmp_path / "out.zarr"))
        assert not (tmp_path / "out.zarr").exists()


def test_a_stream_whose_chunks_are_all_written_is_still_checked(tmp_path: Path) -> None:
    """As if the import had been killed between its last chunk and the check."""
    source = packed(tmp_path, DAMAGE["crc"])

    class Killed(Exception):  # noqa: N818
        pass

    def stop(figures: CopyStats, doing: str) -> None:
        if figures.done == figures.chunks:
            raise Killed

    with pytest.raises((Killed, DataError)):
        import_volume(ImportRequest(str(source), tmp_path / "out.zarr", levels=1), stop)
    with pytest.raises(DataError, match="CRC"):
        import_volume(ImportRequest(str(source), tmp_path / "out.zarr", levels=1))


@pytest.mark.parametrize("kind", ["nii", "nrrd"])
def test_streams_of_several_members_are_read(tmp_path: Path, kind: str) -> None:
    """As bgzip and pigz write them."""
    found, _ = run(
        packed(tmp_path, lambda raw: b"".join(gzip.compress(raw[i : i + 999]) for i in range(0, len(raw), 999)), kind)
    )
    np.testing.assert_array_equal(found, scan("uint16", SHAPE))


def test_bytes_after_the_voxels_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", scan("uint16", SHAPE))
    for source in (
        packed(tmp_path, lambda raw: raw),
        save_raw_nrrd(tmp_path / "v.nrrd", {}, scan("uint16", SHAPE)),
        tmp_path / "v.npy",
    ):
        with source.open("ab") as stream:
            stream.write(b"\0")
        with pytest.raises(DataError, match="bytes follow its voxels"):
            run(source)


# ---- NRRD


def save_raw_nrrd(file: Path, fields: dict[str, str], array: Voxels, before: bytes = b"") -> Path:
    """NRRD of an array with the slowest axis first, its voxels in a file of their own if `fields` name one."""
    about = {
        "type": array.dtype.name,
        "dimension": str(array.ndim),
        "sizes": " ".join(map(str, array.shape[::-1])),
        "encoding": "raw",
        "endian": "little",
    } | fields
    header = "\n".join(["NRRD0005", "# a: comment", *(f"{name}: {value}" for name, value in about.items()), "k:=a: b"])
    data = array.tobytes()
    content = before + (gzip.compress(data) if about["encoding"] == "gzip" else data)
    detached = fields.get("data file")
    file.write_bytes(f"{header}\n\n".encode() + (b"" if detached else content))
    if detached:
        (file.parent / detached).write_bytes(content)
    return file


TYPES = {
    "short int": "i2", "unsigned short int": "u2", "signed short": "i2", "long long int": "i8", "longlong": "i8",
    "unsigned long long int": "u8", "signed char": "i1", "uchar": "u1", "Unsigned Int": "u4", "float": "f4",
    "signed long long int": "i8", "ulonglong": "u8", "uint8_t": "u1", "double": "f8",
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_all_names_of_types_are_known(tmp_path: Path, name: str) -> None:
    voxels = scan(TYPES[name], SHAPE)
    found, _ = run(save_raw_nrrd(tmp_path / "v.nrrd", {"type": name}, voxels))
    assert found.dtype == TYPES[name]
    np.testing.assert_array_equal(found, voxels)


SKIPS: dict[str, tuple[dict[str, str], bytes]] = {
    "lines": ({"line skip": "2"}, b"a\n\xffb\n"),
    "bytes": ({"byte skip": "5"}, b"12345"),
    "lines and bytes": ({"lineskip": "1", "byteskip": "2"}, b"a\n12"),
    "from the end": ({"byte skip": "-1"}, b"anything"),
    "none": ({"byte skip": "0"}, b""),
}


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("case", SKIPS)
def test_lines_and_bytes_before_the_voxels_are_skipped(tmp_path: Path, case: str, detached: bool) -> None:
    fields, before = SKIPS[case]
    about = fields | ({"data file": "v.raw"} if detached else {})
    found, _ = run(save_raw_nrrd(tmp_path / "v.nhdr", about, scan("uint16", SHAPE), before))
    np.testing.assert_array_equal(found, scan("uint16", SHAPE))


def test_lines_are_skipped_before_and_bytes_after_decompression(tmp_path: Path) -> None:
    voxels = scan("uint16", SHAPE)
    fields = {"encoding": "gz", "line skip": "1", "byte skip": "2", "data file": "v.raw.gz"}
    source = save_raw_nrrd(tmp_path / "v.nhdr", fields, voxels)
    (tmp_path / "v.raw.gz").write_bytes(b"line\n" + gzip.compress(b"12" + voxels.tobytes()))
    np.testing.assert_array_equal(run(source)[0], voxels)


AXES: dict[str, tuple[dict[str, str], int]] = {
    # fields, and the stored axis (slowest first) along which six components lie
    "kinds, vector": ({"kinds": "vector domain domain domain"}, 3),
    "kinds, matrix": ({"kinds": "3D-symmetric-matrix space space space"}, 3),
    "kinds, list": ({"kinds": "domain domain domain list"}, 0),
    "kinds, middle": ({"kinds": "domain domain list domain"}, 1),
    "directions": ({"space": "LPS", "space directions": "none (1,0,0) (0,1,0) (0,0,1)"}, 3),
    "directions before kinds": (
        {"space": "LPS", "space directions": "(1,0,0) none (0,1,0) (0,0,1)", "kinds": "vector domain domain domain"}, 2
    ),
    "directions in space and time": (
        {"space": "LPST", "space directions": "(1,0,0,0) (0,1,0,0) (0,0,1,0) (0,0,0,9)", "space origin": "(0,0,0,0)"}, 0
    ),
    "labels": ({"labels": '"x" "y" "c" "z"'}, 1),
    "nothing": ({}, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", AXES)
def test_the_axes_are_those_that_the_file_names(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    fields, axis = AXES[case]
    voxels = scan("uint16", SHAPE)
    array = np.stack([voxels + number for number in range(6)], axis)
    caplog.set_level("INFO")
    found, _ = run(save_raw_nrrd(tmp_path / "v.nrrd", fields, array), 2)
    np.testing.assert_array_equal(found, voxels + 2)
    assert ("the axes have no names" in caplog.text) == (case == "nothing")


def test_an_image_of_colors_is_no_volume(tmp_path: Path) -> None:
    source = save_raw_nrrd(tmp_path / "v.nrrd", {"kinds": "RGB-color domain domain"}, scan("uint8", (20, 30, 3)))
    with pytest.raises(DataError, match="axes YXC of shape 20x30x3, not Z, Y, X"):
        run(source)


BAD_SIZES = [
    "spacings: 1 nan 2",
    "spacings: 0 1 1",
    "spacings: a b c",
    "spacings: 1 2",
    "space directions: (1,0,0) (0,1,0) (0,0,0)",
    "space directions: (1,0,0) (0,x,0) (0,0,1)",
    "space directions: none none none",
    "space directions: (1,0,0) (0,1,0) (0,0,1)\nspace origin: (nan,0,0)",
]


@pytest.mark.parametrize("field", BAD_SIZES)
def test_a_voxel_size_that_cannot_be_used_is_a_warning(
    tmp_path: Path, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, _, value = field.partition(": ")
    source = save_raw_nrrd(tmp_path / "v.nrrd", {name: value}, scan("uint16", SHAPE))
    assert volume.main(["import", str(source), f"{tmp_path}/v.zarr", "--voxel-size-um=8,7,6"]) == 0
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if "WARNING" in line)
    assert "cannot be used" in warning
    np.testing.assert_array_equal(imported(tmp_path / "v.zarr"), scan("uint16", SHAPE))
    assert open_volume(f"{tmp_path}/v.zarr").voxel_size_um == (8, 7, 6)
