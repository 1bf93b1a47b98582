"""`vesuvius demo` deletes only what a demo wrote: no other run, no file of somebody else, nothing behind a link."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zarr

from tests.commands.test_wheel import TINY
from vesuvius.commands import demo, train, volume
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_CONFIG, EXIT_OK
from vesuvius.monitor.samples import MemorySample, RecentFile
from vesuvius.runlog.files import write_atomically
from vesuvius.runlog.run_dir import RunDir
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.volumes.box import shape_of

QUICK = (
    *TINY,
    "data.patch_size=[8, 16, 16]",
    "data.validation.fraction=0",
    "training.train_batch_size=1",
    "training.max_steps=2",
    "training.workers=0",
    "monitor.tensorboard=false",
    "training.preview_every=0",
    "model={channels: [8], blocks_per_level: 1, full_res_channels: 0}",
)


def _everything(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def after_a_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a demo has run."""
    folder, synth = tmp_path_factory.mktemp("demo"), volume.main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(volume, "main", lambda argv: synth([*argv[:3], "32,64,64", *argv[4:]]))  # a small scroll
        patch.chdir(folder)
        assert demo.main([*QUICK]) == EXIT_OK
    return folder


@pytest.fixture
def here(after_a_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(after_a_demo, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here/runs/demo"


def test_the_scroll_of_a_demo_holds_its_patches_and_the_labels_of_its_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tests take a smaller one."""
    asked: list[str] = []

    def refuse(argv: list[str]) -> int:
        asked.extend(argv)
        return EXIT_CONFIG

    monkeypatch.setattr(volume, "main", refuse)
    monkeypatch.chdir(tmp_path)
    assert demo.main([]) == EXIT_CONFIG
    shape = tuple(map(int, asked[asked.index("--shape") + 1].split(",")))
    for path in (demo.VOLUME, demo.VOLUME.with_suffix(".labels.zarr")):
        zarr.create_array(path, shape=shape, chunks=(64, 64, 64), dtype="uint8")
    config = read_config(Path(demo.__file__).parents[1] / "demo.yaml")
    (split,) = prepare_data(config.seed, config.data).splits
    assert split.validation is not None
    assert all(size >= least for size, least in zip(shape_of(split.validation), (64, 128, 128), strict=True))


def test_a_second_demo_replaces_the_first_but_no_folders_of_other_commands(here: Path) -> None:
    (here / "reports").mkdir()
    (here / "reports/mine.html").touch()
    before = (here / "env.json").stat().st_ino
    assert demo.main([*QUICK]) == EXIT_OK
    assert (here / "reports/mine.html").exists()
    assert (here / "env.json").stat().st_ino != before
    assert (here / "metrics.jsonl").read_text().count('"run_start"') == 1


def test_a_demo_replaces_what_a_killed_one_left(here: Path) -> None:
    """Also if it was killed within a write, after a rotation of its records, or while it replaced another."""
    if not (child := os.fork()):
        os.fsync = lambda descriptor: os._exit(9)
        write_atomically(here / "session.json", b"{}")
    os.waitpid(child, 0)
    for _ in range(3):
        recent = RecentFile(here / "recent.jsonl", kept=1)
        recent.write(MemorySample(time.time(), 1, 0, 0, 0))
        recent.close()
    if not (child := os.fork()):
        shutil.rmtree = lambda path: os._exit(9)  # type: ignore[assignment]
        RunDir(here).clear()
    os.waitpid(child, 0)
    left = {path.name for path in here.iterdir()}
    assert "config.source.yaml" in left
    assert demo.main([*QUICK]) == EXIT_OK
    assert not [name for name in os.listdir(here) if "before" in name or name.endswith(".tmp")]


def _trained_by_hand(run: Path) -> None:
    shutil.rmtree(run)
    assert train.main(["--config", "demo.yaml", *QUICK]) == EXIT_OK


def _trained_after_a_failed_demo(run: Path) -> None:
    shutil.rmtree(run)
    assert demo.main([*QUICK, "data.volumes=[{path: absent.zarr}]", "data.condition_classes=0"]) != EXIT_OK
    assert train.main(["--config", "demo.yaml", *QUICK]) == EXIT_OK


def _resumed(run: Path) -> None:
    config = str(run / "config.resolved.yaml")
    assert train.main(["--config", config, "--resume", "training.epochs=2", "training.max_steps=3"]) == EXIT_OK


def _of_an_older_version(run: Path) -> None:
    (run / "config.source.yaml").write_bytes(Path("demo.yaml").read_bytes())


def _with_other_files(run: Path) -> None:
    (run / "thesis.md").touch()


def _linked(run: Path) -> None:
    run.rename(run.parent / "precious")
    run.symlink_to("precious")


def _partly_linked(run: Path) -> None:
    (run / "checkpoints").rename(run.parent / "checkpoints")
    (run / "checkpoints").symlink_to("../checkpoints")


def _a_file(run: Path) -> None:
    shutil.rmtree(run)
    run.touch()


@pytest.mark.parametrize(
    "made",
    [
        _trained_by_hand, pytest.param(_trained_after_a_failed_demo, marks=pytest.mark.long),
        _resumed, _of_an_older_version, _with_other_files, _linked,
        _partly_linked, _a_file,
    ],
)  # fmt: skip
def test_what_a_demo_did_not_make_is_refused_and_stays(
    made: Callable[[Path], None], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path(demo.__file__).parents[1] / "demo.yaml", "demo.yaml")
    made(here)
    before = _everything(here.parent)
    assert demo.main([*QUICK]) == EXIT_CONFIG
    assert _everything(here.parent) == before
    assert "move it away" in capsys.readouterr().err


def test_a_demo_in_use_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _everything(here)
    with RunDir(here).locked(new=False):
        assert demo.main([*QUICK]) == EXIT_CONFIG
    assert "is in use by process" in capsys.readouterr().err
    assert _everything(here) == before


@pytest.mark.parametrize("by", ["override", "variable", "resume"])
def test_no_name_but_demo_is_taken(
    by: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here.rename(here.parent / "precious")
    before = _everything(here.parent)
    if by == "variable":
        monkeypatch.setenv("VESUVIUS_NAME", "precious")
    wanted = {"override": ["name=precious"], "resume": ["training.resume=auto"]}.get(by, [])
    assert demo.main([*QUICK, *wanted]) == EXIT_CONFIG
    assert _everything(here.parent) == before
    assert "A demo does not take" in capsys.readouterr().err
