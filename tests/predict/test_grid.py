"""A grid of patches against numpy, `PatchLoader` and MONAI; a loop decodes each chunk once, in little memory."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference
from torch import Tensor

from tests.conftest import textured, write_array, write_ome
from vesuvius import (
    Aggregator,
    ArrayConfig,
    ConfigError,
    DataError,
    GridLoader,
    PatchLoader,
    open_volume,
    predict_volume,
)
from vesuvius.volumes.box import Box, shape_of, slices
from vesuvius.volumes.errors import ClosedError
from vesuvius.volumes.format.decode import ChunkDecoder

SHAPE = (40, 50, 61)
BOX: Box = ((3, 4, 5), (40, 47, 60))


def load(volume: Any, **options: Any) -> GridLoader:
    return GridLoader(volume, **{"patch_size": (16, 12, 20), "device": "cpu", "normalize": False} | options)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often each chunk is decoded, by its stored bytes."""
    counts, decode = Counter[bytes](), ChunkDecoder.__call__

    def counted(self: ChunkDecoder, data: bytes) -> Any:
        counts[bytes(data)] += 1
        return decode(self, data)

    monkeypatch.setattr(ChunkDecoder, "__call__", counted)
    return counts


@pytest.mark.parametrize("options", [{}, {"zarr_format": 3, "shards": (14, 21, 28)}], ids=["chunks", "shards"])
def test_a_loop_decodes_each_chunk_of_the_box_once(
    tmp_path: Path, options: dict[str, Any], decoded: Counter[bytes]
) -> None:
    voxels = textured(SHAPE, dtype="uint16")
    scan = write_array(tmp_path / "scan.zarr", voxels, chunk=7, **options)
    for batch in load(scan, box=BOX, batch_size=3):
        for image, box in zip(batch.image, batch.boxes, strict=True):
            np.testing.assert_array_equal(image[0], voxels[slices(box)])
    # BOX touches chunks 0 to 5 along z, 0 to 6 along y, 0 to 8 along x
    assert set(decoded.values()) == {1}
    assert len(decoded) == 6 * 7 * 9


def test_labels_of_another_grid_are_aligned_and_decoded_once(tmp_path: Path, decoded: Counter[bytes]) -> None:
    scan, labels = textured(SHAPE), textured((14, 20, 22), 1, "uint16")
    pair = (
        write_ome(tmp_path / "scan.zarr", {"0": scan}, [1.0], chunk=9),
        write_ome(tmp_path / "labels.zarr", {"0": labels}, [2.0], {0: (8, 6, 10)}, chunk=5),
    )
    loader = load(pair[0], labels=pair[1])
    assert loader.box == ((8, 6, 10), (36, 46, 54))  # the shared part
    on_scan = labels.repeat(2, 0).repeat(2, 1).repeat(2, 2)
    for batch in loader:
        assert batch.label is not None
        for image, label, (lo, hi) in zip(batch.image, batch.label, batch.boxes, strict=True):
            np.testing.assert_array_equal(image[0], scan[slices((lo, hi))])
            np.testing.assert_array_equal(label[0], on_scan[slices((lo, hi), loader.box[0])])
    assert set(decoded.values()) == {1}
    assert len(decoded) == 4 * 6 * 5 + 3 * 4 * 5
    with pytest.raises(ConfigError, match=r"box z 8:37, .* is not inside z 8:36, y 6:46, x 10:54, .* share"):
        load(pair[0], labels=pair[1], box=((8, 6, 10), (37, 46, 54)))


def test_memory_depends_on_the_rows_of_tiles_not_on_their_number(tmp_path: Path) -> None:
    peaks = []
    for length in (48, 144):
        scan = write_array(tmp_path / f"{length}.zarr", np.ones((length, 48, 48), np.float32), chunk=(13, 24, 24))
        loader = load(scan, patch_size=(16, 16, 16))
        tracemalloc.start()
        for _ in loader:
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    row_bytes = 16 * 48 * 48 * 4
    assert peaks[1] < 1.6 * peaks[0]  # 3 times the voxels; some garbage waits for its collection, more on Python 3.14
    assert row_bytes < peaks[1] < 8 * row_bytes  # the volume has 9 rows


