"""Loaders under the garbage collector, in forked and spawned processes, and on several ranks."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import sys
import threading
import time
import weakref
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.conftest import textured, write_array
from tests.loader.test_patch_loader import SHAPE, indices, load
from tests.support import fork_server
from tests.support.forked import in_child
from tests.support.rank_runs import ends_of, output_of, started_ranks
from vesuvius import ConfigError, PatchLoader, PatchStream
from vesuvius.stream.options import StreamOptions

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning", "ignore:Got pickle error")


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return write_array(tmp_path / "scan.zarr", textured(SHAPE))


def until(condition: Any) -> bool:
    """Whether a condition holds within a minute."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


# ---- the garbage collector

COLLECTED = """
import gc, sys, threading, time, weakref
import vesuvius

armed, loaders, collected = False, [], []

def collect_inside_submit(frame, event, argument):
    global armed
    if armed and event == "call" and frame.f_back and frame.f_back.f_code.co_name == "submit":
        armed = False
        gc.collect()
        collected.append(loaders[-1]() is None)

def load():
    how = dict(patch_size=(8, 16, 16), batch_size=1, device="cpu", normalize=False)
    return vesuvius.PatchLoader(sys.argv[1], num_workers=0, prefetch_factor=40, **how)

with load() as first:
    next(iter(first))
del first
gc.collect()
gc.freeze()
gc.disable()
threading.setprofile(collect_inside_submit)  # on threads that start from here on
for _ in range(4):
    loader = load()
    loaders.append(weakref.ref(loader))
    loop = iter(loader)
    next(loop)
    loader.cycle = loop
    del loader, loop
    armed = True
    while armed:
        time.sleep(0.01)
while any("batches" in thread.name or "decode" in thread.name for thread in threading.enumerate()):
    time.sleep(0.01)
print(collected)
"""


def test_a_loader_may_be_collected_inside_a_submit_of_its_own_thread(volume: Path) -> None:
    """An executor holds a lock there, which a finalizer that closes the loader would wait for."""
    ended = fork_server.run([sys.executable, "-c", COLLECTED, str(volume)], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "[True, True, True, True]\n", ended.stderr


@pytest.mark.parametrize(
    "kind", ["cycle", "traceback", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("stream", "loader"))]
)
def test_a_dropped_loader_or_stream_frees_its_threads_and_memory(volume: Path, kind: str) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name != "end"]

    gc.collect()
    before = names()
    loader = load(volume)
    next(iter(loader))
    stream = PatchStream(loader._job, StreamOptions(batch_size=4, num_workers=0)) if kind == "stream" else loader.stream
    assert stream._source is not None
    freed = [weakref.ref(stream), weakref.ref(stream._source)]
    if kind == "cycle":
        loader.itself = loader  # type: ignore[attr-defined]
    if kind == "traceback":
        try:
            for _ in loader:
                raise ValueError
        except ValueError as error:
            loader.error = error  # type: ignore[attr-defined]
    if kind == "stream":
        loader.close()
    del stream, loader
    assert until(lambda: (gc.collect() and False) or not [ref for ref in freed if ref() is not None])
    assert until(lambda: len(names()) <= len(before)), names()


EXIT = """
import sys, vesuvius
how = dict(patch_size=(8, 16, 16), batch_size=1, num_workers=0, device="cpu")
loader = vesuvius.PatchLoader(sys.argv[1], batches_per_epoch=9, **how)
loop = iter(loader)
next(loop)
volume = vesuvius.open_volume(sys.argv[1])
volume[0]
if sys.argv[2] == "dropped":
    del loader, loop
elif sys.argv[2] == "error":
    raise ValueError("mine")
print("last line")
"""


@pytest.mark.parametrize("how", ["open", "dropped", "error"])
def test_the_interpreter_exits_whatever_is_open(volume: Path, how: str) -> None:
    command = [sys.executable, "-c", EXIT, str(volume), how]
    ended = fork_server.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == ((1, "") if how == "error" else (0, "last line\n")), ended.stderr


# ---- forked and spawned processes


class Reads(Dataset[list[int]]):
    """A map-style data set that iterates a loader, as somebody may try."""

    def __init__(self, loader: PatchLoader | PatchStream) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[int]:
        return [sample.index for sample in next(iter(self.loader)).samples]


