"""Patterns of paths, `{name}` in the paths of labels and masks, and volumes files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.config_text import MINIMAL
from vesuvius import ArrayConfig, ConfigError, DataConfig, VolumeConfig
from vesuvius.config import ConditionConfig
from vesuvius.config.data import MaskConfig
from vesuvius.config.load import dump_config, parse_config, parse_stored, read_config
from vesuvius.config.patterns import match_volumes
from vesuvius.loader.arguments import data_of

FILES = (
    "images/b.zarr",
    "images/a.zarr",
    "images/A.ome.zarr",
    "images/notes.txt",
    "labels/a_target.zarr",
    "labels/b_target.zarr",
    "labels/A_target.zarr",
    "scans/s2/ct.zarr",
    "scans/s1/ct.zarr",
    "scans/s1/ink.zarr",
    "scans/s2/ink.zarr",
    "odd/x[1]*.zarr",
    "odd/x1.zarr",
    "odd/{name}.zarr",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with empty folders for volumes."""
    for file in FILES:
        (tmp_path / file).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def matched(*volumes: Any, **keys: Any) -> list[VolumeConfig]:
    return list(match_volumes(DataConfig(volumes=volumes, **keys)).volumes)


def paths(volumes: list[VolumeConfig]) -> list[str]:
    return [os.path.relpath(volume.path) for volume in volumes]


def test_a_pattern_becomes_its_matches_in_order_with_all_its_keys(folder: Path) -> None:
    condition = ArrayConfig(path="labels/{name}_target.zarr", level=1)
    pattern = VolumeConfig(path="images/*.zarr", level=2, weight=3, condition=condition)
    before, *found, after = matched(
        VolumeConfig(path="images/b.zarr", condition="labels/{name}_target.zarr"),
        pattern,
        VolumeConfig(path="s3://bucket/d.zarr/?key=v", condition="https://host/{name}.zarr"),
    )
    for volume, name, end in zip(found, ("A", "a", "b"), (".ome.zarr", ".zarr", ".zarr"), strict=True):
        labels = ConditionConfig(path=folder / f"labels/{name}_target.zarr", level=1)
        assert volume == VolumeConfig(path=folder / f"images/{name}{end}", level=2, weight=3, condition=labels)
    assert before.condition == ConditionConfig(path="labels/b_target.zarr")
    assert after.condition == ConditionConfig(path="https://host/d.zarr")


def test_the_name_is_that_of_the_last_open_part_of_the_path() -> None:
    found = matched(VolumeConfig(path="scans/s?/ct.zarr", mask="scans/{name}/ink.zarr"), min_foreground=0.5)
    assert paths(found) == ["scans/s1/ct.zarr", "scans/s2/ct.zarr"]
    assert [each.mask for each in found] == [MaskConfig(path=f"scans/{name}/ink.zarr") for name in ("s1", "s2")]


def test_labels_that_several_volumes_share_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Mostly by mistake; of one match, or of entries one by one, they are as they were written."""
    matched(VolumeConfig(path="images/[ab].zarr", condition="labels/a_target.zarr"))
    assert "labels/a_target.zarr is used for all 2 matches of [ab].zarr; {name} gives each its own" in caplog.text
    caplog.clear()
    for path in ("images/[a].zarr", "images/b.zarr"):
        matched(VolumeConfig(path=path, condition="labels/a_target.zarr"))
    matched(VolumeConfig(path="images/[ab].zarr", condition="labels/{name}_target.zarr"))
    assert not caplog.records


def test_the_name_is_filled_in_wherever_a_path_is(folder: Path) -> None:
    for name in ("s1", "s2"):
        (folder / f"scans/{name}/t.json").touch()
    ink = ArrayConfig(path="scans/{name}/ink.zarr", transform="scans/{name}/t.json")
    volume = VolumeConfig(path="scans/*/ct.zarr", condition=ink, more_labels=(ink,), channels=(ink,), mask=ink)
    for found, name in zip(matched(volume, min_foreground=0.5), ("s1", "s2"), strict=True):
        wanted = ArrayConfig(path=f"scans/{name}/ink.zarr", transform=f"scans/{name}/t.json")
        assert (found.more_labels, found.channels) == ((wanted,), (wanted,))
        assert found.condition == ConditionConfig(**dict(wanted.given))
        assert found.mask == MaskConfig(**wanted.given)
    (folder / "scans/s2/t.json").unlink()
    with pytest.raises(ConfigError, match=r"1 of 4 paths with \{name\} do not exist: .*/scans/s2/t.json; add"):
        matched(volume, min_foreground=0.5)


def test_what_exists_is_no_pattern_and_addresses_are_none(folder: Path) -> None:
    """Called again, nothing changes: what was matched is literal."""
    volumes = ["odd/x[1]*.zarr", "odd/{name}.zarr", "s3://b/*.zarr", "http://[::1]:80/a.zarr"]
    found = matched(*volumes)
    assert [each.path for each in found] == [str(folder / volumes[0]), str(folder / volumes[1]), *volumes[2:]]
    assert matched(VolumeConfig(path="odd/x1.zarr", condition="odd/{name}.zarr"))[0].condition == ConditionConfig(
        path="odd/{name}.zarr"
    ), "that folder exists"
    assert paths(matched("odd/x[[]*.zarr")) == ["odd/x[1]*.zarr"]
    twice = matched(*matched("odd/*.zarr"))
    assert paths(twice) == ["odd/x1.zarr", "odd/x[1]*.zarr", "odd/{name}.zarr"]


def test_a_folder_that_exists_is_no_pattern_whatever_its_characters(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a working directory of such a name, all paths have it; `here[1]` is not `here1`, and `a*` is open."""
    for name in ("here[1]/images/a.zarr", "here[1]/images/b.zarr", "here1/images/c.zarr"):
        (folder / name).mkdir(parents=True)
    monkeypatch.chdir(folder / "here[1]")
    found = matched(VolumeConfig(path="images/*.zarr", condition="images/{name}.zarr"))
    assert paths(found) == ["images/a.zarr", "images/b.zarr"]
    assert [each.path for each in found] == [each.condition.path for each in found if each.condition]
    with pytest.raises(ConfigError, match=r"a pattern of paths in .*/here\[1\]/images, but no path there matches"):
        matched("images/c*.zarr")


