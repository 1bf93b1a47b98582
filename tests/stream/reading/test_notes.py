"""Notes: what a process was reading, and how it ended, is known after its death; care and quarantine follow from it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import textured
from tests.support import fork_server
from tests.support.poison import ARM, poison, write_volume
from vesuvius.config import ArrayConfig
from vesuvius.stream.ray import watch
from vesuvius.stream.ray.watch import OutageLog
from vesuvius.stream.reading import notes as notes_module
from vesuvius.stream.reading.guarded import GuardedReader
from vesuvius.stream.reading.notes import (
    NoteWriter,
    Place,
    claim_folder,
    crashes_touching,
    forget_crashes,
    read_crashes,
    read_notes,
)
from vesuvius.stream.reading.stacks import dump_stacks
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.store.retry import Outage
from vesuvius.volumes.volume import open_volume

BOX = ((8, 8, 8), (50, 50, 50))
FATAL = [signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL]
DIES = """
import os, signal, sys
from collections import Counter
from pathlib import Path
from vesuvius.stream.reading.notes import NoteWriter, Place

with NoteWriter(Path(sys.argv[1])).reading(Place("v.zarr", ((0, 0, 0), (8, 8, 8)), (1, 2, 3), ((0, 0, 0), (4, 4, 4)))):
    os.kill(os.getpid(), int(sys.argv[2]))
"""
# One thread reads, and another crashes, in the way that comes on the command line.
DIES_ELSEWHERE = """
import ctypes, os, sys, threading
from collections import Counter
from pathlib import Path
from vesuvius.stream.reading.notes import NoteWriter, Place

notes, begun = NoteWriter(Path(sys.argv[1]), role="trainer"), threading.Event()

def read():
    with notes.reading(Place("v.zarr", ((0, 0, 0), (8, 8, 8)))):
        begun.set()
        threading.Event().wait()

