"""Notes: what a reader was decoding, and how it ended, is known after its death; quarantine follows from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fork_server
from vesuvius.stream.reading.reading_log import (
    ReaderWatch,
    crashed_chunks,
    open_reading_log,
    read_logs,
    remove_ended_logs,
    remove_logs,
)
from vesuvius.volumes.errors import Outage

# What comes on the command line behind the folder is done while a chunk is decoded.
DIES = """
import ctypes, os, signal, sys, threading
from pathlib import Path
from vesuvius.stream.reading.reading_log import ReadingLogWriter

notes = ReadingLogWriter(Path(sys.argv[1]), "an actor")
notes.chunk("v.zarr", (1, 2, 3))
exec(sys.argv[2])
"""
# A thread that Python does not know: as those of a codec.
NATIVE = """
libc, number = ctypes.CDLL(None), ctypes.c_ulong()
libc.pthread_create(ctypes.byref(number), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
threading.Event().wait()
"""
CASES = {
    "signal.raise_signal(signal.SIGSEGV)": ("Segmentation fault", (1, 2, 3)),
    NATIVE: ("Aborted", (1, 2, 3)),
    "signal.raise_signal(signal.SIGKILL)": (None, (1, 2, 3)),  # a limit of memory, or an operator
    "notes.chunk(None, None); os.abort()": ("Aborted", None),
}


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return fork_server.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("death", CASES)
def test_a_chunk_is_blamed_once_two_readers_crashed_on_it(tmp_path: Path, death: str) -> None:
    crash, chunk = CASES[death]
    for deaths in (1, 2):
        assert run(DIES, tmp_path, death).returncode < 0
        assert [(note.crash, note.chunk) for note in read_logs(tmp_path)] == [(crash, chunk)] * deaths
        is_blamed = deaths == 2 and crash is not None and chunk is not None
        assert crashed_chunks(tmp_path) == ({("v.zarr", (1, 2, 3)): crash} if is_blamed else {})
    assert remove_ended_logs(tmp_path) == []
    assert len(read_logs(tmp_path)) == (2 if crash else 0), "crashes stay on record"
    remove_logs(tmp_path, crashes=True)
    assert list(tmp_path.iterdir()) == []


def test_unicode_names_and_outages_survive_a_crash(tmp_path: Path) -> None:
    name, outage = '/Volumen/\u5dfb\U0001f4dc\x01"/\udcff.zarr', Outage(1000.0, "\U0001f4dc", "http://store")
    code = f"""
from vesuvius.volumes.errors import Outage
notes.chunk({name!r}, (4, 5, 6))
notes.outage({outage!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    run(DIES, tmp_path, code)
    (note,) = read_logs(tmp_path)
    assert (note.volume, note.chunk, note.outage, note.actor) == (name, (4, 5, 6), outage, "an actor")


def test_a_read_only_folder_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert open_reading_log(Path("/proc/none"), "an actor") is None
    assert "Cannot write the reading log" in caplog.text


def test_an_outage_is_logged_once_a_minute_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    readers = ReaderWatch.__new__(ReaderWatch)
    readers._logged, outage = {}, Outage(1000.0, "connection refused", "http://store")
    caplog.set_level("INFO")
    for second in range(130):
        readers.outages = [outage, Outage(1002.0, "timed out", "http://store")]
        readers._log_outages(1000.0 + second)
    readers.outages = []
    readers._log_outages(1130.0)
    readers.outages = [Outage(1140.0, "reset", "http://store")]  # over before anybody is told
    readers._log_outages(1141.0)
    readers.outages = []
    readers._log_outages(1142.0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    first, _, last = (record.getMessage() for record in caplog.records)
    assert "http://store has not answered since" in first
    assert "connection refused" in first
    assert last == "http://store responds again"