def test_a_config_of_a_run_keeps_names_that_look_like_patterns(folder: Path) -> None:
    """The volumes of a checkpoint may be gone or on another machine."""
    config = parse_config(MINIMAL, ["data.volumes=[{path: 'gone/[1].zarr'}]"])
    assert parse_stored(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "images/*.n5",
            "{here}/images/*.n5 is a pattern of paths in {here}/images, but no path there matches; correct",
        ),
        ("imges/*/a?.zarr", "is a pattern of paths in {here}/imges, but there is no such folder; correct data.volumes"),
        ("a\0*", "a pattern"),
    ],
)
def test_a_pattern_without_a_match_names_its_folder(folder: Path, pattern: str, message: str) -> None:
    if "\0" in pattern:
        assert len(matched(pattern)) == 1, "refused when it is opened"
        return
    with pytest.raises(ConfigError) as refused:
        matched("images/*.zarr", pattern)
    assert message.format(here=folder) in str(refused.value)


def test_all_missing_labels_and_masks_are_named_at_once(folder: Path) -> None:
    for number in range(10):
        (folder / f"many/{number}.zarr").mkdir(parents=True)
    (folder / "labels/3.zarr").mkdir()
    wanted = f"9 of 10 paths with {{name}} do not exist: {folder}/labels/0.zarr, {folder}/labels/1.zarr, "
    with pytest.raises(ConfigError) as refused:
        matched(VolumeConfig(path="many/*", condition="labels/{name}.zarr"))
    assert str(refused.value).startswith(wanted)
    assert str(refused.value).endswith("/8.zarr and 1 more; add them, or match fewer volumes")


# ---- files

ENTRIES = """
- path: ../images/[ab].zarr
  voxel_size_um: 7.91
  weight: 2
  labels: {path: "../labels/{name}_target.zarr", level: 1}
- path: https://host/c.zarr
  condition: ~/c_target.zarr
"""


def expected(folder: Path) -> tuple[VolumeConfig, ...]:
    def local(name: str) -> VolumeConfig:
        labels = ConditionConfig(path=folder / f"labels/{name}_target.zarr", level=1)
        return VolumeConfig(path=folder / f"images/{name}.zarr", voxel_size_um=7.91, weight=2, condition=labels)

    return local("a"), local("b"), VolumeConfig(path="https://host/c.zarr", condition="~/c_target.zarr")


@pytest.mark.parametrize("indented", [False, True])
def test_a_volumes_file_has_paths_relative_to_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, indented: bool
) -> None:
    text = f"min_foreground: 0.0\npatch_size: [8, 16, 16]\nvolumes:\n{ENTRIES}" if indented else ENTRIES
    (folder / "lists").mkdir()
    (folder / "lists/volumes.yaml").write_text(text)
    config = folder / "config.yaml"
    config.write_text("name: x\ndata:\n  volumes: lists/volumes.yaml\n  patch_size: [8, 32, 32]\n")
    trained = read_config(config)
    assert trained.data.volumes == match_volumes(trained.data).volumes
    assert [os.path.realpath(each.path) for each in trained.data.volumes[:2]] == [
        each.path for each in expected(folder)[:2]
    ]
    assert trained.data.patch_size == (8, 32, 32), "the config's own key"
    assert parse_config(dump_config(trained)) == trained
    for here, file in ((folder, "lists/volumes.yaml"), (folder / "scans", folder / "lists/volumes.yaml")):
        monkeypatch.chdir(here)
        data, _ = data_of(file, {"patch_size": None, "min_foreground": None, "labels": None, "mask": None}, 0)
        assert data.patch_size == ((8, 16, 16) if indented else (72, 136, 136))
        for found, wanted in zip(data.volumes, expected(folder), strict=True):
            assert (found.weight, found.voxel_size_um) == (wanted.weight, wanted.voxel_size_um)
            for one, two in ((found, wanted), (found.condition, wanted.condition)):
                assert one is not None
                assert two is not None
                assert (one.path if "://" in one.path else os.path.normpath(one.path)) == two.path
                assert one.level == two.level