def test_batches_are_the_same_in_each_loop_whatever_else_is_read(tmp_path: Path) -> None:
    loader = load(write_array(tmp_path / "scan.zarr", textured(SHAPE), chunk=11), batch_size=5)
    wanted = list(product((0, 12, 24), (0, 9, 18, 27, 36, 38), (0, 15, 30, 41)))
    next(iter(loader))  # a loop that is left
    once = list(loader)
    assert [start for batch in once for start, _ in batch.boxes] == wanted
    assert [len(batch.boxes) for batch in once] == [5] * 14 + [2]
    assert len(loader) == 15
    for batches in zip(once, loader, loader, strict=True):
        for batch in batches[1:]:
            assert batch.boxes == batches[0].boxes
            assert torch.equal(batch.image, batches[0].image)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["bool", "uint16", "float64"])
def test_images_and_labels_have_the_bits_of_those_of_the_loader(tmp_path: Path, dtype: str) -> None:
    voxels = textured(SHAPE, dtype=dtype) if dtype != "bool" else textured(SHAPE) > 90
    scan = write_array(tmp_path / "scan.zarr", voxels)
    labels = write_array(tmp_path / "labels.zarr", textured(SHAPE, 1, "uint16"))
    sizes: dict[str, Any] = {"patch_size": (8, 10, 10), "batch_size": 2, "device": "cpu"}
    for normalize in (True, (20.5, 77.25), False):
        options: dict[str, Any] = {"labels": labels, "normalize": normalize}
        with PatchLoader(scan, **sizes, **options, augment=False, num_workers=0, batches_per_epoch=1) as trained:
            batch = next(iter(trained))
            for number, sample in enumerate(batch.samples):
                for given in (normalize, trained, trained.state_dict()):
                    (found,) = GridLoader(scan, **sizes, **options | {"normalize": given}, box=sample.box)
                    assert found.image.dtype == batch.image.dtype
                    assert torch.equal(found.image[0], batch.image[number])
                    assert found.label is not None
                    assert batch.label is not None
                    assert found.label.dtype == batch.label.dtype
                    assert torch.equal(found.label[0], batch.label[number])


@pytest.mark.parametrize("turned", [False, True])
def test_channels_and_several_labels_are_those_of_the_loader(tmp_path: Path, turned: bool) -> None:
    """Also if a transform resamples them: channels linearly, labels to the nearest voxel."""
    arrays = [
        write_array(tmp_path / f"{seed}.zarr", textured(SHAPE, seed, dtype))
        for seed, dtype in enumerate(("uint8", "float32", "uint8", "int32"))
    ]
    images, labels = tuple(arrays[:2]), tuple(arrays[2:])
    if turned:
        rows = [[0.98, -0.2, 0, 3.3], [0.2, 0.98, 0, -2.1], [0, 0, 1, 0.4]]
        (tmp_path / "t.json").write_text(json.dumps({"transformation_matrix": rows, "fixed_volume": "0.zarr"}))
        moved = ArrayConfig(path=arrays[2], transform=tmp_path / "t.json")
        images, labels = (arrays[0], moved), (moved, arrays[3])
    sizes: dict[str, Any] = {"patch_size": (8, 10, 10), "batch_size": 1, "device": "cpu"}
    with PatchLoader([images], labels=[labels], **sizes, augment=False, num_workers=0) as trained:
        batch = next(iter(trained))
        for normalize in (True, trained):
            grid = GridLoader(images, labels=labels, **sizes, normalize=normalize, box=batch.samples[0].box)
            (found,) = grid
            assert torch.equal(found.image, batch.image)
            assert found.label is not None
            assert batch.label is not None
            assert found.label.dtype == batch.label.dtype
            assert torch.equal(found.label, batch.label)
            assert found.label.shape == (1, 2, 8, 10, 10)


