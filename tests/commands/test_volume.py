"""The door `vesuvius volume`: what it prints and where, its exit codes, and what is on disk after Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.conftest import run_vesuvius, textured, write_array
from tests.support import fork_server
from tests.support.chunk_server import ChunkServer
from tests.volumes.test_alignment import volume_of
from tests.volumes.test_axes import axis, ome_06, sequence
from vesuvius.commands import cli, volume
from vesuvius.runlog import progress
from vesuvius.volume_tools.phantom import Phantom


def test_the_command_writes_both_volumes_and_says_so_in_one_line(tmp_path, capsys):
    out = tmp_path / "made" / "v.zarr"
    assert volume.main(["synth", str(out), "--shape", "16,32,48", "--seed", "2", "--chunk", "16"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert line.startswith(f"{out} (sheets: v.labels.zarr) shape 16,32,48 levels 3 stored_mib ")
    assert " seconds " in line
    assert captured.err == ""  # no progress bar where stderr is not a terminal
    np.testing.assert_array_equal(
        zarr.open_group(out, mode="r")["0"][:], Phantom(2, (16, 32, 48)).box((0, 0, 0), (16, 32, 48))[0]
    )


def test_the_command_refuses_an_existing_volume_until_told_to_overwrite(tmp_path, capsys):
    command = ["synth", str(tmp_path / "v.zarr"), "--shape", "16,16,16", "--chunk", "16"]
    assert volume.main(command) == 0
    assert volume.main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert volume.main([*command, "--overwrite"]) == 0


def test_info_of_two_volumes_says_how_the_second_lies_in_the_first_or_that_it_does_not(tmp_path, capsys):
    for name, shape, scale, corner in (
        ("raw", (40, 72, 88), 4, (0, 0, 0)),
        ("labels", (20, 16, 16), 8, (40, 60, 80)),
        ("away", (20, 16, 16), 4, (400, 0, 0)),
    ):
        volume_of(tmp_path / name, shape, scale, corner)
    raw, labels = str(tmp_path / "raw"), str(tmp_path / "labels")
    assert volume.main(["info", raw, f"{labels}@0"]) == 0
    captured = capsys.readouterr()
    rows = [line.split(maxsplit=0)[0] for line in captured.out.splitlines()]
    assert any(row.endswith("(20, 16, 16) voxels of 8 x 8 x 8 nanometer from 40, 60, 80") for row in rows)
    assert any(re.fullmatch(r"known from +scale and translation", row) for row in rows)
    assert any(re.fullmatch(r"voxels covered by one +2 x 2 x 2", row) for row in rows)
    assert any(re.fullmatch(r"its first voxel at +z 10, y 15, x 20", row) for row in rows)
    assert any(re.fullmatch(r"both exist in +z 10:40, y 15:47, x 20:52, of .40, 72, 88.", row) for row in rows)
    assert volume.main(["info", raw, labels, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["factors"], found["offsets"]) == ([2, 2, 2], [10, 15, 20])
    assert found["covered"] == [[10, 15, 20], [40, 47, 52]]
    assert volume.main(["info", raw, str(tmp_path / "away")]) == 6
    assert "they share no voxel; it has (20, 16, 16) voxels" in capsys.readouterr().err


def test_a_wrong_shape_is_a_usage_error(tmp_path, capsys):
    for shape in ("256,512", "0,64,64", "64,64,-64", "64,64,15", "a,b,c", "64.5,64,64", ""):
        with pytest.raises(SystemExit) as exit_info:
            volume.main(["synth", str(tmp_path / "v.zarr"), f"--shape={shape}"])
        assert exit_info.value.code == 2
        assert "three whole numbers z,y,x of at least 16" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_exits_130_and_leaves_nothing_behind(tmp_path):
    # Python's own handler is set by hand: a shell that runs the tests in the background has SIGINT ignored.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from vesuvius.commands.volume import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "synth", str(tmp_path / "v.zarr"), "--shape", "256,1024,1024"]
    with fork_server.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not any(written_chunks(tmp_path)):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.endswith(" ERROR interrupted\n")
    assert all(" INFO writing: " in line for line in err.splitlines()[:-1]), "on a slow machine it says how far it is"
    assert list(tmp_path.iterdir()) == []


def written_chunks(directory: Path) -> list[Path]:
    return [path for path in directory.glob(".v.zarr.*.partial/v.zarr/0/*/*/*") if path.is_file()]


def test_the_door_does_not_import_torch():
    code = "import sys, vesuvius.commands.volume; print(*{'torch', 'ray'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


USAGES = [
    (["info", "v.zarr", "--patch", "8,16"], "'8,16' is not three whole numbers z,y,x of at least 1"),
    (["info", "v.zarr", "--patch", "0,16,16"], "at least 1"),
    (["info", "v.zarr", "--places", "many"], "a whole number of at least 0"),
    (["info", "v.zarr", "--select", "0,x"], "'x' is not a whole number of at least 0"),
    (["copy", "v.zarr"], "OUT.zarr"),
    (["copy", "v.zarr", "c.zarr", "--start=-1,0,0"], "is not three whole numbers z,y,x of at least 0"),
    (["copy", "v.zarr", "c.zarr", "--requests", "0"], "'0' is not a whole number of at least 1"),
    (["occupancy"], "PATH"),
    (["measure"], "invalid choice: 'measure'"),
    ([], "COMMAND"),
]


def test_a_wrong_command_line_exits_2_and_says_why(capsys):
    for arguments, message in USAGES:
        with pytest.raises(SystemExit) as exit_info:
            volume.main(arguments)
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err


def test_help_shows_each_option_with_its_meaning(capsys):
    for command in ("synth", "info", "copy", "occupancy", "verify"):
        with pytest.raises(SystemExit) as exit_info:
            volume.main([command, "--help"])
        assert exit_info.value.code == 0
        _, _, options = capsys.readouterr().out.partition("positional arguments:")
        entries = re.split(r"\n  (?=\S)", options)[1:]
        assert len(entries) > 3
        assert all(re.search(r"  +\w", entry.partition(" ")[2]) for entry in entries), entries


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info", "nothing.zarr"], 6, "a volume must exist; got nothing.zarr"),
        (["info", "v.zarr", "--level", "3"], 6, "a bare array has level 0 only"),
        (["occupancy", "nothing.zarr"], 6, "a volume must exist"),
        (["copy", "nothing.zarr", "c.zarr"], 6, "a volume must exist"),
        (["copy", "v.zarr", "c.zarr", "--size", "1,1,999"], 2, "a box must lie inside the level"),
        (["copy", "v.zarr", "c.tif"], 2, "must end in .zarr"),
    ],
)
def test_errors_have_their_exit_codes_and_print_no_result(tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    write_array(tmp_path / "v.zarr", textured((32, 32, 32)))
    assert volume.main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_info_says_what_the_volume_is(tmp_path, capsys):
    volume.main(["synth", str(tmp_path / "v.zarr"), "--shape", "48,64,64", "--chunk", "16"])
    capsys.readouterr()
    assert volume.main(["info", str(tmp_path / "v.zarr"), "--patch", "8,16,16"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0] == f"{tmp_path / 'v.zarr'}: OME-Zarr 0.4 'v', zarr v2, axes z, y, x"
    header, finest = lines[2], lines[3]
    assert " ".join(finest.split()) == "* 0 0 48x64x64 16x16x16 - uint8 192.0 KiB 7.91 micrometer"
    assert header.index("shape") == finest.index("48x64x64"), "columns are aligned"
    assert any(line.startswith("  codec        blosc(cname=zstd, clevel=3, shuffle=0") for line in lines)
    stored = len([path for path in (tmp_path / "v.zarr" / "0").glob("*/*/*") if path.is_file()])
    assert f"  stored       {stored} of 48 chunks" in captured.out


@pytest.mark.parametrize(
    ("transform", "dtype", "message"),
    [
        ({"type": "rotation", "rotation": []}, "int16", "got a transformation of type 'rotation'"),
        ({"type": "scale", "scale": [1, 1, 1]}, "complex64", "complex64"),
        ({"type": "scale", "scale": [1, 1, 1]}, str, "string"),
    ],
    ids=["rotation", "complex", "text"],
)
def test_info_of_what_cannot_be_read_ends_with_one_line(tmp_path, capsys, transform, dtype, message):
    attributes = ome_06(transform, systems={"physical": [axis(name) for name in "zyx"]})
    zarr.create_group(str(tmp_path / "v.zarr"), zarr_format=3, attributes=attributes)
    zarr.create_array(str(tmp_path / "v.zarr/0"), shape=(32, 32, 32), dtype=dtype, zarr_format=3)
    assert volume.main(["info", str(tmp_path / "v.zarr")]) == 6
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert message in line


def test_info_shows_size_and_unit_of_0_6(tmp_path, capsys):
    scale = {"type": "scale", "scale": [4, 2, 2]}
    steps = sequence(scale, {"type": "translation", "translation": [1, 0, 0]})
    attributes = ome_06(steps, systems={"physical": [axis(name, "nanometer") for name in "xyz"]})
    zarr.create_group(str(tmp_path / "v.zarr"), zarr_format=3, attributes=attributes)
    write_array(tmp_path / "v.zarr/0", textured((32, 48, 64), dtype="int16"), zarr_format=3)
    assert volume.main(["info", str(tmp_path / "v.zarr"), "--patch", "8,16,16"]) == 0
    out = capsys.readouterr().out
    assert "OME-Zarr 0.6 'image', zarr v3, axes x, y, z" in out
    assert "2x2x4 nanometer" in out
    assert "  corner       z 0, y 0, x 1 nanometer" in out
    assert "int16" in out


def test_json_is_alone_on_the_output_and_null_is_unknown(tmp_path, capsys):
    write_array(tmp_path / "v.zarr", textured((32, 32, 32)))
    with ChunkServer(tmp_path) as server:
        assert volume.main(["info", f"{server.url}/v.zarr", "--json", "--places", "0"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["occupancy"]["present"] is None
    assert facts["occupancy"]["unknown"] == "a web server cannot list"
    assert facts["grey"] is None
    assert facts["region"] is None


def test_occupancy_writes_the_sidecar_that_info_then_finds(tmp_path, capsys):
    voxels = textured((64, 64, 64))
    voxels[:32, :32, :32] = 0
    path = write_array(tmp_path / "v.zarr", voxels)
    assert volume.main(["occupancy", str(path)]) == 0
    sidecar = path / ".chunk_occupancy.npz"
    assert capsys.readouterr().out == f"{sidecar}: grid 2x2x2, 7 of 8 chunks (87.5 %), from a listing\n"
    assert volume.main(["info", str(path)]) == 0
    assert "7 of 8 chunks (87.5 %), from a sidecar" in capsys.readouterr().out
    assert volume.main(["occupancy", str(path), "--out", str(tmp_path / "o.npz")]) == 0
    assert (tmp_path / "o.npz").exists()


def test_copy_says_how_far_it_is_and_then_what_it_did(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    voxels = textured((64, 64, 64))
    voxels[:32, :32, :32] = 0
    write_array(tmp_path / "served" / "v.zarr", voxels)
    command = ["copy", "", str(tmp_path / "c.zarr"), "--levels", "2", "--requests", "2"]
    with ChunkServer(tmp_path / "served") as server:
        command[1] = f"{server.url}/v.zarr"
        assert volume.main(command) == 0
        captured = capsys.readouterr()
        assert volume.main(command) == 0
    head, chunks, sizes, seconds = captured.out.splitlines()
    assert head == f"{tmp_path / 'c.zarr'}: box z 0:64, y 0:64, x 0:64 of {command[1]} level 0"
    assert chunks == "  chunks  8 written, 1 air, 0 failed"
    assert re.fullmatch(r"  bytes   256.0 KiB of voxels, \d+\.\d KiB fetched, \d+\.\d KiB stored", sizes)
    assert re.fullmatch(r"  time    \d+\.\d s, \d+\.\d MB/s of voxels, \d+\.\d MB/s fetched", seconds)
    assert re.search(r" INFO copying: \d of 9 chunks, .* MB/s fetched, about .* left\n", captured.err)
    assert "is already there and complete: nothing was done" in capsys.readouterr().out


def test_a_copy_with_an_unreadable_chunk_exits_6_and_says_what_was_copied(tmp_path, capsys):
    path = write_array(tmp_path / "v.zarr", textured((64, 64, 64)))
    (path / "1" / "0" / "1").write_bytes(b"damaged")
    assert volume.main(["copy", str(path), str(tmp_path / "c.zarr")]) == 6
    captured = capsys.readouterr()
    assert "  chunks  7 written, 0 air, 1 failed" in captured.out
    assert "WARNING chunk [1, 0, 1] cannot be read" in captured.err
    assert "the first chunk [1, 0, 1] of " in captured.err


@pytest.mark.parametrize("arguments", [["info", "v.zarr", "--json"], ["info", "--help"]])
def test_a_reader_of_the_output_that_leaves_is_no_error(tmp_path, arguments):
    write_array(tmp_path / "v.zarr", textured((32, 32, 32)))
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does, sooner or later
    done = fork_server.run(
        [sys.executable, "-m", "vesuvius", "volume", *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which stands for a full disk")
@pytest.mark.parametrize("option", ["--json", "--help"])
def test_an_output_that_cannot_be_written_exits_6(tmp_path, option):
    write_array(tmp_path / "v.zarr", textured((32, 32, 32)))
    command = [sys.executable, "-m", "vesuvius", "volume", "info", "v.zarr", option]
    with open("/dev/full", "w") as full:
        done = fork_server.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == 6
    assert "the output must be writable; got [Errno 28]" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_is_found_by_its_names(tmp_path):
    write_array(tmp_path / "v.zarr", textured((32, 32, 32)))
    assert run_vesuvius("volume", "info", "v.zarr", cwd=tmp_path).stdout.startswith("v.zarr: bare array, zarr v2")


def test_help_names_what_verifies_and_says_where_its_list_of_chunks_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert {"list", "verify"} <= set(re.findall(r"\w+", cli.COMMANDS["volume"]))
    with pytest.raises(SystemExit):
        volume.main(["verify", "--help"])
    assert "the list of stored chunks" in " ".join(capsys.readouterr().out.split())
