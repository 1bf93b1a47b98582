"""Files on full or hung disks: lines wait and arrive complete and in order; files are replaced atomically."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vesuvius.runlog import files
from vesuvius.runlog.files import AppendFile, AsyncWriter, write_atomically


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.fixture(autouse=True)
def _captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vesuvius")


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Limit the file size of this process, which simulates a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_half_written_lines_are_completed_first_and_dropped_ones_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_KEPT_LINES", 3)
    path = tmp_path / "lines"
    file = AppendFile(path)
    with no_file_beyond(10):
        for number in range(9):
            file.write_line(f"line {number}")
        assert path.read_bytes() == b"line 0\nlin", "the write was a short one"
    file.write_line("line 9")
    file.close()
    file.write_line("late")
    assert path.read_text().splitlines() == ["line 0", "line 1", "line 2", "line 3", "line 9"]
    (failing, working) = said(caplog)
    assert failing[0] == "ERROR"
    assert (
        "File too large; raise the limit on file sizes (`ulimit -f`); the next 3 lines are kept in memory" in failing[1]
    )
    assert working == ("ERROR", f"{path} is writable again; 5 lines were lost")
    with pytest.raises(OSError, match="No such file or directory"):
        AppendFile(tmp_path / "nowhere" / "lines")


def rotate(path: Path, descriptor: int) -> None:
    path.replace(path.with_suffix(".1"))


def rotate_and_create(path: Path, descriptor: int) -> None:
    rotate(path, descriptor)
    path.touch()


def move_the_folder(path: Path, descriptor: int) -> None:
    number = len(list(path.parent.parent.iterdir()))
    path.parent.rename(path.parent.with_name(f"old {number}"))


def close(path: Path, descriptor: int) -> None:
    os.close(descriptor)


def reuse(path: Path, descriptor: int) -> None:
    """The number of the closed descriptor is given to a file of other code."""
    with path.with_name("foreign").open("wb") as file:
        os.dup2(file.fileno(), descriptor)


def fail_with_eio(path: Path, descriptor: int) -> None:
    """A terminal whose other end has closed."""
    master, terminal = os.openpty()
    os.dup2(terminal, descriptor)
    os.close(terminal)
    os.close(master)


CHANGES = [rotate, rotate_and_create, move_the_folder, close, reuse, fail_with_eio]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_line_is_lost_if_the_open_file_is_no_longer_that_of_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Path, int], None]
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "logs/lines"
    path.parent.mkdir()
    file = AppendFile(path)
    for number in range(6):
        if number in (2, 4):  # a second time, too
            change(path, file._descriptor or 0)
        file.write_line(f"line {number}")
    file.close()
    texts = [each.read_text() for each in tmp_path.rglob("*") if each.is_file() and each.name != "foreign"]
    kept = sorted(line for text in texts for line in text.splitlines())
    first = 2 if change in (rotate, rotate_and_create) else 0  # the second rotation replaces the first
    assert kept == [f"line {number}" for number in range(first, 6)]
    assert path.read_text().endswith("line 5\n")
    assert all(each.read_bytes() == b"" for each in tmp_path.rglob("foreign"))
    assert not [line for level, line in said(caplog) if level != "INFO"]


def test_lines_wait_for_a_disk_to_come_back_and_one_written_in_part_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, away = tmp_path / "mnt/disk", tmp_path / "away"
    disk.mkdir(parents=True)
    file = AppendFile(disk / "lines")
    file.write_line("line 0")
    with no_file_beyond(10):
        file.write_line("line 1")
    disk.parent.rename(away)  # unmounted
    file.write_line("line 2")
    disk.mkdir(parents=True)  # another one is mounted in its place
    file.write_line("line 3")
    file.close()
    assert (disk / "lines").read_text() == "line 1\nline 2\nline 3\n"
    assert (away / "disk/lines").read_text() == "line 0\nlin"


def test_threads_and_signal_handlers_write_complete_lines(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "lines")
    per_writer = 1000
    left = iter(range(per_writer))

    def write_from_the_handler(*_: object) -> None:
        if (number := next(left, None)) is not None:
            file.write_line(f"handler {number}")

    def write_all(name: str) -> None:
        for number in range(per_writer):
            file.write_line(f"{name} {number}")

    before = signal.signal(signal.SIGALRM, write_from_the_handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        threads = [threading.Thread(target=write_all, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        write_all("main")
        for thread in threads:
            thread.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    file.close()
    lines = (tmp_path / "lines").read_text().splitlines()
    for name in ("a", "b", "main"):
        assert [line for line in lines if line.startswith(f"{name} ")] == [f"{name} {n}" for n in range(per_writer)]
    handled = per_writer - len(list(left))
    assert handled > 0
    # Unordered: one handler interrupts another.
    handlers = [line for line in lines if line.startswith("handler")]
    assert sorted(handlers) == sorted(f"handler {n}" for n in range(handled))


def test_lines_written_while_closing_are_kept_once_up_to_a_point(tmp_path: Path) -> None:
    """The file has the first lines of each thread, in order."""
    file, begun = AppendFile(tmp_path / "lines"), threading.Barrier(5)

    def write(name: int) -> None:
        begun.wait()
        for number in range(500):
            file.write_line(f"{name} {number}")

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    file.close()
    for thread in threads:
        thread.join()
    lines = (tmp_path / "lines").read_text().splitlines()
    for name in range(4):
        own = [line for line in lines if line.startswith(f"{name} ")]
        assert own == [f"{name} {number}" for number in range(len(own))]


def test_queued_calls_run_in_order_and_dropped_ones_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, goes_on, written, failed = threading.Event(), threading.Event(), list[int](), list[int]()
    writes = AsyncWriter("a-writer", lambda: failed.append(1))

    def hang() -> None:
        begun.set()
        assert goes_on.wait(60)
        raise OSError("it ends nothing")

    assert writes.submit(hang)
    assert begun.wait(60)
    taken = [writes.submit(lambda number=number: written.append(number)) for number in range(1007)]  # type: ignore[misc]
    assert taken == [True] * 1000 + [False] * 7
    assert not caplog.records, "said once they are known, not one by one"
    goes_on.set()
    assert writes.close(60)
    assert (written, failed) == (list(range(1000)), [1])
    (line,) = caplog.messages
    assert line.startswith("a-writer: ")
    assert "7 more were lost" in line


def test_readers_see_the_old_or_the_new_file_and_no_temporary_file_remains(
    tmp_path: Path,
) -> None:
    path, texts = tmp_path / "x", [letter * 1_000_000 for letter in (b"a", b"b")]
    write_atomically(path, texts[0])
    seen: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(10):
        write_atomically(path, texts[i % 2])
    done.set()
    reader.join()
    assert seen
    assert all(text in texts for text in seen)
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "directory", b"new")
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "missing" / "x", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "x"]
