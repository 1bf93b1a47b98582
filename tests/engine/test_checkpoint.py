"""Checkpoints: whole or not there, and the older one always whole.

Kills inside a save are in `test_checkpoint_writer.py`, kills of whole runs in `tests/test_kills.py`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from vesuvius.engine.checkpoint import (
    Keep,
    find_damage,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    stored_averages,
)
from vesuvius.errors import StorageError

CONFIG = "name: tiny\n"
NOBODY = 65534


def state_of(step: int, size: int = 1000) -> dict[str, Any]:
    """Weights of this value, two averages of them, and what else a state holds."""
    weights = {"conv.weight": torch.full((size,), float(step)), "conv.bias": torch.full((), float(step))}
    averages = {
        name: {"weights": {key: value + shift for key, value in weights.items()}, "updates": torch.tensor(float(step))}
        for name, shift in (("ema", 0.5), ("ema_0.999", 0.25))
    }
    return {"step": step, "model": weights, "averages": averages, "plain": {"a": [1, 2.5, "x", None]}}


def save(directory: Path, step: int, keep_last: int = 3, size: int = 1000, **keep: int | None) -> Path:
    return save_checkpoint(directory, step, state_of(step, size), CONFIG, Keep(keep_last, **keep))


def steps_in(directory: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in list_checkpoints(directory)]


def assert_same(found: Any, expected: Any) -> None:
    """Equal, to the last bit and the dtype."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file of this process may grow over `limit` bytes: real writes that fail, without filling a real disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """Whom permissions bind, unlike root.  Yields a directory of theirs; pytest's own may be root's alone."""
    with tempfile.TemporaryDirectory() as directory:
        if os.geteuid() != 0:
            yield Path(directory)
            return
        os.chown(directory, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(directory)
        finally:
            os.seteuid(0)


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Conv3d(2, 4, 3), torch.nn.Conv3d(4, 2, 3))
    network.to(memory_format=torch.channels_last_3d)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    for _ in range(2):
        network(torch.randn(1, 2, 8, 8, 8)).square().mean().backward()
        optimizer.step()
    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    state = state_of(2) | {
        "model": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": {},
        "averages": {
            "ema": {"weights": {name: weight * 0.1 for name, weight in weights.items()}, "updates": torch.tensor(2.0)},
            "ema_0.5": {"weights": {name: w.double() for name, w in weights.items()}, "updates": torch.tensor(1.0)},
        },
        "half": torch.randn(5).bfloat16(),
    }
    path = save_checkpoint(tmp_path, 2, state, CONFIG, Keep(1))
    found = load_checkpoint(path)
    assert_same(found, state)
    optimizer.load_state_dict(found["optimizer"])
    assert newest_checkpoint(tmp_path) == path
    assert stored_averages(path) == ["ema", "ema_0.5"]


def test_the_averages_are_stored_once_and_with_the_config_beside_them(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    names = ["config.yaml", "manifest.json", "model.safetensors", "model_ema_0.999.safetensors", "state.pt"]
    assert sorted(file.name for file in path.iterdir()) == names
    assert load_file(path / "model.safetensors")["conv.weight"][0] == 7.5
    assert load_file(path / "model_ema_0.999.safetensors")["conv.weight"][0] == 7.25
    stored = torch.load(path / "state.pt", weights_only=True)["averages"]
    assert {name: list(average) for name, average in stored.items()} == {"ema": ["updates"], "ema_0.999": ["updates"]}
    assert (path / "config.yaml").read_text() == CONFIG
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1, "who may read one may read all"
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], sorted(manifest["files"])) == (
        2,
        7,
        [n for n in names if n[:2] != "ma"],
    )


def test_the_exported_weights_depend_on_the_weights_alone(tmp_path: Path) -> None:
    weights = {"b": torch.arange(6.0).reshape(2, 3).T, "a": torch.ones(2)}
    other = {"a": torch.ones(4)[::2], "b": weights["b"].contiguous()}
    for step, average in ((1, weights), (99, other)):
        averages = {"ema": {"weights": average, "updates": torch.tensor(step)}}
        save_checkpoint(tmp_path / str(step), step, state_of(step) | {"averages": averages}, f"step: {step}\n", Keep(1))
    first, second = (next(tmp_path.glob(f"{step}/*/model.safetensors")).read_bytes() for step in (1, 99))
    assert first == second


@pytest.mark.parametrize(
    "file", ["state.pt", "model.safetensors", "model_ema_0.999.safetensors", "config.yaml", "manifest.json"]
)
@pytest.mark.parametrize("harm", ["flip a byte", "truncate", "remove"])
def test_a_damaged_file_is_found_named_and_its_checkpoint_passed_over(
    tmp_path: Path, harm: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    match harm:
        case "flip a byte":
            flip_a_byte(bad / file)
        case "truncate":
            os.truncate(bad / file, 10)
        case "remove":
            (bad / file).unlink()
    assert find_damage(good) is None
    damage = find_damage(bad)
    assert damage is not None
    assert file in damage or file == "manifest.json"
    with pytest.raises(StorageError, match="step_00000002"):
        load_checkpoint(bad)
    assert newest_checkpoint(tmp_path) == good
    assert f"step_00000002 is damaged ({damage})" in caplog.text


def test_where_none_is_whole_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    assert newest_checkpoint(tmp_path) is None
    assert caplog.text == ""
    for step in (1, 2):
        (save(tmp_path, step) / "state.pt").write_bytes(b"")
    assert newest_checkpoint(tmp_path) is None
    assert caplog.text.count("is damaged (state.pt has another checksum) and is passed over") == 2


def test_one_that_is_deleted_while_it_is_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    listed = list_checkpoints(tmp_path)
    save(tmp_path, 2, keep_last=1)
    answers = [listed]  # what the reader saw before the newer one came
    monkeypatch.setattr(
        "vesuvius.engine.checkpoint.list_checkpoints", lambda path: answers.pop() if answers else list_checkpoints(path)
    )
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000002"
    assert caplog.text == ""


@pytest.mark.parametrize(("written_by", "age"), [(1, "an earlier"), (3, "a later")])
def test_one_of_another_version_is_refused_and_not_called_damaged(tmp_path: Path, written_by: int, age: str) -> None:
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text()) | {"format": written_by}
    if written_by == 1:
        del manifest["format"]
        manifest["files"] = {"state.pt": manifest["files"]["state.pt"], "ema.safetensors": ""}
    (path / "manifest.json").write_text(json.dumps(manifest))
    for read in (newest_checkpoint, lambda directory: load_checkpoint(directory / path.name)):
        with pytest.raises(StorageError, match=f"step_00000001, written by {age} version of vesuvius"):
            read(tmp_path)


def test_what_may_not_be_read_is_an_error_and_not_passed_over(as_nobody: Path) -> None:
    save(as_nobody, 1)
    newest = save(as_nobody, 2)
    for hidden in (newest / "state.pt", newest, as_nobody):
        mode = hidden.stat().st_mode
        hidden.chmod(0)
        with pytest.raises(StorageError, match=r"a checkpoint must be readable; got .*change the permissions"):
            newest_checkpoint(as_nobody)
        hidden.chmod(mode)
    assert newest_checkpoint(as_nobody) == newest


class Kept(NamedTuple):
    keep: Keep
    steps: list[int]


@pytest.mark.parametrize(
    "kept",
    [
        Kept(Keep(2), [50, 60]),
        Kept(Keep(9), [10, 20, 30, 40, 50, 60]),
        Kept(Keep(1, keep_every=20), [20, 40, 60]),
        Kept(Keep(2, keep_every=30), [30, 50, 60]),
        Kept(Keep(1, best_step=10), [10, 60]),
        Kept(Keep(2, best_step=60), [50, 60]),
        Kept(Keep(1, best_step=15), [60]),
        Kept(Keep(2, keep_every=40, best_step=20), [20, 40, 50, 60]),
    ],
)
def test_the_newest_the_best_and_multiples_are_kept(tmp_path: Path, kept: Kept) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step, keep_last=9)
    save_checkpoint(tmp_path, 60, state_of(60), CONFIG, kept.keep)
    assert steps_in(tmp_path) == kept.steps
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_best_is_a_link_that_follows_the_best_checkpoint(tmp_path: Path) -> None:
    best = tmp_path / "best"
    save(tmp_path, 1)
    assert not best.is_symlink()
    save(tmp_path, 2, best_step=1)
    assert best.readlink() == Path("step_00000001")
    save(tmp_path, 3, best_step=3, keep_last=1)
    assert best.readlink() == Path("step_00000003")
    assert steps_in(tmp_path) == [3]
    save(tmp_path, 4, best_step=99)  # that one was never saved
    assert best.readlink() == Path("step_00000003")
    shutil.move(tmp_path, tmp_path.with_name("moved"))
    assert load_checkpoint(tmp_path.with_name("moved") / "best")["step"] == 3


def test_a_place_without_links_costs_a_warning_and_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory stands where the link would: that it cannot be made is the same for the saver."""
    (tmp_path / "best" / "mine").mkdir(parents=True)
    for step in (1, 2):
        assert find_damage(save(tmp_path, step, best_step=step)) is None
    assert caplog.text.count("cannot be made a link to the best checkpoint") == 1
    assert (tmp_path / "best" / "mine").is_dir()


