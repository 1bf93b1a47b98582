"""Arrays in the frame of another scan, compared with scipy and with voxels taken at each position."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import textured, write_array, write_ome
from tests.stream.test_stream import open_stream
from tests.support.chunk_server import ChunkServer
from vesuvius.config import ArrayConfig, DataConfig, MaskConfig, VolumeConfig
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.errors import ConfigError, DataError
from vesuvius.generate.volume.inputs import TrainingCondition
from vesuvius.predict.grid import GridLoader
from vesuvius.predict.inputs import Inputs
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.checkpoint.start import _plan_changes
from vesuvius.training.checkpoint.trained import DataFacts, read_facts, trained_volumes, write_facts
from vesuvius.volumes import affine
from vesuvius.volumes.affine import AffineAlignment, as_rows
from vesuvius.volumes.alignment import Alignment, align, log_alignment
from vesuvius.volumes.box import box_at, intersects, shape_of, slices
from vesuvius.volumes.volume import Volume, open_volume

Voxels = np.ndarray[Any, Any]
FLIP = np.eye(4)[[2, 1, 0, 3]]


def turn(degrees: float, axis: int = 0) -> Voxels:
    """A rotation of (z, y, x) about an axis."""
    cos, sin, matrix = math.cos(math.radians(degrees)), math.sin(math.radians(degrees)), np.eye(3)
    others = [each for each in range(3) if each != axis]
    matrix[np.ix_(others, others)] = [[cos, -sin], [sin, cos]]
    return matrix


def centered(linear: Any, volume: Sequence[int], array: Sequence[int]) -> Voxels:
    """[4, 4] from a volume to an array, with their centers at the same place."""
    matrix = np.eye(4)
    matrix[:3, :3] = linear
    matrix[:3, 3] = (np.array(array) - 1) / 2 - matrix[:3, :3] @ (np.array(volume) - 1) / 2
    return matrix


def write_transform(path: Path, matrix: Any, fixed: str = "another", **keys: Any) -> str:
    """Write a matrix for (z, y, x) as villa does, for (x, y, z)."""
    document = {"schema_version": "1.0.0", "fixed_volume": fixed, "fixed_landmarks": [], "moving_landmarks": []}
    document["transformation_matrix"] = (FLIP @ np.array(matrix) @ FLIP)[:3].tolist()
    path.write_text(json.dumps(document | keys))
    return str(path)


def read_by(alignment: AffineAlignment, array: Voxels, box: Any = None) -> Voxels:
    return alignment.read(box or ((0, 0, 0), alignment.volume_zyx), lambda inner, out: array[slices(inner)])


def positions(alignment: AffineAlignment) -> Voxels:
    """Position in the array of each voxel of the volume: [3, Z, Y, X]."""
    matrix = np.array(alignment.rows)
    return np.einsum("ij,jzyx->izyx", matrix[:, :3], np.indices(alignment.volume_zyx)) + matrix[:, 3, None, None, None]


def at_positions(alignment: AffineAlignment, array: Voxels) -> Voxels:
    """The nearest voxel at each position, on a boundary the lower one; `fill` outside."""
    z, y, x = np.ceil(positions(alignment) - 0.5 - 1e-6).astype(int)
    sizes = array.shape
    inside = (z >= 0) & (z < sizes[0]) & (y >= 0) & (y < sizes[1]) & (x >= 0) & (x < sizes[2])
    z, y, x = (index.clip(0, size - 1) for index, size in zip((z, y, x), sizes, strict=True))
    return np.where(inside, array[z, y, x], alignment.fill)


CASES: dict[str, tuple[Any, tuple[int, int, int], tuple[int, int, int]]] = {
    "rotated": (turn(10), (12, 40, 44), (12, 40, 44)),
    "by 90 degrees": (turn(90), (10, 20, 30), (10, 30, 20)),
    "mirrored": (np.diag([1, -1, 1]), (10, 20, 30), (10, 20, 30)),
    "about all axes": (turn(30) @ turn(20, 1) @ turn(50, 2), (30, 36, 40), (40, 36, 30)),
    "sheared": ([[1, 0.1, 0], [0, 1, 0.3], [0.2, 0, 1]], (20, 24, 28), (22, 30, 36)),
    "coarser, by no ratio of integers": (turn(3) @ np.diag([0.47, 0.31, 0.47]), (30, 40, 36), (14, 14, 18)),
    "finer": (2.3 * turn(3), (14, 16, 18), (30, 36, 44)),
    "one plane": (turn(2), (1, 40, 40), (1, 44, 50)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["uint8", "bool", "int32", "float64"])
def test_each_voxel_is_that_at_its_position_in_any_box(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    linear, volume, shape = CASES[name]
    array = (textured(shape) % 2 if dtype == "bool" else textured(shape)).astype(dtype)
    alignment = AffineAlignment(volume, shape, as_rows(centered(linear, volume, shape)), fill=7)
    shown = at_positions(alignment, array)
    whole = read_by(alignment, array)
    assert whole.dtype == array.dtype
    np.testing.assert_array_equal(whole, shown.astype(dtype))
    interpolated = AffineAlignment(volume, shape, alignment.rows, linear=True)
    everything = read_by(interpolated, array)
    rng = np.random.default_rng(0)
    monkeypatch.setattr(affine, "_READ_VOXELS_MAX", 1000)  # in parts
    for _ in range(8):
        start = rng.integers(0, volume)
        box: Any = tuple(start.tolist()), tuple(rng.integers(start + 1, np.array(volume) + 1).tolist())
        np.testing.assert_array_equal(read_by(alignment, array, box), whole[slices(box)])
        np.testing.assert_array_equal(read_by(interpolated, array, box), everything[slices(box)])
    covered = alignment.covered
    there = positions(alignment)[(slice(None), *slices(covered))].reshape(3, -1).T
    assert (there > -0.5).all()
    assert (there <= np.array(shape) - 0.5 + 1e-6).all()
    assert np.prod(shape_of(covered)) > {"about all axes": 0.1}.get(name, 0.6) * np.prod(volume)
    if name in ("by 90 degrees", "mirrored"):
        assert covered == ((0, 0, 0), volume)
        exact = np.rot90(array, -1, (1, 2)) if name == "by 90 degrees" else array[:, ::-1]
        np.testing.assert_array_equal(whole, exact)
        np.testing.assert_array_equal(everything, exact)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("order", [0, 1])
def test_voxels_equal_those_of_scipy(name: str, order: int) -> None:
    ndimage = pytest.importorskip("scipy.ndimage", reason="scipy is not installed")
    linear, volume, shape = CASES[name]
    array, matrix = textured(shape), centered(linear, volume, shape)
    matrix[:3, 3] += 0.013  # no voxel of the volume on a boundary, where scipy rounds up
    alignment = AffineAlignment(volume, shape, as_rows(matrix), linear=bool(order))
    found = read_by(alignment, array)[slices(alignment.covered)]
    shown = ndimage.affine_transform(array.astype(float), matrix, output_shape=volume, order=order, mode="nearest")
    # float32 has 24 bits, and integers are rounded
    np.testing.assert_allclose(found, shown[slices(alignment.covered)], rtol=0, atol=0.5001 * order)
    floats = read_by(alignment, array.astype(np.float32))[slices(alignment.covered)]
    np.testing.assert_allclose(floats, shown[slices(alignment.covered)], rtol=0, atol=1e-3)


def opened(path: Path, shape: Any, scale: Any = 2.4, levels: int = 1, level: int = 0, **keys: Any) -> Volume:
    """A pyramid whose levels show every n-th voxel of a texture."""
    voxels = textured(shape)
    pyramid = {str(n): voxels[:: 2**n, :: 2**n, :: 2**n] for n in range(levels)}
    scales = [[each * 2**n for each in np.broadcast_to(scale, 3)] for n in range(levels)]
    corner = keys.pop("translation", None)
    at = None if corner is None else dict.fromkeys(range(levels), corner)
    write_ome(path, pyramid, scales, at, chunk=16)
    return open_volume(ArrayConfig(path=str(path), level=level, **keys))


SIZES = (24, 40, 44)


def test_fixed_volume_says_which_way_a_transform_leads(tmp_path: Path) -> None:
    """A transform of the volume leads to the labels, as in villa, one into the volume away from them."""
    matrix = centered(0.47 * turn(10), SIZES, (14, 22, 24))
    volume = opened(tmp_path / "scan-7.91um.zarr", SIZES, 2.4)
    there = {
        "other": write_transform(tmp_path / "a.json", matrix),
        "": write_transform(tmp_path / "b.json", matrix, ""),
    }
    inverse = np.linalg.inv(matrix)
    for fixed in (
        "scan-7.91um",
        "scan-7.91um.zarr",
        "s3://bucket/volumes/scan-7.91um.ome.zarr/",
        volume.source.address,
    ):
        there[fixed] = write_transform(tmp_path / f"{len(there)}.json", inverse, fixed)
    found = []
    for number, transform in enumerate(there.values()):
        labels = opened(tmp_path / f"labels{number}.zarr", (14, 22, 24), 2.4 / 0.47, transform=transform)
        found.append(align(volume, labels, "labels"))
    for each in found:
        assert isinstance(each, AffineAlignment)
        np.testing.assert_allclose(each.rows, matrix[:3], atol=1e-9)
    wrong = opened(
        tmp_path / "labels.zarr", (14, 22, 24), 2.4 / 0.47, transform=write_transform(tmp_path / "c", inverse)
    )
    with pytest.raises(
        DataError, match=r"is 2.13 times as long as its voxels by the transform, but 0.47 times by the sc"
    ):
        align(volume, wrong, "labels")


@pytest.mark.parametrize(("of_volume", "of_array"), [(0, 1), (2, 0), (1, 2)])
def test_a_transform_counts_voxels_of_level_0_and_crops_from_their_origin(
    tmp_path: Path, of_volume: int, of_array: int
) -> None:
    """The position in space of each voxel's center, within half a voxel of its level; scales differ along the axes."""
    matrix = centered(turn(10), (32, 40, 44), (32, 40, 44))
    transform = write_transform(tmp_path / "transform.json", matrix)
    scale = (4.8, 2.4, 2.4)
    crop = np.array([8, 4, 12])
    opened(tmp_path / "v", (32, 40, 44), scale, 3, translation=(crop * scale).tolist())
    opened(tmp_path / "a", (32, 40, 44), scale, 3)
    volume = open_volume(ArrayConfig(path=str(tmp_path / "v"), level=of_volume))
    array = open_volume(ArrayConfig(path=str(tmp_path / "a"), level=of_array, transform=transform))
    found = align(volume, array, "labels")
    assert isinstance(found, AffineAlignment)
    step, coarse = 2**of_volume, 2**of_array
    centers = (np.indices(volume.shape_zyx).reshape(3, -1).T + 0.5) * step - 0.5 + crop
    there = (np.hstack([centers, np.ones((len(centers), 1))]) @ matrix.T)[:, :3]
    expected = (there + 0.5) / coarse - 0.5
    np.testing.assert_allclose(positions(found).reshape(3, -1).T, expected, atol=1e-9)


