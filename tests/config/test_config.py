"""The config's models: frozen, strict, described, and the rules that keys must keep among each other."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ValidationError

from tests.support.config_text import MINIMAL, problems, read, sections
from vesuvius.config import ArrayConfig, AugmentConfig, DataConfig, VolumeConfig
from vesuvius.config.describe import iter_keys
from vesuvius.errors import ConfigError


@pytest.mark.parametrize("section", list(dict.fromkeys(sections())), ids=lambda section: section.__name__)
def test_every_section_is_frozen_strict_and_described(section: type[BaseModel]) -> None:
    assert {
        "frozen": True,
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }.items() <= section.model_config.items()
    for name, info in section.model_fields.items():
        assert info.description, f"{section.__name__}.{name} has no description"


def test_a_config_cannot_be_changed() -> None:
    config = read(MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        config.training.lr = 1.0  # type: ignore[misc]
    assert hash(config) == hash(read(MINIMAL))


# ---- rules across keys


def test_warmup_must_end_before_the_run() -> None:
    assert problems(f"{MINIMAL}training: {{warmup_steps: 20, steps_per_epoch: 5, epochs: 4}}") == [
        "x.yaml: training.warmup_steps 20 leaves no steps after the warm-up: epochs x steps_per_epoch is 20; lower "
        "warmup_steps or lengthen the run"
    ]
    assert read(f"{MINIMAL}training: {{warmup_steps: 19, steps_per_epoch: 5, epochs: 4}}").horizon_steps == 20


def test_derived_numbers_follow_from_the_keys() -> None:
    training = "training: {train_batch_size: 3, accumulate_steps: 4, epochs: 2, steps_per_epoch: 600, max_steps: 7}"
    config = read(MINIMAL + training)
    assert (config.global_batch, config.horizon_steps, config.stop_step) == (12, 1200, 7)
    assert read(MINIMAL + training, "training.max_steps=null").stop_step == 1200
    assert read(MINIMAL + training, "training.max_steps=5000").stop_step == 1200


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.patch_size=[72, 136, 128]"],
            "augment.rot90 cannot rotate patches of [72, 136, 128] voxels",
        ),
        (["data.normalize={low: 3}"], "only one of low and high is set"),
        (["data.normalize={low: 3, high: 3}"], "low 3.0 is not below high 3.0"),
        (["model.channels=[8, 12]"], "the last entry of channels, 12, is not a multiple of attention_heads 8"),
        (["diffusion.timesteps=29"], "sampler_steps 30 exceed timesteps 29"),
        (["model.strides=[[1, 2, 2]]"], "strides has length 1 for 3 levels"),
        (["data.condition_classes=[0, 0]"], "condition_classes [0, 0] are not distinct labels"),
        (["data.condition_classes=3"], "condition_classes is 3, but no volume has a condition"),
        (["training.checkpoint_levels=[4]"], "checkpoint_levels [4] exceed the levels of the network"),
        (
            ["training.checkpoint_levels=[0]", "model.full_res_channels=0"],
            "checkpoint_levels contains 0, the full-resolution blocks, but model.full_res_channels is 0",
        ),
        (
            ["data.condition_normalize={low: 0.0, high: 2.0}"],
            "condition_normalize needs a condition of intensities, but there is none; remove",
        ),
        (["diffusion.condition_noise=0.5"], "condition_noise 0.5 is for conditions of intensities with a context"),
        (["diffusion.sampler_condition_noise=0.5"], "sampler_condition_noise 0.5 exceeds what training adds, 0"),
        (["diffusion.sampler_guidance=2.0"], "sampler_guidance 2.0 needs a model trained with and without a condition"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_the_remedy(overrides: list[str], message: str) -> None:
    (problem,) = problems(MINIMAL, *overrides)
    assert message in problem


def test_a_patch_must_suit_the_model_and_the_nearest_sizes_are_named() -> None:
    strides = "model.strides=[[1, 2, 2], [3, 1, 2]]"
    assert read(MINIMAL, strides).model.divisor_zyx == (6, 4, 8)
    assert problems(MINIMAL, strides, "data.patch_size=[70, 136, 136]") == [
        "override data.patch_size=[70, 136, 136]: data.patch_size [70, 136, 136] is not a multiple of [6, 4, 8] "
        "(model.stem_stride times model.strides); the nearest valid sizes are [66, 136, 136] and [72, 136, 136]"
    ]
    (one_slice,) = problems(MINIMAL, strides, "data.patch_size=[1, 136, 136]")
    assert one_slice.endswith(
        "nearest valid sizes are [6, 136, 136]; or set model.stem_stride and model.strides to 1 along z"
    )


def test_python_users_types_are_taken_and_nothing_else_is_converted() -> None:
    class Mounted(os.PathLike[str]):
        def __fspath__(self) -> str:
            return "/mnt/v.zarr"

    mask = {"path": Path("m.zarr"), "select": [np.int64(1)]}
    spec = VolumeConfig(
        path=Mounted(), weight=np.float32(2), level=np.uint8(1), mask=mask, min_foreground=1, condition={"path": "c"}
    )  # type: ignore[arg-type]
    found = DataConfig(
        volumes=[spec],  # type: ignore[arg-type]
        patch_size=np.array([8, 16, 16]),  # type: ignore[arg-type]
        min_foreground=np.float64(0.5),
        nan=np.float32(0.5),
        condition_classes=torch.Size([0, 255]),
        augment=AugmentConfig(flip=np.bool_(True)),  # type: ignore[arg-type]
    )
    plain = DataConfig(
        volumes=(
            VolumeConfig(
                path="/mnt/v.zarr",
                weight=2.0,
                level=1,
                mask=ArrayConfig(path="m.zarr", select=(1,)),
                min_foreground=1.0,
                condition=ArrayConfig(path="c"),
            ),
        ),
        patch_size=(8, 16, 16),
        min_foreground=0.5,
        nan=0.5,
        condition_classes=(0, 255),
        augment=AugmentConfig(flip=True),
    )
    assert found == plain
    assert found.model_dump_json() == plain.model_dump_json()
    wrong: list[dict[str, Any]] = [{"path": 3}, {"path": b"v"}, {"path": None}]
    wrong += [{"path": "v", "level": level} for level in (True, np.True_, 1.0, np.float32(1), "1", np.array([1]))]
    for fields in wrong:
        with pytest.raises(ConfigError):
            VolumeConfig(**fields)


def test_a_home_directory_in_any_key_and_a_file_address_are_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for path, folder in {
        "~/v.zarr": "/home/somebody/v.zarr",
        "file:///data/my%20scroll.zarr": "/data/my scroll.zarr",
        "data/~v.zarr": f"{Path.cwd()}/data/~v.zarr",
        "s3://bucket/~/v.zarr": "s3://bucket/~/v.zarr",
        "file:///data/a#1?b%23.zarr": "/data/a#1?b#.zarr",
        "file://localhost/data/v.zarr": "/data/v.zarr",
    }.items():
        assert ArrayConfig(path=path).path == folder
    # Any key that is a path, also one that comes later: those whose name says that they are one.
    named = [key for key, _ in iter_keys() if key.endswith(("path", "_dir", "_from", "folder", "file"))]
    named = [key for key in named if ".channels" not in key and ".more_labels" not in key]  # a run has none
    assert {"data.volumes[].mask.path", "data.store.cache_dir", "training.init_from"} <= set(named)
    text = MINIMAL + "      mask: {path: m}\n      condition: {path: c}\n  min_foreground: 0.1\n"
    for key in named:
        config: Any = read(text, f"{key.replace('[]', '[0]')}=~/x")
        for name in key.replace("[]", ".0").split("."):
            config = config[int(name)] if name.isdigit() else getattr(config, name)
        assert config == "/home/somebody/x", key


def test_a_name_fits_a_file_name() -> None:
    assert read(MINIMAL, f"name={'n' * 200}").name == "n" * 200
    for name in ("n" * 300, "é" * 101):
        (problem,) = problems(MINIMAL, f"name={name}")
        assert problem.endswith(f"{len(name.encode())} bytes is too long for file names; choose one of at most 200")
