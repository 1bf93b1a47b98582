"""`vesuvius init` as a user types it: the config that it writes passes the dry run and trains."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import SCROLL_DATA, needs_scroll_data, textured, write_array, write_ome
from tests.support.chunk_server import ChunkServer
from tests.support.runs import steps_of, vesuvius_train
from vesuvius.commands import first_config, init, sample
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_CONFIG, EXIT_DATA, EXIT_OK
from vesuvius.training.forecast import plan
from vesuvius.training.forecast.preflight import preflight


@pytest.fixture(autouse=True)
def _slow_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So slow that it gets the smallest patches and network, whatever machine the tests run on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(first_config, "step_range_s", lambda *_: (9.0, 9.0))


def written(volume: object, *arguments: str) -> Config:
    assert init.main([str(volume), "--name", "first", *arguments]) == EXIT_OK
    return read_config(Path("configs/first.yaml"))


@pytest.fixture
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the memory plans, which take seconds; tests/training has them, and a long test here."""
    nothing = SimpleNamespace(ram_bytes=0, vram_bytes=0, flops_per_step=1)
    monkeypatch.setattr(plan, "plan_memory", lambda config, amp: nothing)
    monkeypatch.setattr(first_config, "_fits", lambda config, data: False)


def trains() -> bool:
    """Whether two real steps end well."""
    short = ["training.max_steps=2", "training.workers=0", "monitor.tensorboard=false"]
    return vesuvius_train(Path("configs/first.yaml"), *short) == EXIT_OK and len(steps_of("first")) == 2


def passes_checks(config: Config) -> bool:
    """What a dry run checks, without its plans of memory; raises if it fails."""
    return preflight(config, resume=False, checkpoint=None, caches=False).fixed is not None


@pytest.mark.usefixtures("no_plans")
def test_a_bare_array_gets_a_config_that_fits_it_and_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_array(tmp_path / "scroll.zarr", textured((96, 128, 128)))
    assert init.main(["scroll.zarr"]) == EXIT_OK
    text = capsys.readouterr().out
    for words in (f"volume     {tmp_path}/scroll.zarr", "machine ", "M parameters", "written    configs/scroll.yaml"):
        assert words in text
    for command in (
        "vesuvius train --config configs/scroll.yaml",
        "vesuvius memcheck scroll",
        "vesuvius sample --checkpoint scroll",
    ):
        assert command in text
    config = read_config(Path("configs/scroll.yaml"))
    assert (config.name, config.data.volumes[0].path) == ("scroll", str(tmp_path / "scroll.zarr"))
    assert passes_checks(config)


@pytest.mark.long
def test_what_was_written_for_a_bare_array_trains_and_samples(tmp_path: Path) -> None:
    """With readers, and no override but the number of steps."""
    write_array(tmp_path / "scroll.zarr", textured((96, 128, 128)))
    assert init.main(["scroll.zarr"]) == EXIT_OK
    assert vesuvius_train(Path("configs/scroll.yaml"), "training.max_steps=2") == EXIT_OK
    assert len(steps_of("scroll")) == 2
    assert sample.main(["--checkpoint", "scroll", "--count", "1", "--steps", "2"]) == EXIT_OK, "as it was printed"


@pytest.mark.usefixtures("no_plans")
def test_a_voxel_size_picks_the_level(tmp_path: Path) -> None:
    voxels = textured((32, 64, 64))
    path = write_ome(tmp_path / "v.zarr", {"0": voxels, "1": voxels[::2, ::2, ::2]}, [2.4, 4.8])
    assert written(path, "--level", "4.8um").data.volumes[0].level == 1


@pytest.mark.usefixtures("no_plans")
def test_a_coarse_level_of_few_patches_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    voxels = textured((64, 192, 192))
    path = write_ome(tmp_path / "v.zarr", {"0": voxels, "1": voxels[::2, ::2, ::2]}, [5, 10])
    assert written(path).data.volumes[0].level == 1
    assert "level 1 holds only 36 patches; finer ones hold more, of less than 300 µm" in capsys.readouterr().err
    Path("configs/first.yaml").unlink()
    written(path, "--level", "1")
    assert "holds only" not in capsys.readouterr().err


