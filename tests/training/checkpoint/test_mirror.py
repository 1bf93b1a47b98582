"""The copy of a run in an object store: whole, resumed from elsewhere, and no reason for a run to end."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.kill_harness import Session, final_difference
from tests.support.small_disk import small_disk
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.errors import ConfigError, StorageError
from vesuvius.launch.launch import with_number_of_ranks
from vesuvius.runlog.run_dir import RunDir
from vesuvius.training.checkpoint import mirror as module
from vesuvius.training.checkpoint.format import find_damage, list_checkpoints, newest_checkpoint
from vesuvius.training.checkpoint.mirror import Mirror, RunStore, fetch_run, refuse_stored
from vesuvius.training.checkpoint.save import RetentionPolicy, save_checkpoint
from vesuvius.training.request import Request

WriteConfig = Callable[..., Path]

TWO = RetentionPolicy(2)


@pytest.fixture
def store(s3: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> RunStore:
    """Of a run of this test, in a bucket that wants signatures."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(module, "_PAUSES_S", (0.1,))
    return make_store(f"s3://private/{request.node.name[:40]}")


def make_store(address: str) -> RunStore:
    config = {"name": "r", "data": {"volumes": ({"path": "v"},)}, "cluster": {"storage_path": address}}
    return RunStore(Config.model_validate(config))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "runs/r")
    directory.make_folders()
    return directory


def save(directory: RunDir, step: int, keep_last: int = 2) -> Path:
    state = {"model": {"w": torch.full((4,), float(step))}, "averages": {"ema": {"weights": {"w": torch.ones(4)}}}}
    return save_checkpoint(directory.checkpoints, step, state, "name: r\n", RetentionPolicy(keep_last))


def elsewhere(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "other machine/r")


def test_what_is_copied_comes_back_whole_on_another_machine(run: RunDir, store: RunStore, tmp_path: Path) -> None:
    save(run, 10)
    with Mirror(run, store, TWO):
        save(run, 20)
        run.metrics.write_text("{}\n")
        run.log.write_text("one\n")
    other = elsewhere(tmp_path)
    fetch_run(store, other)
    assert newest_checkpoint(other.checkpoints) == other.checkpoints / "step_00000020"
    assert (other.metrics.read_text(), other.log.read_text()) == ("{}\n", "one\n")
    save(other, 30)
    fetch_run(store, other)  # nothing there is newer
    assert len(list_checkpoints(other.checkpoints)) == 2


def test_a_checkpoint_that_was_half_written_or_is_damaged_is_never_chosen(
    run: RunDir, store: RunStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20, 30):
        save(run, step, keep_last=3)
    whole = Mirror(run, store, TWO)
    for path in list_checkpoints(run.checkpoints)[:2]:
        whole._upload_checkpoint(path)
    (half,) = list_checkpoints(run.checkpoints)[2:]
    for file in half.iterdir():
        if file.name != "manifest.json":
            store.put(f"checkpoints/{half.name}/{file.name}", file)
    (tmp_path / "torn").write_bytes((run.checkpoints / "step_00000020/state.pt").read_bytes()[:-1])
    store.put("checkpoints/step_00000020/state.pt", tmp_path / "torn")
    other = elsewhere(tmp_path)
    with caplog.at_level(logging.WARNING):
        fetch_run(store, other)
    assert [path.name for path in list_checkpoints(other.checkpoints)] == ["step_00000010"]
    assert "step_00000020" in caplog.text
    assert list(other.checkpoints.glob(".*")) == []


def test_a_store_with_parts_of_checkpoints_alone_does_not_let_a_resume_begin_at_step_0(
    run: RunDir, store: RunStore, tmp_path: Path
) -> None:
    path = save(run, 10)
    store.put(f"checkpoints/{path.name}/state.pt", path / "state.pt")
    with pytest.raises(StorageError, match="got only parts in s3://private/"):
        fetch_run(store, elsewhere(tmp_path))
    fetch_run(store, run)  # the machine that wrote them goes on


