"""The door `vesuvius volume`: what it prints, its exit codes, and what is on disk after Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr

from vesuvius import volume
from vesuvius.data.phantom import Phantom


def test_the_command_writes_both_volumes_and_says_so_in_one_line(tmp_path, capsys):
    out = tmp_path / "made" / "v.zarr"
    assert volume.main(["synth", str(out), "--shape", "16,32,48", "--seed", "2", "--chunk", "16"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert line.startswith(f"{out} (sheets: v.labels.zarr) shape 16,32,48 levels 3 stored_mib ")
    assert " ratio " in line
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


@pytest.mark.parametrize("shape", ["256,512", "0,64,64", "64,64,-64", "64,64,15", "a,b,c", "64.5,64,64", "1,2,3,4", ""])
def test_a_wrong_shape_is_a_usage_error(tmp_path, capsys, shape):
    with pytest.raises(SystemExit) as exit_info:
        volume.main(["synth", str(tmp_path / "v.zarr"), f"--shape={shape}"])
    assert exit_info.value.code == 2
    assert "three whole numbers z,y,x of at least 16" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_exits_130_and_leaves_nothing_behind(tmp_path):
    # Python's own handler is set by hand: a shell that runs the tests in the background has SIGINT ignored.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from vesuvius.volume import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "synth", str(tmp_path / "v.zarr"), "--shape", "256,2048,2048"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not any(written_chunks(tmp_path)):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.endswith(" ERROR interrupted\n")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def written_chunks(directory: Path) -> list[Path]:
    return [path for path in directory.glob(".v.zarr.*.partial/v.zarr/0/*/*/*") if path.is_file()]


def test_the_door_does_not_import_torch():
    code = "import sys, vesuvius.volume; print(*{'torch', 'ray'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