@pytest.mark.usefixtures("no_plans")
def test_a_sparse_volume_is_drawn_from_its_stored_chunks(tmp_path: Path) -> None:
    voxels = textured((96, 128, 128))
    voxels[:, 64:], voxels[:, :, 96:] = 0, 0
    config = written(write_array(tmp_path / "sparse.zarr", voxels))
    assert config.data.min_foreground == 0.5
    assert passes_checks(config)


@pytest.mark.usefixtures("no_plans")
def test_a_remote_volume_is_cached(tmp_path: Path, server: ChunkServer) -> None:
    write_array(tmp_path / "far.zarr", textured((96, 128, 128)))
    assert init.main([f"{server.url_of(tmp_path)}/far.zarr/"]) == EXIT_OK
    config = read_config(Path("configs/far.yaml"))
    assert (config.name, config.data.store.cache_dir) == ("far", str(tmp_path / "volumes/cache"))
    assert not Path("volumes").exists(), "nothing is cached before the run"
    assert preflight(config, resume=False, checkpoint=None).fixed is not None
    assert list(Path("volumes/cache").rglob("*"))


@needs_scroll_data
@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize("store", ["scroll_v2_blosc", "scroll_v2_sparse_ragged", "scroll_v3_sharded"])
def test_real_scrolls(store: str) -> None:
    config = written(SCROLL_DATA / f"{store}.zarr")
    assert config.data.validation.fraction > 0
    assert trains() if store == "scroll_v2_sparse_ragged" else passes_checks(config)


def test_the_log_to_watch_is_where_the_runs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_config, "first_config", lambda *_, **__: ("", []))
    for name, runs, shown in ("a", "runs", "runs"), ("b", f"{tmp_path.parent}/my runs", f"'{tmp_path.parent}/my runs"):
        monkeypatch.setenv("VESUVIUS_RUNS", runs)
        assert init.main(["volume.zarr", "--name", name]) == EXIT_OK
        assert f"tail -f {shown}/{name}/logs/train_full.log" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path: Path, volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("name: mine\n")
    assert init.main([str(volume), "--out", "mine.yaml"]) == EXIT_CONFIG
    assert Path("mine.yaml").read_text() == "name: mine\n"
    Path("runs/old").mkdir(parents=True)
    assert init.main([str(volume), "--name", "old"]) == EXIT_CONFIG
    assert init.main([str(volume), "--name", "a/b"]) == EXIT_CONFIG
    message = capsys.readouterr().err
    for words in ("mine.yaml already exists", "Run old exists", "cannot name a run directory"):
        assert words in message
    assert not Path("configs").exists()


@pytest.mark.usefixtures("no_plans")
def test_a_full_disk_leaves_no_incomplete_config(
    tmp_path: Path, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # as a disk with room for 100 bytes
    try:
        assert init.main([str(volume), "--out", "first.yaml"]) == EXIT_DATA
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "first.yaml: [Errno 27] File too large" in capsys.readouterr().err
    assert not Path("first.yaml").exists()
    Path("disk").symlink_to(tmp_path / "not/mounted")
    assert init.main([str(volume), "--out", "disk/first.yaml"]) == EXIT_DATA
    assert f"disk is a link to {tmp_path / 'not/mounted'}, which does not exist" in capsys.readouterr().err
    assert init.main([str(volume), "--out", "first.yaml"]) == EXIT_OK, "the same command works afterwards"


def test_what_is_no_volume_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init.main(["nowhere.zarr"]) == EXIT_DATA
    assert "nowhere.zarr" in capsys.readouterr().err
    write_array(tmp_path / "line.zarr", textured((64, 4, 64)))
    assert init.main(["line.zarr"]) == EXIT_CONFIG
    assert not Path("configs").exists()


@pytest.mark.parametrize(
    ("volume", "name"),
    [
        ("a/scroll.zarr", "scroll"),
        ("s3://bucket/PHerc Paris 4.ome.zarr/", "PHerc-Paris-4"),
        ("https://host/x/y.zarr?token=1", "y"),
        ("volumes/ü.zarr", "first"),
        ("plain", "plain"),
    ],
)
def test_a_run_is_named_after_its_volume(volume: str, name: str) -> None:
    assert init.default_name(volume) == name