threading.Thread(target=read, daemon=True).start()
begun.wait()
exec(sys.argv[2])
threading.Event().wait()
"""
# A thread that Python does not know: as those of a codec, or of torch.
NATIVE = """
libc, number = ctypes.CDLL(None), ctypes.c_ulong()
libc.pthread_create(ctypes.byref(number), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
"""
# What comes on the command line behind the folder and the volume is done to the codecs first.
READS = f"""
{ARM}
import time
from collections import Counter
from pathlib import Path
from vesuvius.config import ArrayConfig
from vesuvius.stream.reading.guarded import GuardedReader
from vesuvius.volumes.volume import Volume, open_volume

exec(sys.argv[3] if len(sys.argv) > 3 else "")
reads = GuardedReader(Path(sys.argv[1]), role="trainer")
try:
    print(int(reads.read(open_volume(ArrayConfig(path=sys.argv[2])), ((8, 8, 8), (50, 50, 50))).sum()))
except Exception as error:
    print(type(error).__name__, error.chunk, error.cause)
reads.close()
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return fork_server.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("number", FATAL)
def test_a_crash_leaves_the_place_and_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    assert run(DIES, tmp_path, int(number)).returncode == -number
    (note,) = read_notes(tmp_path)
    assert note.crash == number.name
    assert note.place == Place("v.zarr", ((0, 0, 0), (8, 8, 8)), (1, 2, 3), ((0, 0, 0), (4, 4, 4)))
    assert not note.is_alive()


def test_crashes_can_be_forgotten_and_other_notes_stay(tmp_path: Path) -> None:
    run(DIES, tmp_path, int(signal.SIGABRT))
    run(DIES, tmp_path, int(signal.SIGKILL))
    assert crashes_touching(tmp_path, "v.zarr", ((0, 0, 0), (2, 2, 2)))
    forget_crashes(tmp_path)
    assert not crashes_touching(tmp_path, "v.zarr", ((0, 0, 0), (2, 2, 2)))
    assert [note.crash for note in read_notes(tmp_path)] == [None]


def test_a_sigkill_leaves_the_place_and_does_not_count(tmp_path: Path) -> None:
    assert run(DIES, tmp_path, int(signal.SIGKILL)).returncode == -signal.SIGKILL
    (note,) = read_notes(tmp_path)
    assert (note.crash, note.place is not None) == (None, True)
    assert crashes_touching(tmp_path, "v.zarr", BOX) == []


def test_between_two_regions_nothing_is_blamed(tmp_path: Path) -> None:
    between = DIES.replace("    os.kill", "    pass\nos.kill")
    assert run(between, tmp_path, int(signal.SIGABRT)).returncode == -signal.SIGABRT
    (note,) = read_notes(tmp_path)
    assert (note.crash, note.place) == ("SIGABRT", None)
    assert crashes_touching(tmp_path, "v.zarr", BOX) == []


@pytest.mark.parametrize("crash", ["os.abort()", "threading.Thread(target=os.abort).start()"])
def test_a_crash_on_another_thread_is_not_blamed_on_what_is_read(tmp_path: Path, crash: str) -> None:
    assert run(DIES_ELSEWHERE, tmp_path, crash).returncode == -signal.SIGABRT
    (note,) = read_notes(tmp_path)
    assert (note.crash, note.place) == ("SIGABRT", None)
    assert crashes_touching(tmp_path, "v.zarr", BOX) == []


def test_a_crash_on_a_thread_that_python_does_not_know_counts_for_its_region(tmp_path: Path) -> None:
    assert run(DIES_ELSEWHERE, tmp_path, NATIVE).returncode == -signal.SIGABRT
    assert [note.crash for note in crashes_touching(tmp_path, "v.zarr", ((0, 0, 0), (8, 8, 8)))] == ["SIGABRT"]


def test_processes_of_the_same_number_do_not_overwrite_each_other(tmp_path: Path) -> None:
    alone = ["unshare", "--pid", "--fork"]  # as in a container: each is process 1
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("only root may give a process the number 1")
    for _ in range(3):
        subprocess.run([*alone, sys.executable, "-c", DIES, tmp_path, "6"], capture_output=True, timeout=120)
    assert [(note.pid, note.crash) for note in read_notes(tmp_path)] == [(1, "SIGABRT")] * 3


def test_notes_of_any_length_and_language_fit(tmp_path: Path) -> None:
    begin, end = "/Volumen/" + '\u5dfb\U0001f4dc\x01"' * 1000, "/\udcff.zarr"
    notes = NoteWriter(tmp_path, role="trainer")
    notes.outage(Outage(1000.0, "\U0001f4dc" * 1000, f"http://{begin}{end}"))
    with notes.reading(Place(begin + end, BOX, (1, 2, 3), BOX)):
        (note,) = read_notes(tmp_path)
    assert note.place is not None
    assert note.outage is not None
    assert note.place.volume.endswith(end)
    assert note.outage.cause.startswith("\U0001f4dc" * 200)
    assert note.outage.address.endswith(end)
    notes.close()


def test_a_volume_of_a_long_name_is_told_from_others_that_end_alike(tmp_path: Path) -> None:
    name = "\u5dfb" * 1500
    run(DIES.replace('"v.zarr"', f"{name!r}"), tmp_path, int(signal.SIGABRT))
    assert crashes_touching(tmp_path, name, BOX) == []
    assert crashes_touching(tmp_path, name, ((0, 0, 0), (2, 2, 2)))
    assert crashes_touching(tmp_path, f"other {name}", ((0, 0, 0), (2, 2, 2))) == []


def test_a_crash_is_parsed_once_and_other_notes_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each region a reader looks for crashes in it."""
    parsed: list[Path] = []
    parse = notes_module._read_note
    monkeypatch.setattr(notes_module, "_read_note", lambda path: (parsed.append(path), parse(path))[1])
    run(DIES, tmp_path, int(signal.SIGKILL))
    run(DIES, tmp_path, int(signal.SIGABRT))
    for _ in range(3):
        (crash,) = crashes_touching(tmp_path, "v.zarr", ((0, 0, 0), (2, 2, 2)))
    assert parsed == [crash.path]
    with crash.path.open("ab") as more:
        more.write(b"the rest of the dump")
    assert len(read_crashes(tmp_path)) == 1
    assert len(parsed) == 2, "it has changed"


def test_a_reader_that_can_writes_its_stacks_without_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal would stop its threads in the middle of whatever changes their stacks, and show a hundred of them."""
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid))
    signalled: list[int] = []
    writer, over = NoteWriter(tmp_path / "notes"), threading.Event()
    threads = [threading.Thread(target=over.wait, name=f"decoder-{number}", daemon=True) for number in range(120)]
    try:
        for thread in threads:
            thread.start()
        for count in (1, 2):
            dump_stacks(tmp_path / "notes", tmp_path / "stacks.txt")
            text = (tmp_path / "stacks.txt").read_text()
            assert text.count(f"in {dump_stacks.__name__}") == count
            assert all(text.count(f" {thread.name} (most recent call first)") == count for thread in threads)
    finally:
        over.set()
        writer.close()
    assert signalled == []


