"""A series of DICOM is read slice by slice in the order of space, with the values that its headers mean; a series that
is incomplete, mixed or damaged is refused with the names of its files.

A wrong program that would pass if names or numbers followed positions: one that sorts by them, hence names that do not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom import uid
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.fileset import FileSet

from tests.volume_tools.test_importing import Voxels, imported, read
from vesuvius.commands import volume
from vesuvius.errors import DataError
from vesuvius.volume_tools.importing import ImportRequest, import_volume
from vesuvius.volume_tools.sources.source import open_source
from vesuvius.volumes.volume import open_volume

SHAPE = (9, 14, 11)
VOXELS = np.random.default_rng(0).integers(0, 4096, SHAPE).astype("u2")
HU = VOXELS.astype("i2") - 1024
SERIES = "1.2.3"


def image(z: int, **changes: Any) -> Dataset:
    """A slice of an axial CT, each with 2 mm to the next; None in `changes` removes an attribute."""
    image = Dataset()
    image.file_meta = FileMetaDataset()
    image.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    image.file_meta.MediaStorageSOPClassUID = image.SOPClassUID = uid.CTImageStorage
    image.file_meta.MediaStorageSOPInstanceUID = image.SOPInstanceUID = uid.generate_uid()
    attributes = {
        "PatientID": "p", "PatientName": "p", "StudyInstanceUID": "1.2", "StudyDate": "20260101", "StudyTime": "120000",
        "StudyID": "s", "SeriesNumber": 1, "SeriesInstanceUID": SERIES, "SeriesDescription": "Thorax", "Modality": "CT",
        "Rows": SHAPE[1], "Columns": SHAPE[2], "SamplesPerPixel": 1, "PhotometricInterpretation": "MONOCHROME2",
        "BitsAllocated": 16, "BitsStored": 12, "HighBit": 11, "PixelRepresentation": 0, "RescaleSlope": 1,
        "RescaleIntercept": -1024, "PixelSpacing": [0.75, 0.5], "SliceThickness": 5, "InstanceNumber": 9 - z,
        "ImageOrientationPatient": [1, 0, 0, 0, 1, 0], "ImagePositionPatient": [10, 20, 2 * z - 30],
        "PixelData": VOXELS[z].tobytes(),
    }  # fmt: skip
    for name, value in (attributes | changes).items():
        if value is not None:
            setattr(image, name, value)
    return image


def save(image: Dataset, file: Path) -> Path:
    image.save_as(file, enforce_file_format=True)
    return file


def series(folder: Path, change: Callable[[int], dict[str, Any] | None] = lambda z: {}) -> Path:
    """A folder of nine slices, less those for which `change` returns None; names and numbers are no order in space."""
    folder.mkdir(exist_ok=True)
    for z in range(len(VOXELS)):
        if (changes := change(z)) is not None:
            save(image(z, **changes), folder / f"IM{z * 7 % 9:04d}")
    return folder


def run(source: Any, *select: int) -> tuple[Voxels, Any]:
    """Voxels and geometry of a series."""
    stored = open_source(str(source), select)
    return read(stored), stored.geometry


def test_slices_are_ordered_by_position_and_rescaled(tmp_path: Path) -> None:
    found, geometry = run(series(tmp_path / "scan"))
    assert found.dtype == "int16"
    np.testing.assert_array_equal(found, HU)
    assert geometry.voxel_size_um == (2000, 750, 500)
    assert geometry.translation_zyx == (-30, 20, 10)
    import_volume(ImportRequest(str(tmp_path / "scan"), tmp_path / "out.zarr"))
    np.testing.assert_array_equal(imported(tmp_path / "out.zarr"), HU)
    assert open_volume(f"{tmp_path}/out.zarr").geometry == geometry


PIXELS: dict[str, tuple[Callable[[int], dict[str, Any]], Voxels]] = {
    "as stored": (lambda z: {"RescaleSlope": None, "RescaleIntercept": None}, VOXELS),
    "slope per slice": (
        lambda z: {"RescaleSlope": 0.5 + z, "RescaleIntercept": 0},
        (VOXELS * (0.5 + np.arange(9)[:, None, None])).astype("f4"),
    ),
    "signed, all bits": (
        lambda z: {"PixelRepresentation": 1, "BitsStored": 16, "HighBit": 15,
                   "PixelData": (VOXELS[z].astype("i2") - 3000).tobytes()},
        VOXELS.astype("i4") - 4024,
    ),
    "inverted": (lambda z: {"PhotometricInterpretation": "MONOCHROME1"}, HU),
}  # fmt: skip


@pytest.mark.parametrize("case", PIXELS)
def test_values_are_those_that_the_header_means(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    change, expected = PIXELS[case]
    found, _ = run(series(tmp_path / "scan", change))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    assert ("MONOCHROME1" in caplog.text) == (case == "inverted")


def test_colors_are_selected(tmp_path: Path) -> None:
    colors = np.random.default_rng(0).integers(0, 255, (*SHAPE, 3)).astype("u1")
    about = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0, "BitsAllocated": 8}
    about |= {"BitsStored": 8, "HighBit": 7, "RescaleSlope": None, "RescaleIntercept": None}
    found, _ = run(series(tmp_path / "scan", lambda z: about | {"PixelData": colors[z].tobytes()}), 1)
    np.testing.assert_array_equal(found, colors[..., 1])


def test_a_coronal_series_is_turned_to_that_of_the_patient(tmp_path: Path) -> None:
    """Rows run down the patient, slices to the back."""
    turned = {"ImageOrientationPatient": [1, 0, 0, 0, 0, -1]}
    found, geometry = run(series(tmp_path / "scan", lambda z: turned | {"ImagePositionPatient": [0, 2 * z, 0]}))
    np.testing.assert_array_equal(found, HU.transpose(1, 0, 2)[::-1])
    assert geometry.scale_zyx == (0.75, 2, 0.5)
    assert geometry.translation_zyx == (-13 * 0.75, 0, 0)


def sequence(**attributes: Any) -> list[Dataset]:
    item = Dataset()
    for name, value in attributes.items():
        setattr(item, name, value)
    return [item]


@pytest.mark.parametrize("name", ["scan.dcm", "scan"])
def test_the_frames_of_one_file_are_ordered_by_position(tmp_path: Path, name: str) -> None:
    order = np.random.default_rng(0).permutation(9)
    absent = dict.fromkeys(
        ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "RescaleSlope", "RescaleIntercept")
    )
    frames = image(0, **absent, NumberOfFrames=9)
    frames.PixelData = VOXELS[order].tobytes()
    frames.SharedFunctionalGroupsSequence = sequence(
        PlaneOrientationSequence=sequence(ImageOrientationPatient=[1, 0, 0, 0, 1, 0]),
        PixelMeasuresSequence=sequence(PixelSpacing=[0.75, 0.5], SliceThickness=2),
        PixelValueTransformationSequence=sequence(RescaleSlope=1, RescaleIntercept=-1024),
    )
    frames.PerFrameFunctionalGroupsSequence = [
        sequence(PlanePositionSequence=sequence(ImagePositionPatient=[10, 20, 2 * int(z) - 30]))[0] for z in order
    ]
    found, geometry = run(save(frames, tmp_path / name))
    np.testing.assert_array_equal(found, HU)
    assert (geometry.scale_zyx, geometry.translation_zyx) == ((2, 0.75, 0.5), (-30, 20, 10))


def test_a_dicomdir_and_its_folder_are_read(tmp_path: Path) -> None:
    files = FileSet()
    for z in range(9):
        files.add(image(z))
    (tmp_path / "cd").mkdir()
    files.write(tmp_path / "cd")
    for source in (tmp_path / "cd/DICOMDIR", tmp_path / "cd"):
        np.testing.assert_array_equal(run(source)[0], HU)


def test_localizers_and_other_files_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scout = {"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"], "ImageOrientationPatient": [1, 0, 0, 0, 0, -1]}
    folder = series(tmp_path / "scan", lambda z: scout | {"SeriesInstanceUID": "9"} if z == 0 else {})
    (folder / "readme.txt").write_text("who scanned this")
    np.testing.assert_array_equal(run(folder)[0], HU[1:])
    assert "1 localizers in" in caplog.text
    assert "1 files in" in caplog.text
    assert "readme.txt" in caplog.text


def test_an_import_into_the_folder_of_its_slices_resumes(tmp_path: Path) -> None:
    request = ImportRequest(str(series(tmp_path / "ct")), tmp_path / "ct/out.zarr")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_volume(request, interrupt)
    assert (tmp_path / "ct/out.zarr.partial/lock").stat().st_size == 0
    for _ in range(2):
        import_volume(request)
        np.testing.assert_array_equal(open_volume(request.out)[:], HU)


def test_one_of_several_series_is_chosen_by_its_uid(tmp_path: Path) -> None:
    folder = series(tmp_path / "scan", lambda z: {"SeriesInstanceUID": "1.2.4" if z > 4 else SERIES})
    with pytest.raises(
        DataError, match=r"it has 2 series; choose one: \S+/scan:/1.2.3 \(Thorax, 5 slices\), \S+:/1.2.4"
    ):
        run(folder)
    np.testing.assert_array_equal(run(f"{folder}:/1.2.4")[0], HU[5:])


@pytest.mark.parametrize("gone", ["ImagePositionPatient", "ImageOrientationPatient"])
def test_without_positions_slices_are_sorted_by_number(
    tmp_path: Path, gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    found, geometry = run(series(tmp_path / "scan", lambda z: {gone: None}))
    np.testing.assert_array_equal(found, HU[::-1])
    assert geometry.scale_zyx == (5, 0.75, 0.5)
    assert "sorted by number" in caplog.text


@pytest.mark.parametrize("spacing", [None, [0, 0], [float("nan"), 1]])
def test_a_pixel_spacing_that_cannot_be_used_is_a_warning(
    tmp_path: Path, spacing: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = series(tmp_path / "scan", lambda z: {"PixelSpacing": spacing})
    assert volume.main(["import", str(folder), f"{tmp_path}/out.zarr", "--voxel-size-um=8,7,6"]) == 0
    assert "cannot be used" in capsys.readouterr().err
    np.testing.assert_array_equal(imported(tmp_path / "out.zarr"), HU)


def compressed(syntax: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        slice_ = image(3)
        slice_.file_meta.TransferSyntaxUID = syntax
        slice_.PixelData = pydicom.encaps.encapsulate([b"\0\0"])
        slice_["PixelData"].VR = "OB"
        slice_["PixelData"].is_undefined_length = True
        save(slice_, folder / "IM0003")

    return change


def shortened(size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / "IM0003").write_bytes((folder / "IM0003").read_bytes()[:size])


TURNED = [0.96, 0.28, 0, -0.28, 0.96, 0]
NOTHING: Callable[[int], dict[str, Any] | None] = lambda z: {}  # noqa: E731
WRONG: dict[str, tuple[Callable[[int], dict[str, Any] | None], Any, str]] = {
    "gap": (
        lambda z: None if z == 4 else {}, None, "the step from IM0003 to IM0008 is 4, but 2 between most slices"
    ),
    "twice": (
        lambda z: {"ImagePositionPatient": [10, 20, 2 * min(z, 7)]}, None, "IM0002 and IM0004 are at the same position"
    ),
    "moved": (lambda z: {"ImagePositionPatient": [9 * (z == 4), 0, 2 * z]}, None, r"to IM000\d is 9.22, but 2"),
    "another size": (
        lambda z: {"Rows": 7, "PixelData": VOXELS[z, :7].tobytes()} if z == 3 else {}, None, r"IM0003 has \(7, 11, "
    ),
    "turned": (
        lambda z: {"ImageOrientationPatient": TURNED} if z == 3 else {}, None, "IM0003 has .*0.96"
    ),
    "tilted": (lambda z: {"ImagePositionPatient": [0, z, 2 * z]}, None, "not at right angles"),
    "a palette": (lambda z: {"PhotometricInterpretation": "PALETTE COLOR"}, None, "are PALETTE COLOR, not gray"),
    "empty": (NOTHING, lambda folder: (folder / "IM0003").write_bytes(b""), "IM0003: it is empty"),
    "cut": (NOTHING, shortened(-9), "IM0003: ValueError: "),
    "header cut": (NOTHING, shortened(400), "IM0003: its header is cut"),
    "no dicom": (
        NOTHING, lambda folder: (folder / "IM0003").rename(folder / "a.dcm").write_bytes(b"a" * 999), "a.dcm: Inv"
    ),
    "no decoder": (NOTHING, compressed(uid.JPEGLosslessSV1), "IM0003: RuntimeError: .*JPEG Loss.*; pip install pyli"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_bad_series_are_refused_with_the_names_of_files(tmp_path: Path, case: str) -> None:
    change, damage, words = WRONG[case]
    folder = series(tmp_path / "scan", change)
    if damage:
        damage(folder)
    with pytest.raises(DataError, match=words):
        run(folder)


def test_a_compressed_series_equals_the_plain_one(tmp_path: Path) -> None:
    (tmp_path / "scan").mkdir()
    for z in range(9):
        slice_ = image(z)
        slice_.compress(uid.RLELossless)
        save(slice_, tmp_path / f"scan/{z}")
    np.testing.assert_array_equal(run(tmp_path / "scan")[0], HU)
