"""A file is there whole or not at all, and nothing is left beside it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from vesuvius.runlog.files.whole_file import write_whole


def test_a_reader_at_any_moment_finds_one_of_the_two_whole(tmp_path: Path) -> None:
    path, texts = tmp_path / "x", [letter * 1_000_000 for letter in (b"a", b"b")]
    write_whole(path, texts[0])
    seen: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(20):
        write_whole(path, texts[i % 2])
    done.set()
    reader.join()
    assert seen
    assert all(text in texts for text in seen)


def test_what_was_there_stays_where_it_cannot_be_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "directory", b"new")
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "x", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["directory"]