def test_text_stands_for_a_path_and_arguments_precede_the_keys_of_a_file(folder: Path) -> None:
    Path("v.yaml").write_text(
        "volumes: [images/a.zarr, images/b.zarr]\nlabels: labels/{name}_target.zarr\npatch_size: 8"
    )
    given = {"patch_size": (8, 16, 16), "labels": None, "mask": ["scans/s1/ct.zarr", "scans/s2/ct.zarr"]}
    data, _ = data_of("v.yaml", given, 0)
    assert paths(list(data.volumes)) == ["images/a.zarr", "images/b.zarr"]
    conditions = [volume.condition for volume in data.volumes]
    assert conditions == [ConditionConfig(path=f"labels/{name}_target.zarr") for name in "ab"]
    assert (data.patch_size, {data.min_foreground_of(each) for each in data.volumes}) == ((8, 16, 16), {0.5})
    entry = "{path: images/a.zarr, labels: [labels/a_target.zarr, {path: labels/b_target.zarr, transform: t.json}]}"
    Path("scans/v.yaml").write_text(f"- {entry.replace('labels/', '../labels/')}")
    (volume,) = data_of("scans/v.yaml", given | {"mask": None}, 0)[0].volumes
    assert [os.path.relpath(each.path) for each in volume.labels] == ["labels/a_target.zarr", "labels/b_target.zarr"]
    assert os.path.relpath(volume.more_labels[0].transform or "") == "scans/t.json"


def test_keys_of_a_file_mean_what_they_mean_in_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a config that names it, and by a path with `~`."""
    entry = "volumes: [{path: images/a.zarr, labels: labels/a_target.zarr}]"
    Path("v.yaml").write_text(f"class_weights: {{1: 0.25, -2: 0.5}}\nignore_label: 255\n{entry}")
    given: dict[str, Any] = dict.fromkeys(("class_weights", "ignore_label", "labels", "mask", "min_foreground"))
    python = {"class_weights": {1: 0.25, -2: 0.5}, "ignore_label": 255, "labels": "labels/a_target.zarr"}
    wanted, _ = data_of("images/a.zarr", given | python, 0)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir("/")
    assert data_of("~/v.yaml", given, 0)[0] == wanted
    (folder / "v.yaml").write_text(f"class_weights: {{1: 0.25, -2: 0.5}}\n{entry}")
    (folder / "x.yaml").write_text("name: x\ndata: {volumes: ~/v.yaml}")
    config = read_config(folder / "x.yaml")
    assert config.data.class_weights == wanted.class_weights
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("volumes: [a]\nshuffle: 1", "v.yaml: unknown keys shuffle; use volumes, labels, mask, patch_size"),
        ("- {path: a, labels: b, condition: c}", "v.yaml: DataConfig is not valid: volumes.0.labels: Extra"),
        ("- {path: a, lvl: 1}", "v.yaml: DataConfig is not valid: volumes.0.lvl: Extra inputs are not permitted$"),
        ("- path: a\n  path: b", "v.yaml:2: 0.path: the key is set twice"),
        ("[]", "at least 1 item"),
        ("volumes: 3", "v.yaml: volumes: 3 (int) is not a path or config; pass the path"),
        ("name: x", "v.yaml: data: required key is missing"),
    ],
)
def test_mistakes_in_a_volumes_file_are_named(text: str, message: str) -> None:
    Path("v.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        data_of("v.yaml", {"patch_size": None, "labels": None, "mask": None}, 0)
    assert message in f"{refused.value}$"


def test_a_file_that_is_none_is_refused_at_the_key_that_names_it(folder: Path) -> None:
    for name, message in (("no.yaml", "no.yaml: No such file or directory"), ("images/a.zarr", "use a list of at lea")):
        Path("x.yaml").write_text(f"name: x\ndata: {{volumes: {name}}}")
        with pytest.raises(ConfigError, match=message):
            read_config(Path("x.yaml"))
    Path("no.yaml").write_text("data: {volumes: [a]}")
    Path("x.yaml").write_text("name: x\ndata: {volumes: no.yaml}")
    with pytest.raises(ConfigError, match=r"'no.yaml' is not valid; use a list of at least 1 value"):
        read_config(Path("x.yaml"))