BUSY = """
import sys, threading, time
from pathlib import Path
from vesuvius.stream.reading.notes import NoteWriter
NoteWriter(Path(sys.argv[1]))
def deep(n):
    return sum(deep(n - 1) for _ in range(2)) if n else len([str(i) for i in range(3)])
def work():
    while True:
        deep(6)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_a_busy_reader_survives_three_hundred_dumps_of_its_stacks(tmp_path: Path) -> None:
    """By a signal alone it died within sixty, in two tries of three (Python 3.11)."""
    with subprocess.Popen([sys.executable, "-c", BUSY, tmp_path / "notes"], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        try:
            for _ in range(300):
                dump_stacks(tmp_path / "notes", tmp_path / "stacks.txt")
                assert reader.poll() is None
        finally:
            reader.kill()


def test_a_reader_that_is_asked_for_its_stacks_too_late_lives(tmp_path: Path) -> None:
    late = (
        "import os, sys; from pathlib import Path; from vesuvius.stream.reading.notes import *; "
        "NoteWriter(Path(sys.argv[1])).close(); os.kill(os.getpid(), STACKS_SIGNAL); print('lives')"
    )
    done = run(late, tmp_path)
    assert (done.returncode, done.stdout) == (0, "lives\n")
    assert list(tmp_path.iterdir()) == []


def test_a_faulthandler_that_was_enabled_is_enabled_afterwards(tmp_path: Path) -> None:
    crash = (
        "import faulthandler, io, os, sys; from pathlib import Path; from vesuvius.stream.reading.notes import *; "
        "{}; sys.stderr = io.StringIO(); NoteWriter(Path(sys.argv[1])).close(); os.abort()"
    )
    assert "Fatal Python error: Aborted" in run(crash.format("faulthandler.enable()"), tmp_path).stderr
    assert "Fatal" not in run(crash.format("pass"), tmp_path).stderr


def test_a_crash_counts_for_what_touches_it_and_is_seen_by_those_at_work(tmp_path: Path) -> None:
    assert crashes_touching(tmp_path, "v.zarr", BOX) == []
    run(DIES, tmp_path, int(signal.SIGABRT))
    assert crashes_touching(tmp_path, "v.zarr", ((3, 3, 3), (9, 9, 9)))
    assert crashes_touching(tmp_path, "v.zarr", ((4, 0, 0), (9, 9, 9))) == [], "the chunk ends there"
    assert crashes_touching(tmp_path, "other.zarr", ((3, 3, 3), (9, 9, 9))) == []


def test_a_living_process_is_told_from_another_of_the_same_number(tmp_path: Path) -> None:
    notes = NoteWriter(tmp_path, role="trainer")
    (note,) = read_notes(tmp_path)
    assert note.is_alive()
    assert (note.pid, note.actor, note.place) == (os.getpid(), "", None)
    notes.close()
    assert read_notes(tmp_path) == []
    assert not type(note)(**{**vars(note), "started": note.started - 60}).is_alive()


def test_a_chunk_that_ends_its_process_is_not_read_a_third_time(tmp_path: Path) -> None:
    path, notes = write_volume(tmp_path / "v.zarr", textured((64, 64, 64))), tmp_path / "notes"
    poison(path, (1, 1, 1))
    first = run(READS, notes, path)
    assert first.returncode == -signal.SIGABRT
    (crash,) = claim_folder(notes)
    assert crash.place == Place(str(path), BOX)
    assert claim_folder(notes) == [], "each is told of once"
    assert run(READS, notes, path).returncode == -signal.SIGABRT, "with care, and a note for each chunk"
    third = run(READS, notes, path)
    assert third.returncode == 0, third.stderr
    assert third.stdout.startswith("UnreadableChunkError (1, 1, 1) killed its reader (SIGABRT)")
    assert len(read_notes(notes)) == 2, "whoever ends well leaves no note"


def test_care_costs_no_voxel_and_no_notes_are_no_error(tmp_path: Path) -> None:
    voxels = textured((64, 64, 64))
    path, notes = write_volume(tmp_path / "v.zarr", voxels), tmp_path / "notes"
    poison(path, (1, 1, 1))
    assert run(READS, notes, path).returncode == -signal.SIGABRT
    write_volume(tmp_path / "sound.zarr", voxels)
    (path / "1/1/1").write_bytes((tmp_path / "sound.zarr" / "1/1/1").read_bytes())
    cut = voxels[8:50, 8:50, 8:50]
    for folder in (notes, None, Path("/proc/none")):
        reads = GuardedReader(folder, role="trainer")
        np.testing.assert_array_equal(reads.read(open_volume(ArrayConfig(path=str(path))), BOX), cut)
        reads.close()


def test_a_chunk_that_was_given_up_is_named_without_a_try(tmp_path: Path) -> None:
    path = write_volume(tmp_path / "v.zarr", textured((64, 64, 64)))
    run(DIES.replace('"v.zarr"', repr(str(path))), tmp_path / "notes", int(signal.SIGSEGV))
    reads = GuardedReader(tmp_path / "notes", role="trainer")
    with pytest.raises(UnreadableChunkError, match=r"killed its reader \(SIGSEGV\)"):
        reads.read(open_volume(ArrayConfig(path=str(path))), ((0, 0, 0), (8, 8, 8)))
    reads.close()


def test_a_reader_that_waits_for_its_store_says_so(tmp_path: Path) -> None:
    volume = open_volume(ArrayConfig(path=str(write_volume(tmp_path / "v.zarr", textured((64, 64, 64))))))
    reads = GuardedReader(tmp_path / "notes", actor="an actor")
    reads.publish_outages([volume])
    outage = Outage(1000.0, "connection refused", "http://store")
    for expected in (outage, None):
        volume.source._retrier.outage = expected
        deadline = time.monotonic() + 30
        while (said := read_notes(tmp_path / "notes")[0].outage) != expected and time.monotonic() < deadline:
            time.sleep(0.05)
        assert said == expected
    reads.close()


def test_outages_are_known_while_ray_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is over must not be told for as long as Ray hangs."""
    monkeypatch.setattr(watch.private, "actor_rows", lambda: 1 / 0)
    notes, outage = NoteWriter(tmp_path, "reader", "an actor"), Outage(1000.0, "connection refused", "http://store")
    readers = watch.ReaderWatch("Reader", tmp_path, lambda death: None)
    for said in (outage, None, outage):
        notes.outage(said)
        deadline = time.monotonic() + 30
        while readers.outages != [one for one in (said,) if one] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert readers.outages == [one for one in (said,) if one]
    readers.close()
    notes.close()


