"""Paths that commands write to, and the working directory that relative ones start in."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from vesuvius.commands import cli
from vesuvius.errors import EXIT_CONFIG, ConfigError
from vesuvius.runlog.find_run import runs_root

ADDRESS = "s3://bucket/x.zarr"
WRITES = [
    ["volume", "synth", ADDRESS],
    ["volume", "copy", "v.zarr", ADDRESS],
    ["sample", "--checkpoint", "n", "--out", ADDRESS],
    ["predict", "--network", "n.pt", "--volume", "v.zarr", "--patch-size", "8,8,8", "--out", ADDRESS],
    ["report", "n", "--out", ADDRESS],
    ["evaluate", "n", "--out", ADDRESS],
    ["init", "v.zarr", "--out", ADDRESS],
]


@pytest.mark.parametrize("arguments", WRITES, ids=lambda arguments: arguments[0])
def test_a_result_for_an_address_is_refused_and_no_folder_is_named_after_it(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == EXIT_CONFIG
    assert f"{ADDRESS} is an address, not a path on a disk" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_runs_lie_on_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, path in (("~/r", tmp_path / "r"), ("file:///a%20b/r", Path("/a b/r")), ("a:b", Path.cwd() / "a:b")):
        monkeypatch.setenv("VESUVIUS_RUNS", given)
        assert runs_root() == cli.full_path(given) == path
    monkeypatch.setenv("VESUVIUS_RUNS", "gs://bucket/runs")
    with pytest.raises(ConfigError, match="VESUVIUS_RUNS=gs://bucket/runs is an address"):
        runs_root()


@pytest.mark.parametrize("arguments", [["report", "n"], ["quarantine", "n"], ["memcheck", "--once"]])
def test_a_working_directory_that_is_gone_is_named_in_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    shutil.rmtree(tmp_path / "gone")
    assert cli.main(arguments) == EXIT_CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("The working directory no longer exists; change to another folder and repeat the command")
