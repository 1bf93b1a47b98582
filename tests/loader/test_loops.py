"""What a `for` over a loader yields: also next to other loops, after errors, and while the loader is closed."""

from __future__ import annotations

import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.loader.test_patch_loader import SHAPE, indices, load
from tests.support.chunk_server import ChunkServer
from vesuvius import DataError, PatchBatch, PatchStream
from vesuvius.errors import VesuviusError
from vesuvius.stream.options import StreamOptions
from vesuvius.volumes.errors import ClosedError


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return write_array(tmp_path / "scan.zarr", textured(SHAPE))


# ---- several loops


def test_each_loop_counts_its_own_batches_and_no_sample_comes_twice(volume: Path) -> None:
    with load(volume, batches_per_epoch=10) as loader:
        seen, outer = [], 0
        for batch in loader:
            outer += 1
            seen.append(batch)
            if outer % 5 == 1:
                seen.append(next(iter(loader)))
            if outer == 3:
                seen += list(loader)
        assert outer == 10
        assert indices(seen) == list(range(4 * (10 + 2 + 10)))
        pairs = list(zip(loader, loader, strict=True))
        assert len(pairs) == 10
        assert indices(batch for pair in pairs for batch in pair) == list(range(88, 168))
        assert len(list(loader)) == 10


def test_a_state_is_that_of_the_loop_that_goes_on(volume: Path) -> None:
    """A peek inside an epoch does not make the epoch a new one."""
    with load(volume, batches_per_epoch=6) as loader:
        left = iter(loader)
        next(left)  # left, but still referenced, as by the traceback of a notebook
        for number, _ in enumerate(loader):
            next(iter(loader))
            if number == 3:
                state = loader.state_dict()
                break
        assert (state["sample_index"], state["in_epoch"]) == (4 * 9, 4 * 4)
        assert len(list(loader)) == 6
        assert loader.state_dict()["in_epoch"] == 0
    with load(volume, batches_per_epoch=6) as other:
        other.load_state_dict(state)
        assert indices(other) == list(range(36, 44))
        assert len(list(other)) == 6


def test_a_loop_whose_loader_is_rewound_yields_the_rest_of_that_epoch(volume: Path) -> None:
    with load(volume, batches_per_epoch=5) as loader:
        loop = iter(loader)
        next(loop)
        good = loader.state_dict()
        assert indices(islice(loop, 3)) == list(range(4, 16))
        loader.load_state_dict(good)
        assert indices(loop) == list(range(4, 20))
        assert len(list(loader)) == 5


