"""The loader against numpy: the patches that the plan names, as tensors, in one order whoever reads them."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import vesuvius
from tests.conftest import textured, write_array, write_ome
from vesuvius import ArrayConfig, ConfigError, DataConfig, PatchBatch, PatchLoader, PatchStream, VolumeConfig
from vesuvius.config import AugmentConfig, ConditionConfig, ValidationConfig
from vesuvius.plan.plan import Sample
from vesuvius.stream.feeder import reusable_arrays
from vesuvius.stream.options import StreamOptions, is_ray_connected
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.volumes.box import slices

SHAPE = (64, 96, 96)
PATCH = (8, 16, 16)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return write_array(tmp_path / "scan.zarr", textured(SHAPE))


def load(*volumes: Any, **options: Any) -> PatchLoader:
    given: Any = volumes if len(volumes) > 1 else volumes[0]
    return PatchLoader(given, **{"batch_size": 4, "patch_size": PATCH, "num_workers": 0, "device": "cpu"} | options)


def indices(batches: Iterable[PatchBatch]) -> list[int]:
    return [sample.index for batch in batches for sample in batch.samples]


def cut(voxels: np.ndarray[Any, Any], sample: Sample) -> np.ndarray[Any, Any]:
    """The patch of a sample, mirrored and turned, by numpy alone."""
    axes = [axis for axis, flip in enumerate(sample.augmentation.flip_zyx) if flip]
    return np.rot90(np.flip(voxels[slices(sample.box)], axes), sample.augmentation.num_rot90, (1, 2))


def same(one: Iterable[PatchBatch], other: Iterable[PatchBatch]) -> int:
    """Compares two loops batch by batch; returns how many there were."""
    count = 0
    for a, b in zip(one, other, strict=True):
        assert a.samples == b.samples
        assert a.image.dtype == b.image.dtype
        assert torch.equal(a.image, b.image)
        assert (a.label is None) == (b.label is None)
        assert a.label is None or b.label is None or torch.equal(a.label, b.label)
        count += 1
    return count


# ---- what a batch holds


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtypes", [("uint8", "uint16"), ("int8", "uint8", "float32"), ("bool", "int16")])
@pytest.mark.parametrize("resident", [False, True])
def test_volumes_of_any_dtypes_mix_and_each_has_its_own_values(
    tmp_path: Path, dtypes: tuple[str, ...], resident: bool
) -> None:
    scans = [
        textured(SHAPE, seed).astype(dtype) * np.dtype(dtype).type(np.dtype(dtype).itemsize)
        for seed, dtype in enumerate(dtypes)
    ]
    paths = [write_array(tmp_path / f"{number}.zarr", scan) for number, scan in enumerate(scans)]
    marked = [write_array(tmp_path / f"{number}.labels.zarr", np.abs(scan // 2)) for number, scan in enumerate(scans)]
    if "bool" in dtypes or "float32" in dtypes:
        marked = []
    with load(*paths, labels=marked or None, batches_per_epoch=12, cache_in_memory=resident) as mixed:
        batches = list(mixed)
    assert {sample.volume for batch in batches for sample in batch.samples} == {*range(len(dtypes))}
    for batch in batches:
        for number, sample in enumerate(batch.samples):
            each, voxels = mixed.intensity_ranges[sample.volume], cut(scans[sample.volume], sample).astype(np.float64)
            wanted = (voxels - each.low) / (each.high / 2 - each.low / 2) - 1
            np.testing.assert_allclose(batch.image[number, 0].numpy(), wanted, atol=1e-5)
            if batch.label is not None:
                np.testing.assert_array_equal(batch.label[number, 0].numpy(), cut(scans[sample.volume], sample) // 2)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("stored", "given", "expected"),
    [
        ("bool", None, torch.int64),
        ("uint16", None, torch.int64),
        ("int8", None, torch.int64),
        ("uint64", None, torch.int64),
        ("float32", None, torch.float32),
        ("uint16", torch.uint16, torch.uint16),
        ("int32", "uint8", torch.uint8),
        ("uint8", np.float32, torch.float32),
        ("float64", torch.int32, torch.int32),
        ("uint8", torch.bfloat16, torch.bfloat16),
    ],
)
def test_labels_have_a_dtype_that_losses_take_and_their_own_values(
    tmp_path: Path, volume: Path, stored: str, given: Any, expected: torch.dtype
) -> None:
    labels = (textured(SHAPE) % 3).astype(stored)
    if stored == "int8":
        labels[labels == 2] = -100  # what torch's losses ignore
    with load(volume, labels=write_array(tmp_path / "l.zarr", labels), label_dtype=given) as loader:
        batch = next(iter(loader))
    assert batch.label is not None
    assert batch.label.dtype == expected
    for label, sample in zip(batch.label, batch.samples, strict=True):
        np.testing.assert_array_equal(label[0].double().numpy(), cut(labels, sample).astype(np.float64))
    if expected == torch.int64:
        torch.nn.functional.cross_entropy(torch.zeros(4, 3, *PATCH), batch.label[:, 0])


def test_labels_that_a_dtype_cannot_hold_or_that_do_not_match_are_refused(tmp_path: Path, volume: Path) -> None:
    arrays = {
        "huge": np.full(SHAPE, 2**64 - 1, np.uint64),
        "half": np.full(SHAPE, 0.5, np.float32),
        "many": np.full(SHAPE, 300, np.int32),
        "signed": np.full(SHAPE, -1, np.int64),
        "ignore": np.full(SHAPE, 65535, np.uint16),
    }
    paths = {name: write_array(tmp_path / f"{name}.zarr", array) for name, array in arrays.items()}
    for name, dtype in (("huge", None), ("half", "int64"), ("many", "uint8"), ("ignore", "float16")):
        with (
            pytest.raises(vesuvius.DataError, match="do not fit label_dtype"),
            load(volume, labels=paths[name], label_dtype=dtype) as loader,
        ):
            next(iter(loader))
    for pair in (("huge", "signed"), ("half", "many")):
        with pytest.raises(vesuvius.DataError, match=r"No integer dtype holds all labels.*convert them to one dtype"):
            load(volume, volume, labels=[paths[name] for name in pair])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("scale", "units", "turns"),
    [
        ((4, 2, 2), ("micrometer",) * 3, True),
        ((2, 2, 2.0000001), (None,) * 3, True),
        ((2, 4, 2), ("micrometer",) * 3, False),
        ((1, 4, 2), (None,) * 3, False),
        ((2, 2, 2000), ("um", "um", "angstrom"), False),
        ((2, 1, 1000), ("um", "um", "nm"), True),
        ((1, 2, 3), ("um", "um", None), True),  # unknown
    ],
)
def test_patches_turn_only_between_axes_of_equal_voxel_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scale: Any, units: Any, turns: bool
) -> None:
    group = zarr.create_group(tmp_path / "v.zarr", zarr_format=2)
    axes = [
        {"name": name, "type": "space"} | ({"unit": unit} if unit else {})
        for name, unit in zip("zyx", units, strict=True)
    ]
    transforms = [{"type": "scale", "scale": list(scale)}]
    datasets = [{"path": "0", "coordinateTransformations": transforms}]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]
    write_array(tmp_path / "v.zarr/0", textured(SHAPE))
    with caplog.at_level(logging.INFO, "vesuvius"), load(tmp_path / "v.zarr", normalize=False) as loader:
        found = {sample.augmentation.num_rot90 for batch in islice(loader, 20) for sample in batch.samples}
    assert found == ({0, 1, 2, 3} if turns else {0})
    assert ("not square in y and x" in caplog.text) != turns
    asked = DataConfig(
        volumes=[VolumeConfig(path=tmp_path / "v.zarr")], patch_size=PATCH, augment=AugmentConfig(rot90=True)
    )
    prepared = prepare_data(0, asked)
    assert prepared.job.data.augment.rot90 == prepared.plan.augment.rot90 == turns
    assert any(record.levelname == "WARNING" for record in caplog.records) != turns


def test_patches_that_are_not_square_are_mirrored_but_not_rotated(volume: Path) -> None:
    with load(volume, patch_size=[8, 16, 24], normalize=False) as loader:
        symmetries = [sample.augmentation for batch in islice(loader, 16) for sample in batch.samples]
    assert {symmetry.num_rot90 for symmetry in symmetries} == {0}
    assert len(set(symmetries)) == 8


def test_the_validation_slab_is_held_out(volume: Path) -> None:
    with load(volume, validation_fraction=0.2) as loader:
        (box,) = loader.validation_boxes
        assert box is not None
        held_out = np.zeros(SHAPE, bool)
        held_out[slices(box)] = True
        assert 0.15 < held_out.mean() < 0.3
        assert not any(held_out[slices(s.box)].any() for batch in islice(loader, 60) for s in batch.samples)
    with load(volume) as loader:
        assert loader.validation_boxes == (None,)


@pytest.mark.long
def test_a_weighted_second_entry_oversamples_ink(tmp_path: Path) -> None:
    """One volume twice: the second entry's patches all hold ink, and those of the first come from everywhere."""
    scan, ink = write_array(tmp_path / "scan.zarr", textured(SHAPE)), np.zeros(SHAPE, np.uint8)
    ink[40:44, 48:60, 48:60] = 1  # on the grid of the map, whose cells are a quarter of a patch
    mask = vesuvius.ArrayConfig(path=str(write_array(tmp_path / "ink.zarr", ink)))
    everywhere = VolumeConfig(path=str(scan), weight=2)
    with_ink = VolumeConfig(path=str(scan), mask=mask, min_foreground=0.01)
    with load(everywhere, with_ink) as loader:
        samples = [sample for batch in islice(loader, 300) for sample in batch.samples]
    touching = [ink[slices(sample.box)].any() for sample in samples]
    number = np.array([sample.volume for sample in samples])
    assert all(np.array(touching)[number == 1])
    assert not all(np.array(touching)[number == 0])
    assert number.mean() == pytest.approx(1 / 3, abs=0.05)
    starts = np.array([sample.start_zyx for sample in samples])[number == 0]
    assert (starts.max(0) - starts.min(0) > 0.8 * (np.array(SHAPE) - PATCH)).all()