def test_the_nodes_of_the_readers_are_said_once_all_run_and_again_where_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = [
        {"NodeID": "a", "NodeManagerHostname": "cpu-1", "Resources": {"CPU": 8.0}},
        {"NodeID": "b", "NodeManagerHostname": "gpu-1", "Resources": {"CPU": 8.0, "GPU": 8.0}},
    ]
    monkeypatch.setattr(watch.private, "actor_rows", list)
    monkeypatch.setattr(watch.ray, "nodes", lambda: cluster)
    caplog.set_level("INFO")
    readers = watch.ReaderWatch("Reader", tmp_path, lambda death: None, say_nodes_of=3)
    for nodes in ("a", "aab", "aab", "aabaab", "abb"):  # the first have started, then twice as many for a moment
        readers._say_nodes(Counter(nodes))
    readers.close()
    said = ["readers: 2 on cpu-1 (no GPU), 1 on gpu-1 (8 GPU)", "readers: 1 on cpu-1 (no GPU), 2 on gpu-1 (8 GPU)"]
    assert [record.getMessage() for record in caplog.records] == said


def test_an_outage_is_said_once_a_minute_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    lines, outage = OutageLog(), Outage(1000.0, "connection refused", "http://store")
    caplog.set_level("INFO")
    for second in range(130):
        lines.take([outage, Outage(1002.0, "timed out", "http://store")], 1000.0 + second / 1)
    lines.take([], 1130.0)
    lines.take([Outage(1140.0, "reset", "http://store")], 1141.0)  # over before anybody is told
    lines.take([], 1142.0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    first, _, last = (record.getMessage() for record in caplog.records)
    assert "http://store has not answered since" in first
    assert "connection refused" in first
    assert last == "http://store answers again after 130 s"
