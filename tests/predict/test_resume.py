"""A prediction resumes after any end, with any workers, to identical files; and refuses to mix two predictions."""

from __future__ import annotations

import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vesuvius
from tests.conftest import write_array
from tests.predict.test_predict import VOXELS, level, network, write
from tests.support import fork_server
from tests.support.forked import in_child
from vesuvius.config import ArrayConfig
from vesuvius.errors import ConfigError, StorageError, VesuviusError
from vesuvius.predict import run, tasks
from vesuvius.predict.forecast import forecast
from vesuvius.predict.network import fingerprint
from vesuvius.predict.run import PredictRequest, predict
from vesuvius.training.stop import StopRequest
from vesuvius.volume_tools.copy import CopyRequest, copy_box

PATCH = (16, 16, 16)


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 voxels, in groups of a few, so that a small volume has several groups."""
    monkeypatch.setattr(run, "CHUNK", 16)
    monkeypatch.setattr(run, "BATCHES_PER_GROUP", 1)
    monkeypatch.setattr("vesuvius.predict.inputs._BLOCK_VOXELS", 16**3)


def scan(tmp_path: Path) -> tuple[Path, Path]:
    """A volume with air at one side, and a mask."""
    voxels, mask = VOXELS.copy(), np.ones(VOXELS.shape, np.uint8)
    voxels[:, :, 40:], mask[:, :16] = 0, 0
    return write(tmp_path / "v.zarr", voxels), write(tmp_path / "m.zarr", mask)


def kill_after(renames: int, before: bool) -> None:
    """Die of SIGKILL when so many files have got, or are about to get, their names."""
    replace, left, lock = Path.replace, [renames], threading.Lock()

    def counting(self: Path, target: Path) -> Path:
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = replace(self, target)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Path.replace = counting  # type: ignore[method-assign]


def test_a_process_killed_five_times_leaves_identical_files_and_no_more_than_it_needs(
    tmp_path: Path, small_blocks: None
) -> None:
    (volume, mask), net, rng = scan(tmp_path), network(), random.Random(0)
    options: dict[str, Any] = {"patch_size": PATCH, "mask": mask, "normalize": (0, 255), "mirror": "z"}

    def act(folder: str, workers: int | None) -> vesuvius.Prediction:
        (tmp_path / folder).mkdir(exist_ok=True)
        return vesuvius.predict_volume(net, volume, tmp_path / folder / "o.zarr", workers=workers, **options)

    once = act("once", None)

    died = 0
    for workers in (None, 1, None, 1, None):
        renames, before = rng.randint(5, 35), rng.random() < 0.5
        died += in_child(lambda: (kill_after(renames, before), act("killed", workers))) < 0  # noqa: B023
    assert died == 5, "each has died before the end"
    assert act("killed", 1).tiles < once.tiles, "finished tiles were kept"
    assert files(tmp_path / "killed" / "o.zarr") == files(tmp_path / "once" / "o.zarr")


def test_the_disk_holds_a_few_rows_of_tiles_and_of_the_input(tmp_path: Path, small_blocks: None) -> None:
    """Of a volume that is long in z, whatever its length."""
    volume, most = write(tmp_path / "v.zarr", np.tile(VOXELS[:32, :32, :32], (6, 1, 1))), {"tiles": 0, "input0": 0}
    folder = tmp_path / "o.zarr.partial" / "state"

    def count(*_: object) -> None:
        for name in most:
            most[name] = max(most[name], len(list((folder / name).glob("*"))))

    done = vesuvius.predict_volume(
        network(), volume, tmp_path / "o.zarr", patch_size=PATCH, workers=1, normalize=(0, 255), on_progress=count
    )
    assert done.tiles == 16 * 9
    assert 9 < most["tiles"] < 8 * 9, "of 144"
    assert 4 < most["input0"] < 32, "of 48"


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", ["network", "volume", "batch_size", "normalize"])
def test_another_prediction_is_refused_and_the_same_one_is_not_repeated(
    tmp_path: Path, small_blocks: None, change: str
) -> None:
    volume, _ = scan(tmp_path)

    class Stop(StopRequest):
        def is_requested(self) -> bool:
            if (tmp_path / "o.zarr.partial" / "state").exists():
                self.request(75, "SIGTERM")
            return self.exit_code is not None

    request = PredictRequest(network(), volume, tmp_path / "o.zarr", PATCH, normalize=(0, 255))
    with pytest.raises(VesuviusError, match=r"prediction stopped .*; run the same command again to resume") as stopped:
        predict(request, stop=Stop(None))
    assert stopped.value.exit_code == 75
    changed: dict[str, Any] = vars(request) | {"network": network(seed=1), "batch_size": 3, "normalize": (0, 200)}
    other = PredictRequest(**vars(request) | ({} if change == "volume" else {change: changed[change]}))
    if change == "volume":
        chunk = volume / "c" / "0" / "0" / "0"
        chunk.write_bytes(chunk.read_bytes())
        os.utime(chunk, (1, 1))
    with pytest.raises(ConfigError, match=rf"started with other arguments: {change.replace('normalize', 'ranges')} "):
        predict(other)
    done = predict(PredictRequest(**vars(other) | {"resume": False}))
    assert done.tiles
    assert predict(other).tiles == 0
    with pytest.raises(ConfigError, match="exists and would be replaced"):
        predict(PredictRequest(**vars(other) | {"resume": False}))


class Scaled(nn.Module):
    """A network with a constant that is not saved, whose text shows where it is in memory."""

    def __init__(self, of: nn.Module, by: complex) -> None:
        super().__init__()
        self.of = of
        self.register_buffer("by", torch.tensor([by]).to_sparse(), persistent=False)

    def extra_repr(self) -> str:
        return object.__repr__(self)


def test_networks_with_the_same_weights_differ_by_their_layers_and_constants() -> None:
    conv = nn.Conv3d(1, 1, 3)
    networks = (
        [nn.Sequential(conv, after) for after in (nn.ReLU(), nn.LeakyReLU(0.1), nn.LeakyReLU(0.2))]
        + [Scaled(conv, 1.0), Scaled(conv, 2.0), Scaled(conv, 2j)]
        + [nn.Sequential(nn.Conv3d(1, 1, 3, stride=2), nn.ReLU())]
    )
    networks[-1].load_state_dict(networks[0].state_dict())
    found = [fingerprint(each, each) for each in networks]
    assert len(set(found)) == len(networks)
    assert found == [fingerprint(each, copy.deepcopy(each).eval()) for each in networks]


@pytest.mark.parametrize("stuck_at", [1, 3])
def test_a_stop_does_not_wait_for_a_slow_network_whose_result_is_then_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck_at: int
) -> None:
    """In the probe, the first call, and in a tile."""
    monkeypatch.setattr("vesuvius.predict.tasks._END_S", 0.1)
    volume, _ = scan(tmp_path)
    calls, stop, stuck, go_on = [0], StopRequest(None), threading.Event(), threading.Event()

    def net(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] >= stuck_at and not go_on.is_set():
            stop.request(75, "SIGTERM")
            stuck.set()
            go_on.wait(30)
        return x

    started = time.monotonic()
    with pytest.raises(VesuviusError, match=r"SIGTERM: prediction stopped .*; run the same command again to resume"):
        predict(PredictRequest(net, volume, tmp_path / "o.zarr", PATCH, normalize=(0, 255)), stop=stop)
    assert stuck.is_set()
    assert time.monotonic() - started < 10
    before = files(tmp_path / "o.zarr.partial") if stuck_at > 1 else {}
    go_on.set()
    time.sleep(0.2)
    assert (files(tmp_path / "o.zarr.partial") if stuck_at > 1 else {}) == before
    assert calls[0] <= stuck_at + run.usable_cores(os.getpid()), "none begins after the stop"


ON_A_THREAD = """
import threading, time
from types import SimpleNamespace
from vesuvius.predict.tasks import Task, run_locally

