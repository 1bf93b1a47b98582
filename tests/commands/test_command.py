"""How a command's process ends."""

from __future__ import annotations

import sys

import pytest

from tests.support import fork_server

STUCK = """
import sys, threading
from vesuvius.commands import cli
def main(argv):
    threading.Thread(target=threading.Event().wait).start()  # as a read of a store that does not answer
    print("printed")
    return int(sys.argv[1])
cli.as_command(main)()
"""


@pytest.mark.parametrize("exit_code", [75])
def test_a_hanging_thread_delays_no_exit_and_keeps_the_exit_code(exit_code: int) -> None:
    command = [sys.executable, "-c", STUCK, str(exit_code)]
    done = fork_server.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "printed\n", "")