def test_a_volume_listed_twice_has_one_intensity_range(tmp_path: Path) -> None:
    """A voxel has one value, from whichever entry its patch comes, and for a `GridLoader` too."""
    bright = np.zeros(SHAPE, np.uint8)
    bright[:, SHAPE[1] // 2 :] = 1
    scan = str(write_array(tmp_path / "scan.zarr", textured(SHAPE) // 4 + bright * 150))
    masked = VolumeConfig(path=scan, mask=write_array(tmp_path / "mask.zarr", bright), min_foreground=0.9)
    with load(scan) as alone, load([scan, masked], normalize=True, augment=False) as both:
        assert both.intensity_ranges == 2 * alone.intensity_ranges
        samples = {sample.volume: (batch, n) for batch in islice(both, 20) for n, sample in enumerate(batch.samples)}
        assert samples.keys() == {0, 1}
        for batch, n in samples.values():
            (found,) = vesuvius.GridLoader(
                scan, patch_size=PATCH, box=batch.samples[n].box, normalize=both, device="cpu"
            )
            assert torch.equal(found.image[0], batch.image[n])


# ---- order


def test_the_loader_has_the_order_of_a_stream_with_the_same_config(volume: Path, tmp_path: Path) -> None:
    data = DataConfig(
        volumes=(VolumeConfig(path=str(volume)),),
        patch_size=PATCH,
        augment=AugmentConfig(rot90=False),
        validation=ValidationConfig(fraction=0.1),
    )
    (tmp_path / "run.yaml").write_text(
        f"name: x\nseed: 3\ndata:\n  volumes: [{{path: {volume}}}]\n  patch_size: [8, 16, 16]\n"
        "  augment: {rot90: false}\n  validation: {fraction: 0.1}\n"
    )
    with (
        PatchStream(prepare_data(3, data).job, StreamOptions(4, num_workers=0)) as stream,
        PatchLoader(data, batch_size=4, num_workers=0, seed=3, device="cpu", normalize=False) as of_config,
        PatchLoader(tmp_path / "run.yaml", batch_size=4, num_workers=0, device="cpu", normalize=False) as of_file,
    ):
        for expected, batch, other in islice(zip(stream, of_config, of_file, strict=True), 12):
            assert batch.samples == other.samples == expected.samples
            raw = [
                cut(patch_as_volume(patch, sample), sample)
                for patch, sample in zip(expected.patches, batch.samples, strict=True)
            ]
            np.testing.assert_array_equal(batch.image[:, 0].numpy(), raw)
            assert torch.equal(batch.image, other.image)


def patch_as_volume(patch: np.ndarray[Any, Any], sample: Sample) -> np.ndarray[Any, Any]:
    """A volume that holds the patch at the sample's place, so that `cut` applies its symmetry."""
    whole = np.zeros(SHAPE, patch.dtype)
    whole[slices(sample.box)] = patch
    return whole


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_state_continues_at_the_next_batch_of_its_epoch(volume: Path, workers: int) -> None:
    with load(volume, batches_per_epoch=6) as whole:
        first, second = [list(whole) for _ in range(2)]
        assert indices(first + second) == list(range(48))
    with load(volume, batches_per_epoch=6) as loader:
        assert indices(islice(loader, 4)) == list(range(16))
        state = loader.state_dict()
    with load(volume, batches_per_epoch=6, num_workers=workers, processes=workers > 0, prefetch_factor=3) as other:
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert same(other, first[4:]) == 2
        assert same(other, second) == 6
        other.load_state_dict(state)  # also while it runs
        assert same(other, first[4:]) == 2
        at_the_end = other.state_dict()
    with load(volume, batches_per_epoch=6) as third:
        third.load_state_dict(at_the_end)
        assert same(third, second) == 6


def test_ranks_share_the_order_and_their_state(volume: Path) -> None:
    with load(volume, batch_size=8, batches_per_epoch=4) as alone:
        expected = indices(alone)
        after_two = alone.state_dict() | {"sample_index": 16, "in_epoch": 16}
    places: list[list[int]] = []
    for rank in range(2):
        with load(volume, rank=rank, world_size=2, batches_per_epoch=4) as loader:
            places.append(indices(islice(loader, 2)))
            assert loader.state_dict() == after_two
            places.append(indices(loader))
    assert sorted(places[0] + places[2]) == expected[:16]
    assert all(index % 2 == 1 for index in places[2] + places[3])
    assert len(places[1]) == 16, "a loop that was left is followed by a whole epoch"


@pytest.mark.long
def test_a_state_continues_with_another_batch_size_or_length(volume: Path) -> None:
    with load(volume, batches_per_epoch=6) as loader:
        list(islice(loader, 3))
        state = loader.state_dict()
    for options, batches in (
        ({"batches_per_epoch": 6, "batch_size": 8}, [5, 6]),  # 36 samples more of 48, so the last batch reaches beyond
        ({"batches_per_epoch": 2}, [2, 2]),
        ({"batches_per_epoch": 12, "batch_size": 2}, [6, 12]),
    ):
        with load(volume, **options) as other:
            other.load_state_dict(state)
            for count in batches:
                begin = other.state_dict()["sample_index"]
                size = int(options.get("batch_size", 4))
                assert indices(other) == list(range(begin, begin + count * size))
                assert other.state_dict()["in_epoch"] == 0
    with (
        load(volume, batches_per_epoch=6) as loader,
        pytest.raises(ConfigError, match="in_epoch of a state '12' is not"),
    ):
        loader.load_state_dict(state | {"in_epoch": "12"})


def test_a_loader_ends_after_its_epochs(volume: Path) -> None:
    with load(volume, batches_per_epoch=3, epochs=2) as loader:
        assert len(loader) == 3
        assert [indices(loader) for _ in range(3)] == [list(range(12)), list(range(12, 24)), []]
    with load(volume) as loader, pytest.raises(TypeError, match="endless"):
        len(loader)


def test_memory_is_reused_only_after_its_batch_is_released(volume: Path) -> None:
    with load(volume, normalize=False, augment=False) as loader:
        held = [(batch.image[1:, 0, 2:], batch.samples[1:]) for batch in islice(loader, 20)]
    for images, samples in held:
        for image, sample in zip(images, samples, strict=True):
            np.testing.assert_array_equal(image.numpy(), textured(SHAPE)[slices(sample.box)][2:])
    arrays = reusable_arrays((4,), np.dtype(np.uint8), kept=2)
    first, second, third = [next(arrays) for _ in range(3)]
    kept = id(first), id(second)
    view = memoryview(first[1:])
    del first, second, third
    assert id(next(arrays)) == kept[1]
    del view
    assert id(next(arrays)) == kept[0]


def test_a_resident_copy_does_not_change_batches(volume: Path) -> None:
    with (
        load(volume, batches_per_epoch=200) as plain,
        load(volume, batches_per_epoch=200, cache_in_memory=True) as kept,
    ):
        assert same(islice(plain, 200), islice(kept, 200)) == 200
        assert kept.stream.has_resident


@pytest.mark.long
def test_two_loaders_read_concurrently(volume: Path) -> None:
    """Ray Data's settings are one for all threads: one loader's executions must not run by the other's."""
    options: dict[str, Any] = {"num_workers": 1, "processes": True, "normalize": False, "batches_per_epoch": 100}
    with load(volume, seed=1, batch_size=8, **options) as train, load(volume, seed=2, **options) as validation:
        pairs = list(zip(train, validation, strict=True))
        assert indices(batch for batch, _ in pairs) == list(range(800))
        assert indices(batch for _, batch in pairs) == list(range(400))
        train.close()
        assert indices(islice(validation, 100)) == list(range(400, 800)), "whoever started Ray"


def test_ray_counts_as_disconnected_while_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert not is_ray_connected()


@pytest.mark.long
def test_arguments_accept_scalars_and_arrays_of_numpy_and_torch(volume: Path) -> None:
    """And the state is plain data all the same."""
    raw: Any = {"normalize": np.False_, "patch_size": torch.tensor(PATCH), "cache_in_memory": np.True_}
    raw |= {"batches_per_epoch": 200}
    with load(volume, **raw) as loader:
        assert next(iter(loader)).image.dtype == torch.uint8
        assert loader.stream.has_resident
    numpys: Any = {
        "patch_size": np.array(PATCH),
        "normalize": [20, 220],
        "seed": np.int64(3),
        "batch_size": torch.tensor(4),
        "batches_per_epoch": np.int64(3),
        "rank": np.int64(0),
        "world_size": np.int64(1),
    }
    with load(volume, **numpys) as loader, load(volume, normalize=(20, 220), seed=3, batches_per_epoch=3) as plain:
        assert same(islice(loader, 2), islice(plain, 2)) == 2
        state = json.loads(json.dumps(loader.state_dict()))
        assert state == plain.state_dict()


# ---- in a DataLoader


def test_a_data_loader_without_workers_yields_the_same_batches(volume: Path) -> None:
    with load(volume, batches_per_epoch=3) as loader, load(volume, batches_per_epoch=3) as other:
        assert same(DataLoader(loader, batch_size=None), other) == 3
        assert len(DataLoader(loader, batch_size=None)) == 3
        for how in ("fork", "spawn"):
            with pytest.raises(ConfigError, match=r"set num_workers=0 and PatchLoader\(num_workers"):
                next(iter(DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context=how)))


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": []}, "labels has 0 entries for 1 volumes"),
        ({"rank": 1}, "rank=1 and world_size=None are incomplete"),
        ({"rank": 2, "world_size": 2}, "rank 2 does not exist with world_size=2"),
        ({"rank": "0", "world_size": "2"}, "rank '0' is not an integer"),  # as the environment has them
        ({"epochs": 2}, "epochs=2 needs the length"),
        ({"batches_per_epoch": 0}, "batches_per_epoch 0 is not an integer of at least 1"),
        ({"batches_per_epoch": 2.5}, "batches_per_epoch 2.5 is not"),
        ({"seed": -1}, "seed -1 is not"),
        ({"patch_size": (8, 16)}, r"patch_size.2: Field required"),
        ({"patch_size": 16}, "patch_size: Input should be"),
        ({"patch_size": (8, 16, 16.5)}, "patch_size.2: Input should be a valid integer"),
        ({"normalize": "minmax"}, "normalize 'minmax' is not valid"),
        ({"normalize": (0, 1, 2)}, r"normalize \(0, 1, 2\) is not valid"),
        ({"labels": [None]}, "volumes without labels need a loader of their own"),
        ({"cache_in_memory": "yes"}, "cache_in_memory 'yes' is not valid"),
        ({"batches_per_epoch": torch.tensor(2.0)}, r"batches_per_epoch tensor\(2.\) is not"),
        ({"label_dtype": "int64"}, "label_dtype=int64 has no effect without labels"),
        ({"device": "gpu"}, "torch does not recognize device 'gpu'"),
        ({"device": "meta"}, r"device 'meta' is neither .*batch.to\('meta'\)"),
        ({"device": f"cuda:{torch.cuda.device_count()}"}, r"device 'cuda:\d+' does not exist"),
        ({"batch_size": 0}, "batch_size 0 is not"),
        ({"normalize": (3, 3)}, "low"),
        ({"augment": True, "patch_size": (8, 16, 16), "min_foreground": 2.0}, "min_foreground"),
    ],
)
def test_invalid_arguments_are_refused(volume: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(volume, **options)


@pytest.mark.parametrize("kind", ["numpy", "zarr", "volume"])
def test_an_array_in_place_of_its_path_is_refused_in_one_line(volume: Path, kind: str) -> None:
    array: Any = {"numpy": np.zeros((40, 40, 40)), "zarr": zarr.open(volume), "volume": vesuvius.open_volume(volume)}
    calls: dict[str, Callable[[Any], Any]] = {
        "volumes": lambda given: load([volume, given]),
        "labels": lambda given: load(volume, labels=[(given, volume)]),
        "mask": lambda given: load(volume, mask=given),
        "volume": lambda given: vesuvius.GridLoader(given, patch_size=(8, 16, 16)),
    }
    for argument, call in calls.items():
        with pytest.raises(
            ConfigError, match=rf"^{argument}: .* \(\w+\) is not a path or config; pass the path [^\n]*$"
        ):
            call(array[kind])


def test_a_data_section_cannot_be_combined_with_sampling_arguments(volume: Path) -> None:
    data = DataConfig(volumes=(VolumeConfig(path=str(volume)),), patch_size=PATCH)
    with pytest.raises(ConfigError, match="patch_size, mask cannot be combined"):
        PatchLoader(data, batch_size=4, patch_size=PATCH, mask="m.zarr")


def test_a_data_section_with_context_is_refused(volume: Path) -> None:
    around = ConditionConfig(path=str(volume), context=2)
    data = DataConfig(volumes=(VolumeConfig(path=str(volume), condition=around),), patch_size=PATCH)
    with pytest.raises(ConfigError, match="not a window around it; remove context"):
        PatchLoader(data, batch_size=4)


def test_a_state_of_another_plan_is_refused_and_changes_nothing(volume: Path) -> None:
    with load(volume, seed=1) as other:
        state = other.state_dict()
    with load(volume, batches_per_epoch=2) as loader:
        for wrong in (state, {}, {"sample_index": 4}, loader.state_dict() | {"quarantined": [{}]}):
            with pytest.raises(ConfigError, match=r"state|not a quarantine record"):
                loader.load_state_dict(wrong)
        assert indices(loader) == list(range(8))


# ---- the package


def test_the_package_imports_lazily() -> None:
    heavy = "torch", "ray", "zarr", "numpy", "pydantic"
    check = f"import sys, vesuvius; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    typed = Path(vesuvius.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    for name in vesuvius.__all__:
        assert re.search(rf"\b{name}$|^{name}:", typed, re.MULTILINE), f"{name} has no type"
        assert getattr(vesuvius, name) is not None
        assert name in dir(vesuvius)
    with pytest.raises(AttributeError, match="no attribute 'Patchloader'"):
        vesuvius.Patchloader  # noqa: B018


_bounds = st.none() | st.integers(-150, 150) | st.integers(-150, 150).map(np.int64)
_indices = (
    st.integers(-150, 150)
    | st.builds(np.int16, st.integers(-128, 127))
    | st.builds(slice, _bounds, _bounds, st.none() | st.integers(-40, 40))
    | st.just(...)
)


@given(index=_indices | st.lists(_indices, max_size=5).map(tuple))
def test_an_open_volume_is_indexed_by_numpys_rules(indexed: vesuvius.Volume, index: Any) -> None:
    voxels = textured(SHAPE)
    try:
        expected = voxels[index]
    except (IndexError, ValueError) as error:
        with pytest.raises(type(error)):
            indexed[index]
        return
    found = indexed[index]
    assert (type(found), found.shape, found.dtype) == (type(expected), expected.shape, expected.dtype)
    np.testing.assert_array_equal(found, expected)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Iterable[vesuvius.Volume]:
    with vesuvius.open_volume(write_array(tmp_path_factory.mktemp("v") / "scan.zarr", textured(SHAPE))) as opened:
        yield opened


def test_an_open_volume_behaves_like_an_array(volume: Path) -> None:
    voxels, opened = textured(SHAPE), vesuvius.open_volume(volume)
    for wrong in (None, True, np.True_, [0, 1], np.array([0, 1]), voxels > 3, 1.5, "z", (0, None), slice("a", None)):
        with pytest.raises(TypeError):
            opened[wrong]
    assert (opened.shape, opened.ndim, opened.size, len(opened)) == (SHAPE, 3, voxels.size, SHAPE[0])
    assert all(np.array_equal(one, other) for one, other in zip(opened, voxels, strict=True))
    np.testing.assert_array_equal(np.asarray(opened), voxels)
    assert np.asarray(opened, dtype=np.float32).dtype == np.float32
    assert np.mean(opened) == np.mean(voxels)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(opened, copy=False)
    assert repr(opened) == f"<Volume {volume}: {SHAPE} uint8>"
    for box in (
        ((0, 0, 0), (65, 1, 1)),
        ((-1, 0, 0), (1, 1, 1)),
        ((5, 0, 0), (4, 1, 1)),
        ((64, 0, 0), (96, 96, 96)),
    ):
        with pytest.raises(IndexError, match="is not inside"):
            opened.read(box)
    assert opened.read(((64, 0, 0), (64, 1, 1))).shape == (0, 1, 1)
    inside = ((10, 20, 30), (40, 50, 60))
    for out in (np.empty((30, 30, 31), np.uint8), np.empty((30, 30, 30), np.int8), np.empty((1, 30, 30), np.uint8)):
        with pytest.raises(ValueError, match="cannot hold"):
            opened.read(inside, out)
    np.testing.assert_array_equal(opened.read(inside, np.empty((30, 30, 30), np.float32)), voxels[slices(inside)])
    with opened:
        pass
    with pytest.raises(vesuvius.VesuviusError, match=r"scan.zarr was closed; open it again"):
        opened[0]


# ---- volumes by pattern


def test_volumes_and_labels_by_pattern_give_the_batches_of_their_lists(tmp_path: Path) -> None:
    names = [f"{name}.zarr" for name in "bac"]
    for seed, name in enumerate(names):
        write_array(tmp_path / "images" / name, scan := textured((32, 48, 48), seed))
        write_array(tmp_path / "labels" / name.replace(".", "_target."), scan % 2)
    images, labels = tmp_path / "images/*.zarr", tmp_path / "labels/{name}_target.zarr"
    (tmp_path / "volumes.yaml").write_text("- {path: images/*.zarr, labels: 'labels/{name}_target.zarr'}")
    names.sort()
    labels_listed = [tmp_path / "labels" / name.replace(".", "_target.") for name in names]
    raw: dict[str, Any] = {"batches_per_epoch": 6, "normalize": False}
    listed = load(*[tmp_path / "images" / name for name in names], labels=labels_listed, **raw)
    matched = load(images, labels=labels, **raw)
    mapped = load([VolumeConfig(path=images)], labels=str(labels), **raw)
    with listed, matched, mapped, load(tmp_path / "volumes.yaml", **raw) as filed:
        wanted = list(listed)
        assert {sample.volume for batch in wanted for sample in batch.samples} == {0, 1, 2}
        for other in (matched, mapped, filed):
            assert same(wanted, other) == 6
    streamed = DataConfig(volumes=(VolumeConfig(path=images, condition=labels),), patch_size=PATCH)
    assert len(prepare_data(0, streamed).job.data.volumes) == 3, "without a loader too"
    (tmp_path / "labels/a_target.zarr").rename(tmp_path / "labels/a.zarr")
    with pytest.raises(ConfigError, match=r"1 of 3 paths with \{name\} do not exist: .*/labels/a_target.zarr; add"):
        load(images, labels=labels)


def test_labels_of_a_volume_by_its_voxel_size(tmp_path: Path) -> None:
    voxels = textured(SHAPE)
    path = write_ome(tmp_path / "v.zarr", {"0": voxels, "1": voxels[::2, ::2, ::2]}, [2.4, 4.8])
    labels = write_ome(tmp_path / "l.zarr", {"0": voxels[::2, ::2, ::2] % 3}, [4.8])
    by_size = load(VolumeConfig(path=path, voxel_size_um=4.8), labels=ArrayConfig(path=labels, voxel_size_um=4.8))
    by_level = load(VolumeConfig(path=path, level=1), labels=labels)
    with by_size, by_level:
        assert same(islice(by_size, 3), islice(by_level, 3)) == 3
