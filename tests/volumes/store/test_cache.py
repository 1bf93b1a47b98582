"""The disk cache: never more than its limit on disk, never a torn byte, never an error, whoever is killed whenever.

Disk usage is measured as `du` does, directories included.  Snapshots are taken with all writers stopped (SIGSTOP):
a walk through a directory that changes meanwhile would count an evicted entry and its successor.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from tests.support import forked
from vesuvius.errors import ConfigError
from vesuvius.volumes.store import cache as disk_cache
from vesuvius.volumes.store.cache import BLOCK_BYTES, HEADER, OVERHEAD_BYTES, DiskCache

KEYS = 120
LIMIT = OVERHEAD_BYTES + 40 * 50_000  # about 40 of the chunks below
GRACE_S = 120  # for processes that must end; only a deadlock takes that long


def chunk(index: int) -> bytes:
    """The bytes of one key, 1 to 100,000 of them; differing in each 8 bytes from those of any other key."""
    return index.to_bytes(8, "little") * random.Random(index).randint(1, 12_500)


def key(index: int) -> str:
    return f"https://example.org/scroll.zarr/0/{index}"


def disk_usage(directory: Path) -> int:
    """What `du -s` says; a block at least for each directory, of which ext4 needs it and other file systems do not."""
    usage = 0
    for folder, _, files in os.walk(directory):
        usage += max(os.lstat(folder).st_blocks * 512, BLOCK_BYTES)
        usage += sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for name in files)
    return usage


def entries(cache: DiskCache) -> list[Path]:
    return [path for path in cache.directory.glob("??/*") if path.is_file()]


def create_folders(cache: DiskCache) -> None:
    """All that an old cache has; a new one counts them all the same, which would hide a total that is too low."""
    cache.prepare()
    for name in disk_cache.SUBDIRECTORIES:
        (cache.directory / name).mkdir(exist_ok=True)


def check_snapshot(cache: DiskCache) -> None:
    """What must hold at every instant: no more on disk than counted, no more counted than allowed."""
    assert disk_usage(cache.directory) <= cache.size_bytes() <= cache.limit_bytes


def check_contents(cache: DiskCache, keys: Iterable[int] = range(KEYS)) -> int:
    """Every key holds its own bytes or nothing; returns how many hold them."""
    found = {index: cache.get(key(index)) for index in keys}
    assert all(data in (None, chunk(index)) for index, data in found.items())
    return sum(data is not None for data in found.values())


def hammer(cache: DiskCache, seed: int, operations: int, at_work: Path | None = None) -> None:
    """One reader: fetch random chunks through the cache, as fast as it can; create the file `at_work` first."""
    if at_work is not None:
        at_work.touch()
    rng = random.Random(seed)
    for _ in range(operations):
        index = rng.randrange(KEYS)
        data = cache.get(key(index))
        assert data in (None, chunk(index)), f"torn bytes for key {index}"
        if data is None or rng.random() < 0.3:
            cache.put(key(index), chunk(index))
    assert cache.directory not in disk_cache._warned


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


def finish(process: BaseProcess) -> None:
    process.join(GRACE_S)
    assert process.exitcode == 0, "an assertion in the process, or a deadlock where it is None; see standard error"


@contextmanager
def stopped(processes: Iterable[BaseProcess]) -> Iterator[None]:
    """All of them stand still inside, wherever they were."""
    pids = [process.pid for process in processes if process.is_alive() and process.pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # it had ended
            while psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                time.sleep(0.0005)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def set_last_use(cache: DiskCache, index: int, seconds_ago: float) -> None:
    os.utime(cache._entry(key(index)), (time.time() - seconds_ago,) * 2)


# One process


def test_what_was_put_is_what_is_got(cache: DiskCache) -> None:
    cache.prepare()
    for index, data in enumerate([b"", b"x", os.urandom(100_000)]):
        cache.put(key(index), data)
        assert cache.get(key(index)) == data
    cache.put(key(1), b"another")
    assert cache.get(key(1)) == b"another"
    cache.drop(key(1))
    assert cache.get(key(1)) is None
    assert cache.get("never put") is None


def test_a_pickled_cache_is_the_same_cache(cache: DiskCache) -> None:
    cache.put(key(0), chunk(0))
    assert pickle.loads(pickle.dumps(cache)).get(key(0)) == chunk(0)


def test_construction_touches_no_disk(cache: DiskCache) -> None:
    assert cache.get(key(0)) is None
    assert cache.size_bytes() == 0
    assert not cache.directory.exists()


def test_the_least_recently_used_go_first_and_getting_is_using(cache: DiskCache) -> None:
    small = DiskCache(cache.directory, OVERHEAD_BYTES + 9 * 100_000)
    for index in range(9):
        small.put(key(index), bytes(90_000))
        set_last_use(small, index, seconds_ago=1000 - index)
    small.get(key(0))  # the oldest, until now
    small.put(key(9), bytes(90_000))
    kept = [index for index in range(10) if small.get(key(index)) is not None]
    assert 0 in kept
    assert 9 in kept
    assert kept[1:] == list(range(kept[1], 10)), "without gaps: the oldest are gone, in order"
    assert 1 not in kept
    assert 6 <= len(kept) <= 8, "an eviction frees a tenth of the limit beyond need: here two or three entries"


def test_an_entry_is_marked_as_used_once_a_minute_at_most(cache: DiskCache) -> None:
    cache.put(key(0), chunk(0))
    for seconds_ago, marked in ((disk_cache.TOUCH_S / 2, False), (disk_cache.TOUCH_S * 2, True)):
        set_last_use(cache, 0, seconds_ago)
        before = cache._entry(key(0)).stat().st_mtime_ns
        assert cache.get(key(0)) is not None
        assert (cache._entry(key(0)).stat().st_mtime_ns != before) == marked


def test_replacing_and_dropping_never_hide_bytes_from_the_limit(cache: DiskCache) -> None:
    rng = random.Random(0)
    create_folders(cache)
    for _ in range(300):
        index = rng.randrange(60)
        cache.put(key(index), chunk(index + rng.randrange(3)))
        if rng.random() < 0.2:
            cache.drop(key(rng.randrange(60)))
        check_snapshot(cache)
    assert disk_usage(cache.directory) > LIMIT - (LIMIT - OVERHEAD_BYTES) / 2, "the limit was never near"


def test_an_entry_that_is_put_again_is_not_counted_again(cache: DiskCache) -> None:
    cache.put(key(0), chunk(0))
    once = cache.size_bytes()
    cache.put(key(0), chunk(0))
    assert cache.size_bytes() == once


def test_folders_that_have_grown_count(cache: DiskCache) -> None:
    """On ext4 a directory never shrinks again."""
    create_folders(cache)
    names = [cache.directory / "00" / f"{number:038x}" for number in range(2000)]
    for name in names:
        name.touch()
    for name in names:
        name.unlink()
    cache.prepare()
    check_snapshot(cache)
    cache.put(key(0), bytes(LIMIT - OVERHEAD_BYTES - 2 * BLOCK_BYTES))  # would fit, had they not grown
    check_snapshot(cache)


def test_an_entry_larger_than_the_limit_is_not_stored(cache: DiskCache) -> None:
    largest = LIMIT - OVERHEAD_BYTES - BLOCK_BYTES - HEADER.size
    largest -= (largest + HEADER.size) % BLOCK_BYTES
    cache.put(key(0), chunk(0))
    cache.put(key(1), bytes(largest + 1))
    assert cache.get(key(1)) is None
    assert cache.get(key(0)) == chunk(0), "nothing was evicted in vain"
    cache.put(key(1), bytes(largest))
    assert cache.get(key(1)) == bytes(largest)
    check_snapshot(cache)


@pytest.mark.parametrize("first_call", ["put", "check"])
def test_a_lower_limit_shrinks_the_directory_at_once_and_a_higher_one_fills(cache: DiskCache, first_call: str) -> None:
    for index in range(KEYS):
        cache.put(key(index), chunk(index))
    assert disk_usage(cache.directory) > LIMIT / 2
    lower = DiskCache(cache.directory, LIMIT // 2)
    if first_call == "put":
        lower.put(key(0), chunk(0))
    else:
        lower.prepare()
    check_snapshot(lower)
    few = check_contents(lower)
    assert few > 0
    higher = DiskCache(cache.directory, 2 * LIMIT)
    for index in range(KEYS):
        higher.put(key(index), chunk(index))
    check_snapshot(higher)
    assert check_contents(higher) > 2 * few


# Damage


def damage(flip: int | None = None, length: int | None = None, append: bytes = b"") -> Callable[[bytes], bytes]:
    def apply(raw: bytes) -> bytes:
        if flip is not None:
            raw = raw[:flip] + bytes([raw[flip] ^ 1]) + raw[flip + 1 :]
        return raw[:length] + append

    return apply


@pytest.mark.parametrize(
    "apply",
    [
        *(pytest.param(damage(flip=place), id=f"bit in byte {place}") for place in (0, 8, 16, 19, HEADER.size, -1)),
        *(pytest.param(damage(length=length), id=f"{length} bytes") for length in (0, 7, HEADER.size, -1)),
        pytest.param(damage(append=b"\0"), id="a byte more"),
        pytest.param(lambda raw: bytes(len(raw)), id="zeros, as a power loss leaves"),
    ],
)
def test_a_damaged_entry_is_a_miss_and_is_removed(cache: DiskCache, apply: Callable[[bytes], bytes]) -> None:
    data = os.urandom(10_000)
    cache.put(key(0), data)
    path = cache._entry(key(0))
    raw = path.read_bytes()
    path.write_bytes(apply(raw))
    assert cache.get(key(0)) is None
    assert not path.exists()
    cache.put(key(0), data)
    assert cache.get(key(0)) == data


@pytest.mark.parametrize("state", ["power loss", "empty", "garbage"])
def test_a_total_that_cannot_be_trusted_is_counted_anew(cache: DiskCache, state: str) -> None:
    for index in range(KEYS):
        cache.put(key(index), chunk(index))
    path = cache.directory / disk_cache.STATE_NAME
    title, numbers = path.read_text().splitlines()
    total, boot = numbers.split()
    low = f"{OVERHEAD_BYTES:0{len(total)}d}"
    path.write_text(
        {"power loss": f"{title}\n{low} {boot[::-1]}\n", "empty": "", "garbage": f"{title}\n-1 {boot}\n"}[state]
    )
    assert cache.size_bytes() >= disk_usage(cache.directory)
    for index in range(KEYS, KEYS + 20):
        cache.put(key(index), chunk(index))
        check_snapshot(cache)


# Foreign files


def test_a_directory_that_holds_something_else_is_refused_and_left_alone(cache: DiskCache) -> None:
    cache.directory.mkdir()
    (cache.directory / "thesis.tex").write_text("ten years")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        cache.prepare()
    cache.put(key(0), chunk(0))
    assert [path.name for path in cache.directory.iterdir()] == ["thesis.tex"]


def test_foreign_files_in_our_directory_outlive_evictions(cache: DiskCache) -> None:
    cache.put(key(0), chunk(0))
    foreign = [cache.directory / "README", cache._entry(key(0)).parent / "notes", cache.directory / "00" / ("0" * 38)]
    foreign[0].write_text("x")
    foreign[1].write_text("x")
    foreign[2].mkdir(parents=True)  # named like an entry, and none
    for index in range(KEYS):
        cache.put(key(index), chunk(index))
    DiskCache(cache.directory, OVERHEAD_BYTES + 20_000).put(key(0), b"x")
    assert check_contents(cache, range(1, KEYS)) == 0
    assert all(path.exists() for path in foreign)


# What check() and prepare() refuse


def test_a_limit_without_room_for_entries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache_gib"):
        DiskCache(tmp_path / "cache", OVERHEAD_BYTES).prepare()


def test_a_limit_beyond_the_free_space_is_refused(cache: DiskCache) -> None:
    with pytest.raises(ConfigError, match=r"free for .* GiB more"):
        DiskCache(cache.directory, 2**60).prepare()


def test_a_file_system_whose_flock_excludes_nobody_is_refused(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda file, operation: None)  # as some network file systems have it
    with pytest.raises(ConfigError, match="working flock"):
        cache.prepare()


def test_a_directory_that_cannot_be_made_is_refused_by_check_and_ignored_by_readers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache", LIMIT)
    with pytest.raises(ConfigError, match="cache_dir"):
        cache.prepare()
    for _ in range(3):
        cache.put(key(0), chunk(0))
        assert cache.get(key(0)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once per process"


def test_a_process_that_lists_the_directory_while_another_creates_it_is_not_refused(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.prepare()
    monkeypatch.setattr(os, "listdir", lambda path: ["3f"])  # what a listing may see of what comes after the state file
    cache.prepare()


def use_a_directory_of_somebody_else(parent: Path) -> None:
    os.chdir(parent)
    if os.getuid() == 0:
        os.setuid(65534)
    cache = DiskCache(Path("cache"), LIMIT)
    with pytest.raises(ConfigError, match="Permission denied"):
        cache.prepare()
    cache.put(key(1), chunk(1))
    assert [cache.get(key(index)) for index in range(2)] == [chunk(0), None]


def test_a_directory_without_permission_to_write_serves_what_it_has(
    cache: DiskCache, start: Callable[..., BaseProcess]
) -> None:
    cache.put(key(0), chunk(0))
    cache._state.chmod(0o666)
    cache.directory.chmod(0o555)
    cache.directory.parent.chmod(0o755)
    finish(start(use_a_directory_of_somebody_else, cache.directory.parent))
    cache.directory.chmod(0o755)  # for pytest, which removes it


# Disks that fail


def use_with_a_limit_on_file_size(cache: DiskCache) -> None:
    """Writing fails as on a full disk, with another errno: RLIMIT_FSIZE, which needs no privileges."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    disk_cache.log.addHandler(handler)
    cache.put(key(0), b"before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    for index in range(1, 200):  # many times the limit: failures may not use it up either
        cache.put(key(index), bytes(90_000))
        assert cache.get(key(index)) is None
        check_snapshot(cache)
    assert cache.get(key(0)) == b"before"
    cache.put(key(1), b"after")
    assert cache.get(key(1)) == b"after"
    assert not cache._incoming.exists()
    assert len(warnings) == 1, warnings
    assert "File too large" in warnings[0]


def test_a_write_that_fails_costs_one_warning_and_nothing_else(
    cache: DiskCache, start: Callable[..., BaseProcess]
) -> None:
    finish(start(use_with_a_limit_on_file_size, cache))


def use_a_small_disk(mount: Path) -> None:
    """In a mount namespace of our own, with a tmpfs of 8 MiB at `mount`."""
    cache = DiskCache(mount / "cache", 6 * 2**20)
    cache.prepare()
    cache.put(key(0), b"before")
    with open(mount / "filler", "wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(2**16)):
            pass
    (mount / "reserve").unlink()  # room for the folder of an entry and a part of the entry
    for index in range(1, 200):
        cache.put(key(index), bytes(500_000))
        assert cache.get(key(index)) is None, "the disk was not full"
        assert not cache._incoming.exists(), "what was written of it takes the last of the disk"
        check_snapshot(cache)
    with pytest.raises(ConfigError, match=r"the disk of the cache must hold all of it|No space left"):
        cache.prepare()
    (mount / "filler").unlink()
    cache.put(key(1), b"after")
    assert cache.get(key(1)) == b"after"
    set_last_use(cache, 0, seconds_ago=1000)  # the next get will try to mark it
    subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
    set_aside = cache.size_bytes()
    cache.put(key(2), b"never")
    cache.drop(key(0))
    assert [cache.get(key(index)) for index in range(3)] == [b"before", b"after", None]
    assert cache.size_bytes() == set_aside
    with pytest.raises(ConfigError, match="Read-only file system"):
        cache.prepare()


def test_a_full_and_then_a_read_only_disk_still_serve(tmp_path: Path) -> None:
    own_mounts = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path)]
    try:
        subprocess.run([*own_mounts, *mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this system gives no mount namespace to users: {error}")
    code = (
        "import sys, pathlib; from tests.volumes.store.test_cache import *; use_a_small_disk(pathlib.Path(sys.argv[1]))"
    )
    script = f'{" ".join(mount[:-1])} "$1" && head -c 300000 /dev/zero > "$1/reserve" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        [*own_mounts, "sh", "-c", script, "sh", tmp_path, sys.executable, code],
        cwd=Path(__file__).parents[3],  # not from conftest, whose imports would slow the start of each process
        text=True,
        capture_output=True,
        timeout=GRACE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the disk cache must be readable and writable") == 1


# Many at a time


def start_writer(start: Callable[..., BaseProcess], cache: DiskCache, seed: int) -> BaseProcess:
    """A process that fetches through the cache without end; returns when it has begun."""
    at_work = cache.directory.parent / f"writer {seed}"
    writer = start(hammer, cache, seed, 10**9, at_work)
    while not at_work.exists():
        assert writer.is_alive()
        time.sleep(0.005)
    return writer


def check_limit_under_load(cache: DiskCache, start: Callable[..., BaseProcess], snapshots: int) -> None:
    rng = random.Random(0)
    create_folders(cache)
    writers = [start_writer(start, cache, seed) for seed in range(4)]
    unfinished, high_water = 0, 0
    for _ in range(snapshots):
        time.sleep(rng.random() * 0.02)
        with stopped(writers):
            check_snapshot(cache)
            unfinished += cache._incoming.exists()
            high_water = max(high_water, disk_usage(cache.directory))
    assert all(writer.is_alive() for writer in writers), "torn bytes, or an error"
    assert check_contents(cache) > 10
    assert unfinished > 0, "no snapshot fell into a write"
    assert high_water > LIMIT - (LIMIT - OVERHEAD_BYTES) / 2, "the limit was never near"


def test_four_processes_never_exceed_the_limit(cache: DiskCache, start: Callable[..., BaseProcess]) -> None:
    check_limit_under_load(cache, start, snapshots=60)


@pytest.mark.long
def test_four_processes_never_exceed_the_limit_for_long(cache: DiskCache, start: Callable[..., BaseProcess]) -> None:
    check_limit_under_load(cache, start, snapshots=5000)


def test_processes_that_start_at_the_same_time_share_a_new_directory(
    cache: DiskCache, start: Callable[..., BaseProcess]
) -> None:
    for process in [start(hammer, cache, seed, 50) for seed in range(4)]:  # one refusal would be a warning, and fail it
        finish(process)
    assert check_contents(cache) > 10


def test_threads_of_one_process_share_the_cache(cache: DiskCache) -> None:
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            hammer(cache, seed, 300)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=partial(run, seed)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GRACE_S)
    assert not errors
    check_snapshot(cache)


def fork_under_the_lock(cache: DiskCache) -> None:
    """As another thread may at any time; the child inherits the open file, and with it the lock."""
    with cache._locked():
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with open(cache._state, "rb") as state:
            fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_fork_during_a_put_does_not_keep_the_lock(cache: DiskCache, start: Callable[..., BaseProcess]) -> None:
    cache.prepare()
    finish(start(fork_under_the_lock, cache))


# Kills


def put_and_die(cache: DiskCache, data: bytes, lines: int) -> None:
    """Put under key 0, and SIGKILL oneself before the given line of the cache's code, counted as they are executed."""
    left = lines

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        callers = {caller.f_code.co_name for caller, _ in traceback.walk_stack(frame)}
        if frame.f_code.co_filename != disk_cache.__file__ or "_scan" in callers:
            return None  # a scan takes a thousand lines, and only reads
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    cache.put(key(0), data)
    os._exit(0)


def kill_at_each_line(cache: DiskCache, evicts: bool) -> None:
    """After each kill all laws must hold, and the next put must work.  Forks, so it runs in a process of its own."""
    create_folders(cache)
    data, lines, left_behind, status = bytes(100_000), 0, 0, signal.SIGKILL
    while status == signal.SIGKILL:
        lines += 1
        cache.drop(key(0))
        cache.prepare()  # the total is exact now
        index = 1
        while cache.size_bytes() + (0 if evicts else 200_000) + 110_000 < cache.limit_bytes:
            cache.put(key(index), chunk(index))
            index += 1
        child = os.fork()
        if child == 0:
            put_and_die(cache, data, lines)
        status = os.waitpid(child, 0)[1]
        check_snapshot(cache)
        check_contents(cache, range(1, KEYS))
        assert cache.get(key(0)) in (None, data)
        left_behind += cache._incoming.exists()
        cache.put(key(KEYS), chunk(KEYS))
        assert cache.get(key(KEYS)) == chunk(KEYS)
        assert not cache._incoming.exists(), "what a killed writer leaves goes with the next put"
        check_snapshot(cache)
    assert status == 0
    assert lines > 30
    assert left_behind > 0, "no write was killed"
    assert cache.get(key(0)) == data, "the last was not killed"


@pytest.mark.parametrize("evicts", [True, False])
def test_a_kill_before_any_line_of_a_put_breaks_no_law(
    cache: DiskCache, start: Callable[..., BaseProcess], evicts: bool
) -> None:
    finish(start(kill_at_each_line, DiskCache(cache.directory, OVERHEAD_BYTES + 500_000), evicts))


def check_random_kills(cache: DiskCache, start: Callable[..., BaseProcess], kills: int) -> None:
    """SIGKILL at any instant, in a system call too; the others go on."""
    rng = random.Random(1)
    create_folders(cache)
    writers = [start_writer(start, cache, seed) for seed in range(3)]
    for number in range(kills):
        time.sleep(rng.random() * 0.05)
        victim = number % 2  # the third is never killed, and must go on
        writers[victim].kill()
        writers[victim].join()
        assert writers[victim].exitcode == -signal.SIGKILL, "it had failed before"
        with stopped(writers):
            check_snapshot(cache)
            writers[victim] = start_writer(start, cache, 3 + number)  # begins sooner while the others stand still
    assert writers[2].is_alive(), "a torn entry, or an error"
    for writer in writers:
        writer.kill()
        writer.join()
    check_snapshot(cache)
    assert check_contents(cache) > 10
    cache.prepare()
    assert not cache._incoming.exists()
    check_snapshot(cache)


def test_writers_killed_at_random_do_not_harm_the_others(cache: DiskCache, start: Callable[..., BaseProcess]) -> None:
    check_random_kills(cache, start, kills=6)


@pytest.mark.long
def test_writers_killed_at_random_do_not_harm_the_others_for_long(
    cache: DiskCache, start: Callable[..., BaseProcess]
) -> None:
    check_random_kills(cache, start, kills=50)


def test_a_file_system_without_locks_is_refused_and_costs_readers_nothing_but_speed(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.prepare()

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=r"create, write and lock; got OSError: .*No locks available"):
        cache.prepare()
    cache.put(key(0), chunk(0))
    assert cache.get(key(0)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_check_changes_nothing(cache: DiskCache) -> None:
    cache.check()
    assert not cache.directory.exists()
    cache.prepare()
    cache.put(key(0), chunk(0))
    before = sorted((path, path.stat().st_mtime_ns) for path in cache.directory.rglob("*"))
    DiskCache(cache.directory, OVERHEAD_BYTES + 1).check()
    assert sorted((path, path.stat().st_mtime_ns) for path in cache.directory.rglob("*")) == before