PLAIN: dict[str, tuple[Any, Any, Any, Any]] = {  # scale of the volume's voxels in the array, its first voxel, expected
    "a crop": ((1, 1, 1), (-3, 0, -5), (1, 1, 1), (3, 0, 5)),
    "half the resolution": ((0.5, 0.5, 0.5), (-0.25, -0.25, -0.25), (2, 2, 2), (0, 0, 0)),
    "finer along two axes": ((1, 3, 3), (2, 1, 1), (1, "1/3", "1/3"), (-2, 0, 0)),
}


@pytest.mark.parametrize("case", PLAIN)
def test_translations_and_scales_are_those_of_ome_metadata(tmp_path: Path, case: str) -> None:
    scales, shift, factors, offsets = PLAIN[case]
    matrix = np.diag([*map(float, scales), 1.0])
    matrix[:3, 3] = shift
    volume = opened(tmp_path / "v", SIZES, 2.4)
    array = opened(tmp_path / "a", (60, 60, 60), [2.4 / each for each in scales])
    array = open_volume(ArrayConfig(path=str(tmp_path / "a"), transform=write_transform(tmp_path / "t.json", matrix)))
    found = align(volume, array, "labels")
    assert isinstance(found, Alignment)
    assert tuple(map(str, found.factors)) == tuple(map(str, factors))
    assert found.offsets == offsets


