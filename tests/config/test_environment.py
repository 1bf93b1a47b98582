"""`VESUVIUS_*` variables set config keys, over files and under the command line, once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.support.config_text import MINIMAL
from vesuvius.commands import train
from vesuvius.config import Config, VolumeConfig
from vesuvius.config.describe import iter_keys
from vesuvius.config.load import parse_config, read_config, take_config
from vesuvius.errors import EXIT_OK, ConfigError

BASE = f"{MINIMAL}training: {{lr: 1e-3, workers: 4, epochs: 5, warmup_steps: 6}}\n"
TOP = "extends: base.yaml\ntraining: {workers: 5, epochs: 6, warmup_steps: 7}\n"
PATH = Path("x.yaml")


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    PATH.write_text(TOP)


def read(*overrides: str, **variables: str) -> Config:
    return read_config(PATH, overrides, {f"VESUVIUS_{name}": value for name, value in variables.items()})


def problems(**variables: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(**variables)
    return str(caught.value).split("\n")


def test_defaults_file_environment_and_command_line_rank_in_that_order() -> None:
    training = read("training.warmup_steps=9", TRAINING__EPOCHS="8", TRAINING__WARMUP_STEPS="8").training
    assert (training.accumulate_steps, training.lr) == (1, 1e-3), "by default, from the file below"
    assert (training.workers, training.epochs, training.warmup_steps) == (5, 8, 9)


def test_values_are_yaml_and_items_of_lists_are_counted_from_0() -> None:
    config = read(
        DATA__VOLUMES="[{path: a.zarr}, {path: b.zarr}]",
        DATA__VOLUMES__1__WEIGHT="3",
        TRAINING__AMP="off",
        TRAINING__COMPILE="true",
        TRAINING__MAX_HOURS="null",
        DATA__PATCH_SIZE__0="64",
        DATA__PATCH_SIZE="[8, 16, 16]",
    )
    assert config.data.volumes == (VolumeConfig(path="a.zarr"), VolumeConfig(path="b.zarr", weight=3.0))
    assert (config.training.amp, config.training.compile, config.training.max_hours) == ("off", True, None)
    assert config.data.patch_size == (64, 16, 16), "a list before its items"


def test_other_variables_are_left_alone() -> None:
    others = {"HOME": "/root", "VESUVIUS_RUNS": "/scratch", "vesuvius_seed": "x", "MY_VESUVIUS_SEED": "x"}
    others |= {"VESUVIUS_HTTP_HEADERS": "host Cookie: a=b"}
    services = {
        "VESUVIUS_SERVICE_HOST": "10.0.0.1",
        "VESUVIUS_SERVICE_PORT_HTTP": "80",
        "VESUVIUS_PORT": "tcp://10.0.0.1",
    }
    assert read_config(PATH, (), others | services) == read_config(PATH)
    assert problems(PORT="80")[0].startswith("environment variable VESUVIUS_PORT: "), "of no Service"


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    for name, problem in {
        "TRAINING__WORKRS": "training.workrs: unknown key; did you mean workers?",
        "LR": "lr: unknown key; did you mean training.lr?",
        "DATA__VOLUMES__PATH": "data.volumes has no entry path; use 0, its only entry",
        "DATA__PATCH_SIZE__Z": "data.patch_size: {z: 1} is not valid; use a list of 3 values, each an integer of "
        "at least 1",
    }.items():
        assert problems(**{name: "1"}) == [f"environment variable VESUVIUS_{name}: {problem}"]


@pytest.mark.parametrize(
    "value",
    ["/data/scan #2.zarr", "#2", "'a' # b", "[a, b] # c", "- path: a\n- path: b #2", "|\n  a\n# b"],
)
@pytest.mark.parametrize("by", ["variable", "override"])
def test_a_value_is_never_cut_at_what_yaml_takes_for_a_comment(value: str, by: str) -> None:
    with pytest.raises(ConfigError, match="is a YAML comment and would be cut off; put the value in quotes"):
        read(f"name={value}") if by == "override" else read(NAME=value)


def test_other_number_signs_belong_to_the_value() -> None:
    for value in ("a#b.zarr", "'/data/scan #2.zarr'", '"#2"', "'it''s # 3'"):
        path = read(f"data.volumes.0.path={value}").data.volumes[0].path
        assert path == os.path.abspath(yaml.safe_load(value))
    assert read("data.volumes=[{path: 'scan #2', level: 1}]").data.volumes[0].path == os.path.abspath("scan #2")


def test_each_problem_names_the_variable_it_comes_from() -> None:
    found = problems(TRAINING__WORKERS="two", SEED="", DATA__VOLUMES__1__LEVEL="2")
    assert sorted(line.removeprefix("environment variable VESUVIUS_") for line in found) == [
        "DATA__VOLUMES__1__LEVEL: data.volumes has no entry 1; use 0, its only entry",
        "SEED: the value is missing; write null for none, or '' for empty text",
        "TRAINING__WORKERS: training.workers: 'two' is not valid; use an integer of at least 0",
    ]


def test_the_printed_config_has_every_key_once_with_its_meaning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VESUVIUS_TRAINING__WORKERS", "3")
    assert train.main(["--config", "x.yaml", "--print-config", "training.epochs=2"]) == EXIT_OK
    text = capsys.readouterr().out
    config = read_config(PATH, ["training.epochs=2"], os.environ)
    assert parse_config(text) == config
    assert yaml.safe_load(text) == config.model_dump(mode="json")
    # null or empty by default
    absent = "data.volumes[].mask.", "data.volumes[].condition.", "data.volumes[].channels[]", "data.class_weights[]"
    absent += ("data.volumes[].more_labels[]",)
    keys = [(key, schema) for key, schema in iter_keys() if not key.startswith(absent)]
    for line, (key, schema) in zip(text.splitlines(), keys, strict=True):
        assert line.strip(" -").startswith(f"{key.rpartition('.')[2]}:")
        assert line.endswith(f"  # {schema['description']}")


def test_child_processes_do_not_see_the_variables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VESUVIUS_TRAINING__WORKERS", "3")
    monkeypatch.setenv("VESUVIUS_RUNS", "elsewhere")
    caplog.set_level("INFO")
    assert take_config(PATH, ["training.lr=1"]).training.workers == 3
    assert caplog.messages == ["config keys from the environment: VESUVIUS_TRAINING__WORKERS"]
    assert "VESUVIUS_TRAINING__WORKERS" not in os.environ
    assert os.environ["VESUVIUS_RUNS"] == "elsewhere"
