"""Paths that commands write to, and the working directory that relative ones start in."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vesuvius.commands import cli
from vesuvius.config import StoreConfig
from vesuvius.errors import EXIT_CONFIG, EXIT_ERROR, ConfigError, system_error
from vesuvius.runlog.files import cache_folder
from vesuvius.runlog.find_run import runs_root
from vesuvius.volumes.store.cache import open_cache

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
    assert f"{ADDRESS!r} is not a path on a disk" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_runs_lie_on_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, path in (("~/r", tmp_path / "r"), ("file:///a%20b/r", Path("/a b/r")), ("a:b", Path.cwd() / "a:b")):
        monkeypatch.setenv("VESUVIUS_RUNS", given)
        assert runs_root() == cli.full_path(given) == path
    monkeypatch.setenv("VESUVIUS_RUNS", "gs://bucket/runs")
    for unset in ("", "s3://b/x", str(Path("s3://b/x"))):
        with pytest.raises(ArgumentTypeError, match="is not a path on a disk"):
            cli.full_path(unset)
    with pytest.raises(ConfigError, match=r"VESUVIUS_RUNS=.gs://bucket/runs. is not a path on a disk"):
        runs_root()


def test_an_unknown_home_directory_or_variable_is_no_folder_unless_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for above in ("~no-such-user", "$NOT_SET", f"{tmp_path}/r/${{NOT_SET}}"):
        with pytest.raises(ArgumentTypeError, match="names no home directory or variable that is known here"):
            cli.full_path(f"{above}/x.zarr")
    cached = StoreConfig(cache_dir="$NOT_SET/cache")
    with pytest.raises(ConfigError, match=r"data\.store\.cache_dir=.*'\$NOT_SET' is no folder"):
        open_cache(cached)
    monkeypatch.setenv("VESUVIUS_RUNS", "$NOT_SET")
    with pytest.raises(ConfigError, match=r"VESUVIUS_RUNS=.*'\$NOT_SET' is no folder"):
        runs_root()
    (tmp_path / "$NOT_SET").mkdir()
    with pytest.raises(ArgumentTypeError, match=r"'~no-such-user' is no folder"):
        cli.full_path("$NOT_SET/~no-such-user/x.zarr")
    assert runs_root() == tmp_path / "$NOT_SET"
    for name in ("$NOT_SET/x.zarr", "$5.zarr", "a$/b~/x.zarr"):
        assert cli.full_path(name) == tmp_path / name
    assert open_cache(cached) is not None


def test_without_a_home_directory_the_variable_to_set_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_user(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_user)
    with pytest.raises(ConfigError, match=r"XDG_CACHE_HOME='~/\.cache': '~' is no folder"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache/vesuvius"


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
    assert "No space" in str(system_error(OSError(errno.ENOSPC, "No space", str(tmp_path)))), "another cause"
    assert line.endswith("The working directory no longer exists; change to another folder, repeat the command")


@pytest.mark.parametrize("request_memory", [lambda: bytearray(2**62), lambda: torch.empty(2**62, dtype=torch.uint8)])
def test_more_memory_than_there_is_is_no_defect_but_other_errors_are(
    request_memory: Callable[[], object], capsys: pytest.CaptureFixture[str]
) -> None:
    def command(error: Callable[[], object]) -> list[str]:
        assert cli.as_command(lambda _: int(bool(error())))([]) == EXIT_ERROR
        return capsys.readouterr().err.splitlines()

    (line,) = command(request_memory)
    assert "The system gives this process no more memory or threads: " in line
    assert "Bug in vesuvius" in command(lambda: [][1])[0]