BROKEN: dict[str, tuple[Any, str]] = {
    "singular": ({"transformation_matrix": [[1, 0, 0, 0], [2, 0, 0, 0], [0, 0, 1, 0]]}, "can be inverted"),
    "NaN": ({"transformation_matrix": [[math.nan, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]}, "3 x 4 finite numbers"),
    "2 rows": ({"transformation_matrix": [[1, 0, 0, 0], [0, 1, 0, 0]]}, "3 x 4 finite numbers"),
    "3 columns": ({"transformation_matrix": [[1, 0, 0], [0, 1, 0], [0, 0, 1]]}, "3 x 4 finite numbers"),
    "no matrix": ({"transformation_matrix": None}, "3 x 4 finite numbers"),
    "words": ({"transformation_matrix": [["a", 0, 0, 0]] * 3}, "3 x 4 finite numbers"),
    "another version": ({"schema_version": "2.0.0"}, "schema_version 1.0.0"),
}


def test_transforms_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    volume = opened(tmp_path / "v", SIZES)
    for number, (name, (keys, message)) in enumerate(BROKEN.items()):
        path = write_transform(tmp_path / f"{number}.json", np.eye(4), **keys)
        with pytest.raises(DataError, match=rf"{number}.json is not usable: .*{message}"):
            align(volume, opened(tmp_path / f"a{number}", SIZES, transform=path), name)
    (tmp_path / "page.json").write_text("<html>")
    for name, message in (
        ("page.json", "is an HTML page"),
        ("none.json", "none.json does not exist"),
        ("v", "is a fold"),
    ):
        with pytest.raises(DataError, match=message):
            align(volume, opened(tmp_path / f"a{name}", SIZES, transform=str(tmp_path / name)), "labels")
    elsewhere = np.eye(4)
    elsewhere[:3, 3] = 0.5, 100, 0
    path = write_transform(tmp_path / "far.json", elsewhere)
    with pytest.raises(
        DataError, match=r"they do not overlap; it has \(24, 40, 44\) voxels of 2.4.*; correct .*/far.json$"
    ):
        align(volume, opened(tmp_path / "far", SIZES, transform=path), "labels")
    with pytest.raises(ConfigError, match=r"interpolation of .* has no effect without a transform"):
        ArrayConfig(path="a", interpolation="linear")
    with pytest.raises(ConfigError, match=r"transform of .* has no effect: it places another array"):
        VolumeConfig(path="v", transform=path)


def test_a_transform_is_read_by_address_and_logged_with_the_share(
    tmp_path: Path, server: ChunkServer, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(write_transform(tmp_path / "transform.json", centered(turn(10), SIZES, SIZES)))
    volume = opened(tmp_path / "v", SIZES)
    array = opened(tmp_path / "a", SIZES, transform=f"{server.url_of(path)}?token=SECRET")
    with caplog.at_level("INFO"):
        found = log_alignment(volume, array, "the condition")
    (record,) = [record.message for record in caplog.records if record.message.startswith("Aligned")]
    assert f"({np.prod(shape_of(found.covered)) / np.prod(SIZES):.0%}); patches come from the shared part" in record
    assert "resampled to the nearest" in record
    blank = path.rename(tmp_path / "my #1.json")
    named = opened(tmp_path / "b", SIZES, transform=server.url_of(blank).replace(" ", "%20").replace("#", "%23"))
    assert align(volume, named, "labels") == found


# ---- in a stream


def config_of(tmp_path: Path, labels: Voxels, matrix: Any, **keys: Any) -> DataConfig:
    volume, array = tmp_path / "v.zarr", tmp_path / "labels.zarr"
    if not volume.exists():
        write_array(volume, textured((48, 96, 96)))
        write_array(array, labels)
    spec = ArrayConfig(path=str(array), transform=write_transform(tmp_path / "t.json", matrix), **keys.pop("array", {}))
    volumes = VolumeConfig(path=str(volume), **{keys.pop("role", "condition"): spec}, **keys.pop("volume", {}))
    settings: dict[str, Any] = {"patch_size": (8, 16, 16), "patches_per_region": 4, "validation": {"fraction": 0}}
    return DataConfig(volumes=(volumes,), **settings | keys)


def alignment_of(data: PreparedData, position: int = 1) -> AffineAlignment:
    found = data.array(0, position)[1]
    assert isinstance(found, AffineAlignment)
    return found


LABELS = textured((60, 80, 90), seed=1)
MATRIX = centered(turn(10) @ turn(5, 1), (48, 96, 96), LABELS.shape)


def test_patches_have_the_labels_at_their_position_and_channels_are_interpolated(tmp_path: Path) -> None:
    for role, kind in (("condition", False), ("channels", True)):
        config = config_of(tmp_path, LABELS, MATRIX)
        spec = config.volumes[0].condition
        of_role = {"condition": None} | {role: (spec,) if role == "channels" else spec}
        config = DataConfig(**dict(config) | {"volumes": (VolumeConfig(**dict(config.volumes[0]) | of_role),)})
        data = prepare_data(0, config)
        alignment = alignment_of(data)
        assert alignment.linear == kind
        shown = read_by(alignment, LABELS)
        (split,) = data.splits
        assert split.train == alignment.covered
        with open_stream(data.job) as stream:
            for batch in (next(stream) for _ in range(8)):
                for patch, sample in zip(batch.arrays[1], batch.samples, strict=True):
                    np.testing.assert_array_equal(patch, shown[slices(sample.box)])


@pytest.mark.parametrize("role", ["condition", "channels", "more_labels"])
def test_a_state_is_not_of_a_plan_with_another_matrix(tmp_path: Path, role: str) -> None:
    """Although patches come from the same box; also of a translation, which is exact.  A copy of the file may move."""
    plans, boxes, first = [], [], np.eye(4)
    first[:3, 3] = -2
    turned = [MATRIX, MATRIX + np.eye(4, k=3) * 1e-4, MATRIX]
    for number, matrix in enumerate([*turned, first, first + np.eye(4, k=3)]):
        config = config_of(tmp_path, LABELS, MATRIX)
        (volume,) = config.volumes
        assert volume.condition is not None
        transform = write_transform(tmp_path / f"{number}.json", matrix)
        placed = ArrayConfig(path=volume.condition.path, transform=transform)
        roles: Any = {"condition": volume.path, role: placed if role == "condition" else (placed,)}
        config = DataConfig(**dict(config) | {"volumes": (VolumeConfig(path=volume.path, **roles),)})
        data = prepare_data(0, config)
        plans.append(data.plan)
        boxes.append(data.within)
    hashes = [plan.hash for plan in plans]
    assert hashes[0] == hashes[2]
    assert len(set(hashes)) == 4
    assert boxes[0] == boxes[1]
    (change,) = _plan_changes(plans[0].describe(), plans[1].describe())
    assert re.fullmatch(r"plan.volumes\[0\].transforms: was .{18}, is .{18} \(a transform.json of .*\)", change)


def test_damage_does_not_depend_on_what_is_known_of_it(tmp_path: Path) -> None:
    """A reader that knows a damaged chunk replaces the same regions as one that meets it."""
    config = config_of(tmp_path, LABELS, MATRIX, max_quarantined=500)
    data = prepare_data(0, config)
    (tmp_path / "labels.zarr/1/1/1").write_bytes(b"torn")
    alignment, chunk = alignment_of(data), ((32, 32, 32), (60, 64, 64))

    def fails(region: Any) -> bool:
        return intersects(alignment.array_box(region), chunk)

    def box_of(index: int) -> Any:
        samples = (data.plan.sample(index, attempt) for attempt in range(100))
        return next(sample.box for sample in samples if not fails(sample.region))

    replaced = [index for index in range(96) if fails(data.plan.sample(index).region)]
    assert 8 < len(replaced) < 88
    shown, taken = read_by(alignment, LABELS), []
    with open_stream(data.job) as stream:
        taken += [next(stream) for _ in range(24)]
        for batch in taken:
            assert batch.condition is not None
            for condition, index in zip(batch.condition, batch.indices, strict=True):
                np.testing.assert_array_equal(condition, shown[slices(box_of(int(index)))])
        first = [(batch.patches.copy(), batch.indices.copy()) for batch in taken[-1:]]
        known = list(stream.quarantined)
    assert known
    with open_stream(data.job, quarantined=known) as stream:
        again = [next(stream) for _ in range(24)][-1]
        np.testing.assert_array_equal(again.patches, first[0][0])


@pytest.mark.parametrize("scale", [1, 3])
def test_a_mask_is_counted_where_it_maps(tmp_path: Path, scale: int) -> None:
    """Patches hold enough of it; of a mask coarser than the volume, to within one of its voxels."""
    mask = (np.indices((72 // scale, 110 // scale, 110 // scale)).sum(0) * scale // 40 % 2).astype(np.uint8) * 5
    matrix = centered(turn(10) / scale, (48, 96, 96), mask.shape)
    spec = MaskConfig(path=str(tmp_path / "labels.zarr"), transform=write_transform(tmp_path / "t.json", matrix))
    write_array(tmp_path / "labels.zarr", mask)
    volume = VolumeConfig(path=str(write_array(tmp_path / "v.zarr", textured((48, 96, 96)))), mask=spec)
    config = DataConfig(
        volumes=(volume,),
        patch_size=(8, 16, 16),
        min_foreground=0.7,
        validation={"fraction": 0},  # type: ignore[arg-type]
    )
    data = prepare_data(0, config)
    alignment = AffineAlignment((48, 96, 96), mask.shape, as_rows(matrix))
    shown, foreground = read_by(alignment, mask) != 0, data.plan.volumes[0].foreground
    assert foreground is not None
    assert foreground.map.voxels is not None
    assert data.within == (alignment.covered,)
    rng = np.random.default_rng(0)
    for start in rng.integers(*alignment.covered, size=(200, 3)):
        box = box_at(tuple(start.tolist()), (8, 16, 16))
        if all(hi <= size for hi, size in zip(box[1], (48, 96, 96), strict=True)):
            counted, there = foreground.map.voxels.count(box), int(shown[slices(box)].sum())
            assert abs(counted - there) <= (0 if scale == 1 else 500)
    other = np.array(matrix)
    other[1, 3] += 2
    write_transform(tmp_path / "t.json", other)
    assert prepare_data(0, config).plan.hash != data.plan.hash


def test_training_facts_keep_the_transform_for_sampling(tmp_path: Path) -> None:
    config = config_of(tmp_path, LABELS % 2, MATRIX, condition_classes=2)
    data = prepare_data(0, config)
    spectrum = Spectrum.of(torch.rand(2, 8, 16, 16))
    facts = DataFacts(trained_volumes(data), data.intensity_ranges(config), spectrum)
    patches = [data.read_patch(0, box_at(data.plan.sample(index).start_zyx, (8, 16, 16)), 1) for index in range(3)]
    (tmp_path / "t.json").unlink()  # sampling needs the condition alone
    write_facts(tmp_path / "facts.pt", config, facts)
    stored = read_facts(tmp_path / "facts.pt", config)
    assert stored is not None
    assert stored.volumes == facts.volumes
    with TrainingCondition(config, stored, 0, 0) as conditions:
        for index, patch in enumerate(patches):
            found = conditions.read("condition", box_at(data.plan.sample(index).start_zyx, (8, 16, 16)))
            np.testing.assert_array_equal(found, patch)
    state = facts.state_dict()
    del state["volumes"][0]["condition_transform"]  # as of an earlier version
    assert DataFacts.from_state(state, tmp_path).volumes[0].condition_transform is None
    write_transform(tmp_path / "t.json", MATRIX + np.eye(4, k=3)[0] * 1e-4)
    assert trained_volumes(prepare_data(0, config)) != facts.volumes


def test_a_grid_reads_labels_at_their_position(tmp_path: Path) -> None:
    config = config_of(tmp_path, LABELS, MATRIX)
    (volume,) = config.volumes
    alignment = alignment_of(prepare_data(0, config))
    shown = read_by(alignment, LABELS)
    loader = GridLoader(volume.path, patch_size=(16, 32, 32), labels=volume.condition, batch_size=3)
    assert loader.box == alignment.covered
    for batch in loader:
        assert batch.label is not None
        for label, box in zip(batch.label, batch.boxes, strict=True):
            np.testing.assert_array_equal(label.reshape(16, 32, 32), shown[slices(box)])


def test_predictions_refuse_transforms(tmp_path: Path) -> None:
    """They would be drawn as if they had none."""
    (volume,) = config_of(tmp_path, LABELS, MATRIX).volumes
    assert volume.condition is not None
    for channels, mask in (((volume, volume.condition), None), ((volume,), volume.condition)):
        with pytest.raises(ConfigError, match="A channel or mask has a transform, which only loaders apply"):
            Inputs(channels, (None, None), mask, None, tmp_path)
