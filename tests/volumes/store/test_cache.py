"""The disk cache stays within a tenth of its limit, and never tears an entry or raises, even if writers are killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from vesuvius import errors
from vesuvius.errors import ConfigError
from vesuvius.volumes.store.cache import DiskCache

KEYS = 400
LIMIT = 8 * 2**20


def chunk(index: int) -> bytes:
    """The bytes of a key, 1 to 100,000 of them; every 8 bytes differ from those of any other key."""
    return index.to_bytes(8, "little") * random.Random(index).randint(1, 12_500)


def key(index: int) -> str:
    return f"https://example.org/scroll.zarr/0/{index}"


def disk_usage(directory: Path) -> int:
    """Bytes of its files on disk."""
    return sum(path.stat().st_blocks * 512 for path in directory.glob("*/*"))


def check_contents(cache: DiskCache, keys: int = KEYS) -> int:
    """Every key holds its own bytes or nothing; returns how many hold them."""
    found = [cache.get(key(index)) for index in range(keys)]
    assert all(data in (None, chunk(index)) for index, data in enumerate(found))
    return sum(data is not None for data in found)


def hammer(cache: DiskCache, seed: int, operations: int) -> None:
    """A reader that fetches random chunks through the cache as fast as possible."""
    rng = random.Random(seed)
    for _ in range(operations):
        index = rng.randrange(KEYS)
        data = cache.get(key(index))
        assert data in (None, chunk(index)), f"torn bytes for key {index}"
        if data is None or rng.random() < 0.3:
            cache.put(key(index), chunk(index))
    assert cache.directory not in [subject for _, subject in errors._warned]


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", LIMIT)


@pytest.fixture
def start() -> Iterator[Callable[..., BaseProcess]]:
    """Starts a process, and ends it with the test."""
    started: list[BaseProcess] = []

    def run(target: Callable[..., None], *arguments: Any) -> BaseProcess:
        started.append(forked.process(target, arguments, daemon=True))
        started[-1].start()
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.join()


def test_least_recently_used_entries_are_removed_first_and_reads_count(cache: DiskCache) -> None:
    for index in range(80):
        cache.put(key(index), bytes(90_000))
        os.utime(cache._entry(key(index)), (time.time() - 1000 + index,) * 2)
    kept = [index for index in range(80) if cache._entry(key(index)).exists()]
    assert kept[0] < 10
    cache.get(key(kept[0]))  # the oldest, until now
    for index in range(80, 100):
        cache.put(key(index), bytes(90_000))
    assert cache.get(key(kept[0])) is not None
    left = [index for index in range(100) if cache._entry(key(index)).exists()][1:]
    assert left == list(range(left[0], 100)), "without gaps: the oldest are gone, in order"
    assert left[0] > kept[1]


def test_a_damaged_entry_is_a_miss_and_is_removed(cache: DiskCache) -> None:
    data, path = os.urandom(10_000), cache._entry(key(0))
    cache.put(key(0), data)
    raw = path.read_bytes()
    for damaged in (raw[:-1] + bytes([raw[-1] ^ 1]), raw[:-1], b"", bytes(len(raw)), raw + b"\0"):
        path.write_bytes(damaged)
        assert cache.get(key(0)) is None
        assert not path.exists()
        cache.put(key(0), data)
        assert cache.get(key(0)) == data


def test_a_limit_beyond_the_free_space_is_refused(cache: DiskCache) -> None:
    with pytest.raises(ConfigError, match=r"GiB free, .* GiB needed"):
        DiskCache(cache.directory, 2**60).check()
    assert not cache.directory.exists(), "a check changes nothing"


def test_an_unusable_directory_fails_check_and_costs_readers_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache", LIMIT)
    with pytest.raises(ConfigError, match="cache_dir"):
        cache.check()
    for _ in range(3):
        cache.put(key(0), chunk(0))
        assert cache.get(key(0)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once per process"


def test_processes_share_a_directory_within_a_tenth_of_its_limit_despite_kills(
    cache: DiskCache, start: Callable[..., BaseProcess]
) -> None:
    rng = random.Random(0)
    writers = [start(hammer, cache, seed, 10**9) for seed in range(4)]
    high_water = 0
    for number in range(8):
        time.sleep(0.15 * rng.random())
        if number % 3 == 0:
            writers[0].kill()
            writers[0].join()
            assert writers[0].exitcode == -signal.SIGKILL, "it had failed before"
            writers[0] = start(hammer, cache, 4 + number, 10**9)
        usage = 0
        for path in cache.directory.glob("*/*"):
            try:
                usage += path.stat().st_blocks * 512
            except FileNotFoundError:
                continue
        high_water = max(high_water, usage)
        assert usage <= 1.1 * LIMIT
    assert all(writer.is_alive() for writer in writers), "torn bytes, or an error"
    assert high_water > LIMIT / 2, "the limit was never near"
    for writer in writers:
        writer.kill()
        writer.join()
    assert check_contents(cache) > 10
