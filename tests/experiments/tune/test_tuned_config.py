"""The tuned config extends its source, sets what differs with a reason each, and reads as what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from vesuvius.config import Config
from vesuvius.config.load import parse_config, read_config
from vesuvius.errors import ConfigError, StorageError
from vesuvius.experiments.tune.report import (
    MARK,
    check_tunable,
    tuned_path,
    tuned_yaml,
)

TOP = "name: tiny\ndata:\n  volumes:\n    - path: scroll.zarr\n"
SHORT = "1.9 times the samples/s"


def tuned_text(source: str, *overrides: str, reasons: dict[str, str] | None = None, name: str = "x.yaml") -> str:
    return tuned_yaml(name, parse_config(source), parse_config(source, overrides), reasons or {}, ["by hand"])


def tuned(tmp_path: Path, source: str, *overrides: str, name: str = "x.yaml") -> Config:
    """Writes source and tuned config, and reads the latter."""
    (tmp_path / name).write_text(source)
    path = tuned_path(tmp_path / name)
    path.write_text(tuned_text(source, *overrides, name=name))
    return read_config(path)


def test_a_tuned_config_has_a_reason_for_each_key() -> None:
    text = tuned_text(
        TOP + "training: {workers: 2}\n",
        "training.workers=6",
        "training.prefetch_factor=4",
        "data.store.requests=32",
        reasons={"training.workers": SHORT, "data.store.requests": "a far store"},
    )
    assert text == (
        f"# {MARK} from x.yaml; tuning it again replaces this file.\n"
        "# by hand\n"
        "\n"
        "extends: x.yaml\n"
        "data:\n"
        "  store:\n"
        "    requests: 32  # was 16 by default; a far store\n"
        "training:\n"
        "  workers: 6  # was 2; 1.9 times the samples/s\n"
        "  prefetch_factor: 4  # was 2 by default; as set for the tune\n"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.volumes.0.level=1"],
        ["data.volumes=[{path: other.zarr}]", "training.lr=2e-3"],
        ["cluster={address: auto}"],  # in place of the section, so that max_restarts is the default again
        ["data.normalize={low: 0, high: 200}", "data.augment.rot90=false"],
        [" training . workers = 3", "name='- a'"],
        ["model={channels: [16, 32]}", "training.checkpoint_levels=[]"],
    ],
)
def test_overrides_of_any_form_are_read_back_from_the_tuned_config(tmp_path: Path, overrides: list[str]) -> None:
    source = (
        TOP + "    - path: b.zarr\n      weight: 2\ncluster: {max_restarts: 2}\ntraining: {checkpoint_levels: [1]}\n"
    )
    overrides = [override.replace("'- a'", "a") for override in overrides]
    assert tuned(tmp_path, source, *overrides) == parse_config(source, overrides)


def test_a_reason_cannot_break_out_of_its_comment(tmp_path: Path) -> None:
    for evil in ("a\nseed: 3", "a\x85seed: 3", "a\u2028seed: 3"):
        text = tuned_text(TOP, "training.workers=6", reasons={"training.workers": evil}, name="x.yaml")
        (tmp_path / "x.yaml").write_text(TOP)
        (tmp_path / "y.yaml").write_text(text)
        assert read_config(tmp_path / "y.yaml") == parse_config(TOP, ["training.workers=6"])


@pytest.mark.parametrize("name", ["- a: b.yaml", "é 1.yaml", "'x'.yaml", "&a *b.yaml"])
def test_odd_names_of_the_source_survive(tmp_path: Path, name: str) -> None:
    check_tunable(tmp_path / name)
    assert tuned(tmp_path, TOP, "training.workers=6", name=name).training.workers == 6


def test_a_tuned_config_cannot_be_tuned(tmp_path: Path) -> None:
    tuned(tmp_path, TOP, "training.workers=6")
    path = tmp_path / "x.tuned.yaml"
    check_tunable(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="tune the config it extends or remove its first line"):
        check_tunable(path)
    path.write_text(path.read_text().partition("\n")[2])
    check_tunable(path)
    (tmp_path / "x.tuned.tuned.yaml").write_text("name: mine\n")
    with pytest.raises(ConfigError, match="was not written by vesuvius tune"):
        check_tunable(path)


def test_only_files_written_by_a_tune_are_replaced(tmp_path: Path) -> None:
    source, path = tmp_path / "x.yaml", tmp_path / "x.tuned.yaml"
    path.write_text(tuned_text(TOP))
    check_tunable(source)
    path.write_text(TOP)
    with pytest.raises(ConfigError, match="was not written by vesuvius tune"):
        check_tunable(source)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="was not written by vesuvius tune"):
        check_tunable(source)
    assert [file.name for file in tmp_path.iterdir()] == ["x.tuned.yaml"]


def test_a_folder_that_is_not_writable_is_reported_before_the_first_trial(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not writable"):
        check_tunable(tmp_path / "missing" / "x.yaml")
