"""Notes: what a reader was reading, and how it ended, is known after its death; quarantine follows from it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import textured
from tests.stream.test_stream import collect, make_job, open_stream
from tests.support import fork_server
from tests.support.poison import ARM, poison, write_volume
from vesuvius.stream.ray import watch
from vesuvius.stream.reading.notes import (
    NoteWriter,
    claim_folder,
    crashed_chunks,
    forget_crashes,
    read_notes,
)
from vesuvius.volumes.store.retry import Outage

BOX = ((0, 0, 0), (8, 8, 8))
# What comes on the command line behind the folder is done while a chunk is decoded, on a thread of its own.
DIES = """
import ctypes, os, sys, threading
from pathlib import Path
from vesuvius.stream.reading.notes import NoteWriter

notes, begun = NoteWriter(Path(sys.argv[1])), threading.Event()

def read():
    notes.region("v.zarr", ((0, 0, 0), (8, 8, 8)))
    notes.chunk((1, 2, 3))
    exec(sys.argv[2])
    begun.set()
    threading.Event().wait()

threading.Thread(target=read, daemon=True).start()
begun.wait()
exec(sys.argv[3])
"""
# A thread that Python does not know: as those of a codec.
NATIVE = """
libc, number = ctypes.CDLL(None), ctypes.c_ulong()
libc.pthread_create(ctypes.byref(number), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
threading.Event().wait()
"""
# As a codec crashes: below a frame of ours that decodes.
DECODES = "exec(compile('import signal; signal.raise_signal(signal.{})', '/x/vesuvius/volumes/decode.py', 'exec'))"
STREAMS = f"""
{ARM}
from dataclasses import replace
from tests.stream.test_stream import collect, make_job, open_stream
with open_stream(replace(make_job(sys.argv[1], max_quarantined=1), notes_dir=sys.argv[2])) as stream:
    collect(stream, 100)
    print(stream.quarantined)
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return fork_server.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", ["SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"])
def test_a_crash_leaves_the_place_and_the_signal(tmp_path: Path, name: str) -> None:
    assert run(DIES, tmp_path, DECODES.format(name), "").returncode == -signal.Signals[name]
    (note,) = read_notes(tmp_path)
    assert (note.crash, note.volume, note.box, note.chunk) == (name, "v.zarr", BOX, (1, 2, 3))
    assert note.place == "volume v.zarr, region z 0:8, y 0:8, x 0:8, chunk [1, 2, 3]"
    assert not note.is_alive()


@pytest.mark.parametrize(
    ("there", "elsewhere", "crash", "chunk"),
    [
        (DECODES.format("SIGKILL"), "", None, (1, 2, 3)),  # a limit of memory, or an operator
        ("notes.region(); os.abort()", "", "SIGABRT", None),
        ("", "os.abort()", "SIGABRT", None),
        ("", NATIVE, "SIGABRT", (1, 2, 3)),
    ],
    ids=["killed", "between two regions", "on another thread", "on a thread that Python does not know"],
)
def test_a_chunk_is_blamed_for_what_may_be_its_codec_alone(
    tmp_path: Path, there: str, elsewhere: str, crash: str | None, chunk: object
) -> None:
    for _ in range(2):
        run(DIES, tmp_path, there, elsewhere)
    assert [(note.crash, note.chunk) for note in read_notes(tmp_path)] == [(crash, chunk)] * 2
    assert bool(crashed_chunks(tmp_path)) == bool(crash and chunk)


def test_a_second_crash_on_a_chunk_counts_and_crashes_can_be_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for signals in ("SIGABRT", "SIGKILL", "SIGSEGV"):
        assert crashed_chunks(tmp_path) == {}
        run(DIES, tmp_path, DECODES.format(signals), "")
    assert crashed_chunks(tmp_path) == {("v.zarr", (1, 2, 3)): "SIGSEGV"}
    claim_folder(tmp_path)
    assert [note.crash for note in read_notes(tmp_path)] == ["SIGABRT", "SIGSEGV"], "crashes stay on record"
    assert "crashed 2 times, the last" in caplog.text
    assert "by SIGSEGV while it read volume v.zarr" in caplog.text
    forget_crashes(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_processes_of_the_same_number_do_not_overwrite_each_other(tmp_path: Path) -> None:
    alone = ["unshare", "--pid", "--fork"]  # as in a container: each is process 1
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("only root may give a process the number 1")
    for _ in range(2):
        command = [*alone, sys.executable, "-c", DIES, tmp_path, DECODES.format("SIGABRT"), ""]
        subprocess.run(command, capture_output=True, timeout=120)
    assert [(note.pid, note.crash) for note in read_notes(tmp_path)] == [(1, "SIGABRT")] * 2


def test_a_note_of_any_length_is_read_and_a_living_process_told_from_another_of_its_number(tmp_path: Path) -> None:
    name = "/Volumen/" + '\u5dfb\U0001f4dc\x01"' * 1000 + "/\udcff.zarr"
    notes = NoteWriter(tmp_path)
    outage = Outage(1000.0, "\U0001f4dc" * 1000, f"http://{name}")
    notes.outage(outage)
    notes.region(name, BOX)
    (note,) = read_notes(tmp_path)
    assert (note.volume, note.outage, note.pid, note.actor) == (name, outage, os.getpid(), "")
    assert note.is_alive()
    assert not type(note)(**{**vars(note), "started": note.started - 60}).is_alive()
    notes.region()
    assert read_notes(tmp_path)[0].place == ""
    notes.close()
    assert list(tmp_path.iterdir()) == []


def test_a_faulthandler_that_was_enabled_is_enabled_afterwards(tmp_path: Path) -> None:
    crash = (
        "import faulthandler, io, os, sys; from pathlib import Path; from vesuvius.stream.reading.notes import *; "
        "{}; sys.stderr = io.StringIO(); NoteWriter(Path(sys.argv[1])).close(); os.abort()"
    )
    assert "Fatal Python error: Aborted" in run(crash.format("faulthandler.enable()"), tmp_path).stderr
    assert "Fatal" not in run(crash.format("pass"), tmp_path).stderr


def test_a_chunk_that_ends_two_processes_is_replaced_by_the_third(tmp_path: Path) -> None:
    """`workers: 0`: the stream's own process ends."""
    path, notes = write_volume(tmp_path / "v.zarr", textured((128, 128, 128))), tmp_path / "notes"
    poison(path, (1, 1, 1))
    for _ in range(2):
        assert run(STREAMS, path, notes).returncode == -signal.SIGABRT
    third = run(STREAMS, path, notes)
    assert third.returncode == 0, third.stderr
    assert "'chunk': [1, 1, 1], 'cause': 'killed two readers, the last by SIGABRT'" in third.stdout
    assert len(read_notes(notes)) == 2, "whoever ends well leaves no note"


def test_a_folder_that_cannot_be_written_is_no_error(volume: Path) -> None:
    job = make_job(volume)
    with open_stream(job) as stream:
        expected, _ = collect(stream, 4)
    with open_stream(type(job)(**{**vars(job), "notes_dir": "/proc/none"})) as stream:
        found, _ = collect(stream, 4)
    assert found.tobytes() == expected.tobytes()


def test_outages_are_known_while_ray_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is over must not be told for as long as Ray hangs."""
    monkeypatch.setattr(watch.private, "actor_rows", lambda: 1 / 0)
    notes, outage = NoteWriter(tmp_path, "an actor"), Outage(1000.0, "connection refused", "http://store")
    readers = watch.ReaderWatch("Reader", tmp_path, lambda death: None, lambda text, fields: None)
    for said in (outage, None, outage):
        notes.outage(said)
        deadline = time.monotonic() + 30
        while readers.outages != [one for one in (said,) if one] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert readers.outages == [one for one in (said,) if one]
    readers.close()
    notes.close()


def test_an_outage_is_said_once_a_minute_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    readers = watch.ReaderWatch.__new__(watch.ReaderWatch)
    readers._said, outage = {}, Outage(1000.0, "connection refused", "http://store")
    caplog.set_level("INFO")
    for second in range(130):
        readers.outages = [outage, Outage(1002.0, "timed out", "http://store")]
        readers._say_outages(1000.0 + second)
    readers.outages = []
    readers._say_outages(1130.0)
    readers.outages = [Outage(1140.0, "reset", "http://store")]  # over before anybody is told
    readers._say_outages(1141.0)
    readers.outages = []
    readers._say_outages(1142.0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    first, _, last = (record.getMessage() for record in caplog.records)
    assert "http://store has not answered since" in first
    assert "connection refused" in first
    assert last == "http://store answers again"