def test_what_an_earlier_session_has_stored_is_neither_deleted_nor_sent_again(
    run: RunDir, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is lost meanwhile would have taken the only copy with it."""
    for step in (10, 20):
        save(run, step)
    with Mirror(run, store, TWO):
        pass
    sent, put = [], store.put
    monkeypatch.setattr(store, "put", lambda key, file: (sent.append(key), put(key, file)))
    monkeypatch.setattr(store, "delete_checkpoint", lambda name: sent.append(f"delete {name}"))
    with Mirror(run, store, TWO):
        pass
    assert [key for key in sent if "step_" in key] == []
    save(run, 30)
    with Mirror(run, store, RetentionPolicy(3)):
        pass
    assert {key.split("/")[1] for key in sent if key.startswith("checkpoints/")} == {"step_00000030"}


def test_auto_ranks_of_a_run_that_is_resumed_elsewhere_are_those_that_it_began_with(
    run: RunDir, store: RunStore, tmp_path: Path, tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tiny_config(name="r", training={"ranks": "auto"}, cluster={"storage_path": store.address.removesuffix("/r")})
    request = Request(read_config(path), path, resume=True)
    assert with_number_of_ranks(request, None).config.training.ranks == 1, "nothing is stored"
    (tmp_path / "resolved").write_text("training: {ranks: 8}")
    store.put("config.resolved.yaml", tmp_path / "resolved")
    assert with_number_of_ranks(request, None).config.training.ranks == 8


def test_a_damaged_checkpoint_of_this_machine_is_replaced_by_the_whole_one(run: RunDir, store: RunStore) -> None:
    path = save(run, 10)
    with Mirror(run, store, TWO):
        pass
    (path / "state.pt").write_bytes(b"torn")
    fetch_run(store, run)
    assert newest_checkpoint(run.checkpoints) == path
    assert find_damage(path) is None


def test_a_folder_that_cannot_be_listed_for_a_moment_does_not_end_the_copies(
    run: RunDir, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, asked = module.list_checkpoints, []

    def stale_once(directory: Path) -> list[Path]:
        asked.append(directory)
        if len(asked) == 1:
            raise StorageError("stale file handle")
        return honest(directory)

    monkeypatch.setattr(module, "list_checkpoints", stale_once)
    monkeypatch.setattr(module, "_EVERY_S", 0.05)
    save(run, 10)
    with Mirror(run, store, TWO):
        pass
    assert any(key.startswith("checkpoints/step_") for key in store.list_keys())


def test_the_manifest_of_a_checkpoint_is_written_last_and_pruned_ones_go(
    run: RunDir, store: RunStore, tmp_path: Path
) -> None:
    save(run, 10)
    files = {path.name for path in (run.checkpoints / "step_00000010").iterdir()}
    order: list[str] = []
    put = store.put
    store.put = lambda key, file: (order.append(Path(key).name), put(key, file))[1]  # type: ignore[method-assign]
    copying = Mirror(run, store, TWO)
    assert copying._copy(at_once=True) == []
    assert set(order[: len(files)]) == files
    assert order[len(files) - 1] == "manifest.json"
    save(run, 20)
    save(run, 30)  # and 10 is pruned
    assert copying._copy(at_once=True) == []
    there = {key.split("/")[1] for key in store.list_keys("checkpoints")}
    assert there == {"step_00000020", "step_00000030"}


def test_a_checkpoint_that_is_replaced_at_its_step_is_stored_again_and_never_mixed(
    run: RunDir, store: RunStore, tmp_path: Path
) -> None:
    """Replaced after its upload, and in the middle of it."""
    path, put, replaced = save(run, 10), store.put, []
    copying = Mirror(run, store, TWO)
    assert copying._copy(at_once=True) == []

    def replace_at_first(key: str, file: Path) -> None:
        put(key, file)
        if not replaced:
            replaced.append(key)
            shutil.rmtree(path)
            resave(2.0)

    def resave(value: float) -> None:
        state = {"model": {"w": torch.full((4,), value)}, "averages": {"ema": {"weights": {"w": torch.ones(4)}}}}
        save_checkpoint(run.checkpoints, 10, state, "name: r\n", TWO)

    shutil.rmtree(path)
    resave(1.0)
    store.put = replace_at_first  # type: ignore[method-assign]
    copying._copy(at_once=True)
    assert not any(key.endswith("manifest.json") for key in store.list_keys("checkpoints"))
    assert copying._copy(at_once=True) == []
    fetch_run(store, other := elsewhere(tmp_path))
    (found,) = list_checkpoints(other.checkpoints)
    assert find_damage(found) is None
    assert all((found / file.name).read_bytes() == file.read_bytes() for file in path.iterdir())


def test_checkpoints_of_earlier_sessions_obey_the_policy_on_another_machine(
    run: RunDir, store: RunStore, tmp_path: Path
) -> None:
    for step in (10, 20, 25, 30, 40):
        save(run, step, keep_last=9)
    with Mirror(run, store, RetentionPolicy(9)):
        pass
    store.put("checkpoints/step_00000035/state.pt", run.checkpoints / "step_00000040/state.pt")  # half stored
    store.put("checkpoints/notes.txt", run.checkpoints / "step_00000040/config.yaml")  # somebody's
    other = elsewhere(tmp_path)
    fetch_run(store, other)
    later = make_store(store.address.removesuffix("/r"))
    copying = Mirror(other, later, RetentionPolicy(2, keep_every=20, best_step=25))
    save(other, 50)
    for _ in range(2):
        assert copying._copy(at_once=True) == []
        stored = sorted({key.split("/")[1] for key in later.list_keys("checkpoints")})
        assert stored == ["notes.txt", *(f"step_000000{step}" for step in (20, 25, 40, 50))]
    (other.checkpoints / "best").symlink_to("step_00000050")  # a better one
    assert copying._copy(at_once=True) == []
    assert "checkpoints/step_00000025/manifest.json" not in later.list_keys("checkpoints")


def test_what_lies_beyond_this_session_is_not_deleted_from_the_store(
    run: RunDir, store: RunStore, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        save(run, step, keep_last=9)
    with Mirror(run, store, RetentionPolicy(9)):
        pass
    other = elsewhere(tmp_path)
    other.make_folders()
    copying = Mirror(other, store, RetentionPolicy(1))
    assert copying._copy(at_once=True) == []  # nothing here yet
    save(other, 20)
    assert copying._copy(at_once=True) == []
    assert {key.split("/")[1] for key in store.list_keys("checkpoints")} == {"step_00000020", "step_00000030"}


def test_a_disk_that_is_full_while_a_run_comes_down_is_named_as_such(
    run: RunDir, store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSES_S", (1e6,))  # it is not tried again
    save(run, 10)
    with Mirror(run, store, TWO):
        pass
    (mount := tmp_path / "small").mkdir()
    with small_disk(mount, kib=8) as disk:
        other = RunDir(disk / "r")
        with pytest.raises(
            StorageError, match=r"No space left on device.*step_00000010/.* was copied from s3://.*free"
        ):
            fetch_run(store, other)
        assert list(other.checkpoints.iterdir()) == [], "nothing half is left on a full disk"


def test_a_store_that_is_away_is_told_once_and_what_waits_at_the_end_is_named(
    run: RunDir, store: RunStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        away = make_store("s3://private/away")
        monkeypatch.setattr(module, "_EVERY_S", 0.1)
        monkeypatch.setattr(module, "_END_S", 0.5)
        save(run, 10)
        with caplog.at_level(logging.WARNING), Mirror(run, away, TWO) as copying:
            while len(copying._waiting) == 0:
                time.sleep(0.01)
        assert caplog.text.count("the run continues") == 1
        assert "not uploaded" in caplog.text
        assert "checkpoints/step_00000010" in caplog.text
        with pytest.raises(StorageError, match="storage_path must be readable at the start"):
            fetch_run(away, run)


def test_a_store_that_answers_again_gets_what_it_has_missed(
    run: RunDir, store: RunStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(run, 10)
    copying, put = Mirror(run, store, TWO), store.put

    def refuses(key: str, file: Path) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(store, "put", refuses)
    assert copying._copy(at_once=False) == ["checkpoints/step_00000010"]
    monkeypatch.setattr(store, "put", put)
    with caplog.at_level(logging.INFO):
        assert copying._copy(at_once=False) == []
    assert "answers again" in caplog.text
    assert "checkpoints/step_00000010/manifest.json" in store.list_keys()


def test_a_new_run_does_not_overwrite_what_is_stored(run: RunDir, store: RunStore) -> None:
    refuse_stored(store)
    save(run, 10)
    Mirror(run, store, TWO)._copy(at_once=True)
    with pytest.raises(ConfigError, match=r"a new run needs a place of its own.*--resume"):
        refuse_stored(store)


def test_a_run_goes_on_from_the_store_on_another_machine(
    tiny_config: WriteConfig, tmp_path: Path, store: RunStore
) -> None:
    training = {"steps_per_epoch": 2, "save_every": 1}
    environment = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    config = tiny_config("r", training=training, cluster={"storage_path": store.address.removesuffix("/r")})
    with Session(config, tmp_path, "training.max_steps=2", environment=environment) as session:
        assert session.end() == 0, session.text()
    shutil.rmtree(tmp_path / "runs/r")
    with Session(config, tmp_path, "--resume", environment=environment) as session:
        assert session.end() == 0, session.text()
        assert "step_00000002 and the records of the run come from s3://" in session.text()
    with Session(config, tmp_path, environment=environment) as session:
        assert session.end() == 2
    tiny_config("whole", training=training)
    with Session(tmp_path / "whole.yaml", tmp_path) as session:
        assert session.end() == 0, session.text()
    assert final_difference(tmp_path / "runs/r", tmp_path / "runs/whole") is None
    assert "checkpoints/step_00000004/manifest.json" in store.list_keys()


def test_a_file_that_grows_is_uploaded_for_a_twentieth_of_the_time_at_most(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole files are uploaded: the log of a run of weeks would otherwise take all of a slow line."""
    now, uploads = [1000.0], []

    def put(key: str, file: Path) -> None:
        uploads.append(key)
        now[0] += 6.0

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    store: Any = SimpleNamespace(put=put, address="s3://slow/r")
    mirror = Mirror(run, store, TWO)
    for line in range(300):
        with run.metrics.open("a") as file:
            file.write(f"{line}\n")
        for _, job in mirror._record_jobs(at_once=False):
            job()
        now[0] += 30.0
    assert 0.03 < 6.0 * len(uploads) / (now[0] - 1000.0) <= 0.05
    assert [key for key, _ in mirror._record_jobs(at_once=True)] == ["metrics.jsonl"], "the last look takes all"