@pytest.mark.parametrize("overlap", [0.25, 0.5])
@pytest.mark.parametrize("mode", ["gaussian", "constant"])
@pytest.mark.parametrize("box", [BOX, ((3, 4, 5), (12, 30, 44))], ids=["larger", "smaller than a patch"])
def test_the_blend_is_that_of_monai(tmp_path: Path, mode: Any, overlap: float, box: Box) -> None:
    torch.manual_seed(0)
    network = torch.nn.Conv3d(1, 3, 7, padding=3).eval()  # its zero padding makes tiles differ where they overlap
    loader = load(write_array(tmp_path / "scan.zarr", textured(SHAPE)), box=box, overlap=overlap, normalize=(0, 200))
    blend = Aggregator(loader, mode)
    with torch.inference_mode():
        for batch in loader:
            blend.add(batch, network(batch.image))
        scan = torch.from_numpy(textured(SHAPE)[slices(box)][None, None]) / 100.0 - 1
        wanted = sliding_window_inference(
            scan, loader.tiling.patch_zyx, 1, network, overlap=overlap, mode=mode, padding_mode="replicate"
        )
    assert blend.result().shape == (3, *shape_of(box))
    np.testing.assert_allclose(blend.result(), wanted[0].numpy(), atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("blend", ["gaussian", "linear", "crop"])
def test_the_blend_is_that_of_a_predicted_volume(tmp_path: Path, blend: Any) -> None:
    torch.manual_seed(0)
    network = torch.nn.Conv3d(1, 2, 5, padding=2).eval()
    scan = write_array(tmp_path / "scan.zarr", textured(SHAPE))
    loader = load(scan, box=BOX, normalize=True, batch_size=2)
    aggregator = Aggregator(loader, blend)
    with torch.inference_mode():
        for batch in loader:
            aggregator.add(batch, network(batch.image))
    out = tmp_path / "out.zarr"
    predict_volume(network, scan, out, patch_size=loader.tiling.patch_zyx, box=BOX, blend=blend, device="cpu")
    for channel, values in enumerate(aggregator.result()):
        with open_volume(ArrayConfig(path=str(out), select=(channel,))) as predicted:
            np.testing.assert_allclose(values, predicted[:], atol=1e-6)


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize("blend", ["gaussian", "linear", "constant", "crop"])
def test_outputs_of_another_resolution_are_blended_in_place(tmp_path: Path, blend: Any, factor: float) -> None:
    voxels = textured((21, 30, 43))
    loader = load(write_array(tmp_path / "scan.zarr", voxels), patch_size=(8, 10, 12), multiple=2, batch_size=7)

    def network(image: Tensor) -> Tensor:
        image = image.float()
        return torch.nn.AvgPool3d(2)(image) if factor < 1 else torch.nn.Upsample(scale_factor=2)(image)

    aggregator = Aggregator(loader, blend)
    for batch in loader:
        aggregator.add(batch.boxes, network(batch.image))
    odd = torch.nn.functional.pad(torch.from_numpy(voxels).float()[None, None], (0, 1, 0, 0, 0, 1), "replicate")
    wanted = network(odd)[0, 0].numpy()
    result = aggregator.result()
    assert result.shape == ((1, 11, 15, 22) if factor < 1 else (1, 42, 60, 86))
    np.testing.assert_allclose(result[0], wanted[slices(((0, 0, 0), result.shape[1:]))], rtol=1e-6)  # type: ignore[arg-type]


def test_an_output_that_does_not_fit_or_comes_twice_is_refused(tmp_path: Path) -> None:
    loader = load(write_array(tmp_path / "scan.zarr", textured(SHAPE)), batch_size=8)
    with pytest.raises(ConfigError, match="blend 'gausian' does not exist; choose gaussian, linear"):
        Aggregator(loader, "gausian")  # type: ignore[arg-type]
    first, *others = loader
    blend = Aggregator(loader)
    for answer in ((first.image,), {"out": first.image}):
        with pytest.raises(ConfigError, match=r"The output is a (tuple|dict), not a tensor; add the tensor in it"):
            blend.add(first, answer)  # type: ignore[arg-type]
    for unreal in (first.image.to(torch.complex64), first.image.numpy().astype(object)):
        with pytest.raises(ConfigError, match=r"The output is of (torch\.complex64|object), not of real numbers"):
            blend.add(first, unreal)
    for wrong in (first.image[0], first.image[..., 1:], first.image[:, :, :0]):
        with pytest.raises(ConfigError, match="The output has shape"):
            blend.add(first, wrong)
    with pytest.raises(ConfigError, match=r"begin between voxels of an output with a factor of 1/2; .*multiple=2"):
        blend.add(first, first.image[..., ::2, ::2, ::2])
    big = torch.full(first.image.shape, 2**24 + 1)
    with pytest.raises(ConfigError, match=r"Integers up to 16777216 are not exact .*open_volume"):
        blend.add(first, big)
    Aggregator(loader).add(first, big - 2)
    with pytest.raises(ConfigError, match="72 of 72 patches were not added"):
        blend.result()
    blend.add(first, first.image)
    with pytest.raises(ConfigError, match=r"patch z 0:16, y 0:12, x 0:20 was added before"):
        blend.add(first, first.image)
    with pytest.raises(ConfigError, match=r"The output has shape \(8, 2, 16, 12, 20\), not \(8, 1, 16"):
        blend.add(others[0], others[0].image.expand(-1, 2, -1, -1, -1))
    for batch in others:
        blend.add(batch, batch.image.numpy()[..., ::-1].copy().astype(">f4")[..., ::-1])
    np.testing.assert_allclose(blend.result()[0], textured(SHAPE), rtol=1e-5)


def test_a_damaged_chunk_is_named_in_each_loop_and_a_closed_loader_says_so(tmp_path: Path) -> None:
    scan = write_array(tmp_path / "scan.zarr", textured(SHAPE), chunk=16)
    (scan / "1/2/3").write_bytes(b"damaged")
    loader = load(scan)
    for _ in range(2):
        with pytest.raises(DataError, match=r"\[1, 2, 3\] of volume .*scan\.zarr"):
            list(loader)
    assert len(list(load(scan, box=((0, 0, 0), (16, 50, 61))))) == 24
    loop = iter(loader)
    next(loop)
    loader.close()
    loader.close()
    for each in (loop, iter(loader)):
        with pytest.raises(ClosedError):
            list(each)


def test_arguments_that_would_predict_something_else_are_refused(tmp_path: Path) -> None:
    scan = write_array(tmp_path / "scan.zarr", textured(SHAPE))
    with PatchLoader(scan, patch_size=(8, 8, 8), batch_size=1, num_workers=0) as loader:
        held_out = loader.validation_boxes[0]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"box": held_out}, "box is None: no voxels are held out"),
        ({"box": ((0, 0, 0), (40, 50))}, r"box has \(40, 50\) in place of three integers"),
        ({"box": ((0, 0, 0), (0, 50, 61))}, "box z 0:0, y 0:50, x 0:61 is not inside"),
        ({"box": ((0, 0, 0), (41, 50, 61))}, "box z 0:41, .* is not inside z 0:40"),
        ({"box": 7}, "box 7 is not"),
        ({"normalize": (9, 3)}, "low 9.* is not below high 3"),
        ({"patch_size": (8, 8)}, r"patch_size has \(8, 8\)"),
        ({"patch_size": (8, 8, 0)}, "patch_size"),
        ({"overlap": 1.0}, "overlap 1.0 is not at least 0 and below 1"),
        ({"batch_size": 0}, "batch_size"),
        ({"label_dtype": torch.int64}, "label_dtype=torch.int64 has no effect without labels"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            load(ArrayConfig(path=str(scan)), **options)