def test_a_damaged_newer_one_does_not_push_out_whole_ones(tmp_path: Path) -> None:
    save(tmp_path, 20)
    (save(tmp_path, 30) / "manifest.json").unlink()
    save(tmp_path, 25, keep_last=2)
    assert steps_in(tmp_path) == [20, 25, 30]
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000025"
    save(tmp_path, 30, keep_last=2)
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000030"


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.txt").touch()
    (tmp_path / "step_00000002.bak").mkdir()
    (tmp_path / "step_00000003").touch()
    for step in (4, 5):
        save(tmp_path, step, keep_last=1)
    assert steps_in(tmp_path) == [5]
    assert len(list(tmp_path.iterdir())) == 4


def test_what_a_killed_save_has_left_is_no_checkpoint_and_goes_with_the_next(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / ".partial-step_00000002")
    shutil.copytree(tmp_path / "step_00000001", tmp_path / ".pruned-step_00000000")
    assert newest_checkpoint(tmp_path) == tmp_path / "step_00000001"
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]


def test_one_that_cannot_be_deleted_costs_a_warning_and_no_save(
    as_nobody: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(as_nobody, 1).chmod(0o500)
    assert find_damage(save(as_nobody, 2, keep_last=1)) is None
    assert "step_00000001 could not be deleted" in caplog.text
    assert steps_in(as_nobody) == [2]
    assert find_damage(save(as_nobody, 3, keep_last=1)) is None
    assert ".pruned-step_00000001 could not be deleted" in caplog.text
    (as_nobody / ".pruned-step_00000001").chmod(0o700)


def test_without_room_for_all_of_it_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    size = sum(file.stat().st_size for file in save(tmp_path / "elsewhere", 2, size=10**6).iterdir())
    shutil.rmtree(tmp_path / "elsewhere")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    with pytest.raises(
        StorageError, match=r"must fit on the disk; got 1[23] MiB needed and 11 MiB free for .*step_000"
    ):
        save(tmp_path, 2, keep_last=1, size=10**6)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size + 2 * 2**20))
    save(tmp_path, 2, size=10**6)


@pytest.mark.parametrize(("large", "kind"), [("model", "OSError: .Errno 27"), ("ema", "SafetensorError")])
def test_a_full_disk_is_an_error_and_leaves_the_older_checkpoint_whole(tmp_path: Path, large: str, kind: str) -> None:
    """Whichever file it is that does not fit."""
    old = save(tmp_path, 1)
    state = state_of(2)
    weights = state["model"] if large == "model" else state["averages"]["ema"]["weights"]
    weights["large"] = torch.zeros(10**6)
    with small_files(100_000), pytest.raises(
        StorageError, match=rf"must fit on the disk; got {kind}.*step_00000002.*--resume"
    ):  # fmt: skip
        save_checkpoint(tmp_path, 2, state, CONFIG, Keep(1))
    assert find_damage(old) is None
    assert [path.name for path in tmp_path.iterdir()] == [old.name], "nothing half-written is left"


def test_a_place_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"must fit on the disk; got .*free some space"):
        save(tmp_path / "file" / "checkpoints", 1)
