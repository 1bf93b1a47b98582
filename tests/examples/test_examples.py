"""The recipes of examples/, run with the libraries they are for."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vesuvius
from tests.conftest import textured, write_array
from tests.support.rank_runs import ends_of, output_of, started_ranks
from tests.training.step.test_conditioning import write_group

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPE = (64, 96, 96)


@pytest.fixture
def scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    return str(write_array(tmp_path / "scan.zarr", textured(SHAPE)))


@pytest.fixture
def labels(tmp_path: Path) -> str:
    return str(write_array(tmp_path / "labels.zarr", (textured(SHAPE) > 128).astype(np.uint16)))


def example(name: str, *needs: str) -> Any:
    for each in needs:
        pytest.importorskip(each, reason=f"{each} is not installed, which [dev] brings")
    return importlib.import_module(name)


@pytest.mark.long
def test_segmentation_learns_and_goes_on_as_if_it_had_not_stopped(
    scan: str, labels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segmentation = example("segmentation")
    whole = segmentation.train(scan, labels, "whole.pt")[2]
    assert np.mean(whole[-5:]) < 0.8 * np.mean(whole[:5])
    monkeypatch.setattr(segmentation, "EPOCHS", 1)
    first = segmentation.train(scan, labels, "parts.pt")[2]
    monkeypatch.setattr(segmentation, "EPOCHS", 2)
    assert first + segmentation.train(scan, labels, "parts.pt")[2] == whole


@pytest.mark.long
def test_segmentation_predicts_the_volume_as_well_as_the_held_out_voxels(scan: str, labels: str) -> None:
    dice = example("segmentation").main(scan, labels)
    predicted, truth = vesuvius.open_volume("segmentation.zarr")[:] == 1, vesuvius.open_volume(labels)[:] != 0
    assert dice > 0.9
    assert 2 * (predicted & truth).sum() / (predicted.sum() + truth.sum()) == pytest.approx(dice, abs=0.05)
    with Image.open("segmentation.png") as picture:
        shown = np.hsplit(np.asarray(picture), 3)
    np.testing.assert_array_equal(shown[1] != 0, truth[SHAPE[0] // 2])
    np.testing.assert_array_equal(shown[2] != 0, predicted[SHAPE[0] // 2])


@pytest.mark.long
def test_lightning_resumes_the_order(scan: str) -> None:
    module = example("lightning_module", "lightning")
    assert module.main(scan).seen == list(range(80))
    assert module.main(scan, epochs=1).seen == list(range(40))
    assert module.main(scan, "denoiser.ckpt").seen == list(range(40, 80))


@pytest.mark.long
def test_accelerate_saves_the_loader_with_the_rest(scan: str, tmp_path: Path) -> None:
    module = example("accelerate_loop", "accelerate")
    seen = [module.main(scan, str(tmp_path / "state")) for _ in range(2)]
    assert seen == [list(range(40)), list(range(40, 80))]


@pytest.mark.long
def test_monai_takes_the_batches(scan: str, labels: str) -> None:
    losses = example("monai_network", "monai").main(scan, labels)
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])


def test_pairs_whose_labels_a_segmenter_does_not_recover_are_dropped(
    tmp_path: Path, scan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segmenter finds what is brighter than the mean: the labels of the first pair, not those of the second.

    A command that ends between two moves is repeated.
    """
    voxels = textured(SHAPE)
    bright = (voxels > voxels.mean()).astype(np.uint8)
    for number, labels in enumerate((bright, np.roll(bright, 1, 0)), start=1):
        write_array(tmp_path / f"pairs/images/{number}.zarr", voxels)
        write_array(tmp_path / f"pairs/labels/{number}_labels.zarr", labels)
        write_array(tmp_path / f"pairs/instances/{number}_instances.zarr", labels)
    module, tile = example("filter_pairs"), "32,48,48"
    network, rename, left = (lambda x: torch.cat([-x, x - 1e-3], 1)), Path.rename, 2

    def rename_some(self: Path, target: Path) -> Path:
        nonlocal left
        left -= "pairs" in str(self) and "dropped" in str(target)
        if left < 0:
            raise KeyboardInterrupt
        return rename(self, target)

    assert 0.4 < module.main("pairs", network, tile, 0.1)["2"] < 0.6
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_some)
        with pytest.raises(KeyboardInterrupt):
            module.main("pairs", network, tile, 0.9)
    scores = module.main("pairs", network, tile, 0.9)
    assert scores["1"] > 0.98
    assert scores.keys() == {"1"}
    for kind, name in (
        ("images", "2.zarr"),
        ("labels", "2_labels.zarr"),
        ("instances", "2_instances.zarr"),
        ("predicted", "2.zarr"),
    ):
        assert (tmp_path / "pairs/dropped" / kind / name).exists()
        assert len(list((tmp_path / "pairs" / kind).iterdir())) == 1
    write_array(tmp_path / "pairs/images/2.zarr", voxels)  # drawn again
    with pytest.raises(SystemExit, match=r"both have images/2\.zarr; remove or rename"):
        module.main("pairs", network, tile, 0.9)
    shutil.rmtree(tmp_path / "pairs/images/2.zarr")
    assert module.main("pairs", network, tile, 1.1)["1"] > 0.98
    with pytest.raises(SystemExit, match="as all 2 were dropped"):
        module.main("pairs", network, tile, 0.9)


