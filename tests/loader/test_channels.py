"""Several channels, several labels and a transform, against numpy."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import textured, write_array, write_ome
from tests.loader.test_patch_loader import PATCH, cut, indices, load, same
from vesuvius import ArrayConfig, ConfigError, PatchBatch, VolumeConfig
from vesuvius.config.load import parse_config
from vesuvius.stream.reading.quarantine import parse_damaged_box
from vesuvius.volumes.box import slices

SHAPE, AT = (64, 96, 96), (12, 20, 8)  # of the first channel, and where the others begin, in its voxels
Voxels = np.ndarray[Any, Any]


def scan(path: Path, seed: int) -> tuple[list[Path], list[Voxels]]:
    """Three channels of a volume: uint8, uint16 at half the resolution of a part of it, and a float32 part.

    Returns their paths and what they show of each voxel of the first, NaN where they do not cover it.
    """
    one, half, part = textured(SHAPE, seed), textured((24, 36, 40), seed + 1), textured((40, 70, 80), seed + 2)
    stored = [one, half.astype(np.uint16) * 256, part.astype(np.float32) / 7 - 100]
    paths, shown = [], [one.astype(np.float64)]
    for number, (voxels, size) in enumerate(zip(stored, (2, 4, 2), strict=True)):
        at = [2 * begin if number else 0 for begin in AT]
        paths.append(write_ome(path / f"{seed}-{number}", {"0": voxels}, [size], {0: at}))
    for voxels, repeats in zip(stored[1:], (2, 1), strict=True):
        whole = np.full(SHAPE, np.nan)
        inside = tuple(slice(at, at + repeats * size) for at, size in zip(AT, voxels.shape, strict=True))
        whole[inside] = np.kron(voxels, np.ones((repeats,) * 3))
        shown.append(whole)
    return paths, shown


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(long, marks=pytest.mark.long) for long in ({"cache_in_memory": True}, {"num_workers": 2}))],
)
def test_each_channel_is_aligned_normalized_by_itself_and_augmented_alike(tmp_path: Path, options: Any) -> None:
    (first, shown_first), (second, shown_second) = scan(tmp_path, 0), scan(tmp_path, 10)
    shown = [shown_first, shown_second]
    with load([tuple(first), tuple(second)], batches_per_epoch=10, **options) as loader:
        whole = list(loader)
        ranges = loader.intensity_ranges
        assert len(ranges) == 6
        state = loader.state_dict()
    for found, voxels in zip(ranges, [*shown_first, *shown_second], strict=True):
        low, high = np.nanpercentile(voxels, (0.5, 99.5))
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.03 * (high - low)), "of this channel"
    for batch in whole:
        assert batch.image.shape == (4, 3, *PATCH)
        for image, sample in zip(batch.image.numpy(), batch.samples, strict=True):
            for channel, voxels in enumerate(shown[sample.volume]):
                of = ranges[3 * sample.volume + channel]
                wanted = (cut(voxels, sample) - of.low) / (of.high - of.low) * 2 - 1
                np.testing.assert_allclose(image[channel], wanted, atol=1e-5)
    assert {sample.volume for batch in whole for sample in batch.samples} == {0, 1}
    with load([tuple(first), tuple(second)], batches_per_epoch=10, cache_in_memory=True) as other:
        halfway = state | {"sample_index": 20, "in_epoch": 20}
        other.load_state_dict(halfway)
        assert same(other, whole[5:]) == 5


def test_channels_as_stored_have_the_dtype_that_holds_all(tmp_path: Path) -> None:
    arrays = [textured(SHAPE).astype(dtype) for dtype in ("uint8", "uint16", "int64", "float32")]
    paths = [write_array(tmp_path / str(array.dtype), array) for array in arrays]
    with load([tuple(paths[:2])], normalize=False, augment=False) as loader:
        batch = next(iter(loader))
    assert batch.image.dtype == torch.uint16
    for image, sample in zip(batch.image, batch.samples, strict=True):
        for channel, array in zip(image.numpy(), arrays, strict=False):
            np.testing.assert_array_equal(channel, array[slices(sample.box)])
    with pytest.raises(ConfigError, match="No dtype holds all values of int64 and float32; set normalize=True"):
        load([tuple(paths[2:])], normalize=False)
    with load([tuple(paths[2:])], normalize=(-100, 300)) as loader:
        assert {(each.low, each.high) for each in loader.intensity_ranges} == {(-100, 300)}
        assert next(iter(loader)).image.dtype == torch.float32


def test_damage_in_a_channel_is_quarantined_in_voxels_of_the_volume(tmp_path: Path) -> None:
    (first, second, _), _ = scan(tmp_path, 0)
    chunk = second / "0/0/0/1"  # from voxel 20 + 2 * 0, 8 + 2 * 32 of the second array on
    chunk.write_bytes(b"torn")
    bad = (12, 20, 72), (60, 84, 88)
    with load([(first, second)]) as loader:
        batches = list(islice(loader, 40))
        (record,) = loader.stream.quarantined
    assert parse_damaged_box(record, 1) == (0, bad)
    damaged = np.zeros(SHAPE, bool)
    damaged[slices(bad)] = True
    assert not any(damaged[slices(sample.box)].any() for batch in batches for sample in batch.samples)
    assert indices(batches) == list(range(160))


def test_entries_that_share_any_channel_share_the_slab(tmp_path: Path) -> None:
    a, b, c = (write_array(tmp_path / name, textured(SHAPE, seed)) for seed, name in enumerate("abc"))
    with load([(a, b), (c, a)], validation_fraction=0.2) as loader:
        assert loader.validation_boxes[0] == loader.validation_boxes[1] is not None
    with pytest.raises(ConfigError, match="different numbers of channels"):
        load([(a, b), c])
    of_channels: dict[str, Any] = {"channels": [VolumeConfig(path=b, weight=2)]}
    for keys in (of_channels, {"condition": VolumeConfig(path=b, weight=2)}):
        with pytest.raises(ConfigError, match="channels and labels have no weight"):
            load(VolumeConfig(path=a, **keys))
    config = f"name: x\ndata:\n  volumes: [{{path: {a}, channels: [{{path: {b}}}]}}]\n"
    with pytest.raises(ConfigError, match="are for PatchLoader: a run trains on one channel"):
        parse_config(config)


def test_several_labels_are_channels_of_one_dtype(tmp_path: Path) -> None:
    voxels, classes = textured(SHAPE), textured(SHAPE, 1) % 3
    distance = textured(SHAPE, 2, "float32") / 7
    a, b, c = (write_array(tmp_path / n, v) for n, v in (("a", voxels), ("b", classes), ("c", distance)))
    for labels, dtype in (((b, ArrayConfig(path=c)), torch.float32), ((b, b), torch.int64)):
        with load(a, labels=[labels]) as loader:
            batch = next(iter(loader))
        assert batch.label is not None
        assert (batch.label.dtype, batch.label.shape) == (dtype, (4, 2, *PATCH))
        for label, sample in zip(batch.label.numpy(), batch.samples, strict=True):
            np.testing.assert_array_equal(label[0], cut(classes, sample))
            np.testing.assert_array_equal(label[1], cut(distance if dtype == torch.float32 else classes, sample))
    for wrong, message in (
        ({"labels": (b, c)}, "labels has 2 entries for 1 volumes; .* several labels of one volume as a tuple"),
        ({"labels": [()]}, "condition: Input should be a valid dictionary"),
        ({"mask": [(b, b)]}, "mask: Input should be a valid dictionary"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(a, **wrong)


def inverted(batch: PatchBatch) -> PatchBatch:
    return replace(batch, image=-batch.image)


def test_a_transform_changes_each_batch_and_travels_with_the_loader(tmp_path: Path) -> None:
    volume = write_array(tmp_path / "v", textured(SHAPE))
    with load(volume, batches_per_epoch=4) as plain, load(volume, batches_per_epoch=4, transform=inverted) as loader:
        for one, other in zip(plain, pickle.loads(pickle.dumps(loader)), strict=True):
            assert torch.equal(one.image, -other.image)
            assert one.samples == other.samples
    failing = iter([ValueError("a bug of theirs"), StopIteration(), None])

    def fails_twice(batch: PatchBatch) -> PatchBatch:
        if (error := next(failing)) is not None:
            raise error
        return batch

    with load(volume, transform=fails_twice) as loader:
        with pytest.raises(ValueError, match="theirs"):
            next(iter(loader))
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(iter(loader))
        assert indices([next(iter(loader))]) == [0, 1, 2, 3], "the batch comes again"
    wrong: Any = lambda batch: batch.image  # noqa: E731
    with load(volume, transform=wrong) as loader, pytest.raises(ConfigError, match="returned Tensor, not a PatchBatch"):
        next(iter(loader))
    with pytest.raises(ConfigError, match="cannot be called"):
        load(volume, transform=3)
