"""The preview: real patches of a reference, tiny networks, picture and record."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vesuvius.config import Config
from vesuvius.diffusion.estimate import Condition
from vesuvius.diffusion.schedule import Schedule
from vesuvius.runlog.records import JsonLines, read_records
from vesuvius.stream.start.prepare import IntensityRange, IntensityRanges
from vesuvius.training.step.feed import Conditioner
from vesuvius.training.validation.fixed_patches import FixedPatches
from vesuvius.training.validation.pictures import GAP, LINE, make_preview
from vesuvius.training.validation.texture import HISTOGRAM_EDGES, measure_texture
from vesuvius.training.validation.validation import ValidationPatches

SHAPE = (8, 16, 16)
SIDE = 6 * (16 + 8) + 2 * GAP  # of a patch in the picture: z beside x, and below y
INTENSITIES = (IntensityRange(0, 255),)
CPU = torch.device("cpu")


def config(steps: int = 3) -> Config:
    sections: dict[str, Any] = {
        "data": {"volumes": ({"path": "scroll.zarr"},), "patch_size": SHAPE},
        "diffusion": {"sampler_steps": steps, "noise": "cosine", "prediction": "x_0"},
    }
    return Config.model_validate({"name": "tiny", **sections})


def reference(patches: int = 3, held_out: bool = True) -> ValidationPatches:
    """Its condition is the patch itself."""
    stored = np.random.default_rng(0).integers(0, 256, (patches, *SHAPE)).astype(np.uint8)
    fixed = FixedPatches(held_out, (0,) * patches, ((0, 0, 0),) * patches, stored, stored)
    conditioner = Conditioner(None, INTENSITIES, CPU)
    return ValidationPatches(fixed, IntensityRanges(INTENSITIES, INTENSITIES), conditioner, CPU)


def smooth(x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
    return torch.nn.functional.avg_pool3d(x_t, 3, 1, 1)


def preview(run: Path, used: Config | None = None, step: int = 500, **options: Any) -> dict[str, Any]:
    used = used or config()
    options = {"denoise": smooth, "reference": reference(), "voxel_size_um": None, "stop": lambda: False} | options
    record = make_preview(used, run, step, schedule=Schedule.from_config(used.diffusion), **options)
    assert record is not None
    return record


def pixels(run: Path, step: int = 500) -> NDArray[np.uint8]:
    return np.asarray(Image.open(run / f"samples/step_{step:08d}.png"))


def columns_of(picture: NDArray[np.uint8], count: int = 2) -> list[NDArray[np.uint8]]:
    """Real patches, their conditions, patches drawn under them, and without them: the pixels of each."""
    rows, width = picture[2 * LINE :, GAP:][: count * SIDE], (picture.shape[1] - GAP) // 4
    return [rows[:, left : left + SIDE] for left in range(0, 4 * width, width)]


def test_the_picture_has_a_row_per_patch_and_curves_below(tmp_path: Path) -> None:
    preview(tmp_path)
    picture = pixels(tmp_path)
    assert picture.shape[0] == 3 * LINE + 2 * SIDE + 300
    real, condition, under, without = columns_of(picture)
    assert np.array_equal(real, condition), "the reference's condition is the patch itself"
    assert min(column.std() for column in (real, under, without)) > 10
    assert not np.array_equal(under, real)
    assert not np.array_equal(real[:SIDE], real[SIDE:])
    assert picture[-300:].std() > 10
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_00000500.png"]


def test_patches_are_generated_with_the_conditions_of_the_real_ones(tmp_path: Path) -> None:
    def echo(x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        assert condition is not None
        return condition[:, :1]

    record = preview(tmp_path, reference=reference(2), denoise=echo)
    real, _, under, without = columns_of(pixels(tmp_path))
    assert np.array_equal(under, real)
    assert (without[:90, :90] == 127).all(), "left out it is 0"
    assert math.isnan(record["unconditional"]["planarity"])
    assert record["histogram_distance"] == 0
    # 1e-4: what the sampler's float32 leaves.
    assert abs(record["spectrum_distance_db"]) < 1e-4


def test_curves_are_means_over_generated_and_all_reference_patches(tmp_path: Path) -> None:
    patches = reference(5)
    record = preview(tmp_path, reference=patches)
    real = measure_texture(patches.x_0(range(5))[:, 0].numpy())
    assert record["histogram"]["real"] == real.histogram.tolist()
    assert record["spectrum"]["real"] == real.power.tolist()
    assert record["correlation"]["real"] == [along.tolist() for along in real.correlation]
    assert record["air"]["real"] == real.air
    assert len(record["histogram"]["edges"]) == len(HISTOGRAM_EDGES)
    assert record["spectrum"]["frequency"] == real.frequency.tolist()
    assert sum(record["histogram"]["generated"]) == pytest.approx(1)
    assert record["histogram_distance"] > 0.1
    assert record["spectrum_distance_db"] > 1
    assert record["picture"] == "samples/step_00000500.png"


def test_preview_noise_is_the_same_at_every_step(tmp_path: Path) -> None:
    for run, step in (("a", 500), ("b", 1000)):
        preview(tmp_path / run, step=step)
    one, two = pixels(tmp_path / "a"), pixels(tmp_path / "b", 1000)
    for column, other in zip(columns_of(one), columns_of(two), strict=True):
        assert np.array_equal(column, other)
    assert not np.array_equal(one[:LINE], two[:LINE]), "the title says the step"


def test_a_stop_ends_a_preview_after_the_current_sampling_step_without_a_file(tmp_path: Path) -> None:
    called, calls = 0, 4

    def counted(x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        nonlocal called
        called += 1
        return smooth(x_t, t, condition)

    used = config(steps=3)
    schedule = Schedule.from_config(used.diffusion)
    assert make_preview(used, tmp_path, 500, counted, schedule, reference(), None, lambda: called >= calls) is None
    assert called == calls
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error")
def test_non_finite_values_are_shown_and_reported_without_distances(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:

    def broken(x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        x_0 = torch.sin(x_t)
        x_0[..., 0], x_0[..., 1], x_0[..., 2] = math.nan, math.inf, -1e38
        return x_0

    record = preview(tmp_path, denoise=broken)
    (warning,) = [record for record in caplog.records if record.name == "vesuvius.training.validation.pictures"]
    assert warning.levelname == "WARNING"
    assert "512 of 4096 generated voxels are not finite at step 500;" in warning.getMessage()
    generated = columns_of(pixels(tmp_path))[2]
    assert (generated[:90, 0] == 0).all(), "NaN is black"
    assert generated[:90, 18:90].std() > 10, "the rest is seen"
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write("preview", **record)
    lines.close()
    (written,) = read_records(tmp_path / "metrics.jsonl")
    assert written["histogram_distance"] is None
    assert written["spectrum_distance_db"] is None
    assert written["correlation_distance"] is None
    assert written["spectrum"]["generated"] == [None] * 7
    assert sum(written["histogram"]["generated"]) == pytest.approx(1)
    json.dumps(written, allow_nan=False)
