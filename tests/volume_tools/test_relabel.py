"""Changed labels: topology is that of closed forms, ids stay exact, contacts reach their share, maps never fold."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import zarr

from tests.conftest import write_array, write_ome
from vesuvius.commands import volume
from vesuvius.config import ArrayConfig
from vesuvius.errors import ConfigError
from vesuvius.volume_tools.partial import PartialCopy
from vesuvius.volume_tools.pyramid import downsample_mode
from vesuvius.volumes.volume import open_volume

pytest.importorskip("scipy.ndimage", reason="scipy is not installed")

from vesuvius.volume_tools import relabel_volume
from vesuvius.volume_tools.measures import approaches, boundaries, facing, topologies, topology
from vesuvius.volume_tools.relabel import Changes, change_labels, displacement

Labels = np.ndarray[Any, Any]


def sheets(*gaps: int, size: int = 40, thick: int = 4, dtype: str = "int64") -> Labels:
    """Flat sheets across y, with ids 10, 20, ..., and these gaps between them."""
    ids = np.zeros((size, 6 + sum(gaps) + thick * (len(gaps) + 1), size), dtype)
    y = 3
    for number, gap in enumerate((*gaps, 0), start=1):
        ids[:, y : y + thick] = 10 * number
        y += thick + gap
    return ids


def pair_gaps(instances: Labels) -> dict[tuple[int, int], float]:
    return {pair: gap for pair, (gap, _) in approaches(facing(instances)).items()}


def cells(size: int = 48, count: int = 12) -> Labels:
    """Dense bodies: the cells nearest to random points."""
    rng = np.random.default_rng(3)
    grid = np.stack(np.meshgrid(*[np.arange(size)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    nearest = np.square(grid - rng.uniform(0, size, (count, 3))).sum(-1).argmin(1)
    return (100 + nearest.reshape(size, size, size)).astype(np.uint32)


def test_topology_is_that_of_closed_forms() -> None:
    z, y, x = np.ogrid[-12:13, -12:13, -12:13]
    ring = np.sqrt(x**2 + y**2) - 8
    torus = ring**2 + z**2 < 9
    shell = abs(np.sqrt(x**2 + y**2 + z**2) - 8) < 1.5
    corner = np.zeros((4, 4, 4), np.bool_)
    corner[1, 1, 1] = corner[2, 2, 2] = True  # they share a corner
    frame = np.zeros((9, 9, 17), np.bool_)
    frame[4, 1:8, 1:16] = True
    frame[4, 3:6, [3, 4, 7, 8, 11, 12]] = False  # three holes
    assert topology(torus) == (1, 1, 0)
    assert topology(shell) == (1, 0, 1)
    assert topology(corner) == (1, 0, 0)
    assert topology(frame) == (1, 3, 0)
    assert topology(np.zeros((3, 3, 3), np.bool_)) == (0, 0, 0)
    assert topology(np.pad(shell, ((0, 0), (0, 0), (0, 12))) | np.pad(torus, ((0, 0), (0, 0), (12, 0)))).cavities == 1


def test_gaps_are_those_of_the_nearest_voxels_of_neighbors() -> None:
    ids = sheets(3, 9, 0)
    assert pair_gaps(ids) == {(10, 20): 3, (20, 30): 9, (30, 40): 0}
    ids[5, 7, 5] = ids[5, 8, 5] = 10  # a bump
    assert pair_gaps(ids)[10, 20] == 1
    assert pair_gaps(np.zeros_like(ids)) == pair_gaps(np.ones_like(ids)) == {}


def test_boundaries_are_voxels_with_a_neighbor_in_another_body() -> None:
    ids = cells(16)
    ids[3, 3, 3] = 0
    expected = ids == 0
    for axis in range(3):
        for step in (1, -1):
            other = np.roll(ids, step, axis)
            end = [slice(None)] * 3
            end[axis] = slice(0, 1) if step == 1 else slice(-1, None)
            other[tuple(end)] = ids[tuple(end)]
            expected |= other != ids
    np.testing.assert_array_equal(boundaries(ids), expected)


def test_a_displacement_has_its_amplitude_and_correlation_length_and_crosses_no_face() -> None:
    """The correlation at a distance of the length is exp(-1/2): over 20 fields, within 0.08."""
    fields = [displacement((96, 64, 64), 3.0, [8.0] * 3, np.random.default_rng(seed)) for seed in range(20)]
    for by in fields:
        assert np.sqrt(3 * np.mean(np.square(by))) == pytest.approx(3.0, rel=1e-4)
    one = np.array([by[1, 20:76, 16:48, 16:48] for by in fields])
    for axis in (1, 2, 3):
        near, far = (np.moveaxis(one, axis, 0)[part] for part in (slice(None, -8), slice(8, None)))
        assert (near * far).mean() / np.square(one).mean() == pytest.approx(np.exp(-0.5), abs=0.08)
    for axis in range(3):
        ends = np.moveaxis(np.array(fields)[:, axis], axis + 1, 0)[[0, -1]]
        assert abs(ends).max() < 0.3 * abs(fields[0]).max(), "half a voxel from the face, where it is 0"


@pytest.mark.parametrize("changes", [Changes(deform=3, deform_length=16), Changes(bend=5)])
def test_deformation_keeps_ids_classes_and_topology(changes: Changes) -> None:
    ids = cells().astype(np.uint64) + np.uint64(2**40)
    classes = (1 + ids % 3).astype(np.uint8)
    changed = change_labels(classes, ids, changes, 7)
    assert changed.classes is not None
    assert changed.instances is not None
    assert changed.instances.dtype == ids.dtype
    assert (changed.instances != ids).mean() > 0.1
    assert set(np.unique(changed.instances)) == set(np.unique(ids))
    np.testing.assert_array_equal(changed.classes, 1 + changed.instances % 3)
    again = change_labels(classes, ids, changes, 7)
    np.testing.assert_array_equal(again.instances, changed.instances)
    assert again.report == changed.report
    assert (change_labels(classes, ids, changes, 8).instances != changed.instances).any()
    before, after = changed.report["instances"]
    assert before["components"] == after["components"] == 12, "smooth bodies of this size are not split"
    alone = change_labels(classes, None, changes, 7)
    assert alone.instances is None
    assert np.count_nonzero(alone.classes != changed.classes) < 10


def test_a_map_that_folds_is_refused() -> None:
    with pytest.raises(ConfigError, match="fold the labels; lower them"):
        change_labels(None, cells(32), Changes(deform=8, deform_length=8), 0)
    with pytest.raises(ConfigError, match="fold the labels; lower them"):  # in a plane, too
        change_labels(None, cells(32)[:1], Changes(deform=8, deform_length=8), 0)
    with pytest.raises(ConfigError, match=r"^--bend 9 voxels would fold the labels; lower them, or choose a larger"):
        change_labels(None, cells(32), Changes(bend=9), 0)


def test_thickening_grows_into_free_voxels_only() -> None:
    """Sheets 8 apart become 4 apart, those 3 apart touch, and the class 2 between two of them stays."""
    ids = sheets(8, 3, 8)
    classes = (ids > 0).astype(np.uint8)
    classes[:, 27:29] = 2  # unlabeled, within 2 voxels of the third sheet
    changed = change_labels(classes, ids, Changes(thicken=2), 0)
    assert changed.classes is not None
    assert changed.instances is not None
    assert pair_gaps(changed.instances) == {(10, 20): 4, (20, 30): 0, (30, 40): 5}
    assert (changed.instances[ids > 0] == ids[ids > 0]).all()
    assert (changed.classes[classes == 2] == 2).all()
    np.testing.assert_array_equal(changed.classes == 1, changed.instances > 0)


def test_shrinking_separates_touching_bodies_and_keeps_thin_parts() -> None:
    ids = sheets(0, 4, thick=6)
    ids[:, 25:] = 0
    ids[10:14, 15:21, 10:14] = 0
    ids[11, 15:21, 11] = 30  # a pillar one voxel thick, alone
    classes = (ids > 0).astype(np.uint8)
    classes[:, 26:] = 2  # unlabeled: not an instance
    changed = change_labels(classes, ids, Changes(thicken=-1), 0)
    assert changed.classes is not None
    assert changed.instances is not None
    assert (changed.classes[:, 26:] == 2).all()
    assert pair_gaps(changed.instances)[10, 20] == 2
    assert (changed.instances[11, 15:21, 11] == 30).all()
    assert changed.report["lost"] == []


def test_shrinking_further_never_leaves_more() -> None:
    """Plates of 5 and 12 that touch: each loses its layers until one or two are left, which stay."""
    ids = np.zeros((20, 23, 20), np.int32)
    ids[:, 3:8], ids[:, 8:20] = 1, 2
    widths, last = [], ids
    for voxels in (1, 2, 3, 5, 6, 100):
        changed = change_labels(None, ids, Changes(thicken=-voxels), 0).instances
        assert changed is not None
        assert (last[changed != 0] == changed[changed != 0]).all()
        widths.append(tuple((changed[10, :, 10] == number).sum() for number in (1, 2)))
        last = changed
    assert widths == [(3, 10), (1, 8), (1, 6), (1, 2), (1, 2), (1, 2)]


def test_tears_split_instances_and_nothing_else() -> None:
    ids = sheets(5, 5)
    changed = change_labels((ids > 0).astype(np.uint8), ids, Changes(tear=2), 0)
    assert changed.classes is not None
    assert changed.instances is not None
    torn = changed.report["torn"]
    assert 1 <= len(torn) <= 2
    assert changed.report["other_parts"] == []
    for number, found in topologies(changed.instances).items():
        assert (found.components > 1) == (number in torn)
    gone = changed.instances != ids
    assert (changed.instances[gone] == 0).all()
    assert 0.01 < gone.sum() / (ids > 0).sum() < 0.2
    np.testing.assert_array_equal(changed.classes, changed.instances > 0)


def windings() -> Labels:
    """A quarter of wavy windings 4 thick: at some angles each touches the next one, at others it is 8 away."""
    _, y, x = np.ogrid[:20, :56, :56]
    radius, angle = np.hypot(y, x), np.arctan2(y, x)
    ids = np.zeros((20, 56, 56), np.int64)
    for number in range(1, 6):
        ids[np.broadcast_to(abs(radius - 9 * number - 2.6 * (-1) ** number * np.cos(4 * angle)) < 2, ids.shape)] = (
            number
        )
    return ids


@pytest.mark.parametrize(("share", "within"), [(0.65, 3.0), (0.4, 0.9)])
def test_contacts_reach_their_share_of_the_surface_with_whole_sheets(share: float, within: float) -> None:
    """Sheets are bent, not stuffed: each keeps its topology and volume."""
    ids = windings()
    assert max(pair_gaps(ids).values()) <= within, "each pair is near somewhere from the start"
    classes = np.where(ids > 0, 1 + ids % 2, 0)
    changed = change_labels(classes, ids, Changes(contact=share, within=within), 5)
    assert changed.instances is not None
    near_before, near = ((facing(each.astype(np.int32)).gaps <= within).mean() for each in (ids, changed.instances))
    assert near_before < share - 0.1
    assert share <= near < share + 0.15
    rows = changed.report["instances"]
    assert [row["facing_within"] for row in rows] == [near_before, near]
    assert topologies(changed.instances) == topologies(ids)
    np.testing.assert_array_equal(changed.classes, np.where(changed.instances > 0, 1 + changed.instances % 2, 0))
    np.testing.assert_array_equal(np.bincount(changed.instances.ravel()), np.bincount(ids.ravel()))


def test_contacts_that_change_nothing_or_too_little_are_said(caplog: pytest.LogCaptureFixture) -> None:
    ids = windings()
    changed = change_labels(None, ids, Changes(contact=0.1, within=6), 0)
    np.testing.assert_array_equal(changed.instances, ids)
    assert "--contact changes nothing, so raise it or lower --within" in caplog.text
    change_labels(None, ids[:4], Changes(contact=1, within=0), 0)
    assert re.search(r"% of the surface .* before .*%; no place was found to bring more together", caplog.text)


def test_wrong_labels_are_refused_with_a_remedy() -> None:
    ids = sheets(5)
    with pytest.raises(ConfigError, match="only classes; add --instances"):
        change_labels((ids > 0).astype(np.uint8), None, Changes(contact=1), 0)
    with pytest.raises(ConfigError, match=r"^\d+ voxels of class 0 have an instance"):
        change_labels(np.zeros_like(ids), ids, Changes(), 0)
    with pytest.raises(ConfigError, match="instance -20 is negative"):
        change_labels(None, -ids, Changes(), 0)
    with pytest.raises(ConfigError, match="--deform-length 9 has no effect without --deform"):
        change_labels(None, ids, Changes(bend=1, deform_length=9), 0)
    with pytest.raises(ConfigError, match=r"--thicken -0.9 is less than a voxel"):
        change_labels(None, ids, Changes(thicken=-0.9), 0)
    for changes in (Changes(contact=5), Changes(thicken=float("nan")), Changes(thicken=-1000)):
        with pytest.raises(ConfigError, match=r"is not between .* change it"):
            change_labels(None, ids, changes, 0)
    for size in (1, 4, 5, 6):  # the map before scaling: 0, below float32's least number, its square
        with pytest.raises(ConfigError, match="too few for a map as smooth; lower --deform-length"):
            change_labels(None, ids[:size, :size, :size], Changes(deform=1), 0)


def test_strips_that_split_nothing_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    change_labels(None, np.ones((8, 4, 4), np.uint8), Changes(tear=10**9), 0)  # and end
    assert re.search(r"\b\d of 1000000000 strips were cut out", caplog.text)


def test_a_contact_without_neighbors_is_said(caplog: pytest.LogCaptureFixture) -> None:
    change_labels(None, np.ones((8, 4, 4), np.uint8), Changes(contact=1), 0)
    assert "no two instances are neighbors" in caplog.text


def test_classes_of_any_sign_are_counted() -> None:
    classes = np.zeros((9, 9, 9), np.int8)
    classes[:3], classes[5:8, 2:5, 2:5], classes[6, 3, 3] = -1, 4, 0
    rows = change_labels(classes, None, Changes(), 0).report["classes"]
    facts = {row["class"]: (row["voxels"], row["components"], row["cavities"]) for row in rows}
    assert facts == {-1: (243, 1, 0), 4: (26, 1, 1)}


# ---- volumes


def relabel(*arguments: object) -> int:
    return volume.main(["relabel", *map(str, arguments)])


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def stack(tmp_path: Path) -> tuple[Path, Path]:
    """Classes and instances of sheets, as OME-Zarr with voxels of 5 um."""
    ids = sheets(9, 12, 9, size=32, dtype="uint16")
    written = {"classes": (ids > 0).astype(np.uint8), "ids": ids}
    classes, instances = (write_ome(tmp_path / f"{name}.zarr", {"0": v}, [5.0]) for name, v in written.items())
    return classes, instances


CHANGES = ("--deform=1", "--deform-length=12", "--contact=1", "--within=4", "--seed=3")


def test_classes_and_instances_on_disk_are_those_in_memory(
    tmp_path: Path, stack: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    classes, instances = stack
    box = "--box=4:28,0:50,8:32"
    assert relabel(classes, tmp_path / "new.zarr", "--instances", instances, box, *CHANGES) == 0
    printed = capsys.readouterr().out
    read = [open_volume(path)[4:28, 0:50, 8:32] for path in stack]
    changes = Changes(deform=1, deform_length=12, contact=1, within=4)
    expected = change_labels(read[0], read[1], changes, 3)
    with open_volume(tmp_path / "new.zarr") as new, open_volume(tmp_path / "new.instances.zarr") as ids:
        assert expected.instances is not None
        np.testing.assert_array_equal(new[:], expected.classes)
        np.testing.assert_array_equal(ids[:], expected.instances)
        np.testing.assert_array_equal(new[:] == 0, ids[:] == 0)
        assert (new.dtype, ids.dtype) == (np.uint8, np.uint16)
        assert new.geometry == ids.geometry
        assert new.geometry is not None
        assert (new.geometry.scale_zyx, new.geometry.translation_zyx) == ((5, 5, 5), (20, 0, 40))
    record = zarr.open_group(tmp_path / "new.zarr", mode="r").attrs["vesuvius_relabel"]
    assert record["counts"] == json.loads(json.dumps(expected.report))  # type: ignore[index, call-overload]
    assert "within_4" in printed
    before = files_of(tmp_path)
    assert relabel(classes, tmp_path / "new.zarr", "--instances", instances, box, *CHANGES) == 0
    assert capsys.readouterr().out == printed
    assert files_of(tmp_path) == before, "finished labels are left unchanged"
    assert relabel(classes, tmp_path / "new.zarr", box, *CHANGES[:2], "--seed=3") == 2
    assert relabel(classes, tmp_path / "new.zarr", "--instances", instances, box, *CHANGES[:-1], "--seed=4") == 2
    assert "started with other arguments" in capsys.readouterr().err


def test_an_interrupted_command_resumes_with_the_same_voxels(
    tmp_path: Path, stack: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the instances, at their coarser level, and in the classes, whose name implies both.

    Labels that have changed since then are refused: classes and instances would be of different ones.
    """
    monkeypatch.setattr(relabel_volume, "_CHUNK", 16)
    classes, instances = (ArrayConfig(path=str(path)) for path in stack)
    arguments: dict[str, Any] = {"labels": classes, "instances": instances, "changes": Changes(1, 12)}

    write, left = PartialCopy.write, 0

    def write_some(target: PartialCopy, *arguments: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return write(target, *arguments)

    monkeypatch.setattr(PartialCopy, "write", write_some)
    for count in (3, 10, 14):
        left = count
        with pytest.raises(KeyboardInterrupt):
            relabel_volume.relabel_volume(out=tmp_path / "a.zarr", **arguments)
        assert not (tmp_path / "a.zarr").exists()
    left = 10**6
    assert (tmp_path / "a.instances.zarr").exists()
    chunk = next(file for file in sorted(stack[0].rglob("0*")) if file.is_file())
    written_s = chunk.stat().st_mtime_ns
    os.utime(chunk, ns=(written_s, written_s + 1))
    with pytest.raises(ConfigError, match=r"a\.instances\.zarr was started with other arguments: labels"):
        relabel_volume.relabel_volume(out=tmp_path / "a.zarr", **arguments)
    os.utime(chunk, ns=(written_s, written_s))
    for name in "ab":
        relabel_volume.relabel_volume(out=tmp_path / f"{name}.zarr", **arguments)
    for ending in (".zarr", ".instances.zarr"):
        one, other = (zarr.open_group(tmp_path / f"{name}{ending}", mode="r") for name in "ab")
        for level in "012":
            np.testing.assert_array_equal(one[level][...], other[level][...])  # type: ignore[index]
        assert dict(one.attrs)["vesuvius_relabel"] == dict(other.attrs)["vesuvius_relabel"]
        np.testing.assert_array_equal(one["1"][...], downsample_mode(one["0"][...]))  # type: ignore[index, arg-type]


def test_ctrl_c_names_the_remedy(
    tmp_path: Path, stack: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(relabel_volume, "change_labels", interrupted)
    assert relabel(stack[0], tmp_path / "a.zarr", "--deform=1") == 130
    assert "run the same command again to continue" in capsys.readouterr().err


def test_the_boundaries_of_changed_bodies_are_the_classes(tmp_path: Path) -> None:
    path = write_array(tmp_path / "bodies.zarr", cells(32))
    assert relabel(path, tmp_path / "new.zarr", "--boundary", "--deform=2", "--deform-length=16") == 0
    bodies = open_volume(tmp_path / "new.instances.zarr")[:]
    np.testing.assert_array_equal(open_volume(tmp_path / "new.zarr")[:], boundaries(bodies))
    assert set(np.unique(bodies)) == set(np.unique(cells(32)))


def test_changes_too_small_to_change_a_voxel_are_said(
    tmp_path: Path, stack: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for deform, said in (("1e-9", True), ("1", False)):
        assert relabel(stack[0], tmp_path / f"{deform}.zarr", f"--deform={deform}", "--deform-length=12") == 0
        assert ("no voxel of the labels has changed" in capsys.readouterr().err) == said
    assert relabel(stack[1], tmp_path / "boundaries.zarr", "--boundary") == 0
    assert "no voxel" not in capsys.readouterr().err, "none was to change"


def test_what_cannot_be_changed_is_refused_and_nothing_written(
    tmp_path: Path, stack: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    floats = write_array(tmp_path / "floats.zarr", np.ones((8, 8, 8), np.float32))
    small = write_array(tmp_path / "small.zarr", np.ones((8, 8, 8), np.uint8))
    moved = write_ome(tmp_path / "moved.zarr", {"0": open_volume(stack[1])[:]}, [4.0])
    out = tmp_path / "out.zarr"
    for arguments, message in (
        ((floats, out), "is float32, not labels"),
        ((stack[0], out, "--instances", small), "give instances of the same voxels"),
        ((stack[0], out, "--instances", moved), "give instances of the same voxels"),
        ((stack[0], out, "--within=3"), "no change is asked for"),
        ((stack[0], out, "--instances", stack[1], "--boundary"), "remove one of them"),
        ((stack[0], out, "--box=0:8,0:8,30:40"), "is not inside"),
        ((stack[1], out, "--boundary", "--deform=9", "--deform-length=6"), "would fold"),
        ((stack[1], out, "--boundary", "--deform=1e300"), "--deform 1e+300 is not between 0 and 10000"),
        ((stack[1], out, "--boundary", "--deform=1", "--deform-length=1e-9"), "--deform-length 1e-09 is not between"),
    ):
        assert relabel(*arguments) == 2
        assert message in capsys.readouterr().err
    with monkeypatch.context() as patch:  # before anything is opened
        patch.setattr(relabel_volume, "open_volume", pytest.fail)
        assert relabel(stack[0], out, "--contact", 1) == 2
        assert "add --instances" in capsys.readouterr().err
        assert relabel(stack[1], out, "--boundary", "--thicken=nan") == 2
        assert "--thicken nan is not between" in capsys.readouterr().err
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20))
    assert relabel(stack[0], out, "--deform=1") == 2
    assert "in boxes of up to 22 voxels along each axis with --box" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