def predict():
    runner = SimpleNamespace(run=lambda task: time.sleep(0.1), close=lambda: None)
    with run_locally(lambda: runner, threads=2) as run_tasks:
        for _ in run_tasks(Task("block", 0, n) for n in range(1000)):
            begun.set()

begun = threading.Event()
threading.Thread(target=predict).start()
begun.wait()
"""


def test_a_prediction_on_a_thread_ends_with_the_program() -> None:
    """At its exit the calls that have not begun are cancelled."""
    done = fork_server.run([sys.executable, "-c", ON_A_THREAD], timeout=60, capture_output=True, text=True)
    assert "CancelledError" in done.stderr


def test_a_rehearsal_of_a_restart_deletes_nothing(tmp_path: Path) -> None:
    volume, _ = scan(tmp_path)
    partial = tmp_path / "o.zarr.partial"
    partial.mkdir()
    (partial / "prediction.json").write_text('{"batch_size": 7, "device": "cpu"}')
    request = PredictRequest(network(), volume, tmp_path / "o.zarr", PATCH, resume=False)
    assert "tiles" in forecast(request)
    for wrong in ({"blend": "none"}, {"network": "gone.pt"}, {"box": 3}):
        with pytest.raises(ConfigError):
            predict(PredictRequest(**vars(request) | wrong))
    assert (partial / "prediction.json").exists()


def test_a_restart_deletes_only_predictions(tmp_path: Path) -> None:
    """What an interrupted `vesuvius volume import` of the same name has written stays."""
    volume, _ = scan(tmp_path)
    shard = tmp_path / "o.zarr.partial/volume.zarr/0/c/0/0/0"
    shard.parent.mkdir(parents=True)
    shard.write_text("days of work")
    (tmp_path / "o.zarr.partial/import.json").write_text("{}")
    for resume in (True, False):
        with pytest.raises(ConfigError, match=r"o\.zarr\.partial .*was not (made|begun) by this command"):
            predict(PredictRequest(network(), volume, tmp_path / "o.zarr", PATCH, resume=resume))
    assert shard.read_text() == "days of work"
    (tmp_path / "o.zarr.partial/import.json").rename(tmp_path / "o.zarr.partial/.prediction.json.77.tmp")
    shutil.rmtree(tmp_path / "o.zarr.partial/volume.zarr")
    predict(PredictRequest(network(), volume, tmp_path / "o.zarr", PATCH, resume=False))  # killed as it began


def test_two_processes_do_not_write_one_volume(tmp_path: Path) -> None:
    volume, _ = scan(tmp_path)
    tried = list[str]()

    def on_progress(*_: object) -> None:
        for resume in (True, False) if not tried else ():
            with pytest.raises(ConfigError, match="another process is writing it") as error:
                predict(PredictRequest(network(), volume, tmp_path / "o.zarr", PATCH, resume=resume))
            tried.append(str(error.value))

    vesuvius.predict_volume(network(), volume, tmp_path / "o.zarr", patch_size=PATCH, on_progress=on_progress)
    assert len(tried) == 2


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("what", ["tiles", "tiles of workers", "copy", "shards"])
def test_what_is_moved_away_while_it_is_written_puts_nothing_into_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, replaced: bool
) -> None:
    """Otherwise tiles of one network become voxels of another's prediction: their files have the same names."""
    volume, _ = scan(tmp_path)
    out, successor = tmp_path / "o.zarr", tmp_path / "o.zarr.partial"
    if what == "tiles of workers":  # which know nothing of the lock, so a few of theirs may be left there
        monkeypatch.setattr(tasks, "refuse_moved", lambda path: None)

    def move(*_: object) -> None:
        if not (tmp_path / "away").exists():
            successor.rename(tmp_path / "away")
            if replaced:
                successor.mkdir(exist_ok=True)  # a writer may have been faster

    def write() -> None:
        if "tiles" in what:
            vesuvius.predict_volume(network(), volume, out, patch_size=PATCH, on_progress=move)
            return
        grid: dict[str, Any] = {"zarr_format": 3, "shards": (16, 16, 16)} if what == "shards" else {}
        source = write_array(tmp_path / "source.zarr", VOXELS, chunk=8, **grid)
        copy_box(CopyRequest(ArrayConfig(path=str(source)), out), on_progress=move)

    with pytest.raises(StorageError, match=r"was moved to .*away|No such file"):
        write()
    assert not out.exists()
    assert "workers" in what or not successor.exists() or not list(successor.iterdir())