def test_nnunet_gets_every_voxel_of_the_pairs_on_the_grid_of_the_scan(tmp_path: Path, scan: str) -> None:
    example_module, nibabel = example("export_nnunet", "nibabel"), importlib.import_module("nibabel")
    voxels = np.random.default_rng(0).integers(0, 3, (8, 20, 11), np.uint16)
    for part, sign in (("images/7", 1000), ("labels/7_labels", 0)):
        write_group(tmp_path / f"pairs/{part}.zarr", (voxels + sign).astype(np.uint16), [2.0, 3.0, 4.0])
    out = tmp_path / "Dataset501_Pairs"
    assert example_module.main(str(tmp_path / "pairs"), str(out), "16,8,8", "sheet", "ignore") == 6
    covered = np.zeros(voxels.shape, int)
    for path in (out / "labelsTr").iterdir():
        name = path.name.removesuffix(".nii.gz")
        where = tuple(slice(int(lo), int(lo) + side) for lo, side in zip(name.split("_")[1:], (8, 8, 8), strict=True))
        covered[where] += 1
        for file, offset in ((path, 0), (out / f"imagesTr/{name}_0000.nii.gz", 1000)):
            read = nibabel.load(file)
            np.testing.assert_array_equal(np.asarray(read.dataobj).T, voxels[where] + offset)
            np.testing.assert_allclose(read.affine, np.diag([-0.004, -0.003, 0.002, 1]), rtol=1e-6)  # left, back, head
    assert covered.min() == 1
    about = json.loads((out / "dataset.json").read_text())
    assert about["labels"] == {"background": 0, "sheet": 1, "ignore": 2}
    assert (about["numTraining"], about["file_ending"]) == (6, ".nii.gz")


def test_two_ranks_share_one_order(scan: str, tmp_path: Path) -> None:
    with started_ranks(None, tmp_path, 2, program=(str(EXAMPLES / "torchrun_ranks.py"), scan)) as ranks:
        assert ends_of(ranks) == [0, 0], output_of(tmp_path, 2)
    read = dict(re.findall(r"rank (\d) read (\[[^]]*\])", output_of(tmp_path, 2)))
    assert {int(rank): eval(seen) for rank, seen in read.items()} == {
        0: list(range(0, 80, 2)),
        1: list(range(1, 80, 2)),
    }
    with vesuvius.PatchLoader(scan, patch_size=(16, 32, 32), batch_size=8, num_workers=0, device="cpu") as alone:
        assert [s.index for batch in islice(alone, 10) for s in batch.samples] == list(range(80))
