"""Fixed patches as model values: scaled by their volume's range, with their own conditions, in any order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.conftest import textured, write_array
from tests.training.step.test_conditioning import make_config, write_group
from vesuvius.config import Config
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.step.feed import Conditioner
from vesuvius.training.validation.fixed_patches import FixedPatches, read_fixed_patches
from vesuvius.training.validation.validation import ValidationPatches
from vesuvius.volumes.box import slices

CPU = torch.device("cpu")
SHAPE = (96, 128, 128)


def two_scans(folder: Path) -> Config:
    """Scans with different intensities, each with a condition that is twice as bright."""
    volumes = []
    for number, bright in enumerate((1, 100)):
        voxels = textured(SHAPE, number).astype("uint16") * bright
        path = write_group(folder / f"{number}.zarr", voxels, [2.0 ** (number + 1)] * 3)
        condition = write_array(folder / f"c{number}.zarr", 2 * voxels)
        volumes.append({"path": str(path), "condition": {"path": str(condition)}})
    return make_config(volumes)


def open_reference(config: Config, count: int) -> tuple[FixedPatches, ValidationPatches]:
    data = prepare_data(config.seed, config.data)
    intensities = data.intensity_ranges(config.data)
    fixed = read_fixed_patches(data, config.data, count)
    conditioner = Conditioner(config.data.class_values, intensities.conditions, CPU)
    return fixed, ValidationPatches(fixed, intensities, conditioner, CPU)


def test_patches_and_conditions_are_scaled_by_the_range_of_their_own_volume(tmp_path: Path) -> None:
    config = two_scans(tmp_path)
    fixed, reference = open_reference(config, 8)
    assert set(fixed.volumes) == {0, 1}
    data = prepare_data(config.seed, config.data)
    intensities = data.intensity_ranges(config.data)
    x_0, condition = reference.x_0(range(8)), reference.condition(range(8))
    assert condition is not None
    assert x_0.dtype == torch.float32
    assert x_0.shape == (8, 1, 8, 16, 16)
    for row, number in enumerate(fixed.volumes):
        low, high = intensities.volumes[number].low, intensities.volumes[number].high
        # 1e-5: float32 rounding of model values near 1.
        np.testing.assert_allclose(x_0[row, 0], (fixed.patches[row] - low) * 2 / (high - low) - 1, rtol=0, atol=1e-5)
        # The condition's voxels and range are twice its volume's, so its model values are the same.
        torch.testing.assert_close(condition[row, 0], x_0[row, 0], rtol=0, atol=1e-5)
        assert condition[row, 1].unique().tolist() == [1.0]
    rows = [3, 0, 3]
    assert len(reference) == 8
    assert torch.equal(reference.x_0(rows), x_0[rows]), "in the order asked for"
    some = reference.condition(rows)
    assert some is not None
    assert torch.equal(some, condition[rows])


def test_with_context_the_condition_at_a_patch_is_the_same_and_a_share_of_the_patches_keeps_its_windows(
    tmp_path: Path,
) -> None:
    scan = write_array(tmp_path / "scan.zarr", textured(SHAPE))
    coarse = write_array(tmp_path / "coarse.zarr", textured((48, 64, 64), 1))
    seen = {}
    for context in (None, 2):
        volume = {"path": str(scan), "condition": {"path": str(coarse), "context": context}}
        fixed, reference = open_reference(make_config([volume], condition_normalize={"low": 0.0, "high": 200.0}), 6)
        seen[context] = reference.condition(range(6))
    plain, around = seen[None], seen[2]
    assert plain is not None
    assert around is not None
    assert torch.equal(around[:, :2], plain)
    context = prepare_data(0, make_config([volume]).data).job.contexts[0]
    windows = [context.window(start) for start in fixed.starts_zyx]
    wide = np.pad(textured((48, 64, 64), 1), 20, mode="edge")
    expected = np.stack([wide[slices(window, (-20,) * 3)] for window in windows]) / 100.0 - 1
    np.testing.assert_allclose(around[:, 3], expected, rtol=0, atol=1e-6)
    assert [*fixed.rows(2, 5).windows] == [*fixed.windows[2:5]]
