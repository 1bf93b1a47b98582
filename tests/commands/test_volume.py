"""`vesuvius volume`: output, exit codes, and the files left after Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.support import fork_server
from tests.support.chunk_server import ChunkServer
from tests.volumes.test_alignment import volume_of
from vesuvius.commands import volume
from vesuvius.runlog import progress
from vesuvius.volume_tools.phantom import Phantom


def facts_of(text: str) -> dict[str, str]:
    """The rows `name  value`; later ones win."""
    return {name: value for name, _, value in (line.strip().partition("  ") for line in text.splitlines())}


@pytest.mark.long
def test_the_command_writes_both_volumes_and_says_so(tmp_path, capsys):
    out = tmp_path / "made" / "v.zarr"
    command = ["synth", str(out), "--shape", "16,32,48", "--seed", "2", "--chunk", "16"]
    assert volume.main(command) == 0
    captured = capsys.readouterr()
    facts = {name: value.strip() for name, value in facts_of(captured.out).items()}
    assert (facts["path"], facts["labels_path"]) == (str(out), str(out.with_suffix(".labels.zarr")))
    assert (facts["shape_zyx"], facts["levels"]) == ("16x32x48", "3")
    assert all(" INFO writing: " in line for line in captured.err.splitlines()), (
        "on a slow machine it says how far it is"
    )
    np.testing.assert_array_equal(
        zarr.open_group(out, mode="r")["0"][:], Phantom(2, (16, 32, 48)).box((0, 0, 0), (16, 32, 48))[0]
    )
    assert volume.main(command) == 0, "it is there"
    assert volume.main([*command, "--seed", "3"]) == 2
    assert "remove it" in capsys.readouterr().err


def test_info_of_two_volumes_describes_their_alignment(tmp_path, capsys):
    for name, shape, scale, corner in (
        ("raw", (40, 72, 88), 4, (0, 0, 0)),
        ("labels", (20, 16, 16), 8, (40, 60, 80)),
        ("away", (20, 16, 16), 4, (400, 0, 0)),
    ):
        volume_of(tmp_path / name, shape, scale, corner)
    raw, labels = str(tmp_path / "raw"), str(tmp_path / "labels")
    assert volume.main(["info", raw, f"{labels}@0"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "(20, 16, 16) voxels of 8 x 8 x 8 nanometer from 40, 60, 80" in out
    assert "known_from scale and translation factors 2, 2, 2 offsets 10, 15, 20" in out
    assert "covered z 10:40, y 15:47, x 20:52" in out
    assert volume.main(["info", raw, labels, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["factors"], found["offsets"]) == ([2, 2, 2], [10, 15, 20])
    assert found["covered"] == [[10, 15, 20], [40, 47, 52]]
    assert volume.main(["info", raw, str(tmp_path / "away")]) == 6
    assert "they do not overlap; it has (20, 16, 16) voxels" in capsys.readouterr().err


@pytest.mark.long
def test_ctrl_c_exits_130_and_the_same_command_continues(tmp_path):
    # Python's own handler is set by hand: a shell that runs the tests in the background has SIGINT ignored.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from vesuvius.commands.volume import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "synth", str(tmp_path / "v.zarr"), "--shape=256,1024,1024", "--chunk=32"]
    with fork_server.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not [path for path in tmp_path.glob("v.zarr.partial/volume.zarr/0/*/*/*") if path.is_file()]:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.endswith(" ERROR interrupted\n")
    assert all(" INFO writing: " in line for line in err.splitlines()[:-1]), "on a slow machine it says how far it is"
    assert not (tmp_path / "v.zarr").exists()


USAGES = [
    *(
        (["synth", "v.zarr", f"--shape={shape}"], "three integers z,y,x of at least 16")
        for shape in ("256,512", "64,64,15", "a,b,c", "")
    ),
    (["copy", "v.zarr", "c.zarr", "--size", "8,16"], "'8,16' is not three integers z,y,x of at least 1"),
    (["info", "v.zarr", "--boxes", "many"], "an integer of at least 0"),
    (["info", "v.zarr", "--select", "0,x"], "'x' is not an integer of at least 0"),
    (["copy", "v.zarr"], "OUT.zarr"),
    (["copy", "v.zarr", "c.zarr", "--start=-1,0,0"], "is not three integers z,y,x of at least 0"),
    (["copy", "v.zarr", "c.zarr", "--requests", "0"], "'0' is not an integer of at least 1"),
    (["occupancy"], "PATH"),
    (["measure"], "invalid choice: 'measure'"),
    ([], "COMMAND"),
]


def test_a_wrong_command_line_exits_2_with_a_reason(capsys):
    for arguments, message in USAGES:
        with pytest.raises(SystemExit) as exit_info:
            volume.main(arguments)
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info", "nothing.zarr"], 6, "/nothing.zarr: it does not exist"),
        (["info", "v.zarr", "--level", "3"], 6, "a bare array has only level 0"),
        (
            ["occupancy", "nothing.zarr"],
            6,
            "exist; nothing.zarr starts in the working directory: change to its own, or",
        ),
        (["info", "/nothing.zarr"], 6, "/nothing.zarr: it does not exist; create"),
        (["copy", "nothing.zarr", "c.zarr"], 6, "it does not exist"),
        (["copy", "v.zarr", "c.zarr", "--size", "1,1,999"], 2, "is not inside"),
        (["copy", "v.zarr", "c.tif"], 2, "c.tif does not end in .zarr"),
    ],
)
def test_errors_have_their_exit_codes_and_print_no_result(tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    write_array(tmp_path / "v.zarr", textured((32, 32, 32)))
    assert volume.main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_info_describes_a_volume(tmp_path, capsys):
    volume.main(["synth", str(tmp_path / "v.zarr"), "--shape", "48,64,64", "--chunk", "16"])
    capsys.readouterr()
    assert volume.main(["info", str(tmp_path / "v.zarr")]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    facts = {name: value.strip() for name, value in facts_of(captured.out).items()}
    assert (facts["ome_version"], facts["title"], facts["zarr_format"], facts["axes"]) == ("0.4", "v", "2", "z, y, x")
    header = lines.index("levels") + 1
    finest = " ".join(lines[header + 1].split())
    assert finest == ("0 0 48x64x64 16x16x16 - uint8 0.188 MiB 7.91x7.91x7.91 0x0x0 micrometer 7.91x7.91x7.91"), finest
    assert lines[header].index("shape") == lines[header + 1].index("48x64x64"), "columns are aligned"
    assert facts["codec"].startswith("blosc(cname=zstd, clevel=3, shuffle=0")
    stored = len([path for path in (tmp_path / "v.zarr" / "0").glob("*/*/*") if path.is_file()])
    assert (facts["present"], facts["total"], facts["source"]) == (str(stored), "48", "listing")


def test_what_is_not_known_is_no_line_of_a_section(tmp_path, capsys):
    path = write_array(tmp_path / "v.zarr", textured((32, 32, 32)))
    assert volume.main(["info", str(path)]) == 0
    text = capsys.readouterr().out
    assert "present  1" in text
    assert "unknown" not in text
    assert "chunks_tried" not in text
    assert facts_of(text)["title"].strip() == "-"
    assert volume.main(["info", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["occupancy"]["unknown"] is None


def test_json_is_alone_on_the_output_and_null_is_unknown(tmp_path, capsys):
    write_array(tmp_path / "v.zarr", textured((32, 32, 32)))
    with ChunkServer(tmp_path) as server:
        assert volume.main(["info", f"{server.url}/v.zarr", "--json", "--boxes", "0"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["occupancy"]["present"] is None
    assert facts["occupancy"]["unknown"] == "web servers cannot be listed"
    assert facts["intensity"] is None


def test_occupancy_writes_the_sidecar_that_info_then_finds(tmp_path, capsys):
    voxels = textured((64, 64, 64))
    voxels[:32, :32, :32] = 0
    path = write_array(tmp_path / "v.zarr", voxels)
    assert volume.main(["occupancy", str(path)]) == 0
    sidecar = path / ".chunk_occupancy.npz"
    assert " ".join(capsys.readouterr().out.split()).startswith(f"written {sidecar} present 7 total 8 unit chunks")
    assert volume.main(["info", str(path)]) == 0
    assert re.search(r"present +7\n +total +8\n +unit +chunks\n +source +sidecar\n", capsys.readouterr().out)
    assert volume.main(["occupancy", str(path), "--out", str(tmp_path / "o.npz")]) == 0
    assert (tmp_path / "o.npz").exists()


def test_copy_shows_progress_and_then_a_summary(tmp_path, capsys, monkeypatch):
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
    facts = {name: value.strip() for name, value in facts_of(captured.out).items()}
    assert facts["source_box"] == "z 0:64, y 0:64, x 0:64"
    assert (facts["chunks"], facts["written"], facts["air"], facts["failures"]) == ("9", "8", "1", "0")
    assert (facts["voxel_bytes"], facts["fetched_bytes"] != "-") == ("0.25 MiB", True)
    assert re.search(r" INFO copying: \d of 9 chunks, .* [kM]B/s of voxels, about .* left\n", captured.err)
    assert "c.zarr, is complete" in capsys.readouterr().out
