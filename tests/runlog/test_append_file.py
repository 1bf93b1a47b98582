"""A file on a disk that is full for a while: lines wait, and arrive whole and in order."""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vesuvius.runlog.files.append_file import AppendFile
from vesuvius.runlog.rotated import RotatedFile, iter_rotated


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.fixture(autouse=True)
def _captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vesuvius")


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Writes of this process that would make a file larger are cut short, and fail: a full disk without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_of_which_half_was_written_is_completed_before_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lines"
    file = AppendFile(path)
    with no_file_beyond(10):
        file.write_line("line 1")
        file.write_line("line 2")
        file.write_line("line 3")
        assert path.read_bytes() == b"line 1\nlin", "the write was a short one"
    file.write_line("line 4")
    assert path.read_text().splitlines() == ["line 1", "line 2", "line 3", "line 4"]
    file.close()
    (failing, working) = said(caplog)
    assert failing[0] == "ERROR"
    assert "File too large; free some space: its next 10000 lines are kept in memory" in failing[1]
    assert working == ("INFO", f"{path} is writable again; 0 lines were lost")


def test_lines_beyond_what_is_kept_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = AppendFile(tmp_path / "lines", keep=3)
    with no_file_beyond(2):
        for number in range(8):
            file.write_line(f"line {number}")
    file.write_line("line 8")
    file.close()
    assert (tmp_path / "lines").read_text().splitlines() == ["line 0", "line 1", "line 2", "line 8"]
    assert said(caplog)[-1] == ("ERROR", f"{tmp_path / 'lines'} is writable again; 5 lines were lost")


def test_a_directory_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        AppendFile(tmp_path / "nowhere" / "lines")


def test_threads_and_signal_handlers_write_whole_lines_and_lose_none(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "lines")
    per_writer = 2000
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
    # In no order: one handler interrupts another.
    assert sorted(line for line in lines if line.startswith("handler")) == sorted(
        f"handler {n}" for n in range(handled)
    )


def test_a_line_after_the_end_goes_nowhere(tmp_path: Path) -> None:
    """The number of the closed descriptor may be another file's by then."""
    file = AppendFile(tmp_path / "a.jsonl")
    file.write_line("first")
    file.close()
    with (tmp_path / "other").open("wb"):
        file.write_line("late")
    file.close()
    assert (tmp_path / "a.jsonl").read_text() == "first\n"
    assert (tmp_path / "other").read_bytes() == b""


@pytest.mark.parametrize("make", [AppendFile, lambda path: RotatedFile(path, rotate_bytes=200)])
def test_threads_that_write_while_it_is_closed_leave_each_line_once_up_to_one_from_which_on_none_is_taken(
    tmp_path: Path, make: Callable[[Path], Any]
) -> None:
    """Each thread's lines in the file are its first ones, in order: whatever was taken is there."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for attempt in range(10):
            path = tmp_path / f"lines{attempt}.jsonl"
            file, begun, failed = make(path), threading.Barrier(5), []

            def write(
                name: int, file: Any = file, begun: threading.Barrier = begun, failed: list[Any] = failed
            ) -> None:
                begun.wait()
                try:
                    for number in range(50):
                        file.write_line(json.dumps({"name": name, "number": number}))
                except Exception as error:
                    failed.append(error)

            threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
            for thread in threads:
                thread.start()
            begun.wait()
            file.close()
            for thread in threads:
                thread.join()
            file.close()
            assert failed == []
            lines = list(iter_rotated(path))
            for name in range(4):
                numbers = [line["number"] for line in lines if line["name"] == name]
                assert numbers == list(range(len(numbers)))
    finally:
        sys.setswitchinterval(before)
