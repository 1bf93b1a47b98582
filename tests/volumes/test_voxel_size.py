"""The level of a pyramid, picked by its voxel size: everywhere where a number picks it."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import textured, write_array, write_ome
from tests.support.config_text import MINIMAL, read
from vesuvius import ArrayConfig, ConfigError, DataConfig, DataError, VolumeConfig
from vesuvius.commands import volume as volume_command
from vesuvius.commands.sample import array, level
from vesuvius.config.load import dump_config, parse_config
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.volumes.volume import open_volume

FULL = (32, 48, 40)


def pyramid(path: Path, scales: list[Any], step: tuple[int, int, int] = (2, 2, 2), **options: Any) -> Path:
    z, y, x = step
    levels = {f"s{n}": textured(FULL)[:: z**n, :: y**n, :: x**n] for n in range(len(scales))}
    return write_ome(path, levels, scales, chunk=16, **options)


@pytest.mark.parametrize(
    ("options", "size", "expected"),
    [
        ({"scales": [7.91, 15.82, 31.64]}, 7.91, 0),
        ({"scales": [7.91, 15.82, 31.64]}, 15.8, 1),
        ({"scales": [7.91, 15.82, 31.64]}, 32, 2),
        ({"scales": [7910, 15820], "unit": "nanometer"}, 15.82, 1),
        ({"scales": [(8, 2, 2), (8, 4, 4)], "step": (1, 2, 2)}, (8, 4, 4), 1),
        ({"scales": [2.4, 4.8], "version": "0.5"}, 4.8, 1),
        ({"scales": [1, 2], "entry": {"coordinateTransformations": [{"type": "scale", "scale": [3] * 3}]}}, 6, 1),
    ],
)
def test_the_only_level_of_that_size_is_opened(
    tmp_path: Path, options: dict[str, Any], size: Any, expected: int
) -> None:
    path = pyramid(tmp_path / "v", **options)
    with open_volume(ArrayConfig(path=path, voxel_size_um=size)) as found:
        assert found.spec == ArrayConfig(path=path, level=expected)
        assert pickle.loads(pickle.dumps(found)).spec == found.spec
        np.testing.assert_array_equal(found[:], open_volume(found.spec)[:])


def test_levels_that_were_not_copied_are_passed_over(tmp_path: Path) -> None:
    path = pyramid(tmp_path / "v", [2, 4, 8])
    shutil.rmtree(path / "s0")
    assert open_volume(ArrayConfig(path=path, voxel_size_um=8)).spec.level == 2
    with pytest.raises(DataError, match=r"voxel size, 2.0 x 2.0 x 2.0 µm: level 1: 4 x 4 x 4, level 2: 8 x 8 x 8; ch"):
        open_volume(ArrayConfig(path=path, voxel_size_um=2))


@pytest.mark.parametrize(
    ("options", "size", "known"),
    [
        ({"scales": [7.91, 15.82]}, 8.2, "level 0: 7.91 x 7.91 x 7.91, level 1: 15.82 x 15.82 x 15.82; change"),
        ({"scales": [(8, 2, 2), (8, 4, 4)]}, 8, "level 0: 8 x 2 x 2, level 1: 8 x 4 x 4; change"),
        ({"scales": [2, 2]}, 2, "level 0: 2 x 2 x 2, level 1: 2 x 2 x 2; change"),
        ({"scales": [2, 4], "unit": None}, 2, "it has no OME scale with a unit of length; change voxel_size_um, or se"),
        ({}, 2, "it has no OME scale with a unit of length; "),
    ],
)
def test_a_size_of_no_level_or_of_several_is_refused_with_all_sizes(
    tmp_path: Path, options: dict[str, Any], size: Any, known: str
) -> None:
    path = pyramid(tmp_path / "v", **options) if options else write_array(tmp_path / "v", textured(FULL))
    with pytest.raises(DataError) as refused:
        open_volume(ArrayConfig(path=path, voxel_size_um=size))
    assert known in str(refused.value)


def test_the_cause_is_named_if_no_level_can_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="select"):
        open_volume(ArrayConfig(path=pyramid(tmp_path / "v", [2, 4]), voxel_size_um=4, select=(0,)))


@pytest.mark.parametrize("keys", [{"level": 0}, {"level": 1}])
def test_a_level_and_a_size_contradict_each_other(keys: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"level {keys['level']} and voxel_size_um 2.0 both pick a level; remove"):
        ArrayConfig(path="v", voxel_size_um=2.0, **keys)


def test_a_config_with_a_size_is_written_and_read_back(tmp_path: Path) -> None:
    entry = "{path: v, voxel_size_um: 7.91, mask: {path: m, voxel_size_um: [8, 4, 4]}, min_foreground: 0.5}"
    config = read(MINIMAL, f"data.volumes=[{entry}]")
    for text in (dump_config(config), json.dumps(config.model_dump(mode="json"))):
        assert parse_config(text) == config
    assert "level" not in config.model_dump()["data"]["volumes"][0]
    with pytest.raises(ConfigError, match="number above 0"):
        read(MINIMAL, "data.volumes=[{path: v, voxel_size_um: 0}]")


def test_volumes_labels_and_masks_by_size_give_the_plan_of_their_levels(tmp_path: Path) -> None:
    scan, labels = pyramid(tmp_path / "scan", [2, 4]), pyramid(tmp_path / "labels", [4, 8], (2, 2, 2))

    def prepared(scan_at: dict[str, Any], labels_at: dict[str, Any]) -> Any:
        other = ArrayConfig(path=labels, **labels_at)
        spec = VolumeConfig(path=scan, condition=other, mask=other, min_foreground=0.1, **scan_at)
        return prepare_data(0, DataConfig(volumes=(spec,), patch_size=(8, 8, 8)))

    by_size, by_level = prepared({"voxel_size_um": 4}, {"voxel_size_um": 8}), prepared({"level": 1}, {"level": 1})
    assert by_size.plan.hash == by_level.plan.hash
    assert by_size.splits == by_level.splits
    assert [each.spec.level for each in (*by_size.volumes, *by_size.conditions)] == [1, 1]


def test_the_command_line_takes_a_size_for_a_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert array("a@b@7.91um") == ArrayConfig(path="a@b", voxel_size_um=7.91)
    assert array("a@8,4,4um") == ArrayConfig(path="a", voxel_size_um=(8.0, 4.0, 4.0))
    assert (array("a@2"), array("a@2nm")) == (ArrayConfig(path="a", level=2), ArrayConfig(path="a@2nm"))
    assert level("2") == {"level": 2}
    path = str(pyramid(tmp_path / "v", [2, 4]))
    assert volume_command.main(["info", path, "--level", "4um", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["level"] == 1
    assert volume_command.main(["info", path, f"{path}@4um"]) == 0
    assert f"{path} level 1: (16, 24, 20) voxels" in capsys.readouterr().out
    assert volume_command.main(["copy", path, str(tmp_path / "out.zarr"), "--level", "4um"]) == 0
    with pytest.raises(SystemExit):
        volume_command.main(["info", path, "--level", "1,2um"])
    assert "'1,2' is not three numbers z,y,x above 0; try 7.91,7.91,7.91" in capsys.readouterr().err