def test_threads_share_the_batches_of_a_loader(volume: Path) -> None:
    with load(volume, batches_per_epoch=30) as loader:
        found: list[list[PatchBatch]] = [[], [], []]
        loops = [iter(loader) for _ in found]
        threads = [threading.Thread(target=into.extend, args=(loop,)) for into, loop in zip(found, loops, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert [len(each) for each in found] == [30] * 3
        assert sorted(indices(batch for each in found for batch in each)) == list(range(360))


# ---- errors


def test_a_loop_after_an_error_goes_on_at_the_batch_that_failed(volume: Path) -> None:
    """It raises again as long as the cause lasts; an empty epoch would look like a finished one."""
    away = volume.with_suffix(".away")
    with load(volume, batches_per_epoch=200) as loader:
        loop = iter(loader)
        seen = indices(islice(loop, 1))
        volume.rename(away)
        with pytest.raises(DataError, match="gone"):
            seen += (i for batch in loop for i in indices([batch]))
        for _ in range(2):
            with pytest.raises(DataError):
                next(iter(loader))
        position = loader.state_dict()["sample_index"]
        assert (seen, loader.state_dict()["in_epoch"]) == (list(range(position)), position)
        assert loader.stream.events is not None
        away.rename(volume)
        rest = indices(loop)
        assert seen + rest == list(range(800)), "the same loop can go on"
        assert indices(loader) == list(range(800, 1600))


def test_a_stream_that_failed_fails_again_until_it_is_rewound(volume: Path, tmp_path: Path) -> None:
    away = volume.with_suffix(".away")
    with load(volume) as loader, PatchStream(loader._job, StreamOptions(batch_size=4, num_workers=0)) as stream:
        next(stream)
        volume.rename(away)
        with pytest.raises(DataError) as first:
            list(islice(stream, 400))
        with pytest.raises(DataError) as second:
            next(stream)
        assert str(first.value) == str(second.value)
        away.rename(volume)
        state = stream.state_dict()
        stream.load_state_dict(state)
        assert next(stream).samples[0].index == state["sample_index"]


def test_an_interrupted_batch_is_delivered_by_the_next_loop(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the stream and the device: its samples must not be lost."""
    with load(volume, batches_per_epoch=5) as loader:
        loop = iter(loader)
        next(loop)
        assert loader._feed is not None

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(loader._feed, "copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(loop)
        assert loader.state_dict()["sample_index"] == 4
        assert indices(loop) == list(range(4, 20))


# ---- closing


def test_a_loop_raises_once_its_loader_is_closed_and_a_new_one_goes_on(volume: Path) -> None:
    with load(volume, batches_per_epoch=5) as loader:
        loop = iter(loader)
        assert indices(islice(loop, 2)) == list(range(8))
        stream = loader.stream
        loader.close()
        with pytest.raises(ClosedError, match="begin another"):
            next(loop)
        assert loader.stream is stream, "with its statistics; no readers start"
        assert stream.feeder_stats.batches == 2
        with pytest.raises(VesuviusError, match="closed"):
            loader.reconfigure(prefetch_factor=3)
        assert indices(loader) == list(range(8, 28))
        with pytest.raises(ClosedError):
            next(loop)
    unread = load(volume)
    unread.close()
    with pytest.raises(VesuviusError, match="has not read"):
        unread.stream  # noqa: B018


def test_closing_ends_the_wait_of_another_thread(server: ChunkServer, tmp_path: Path) -> None:
    """A read that an outage would hold up for an hour; the samples come later."""
    path = write_array(tmp_path / "scan.zarr", textured(SHAPE))
    with load(server.url_of(path), normalize=False) as loader:
        ended: list[BaseException] = []

        def read() -> None:
            try:
                next(iter(loader))
            except BaseException as error:
                ended.append(error)

        server.set_faults([{"path": r"scan.zarr/\d", "kind": "status"}])
        thread = threading.Thread(target=read)
        thread.start()
        while "has not answered" not in str(loader._stream and loader._stream.waiting_for()):
            time.sleep(0.01)
        loader.close()
        loader.close()
        thread.join(60)
        assert [type(error) for error in ended] == [ClosedError]
        server.set_faults([])
        assert indices(islice(loader, 2)) == list(range(8))


def test_a_changed_reader_setting_outlasts_a_close(volume: Path) -> None:
    with load(volume, batches_per_epoch=4) as loader:
        next(iter(loader))
        loader.reconfigure(prefetch_factor=np.int64(5))  # type: ignore[typeddict-item]
        loader.close()
        next(iter(loader))
        assert loader.stream.options.prefetch_factor == 5
        assert type(loader.stream.options.prefetch_factor) is int


def test_a_loader_warns_of_chunks_that_are_decoded_many_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the trainer does: each patch of a volume stored as slices decodes eight whole slices."""
    slices = zarr.create_array(tmp_path / "slices.zarr", shape=(64, 2048, 2304), chunks=(1, 2048, 2304), dtype="u1")
    slices[0] = 1
    with load(tmp_path / "slices.zarr", normalize=False) as loader:
        assert not caplog.records, "it depends on the number of ranks"
        iter(loader)
    assert "the read amplification of" in caplog.text


def test_the_threads_of_a_loader_do_not_grow_with_its_volumes(tmp_path: Path) -> None:
    """A reader has them for what it reads, and hundreds of volumes have labels each."""
    before = {id(thread) for thread in threading.enumerate()}
    paths = [write_array(tmp_path / f"{number}.zarr", textured((16, 32, 32)), chunk=8) for number in range(4)]

    def fetching() -> int:
        return sum(thread.name == "fetch" and id(thread) not in before for thread in threading.enumerate())

    with load(paths, labels=paths, num_workers=2) as loader:
        volumes = {sample.volume for batch in islice(loader, 15) for sample in batch.samples}
        assert len(volumes) == len(paths)
        deadline = time.monotonic() + 30
        while fetching() > 2 * 2 * 5 and time.monotonic() < deadline:  # readers, arrays, chunks that a read is ahead
            time.sleep(0.05)
        assert fetching() <= 2 * 2 * 5
