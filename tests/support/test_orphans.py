"""What tests start does not outlive their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import fork_server, orphans

ROOT = Path(__file__).parents[2]
SLEEP = "import time; time.sleep(600)"
# A child, a grandchild in a session of its own, and one whose parent has ended; then as pytest-timeout ends a process.
TREE = f"""
import os, subprocess, sys
from tests.support import orphans
orphans.watch_over_this_process()
sleep = [sys.executable, "-S", "-c", {SLEEP!r}]
middle = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True).pid, flush=True)"
started = [subprocess.Popen(sleep).pid]
for stays in ("; import time; time.sleep(600)", ""):
    parent = subprocess.Popen([sys.executable, "-S", "-c", middle + stays, *sleep], stdout=subprocess.PIPE, text=True)
    started += [int(parent.stdout.readline()), *([parent.pid] if stays else [])]
print(*started, flush=True)
sys.stdin.readline()
os._exit(1)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells of the end of any process")
@pytest.mark.parametrize("end", ["pytest-timeout", "kill"])
def test_a_whole_tree_of_processes_ends_with_the_one_that_started_it(end: str) -> None:
    bystander = subprocess.Popen([sys.executable, "-S", "-c", SLEEP])
    with subprocess.Popen(
        [sys.executable, "-c", TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as root:
        assert root.stdout is not None
        tree = [psutil.Process(int(pid)) for pid in root.stdout.readline().split()]
        assert len(tree) == 4
        if end == "kill":
            root.send_signal(signal.SIGKILL)
        else:
            root.communicate("\n")
    _, alive = psutil.wait_procs(tree, timeout=30)
    assert not alive
    assert bystander.poll() is None, "it was not that process that started it"
    bystander.kill()
    bystander.wait()


def test_this_test_process_and_its_fork_server_mark_what_they_start() -> None:
    """`conftest.py` has called it; a forked process shows the environment of the server."""
    command = [sys.executable, "-c", SLEEP]
    for start in (fork_server.Popen, subprocess.Popen):
        with start(command) as process:
            assert process.pid in orphans.bearers_of(os.environ[orphans.MARK])
            process.kill()
    assert os.getpid() not in orphans.bearers_of(os.environ[orphans.MARK])
