"""A config may extend another: its keys override those of the other, and problems name file and line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vesuvius.config import Config, VolumeConfig
from vesuvius.config.load import parse_config, read_config, read_source
from vesuvius.errors import ConfigError

BASE = """\
name: base
data:
  volumes:
    - path: a.zarr
      level: 2
training:
  lr: 1e-3
  workers: 4
model: {channels: [8, 16, 32]}
"""


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)


def read(text: str, *overrides: str, path: str = "x.yaml") -> Config:
    Path(path).write_text(text)
    return read_config(Path(path), overrides)


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    return str(caught.value).split("\n")


def test_sections_are_merged_key_by_key_and_lists_are_replaced() -> None:
    config = read(
        "extends: base.yaml\nname: x\ntraining: {workers: 8}\ndata: {volumes: [{path: b.zarr}]}\nmodel: {channels: [8]}"
    )
    assert (config.name, config.training.lr, config.training.workers) == ("x", 1e-3, 8)
    assert config.data.volumes == (VolumeConfig(path="b.zarr"),), "level 2 of the other list is gone"
    assert config.model.channels == (8,)
    assert read("extends: base.yaml") == read_config(Path("base.yaml"))
    assert read("extends: base.yaml\ntraining: {}") == read_config(Path("base.yaml"))


def test_a_chain_is_read_from_the_folder_of_each_file(tmp_path: Path) -> None:
    for folder in ("deep/er", "other"):
        Path(folder).mkdir(parents=True)
    read("extends: ../base.yaml\nseed: 1\ntraining: {epochs: 2}", path="other/middle.yaml")
    config = read("extends: ../../other/middle.yaml\nseed: 2\n", path="deep/er/x.yaml")
    assert (config.seed, config.training.epochs, config.training.workers) == (2, 2, 4)
    absolute = read(f"extends: {tmp_path / 'base.yaml'}\nname: x")
    assert absolute.training.workers == 4


def test_each_problem_names_its_file_and_line() -> None:
    Path("base.yaml").write_text(BASE.replace("1e-3", "-1") + "sead: 1\n")
    assert set(problems("extends: base.yaml\ntraining:\n  workers: two\n", "seed=a")) == {
        "x.yaml:3: training.workers: 'two' is not valid; use an integer of at least 0",
        "base.yaml:7: training.lr: -1 is not valid; use a number above 0",
        "base.yaml:10: sead: unknown key; did you mean seed?",
        "override seed=a: seed: 'a' is not valid; use an integer of at least 0",
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "extends: none.yaml",
            "x.yaml:2: extends: none.yaml: No such file or directory; give the path of a YAML config",
        ),
        ("extends: .", "x.yaml:2: extends: .: Is a directory; give the path of a YAML config"),
        ("extends:", "x.yaml:2: extends: null is not the path of a YAML config, relative to this file"),
        ("extends: [base.yaml]", "x.yaml:2: extends: "),
        ('extends: "a\\0b"', "x.yaml:2: extends: "),
        ("training: {extends: base.yaml}", "x.yaml:2: training.extends: unknown key; "),
        ("extends: x.yaml", "x.yaml:2: extends: files extend each other in a cycle (x.yaml -> x.yaml);"),
    ],
)
def test_what_cannot_be_extended_is_refused_at_its_line(line: str, message: str) -> None:
    assert any(problem.startswith(message) for problem in problems(f"name: x\n{line}\n"))


def test_a_text_without_a_file_extends_nothing() -> None:
    with pytest.raises(ConfigError, match="x:2: extends: only a file on disk can extend another"):
        parse_config("name: x\nextends: base.yaml", source="x")


def test_the_kept_source_needs_no_other_file() -> None:
    assert read_source(Path("base.yaml")) == BASE.encode(), "as it is"
    config = read("extends: base.yaml\nseed: 3\ntraining: {workers: 8}")
    kept = read_source(Path("x.yaml")).decode()
    assert parse_config(kept) == config
    assert kept.startswith("# Merged from 'x.yaml', 'base.yaml'.\n")
    Path("base.yaml").unlink()
    Path("kept.yaml").write_text(kept)
    assert read_config(Path("kept.yaml")) == config
    assert read_source(Path("kept.yaml")).decode() == kept, "a resume from the kept source leaves it as it is"


def test_the_kept_source_is_what_was_read_whatever_an_editor_has_done_since() -> None:
    config = read("extends: base.yaml\nname: x", path="x.yaml")
    Path("base.yaml").write_text(BASE.replace("1e-3", "5.0"))
    Path("x.yaml").unlink()
    assert parse_config(read_source(Path("x.yaml")).decode()) == config
    assert read_config(Path("base.yaml")).training.lr == 5.0, "each read of a config is a new one"
    ends = os.pipe()
    os.write(ends[1], BASE.encode())
    os.close(ends[1])
    piped = Path(f"/dev/fd/{ends[0]}")
    assert read_config(piped).name == "base"
    assert read_source(piped) == BASE.encode()
    os.close(ends[0])