@pytest.mark.parametrize("opened", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_worker_of_a_data_loader_or_a_forked_child_is_refused(
    volume: Path, opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)  # torch waits so long for the worker
    with (
        load(volume, batches_per_epoch=4) as loader,
        PatchStream(loader._job, StreamOptions(4, num_workers=0)) as stream,
    ):
        if opened:
            next(iter(loader))
        for data, batch_size in ((loader, None), (Reads(loader), 1), (Reads(stream), 1)):
            made: Any = DataLoader(data, batch_size=batch_size, num_workers=1, multiprocessing_context="fork")
            with pytest.raises(
                ConfigError, match=r"worker of a DataLoader.*set num_workers=0 and PatchLoader\(num_workers"
            ):
                next(iter(made))

        def act() -> None:
            uses = [lambda: iter(loader), lambda: next(stream), lambda: stream.reconfigure(), lambda: next(loop)]
            for use in uses if opened else uses[:-1]:
                with pytest.raises(ConfigError, match="forked process"):
                    use()
            loader.close()

        loop = iter(loader) if opened else iter(())
        assert in_child(act) == 0
        assert len(list(loader)) == 4, "the parent's own is as it was"


class Makes(Dataset[list[int]]):
    def __init__(self, volume: str) -> None:
        self.volume = volume

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[int]:
        with load(self.volume) as loader:
            return indices(islice(loader, 1))


def put_indices(loader: PatchLoader, queue: Any) -> None:
    with loader:
        queue.put(indices(islice(loader, 2)))


@pytest.mark.long
def test_a_pickled_loader_continues_at_its_position(volume: Path) -> None:
    """With its state, in another process, as mp.spawn does; one whose readers run cannot be pickled."""
    with load(volume, batches_per_epoch=6) as loader:
        with pickle.loads(pickle.dumps(loader)) as copy:
            assert indices(copy) == list(range(24))
        list(islice(loader, 3))
        with pytest.raises(ConfigError, match="while its workers run; close"):
            pickle.dumps(loader)
        loader.close()
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=put_indices, args=(loader, queue))
        process.start()
        assert queue.get(timeout=120) == list(range(12, 20))
        process.join(60)
        assert process.exitcode == 0


# ---- ranks

RANKS = """
import sys, os
import torch, vesuvius
from torch import distributed

def seen(loader, count=2):
    return [sample.index for batch, _ in zip(loader, range(count)) for sample in batch.samples]

def load(**options):
    return vesuvius.PatchLoader(
        sys.argv[1], patch_size=(8, 16, 16), batch_size=2, num_workers=0, device="cpu", normalize=False, **options
    )

early = load(batches_per_epoch=3)
assert len(early) == 3
state = load().state_dict()
early.load_state_dict(state | {"sample_index": 8, "in_epoch": 4})
assert early.state_dict()["in_epoch"] == 4
try:
    iter(early)
except vesuvius.ConfigError as error:
    assert "WORLD_SIZE=2" in str(error) and "init_process_group" in str(error), error
else:
    raise AssertionError("the rank is unknown")
distributed.init_process_group("gloo")
rank = distributed.get_rank()
assert seen(early, 9) == [8 + rank, 10 + rank, 12 + rank, 14 + rank], "one of 3 batches is over"
early.close()
if rank == 0:
    with load(rank=0, world_size=1) as alone:  # a loader of one rank waits for nobody
        assert seen(alone) == [0, 1, 2, 3]
    with load(seed=5) as lonely:
        assert seen(lonely) == [0, 2, 4, 6]
distributed.barrier()
refused = 0
with load(seed=3) as uneven:
    if rank == 1:
        uneven.load_state_dict(uneven.state_dict() | {"sample_index": 4})
        distributed.barrier()
    try:
        seen(uneven)
    except vesuvius.ConfigError as error:
        assert f"Rank {rank} starts at sample {4 * rank}, but another rank at" in str(error), error
        refused = 1
    if rank == 0:
        distributed.barrier()
    both = torch.tensor([refused])
    distributed.all_reduce(both)
    assert both.item() == 1, "by the rank that comes last"
    uneven.load_state_dict(uneven.state_dict() | {"sample_index": 4})
    loop = iter(uneven)
    assert next(loop).samples[0].index == 4 + rank
    refused = 0
    try:
        uneven.load_state_dict(uneven.state_dict() | {"sample_index": 12 + 4 * rank})
    except vesuvius.ConfigError as error:
        assert f"Rank {rank} starts at sample {12 + 4 * rank}, but another" in str(error), error
        assert next(loop).samples[0].index == 8 + rank, "it is unchanged"
        refused = 1
    both = torch.tensor([refused])
    distributed.all_reduce(both)
    assert both.item() == 1, "also while it reads"
print(f"rank {rank} is right", flush=True)
distributed.destroy_process_group()
"""


def test_the_rank_is_that_of_the_first_loop_and_all_begin_together(volume: Path, tmp_path: Path) -> None:
    with started_ranks(None, tmp_path, 2, program=("-c", RANKS, str(volume))) as ranks:
        assert ends_of(ranks) == [0, 0], output_of(tmp_path, 2)


def test_a_group_that_begins_later_changes_the_rank(volume: Path, tmp_path: Path) -> None:
    """A look at the first batch must not make every rank read all samples."""
    with load(volume) as loader:
        assert indices(islice(loader, 1)) == [0, 1, 2, 3]
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
        try:
            assert indices(islice(loader, 1)) == [4, 5, 6, 7]
        finally:
            torch.distributed.destroy_process_group()
        assert indices(islice(loader, 1)) == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_SIZE", "8"), ("SLURM_STEP_NUM_TASKS", "4"), ("WORLD_SIZE", "two")],
)
def test_an_unknown_rank_of_several_is_refused(
    volume: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with load(volume) as loader, pytest.raises(ConfigError, match=f"{variable}={value}.*pass rank and world_size"):
        loader.stream  # noqa: B018
    with load(volume, rank=1, world_size=2) as known:
        assert indices(islice(known, 1)) == [1, 3, 5, 7]
    monkeypatch.setenv(variable, "1" if "SLURM" not in variable else value)
    monkeypatch.setenv("SLURM_PTY_PORT", "4000")  # the shell of `srun --pty`
    with load(volume) as alone:
        assert indices(islice(alone, 1)) == [0, 1, 2, 3]