@pytest.mark.long
def test_ray_workers_and_threads_of_killed_drivers_leave_identical_files(tmp_path: Path) -> None:
    write(tmp_path / "v.zarr", np.tile(VOXELS, (2, 2, 2)))
    torch.jit.script(network()).save(str(tmp_path / "net.pt"))
    program = textwrap.dedent("""
        import sys, vesuvius
        folder, workers = sys.argv[1:]
        vesuvius.predict_volume("net.pt", "v.zarr", f"{folder}/o.zarr", patch_size=(16, 16, 16), normalize=(0, 255),
            workers=int(workers) or None)
    """)

    def start(folder: str, workers: int) -> subprocess.Popen[bytes]:
        (tmp_path / folder).mkdir(exist_ok=True)
        return subprocess.Popen([sys.executable, "-c", program, folder, str(workers)], cwd=tmp_path)

    assert start("once", 0).wait(300) == 0
    rng, partial = random.Random(0), tmp_path / "killed" / "o.zarr.partial"
    for workers in (2, 0, 1, 2, 0):
        driver, deadline, least = start("killed", workers), time.monotonic() + 200, len(list(partial.rglob("*")))
        while len(list(partial.rglob("*"))) < least + 20 and time.monotonic() < deadline and driver.poll() is None:
            time.sleep(0.05)
        time.sleep(rng.random())
        driver.kill()
        driver.wait(30)
    time.sleep(3)  # for actors of a killed driver, which may still write a tile
    assert start("killed", 2).wait(300) == 0
    assert files(tmp_path / "killed" / "o.zarr") == files(tmp_path / "once" / "o.zarr")
    assert level(tmp_path / "once" / "o.zarr").any()
