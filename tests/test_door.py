"""How a command's process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

STUCK = """
import sys, threading
from vesuvius import door
def main(argv):
    threading.Thread(target=threading.Event().wait).start()  # as a read of a store that does not answer
    print("printed")
    return int(sys.argv[1])
door.run_door(main, None)
"""


@pytest.mark.parametrize("exit_code", [0, 6, 75])
def test_a_thread_that_never_ends_holds_no_command_and_its_exit_code_stays(exit_code: int) -> None:
    command = [sys.executable, "-c", STUCK, str(exit_code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "printed\n", "")
