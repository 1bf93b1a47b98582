"""Limits on processes and threads, as the kernel enforces them here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real_cgroup import popen_in
from vesuvius.monitor.probes.cores import task_limits

PIDS = Path("/sys/fs/cgroup/pids")

# Prints the limits, then the number of threads that can really be started.
COUNT = """
import json, threading
from dataclasses import asdict
from vesuvius.monitor.probes.cores import task_limits
before = [asdict(limit) | {"left": limit.left} for limit in task_limits()]
over, threads = threading.Event(), 1
try:
    while threads < 500:
        threading.Thread(target=over.wait, daemon=True).start()
        threads += 1
except RuntimeError:
    pass
print(json.dumps([before, threads]), flush=True)
"""


@pytest.fixture
def cgroups() -> Iterator[tuple[Path, Path]]:
    """A pids cgroup of version 1, with one in it."""
    outer = PIDS / f"vesuvius-{uuid.uuid4().hex[:8]}"
    try:
        (outer / "inner").mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no pids cgroup can be made here: {error}")
    yield outer, outer / "inner"
    (outer / "inner").rmdir()
    outer.rmdir()


@pytest.mark.parametrize("limited", [0, 1])
def test_the_tightest_cgroup_limits_the_number_of_threads(limited: int, cgroups: tuple[Path, Path]) -> None:
    """Limits of the own cgroup and of its parent, which also has another process with threads."""
    (cgroups[limited] / "pids.max").write_text("40")
    other = popen_in(cgroups[1], [sys.executable, "-c", "import time; time.sleep(60)"])
    with popen_in(cgroups[1], [sys.executable, "-c", COUNT], stdout=subprocess.PIPE, text=True) as process:
        (tightest, *_), threads = json.loads(process.communicate(timeout=60)[0])
    other.kill()
    other.wait()
    assert tightest["name"] == f"pids.max of cgroup /{cgroups[limited].relative_to(PIDS)}"
    assert (tightest["limit"], tightest["others"], tightest["left"]) == (40, 1, 39)
    assert threads == 39


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to become another user")
@pytest.mark.parametrize("root", [False, True])
def test_the_user_limit_applies_to_all_but_root(root: bool) -> None:
    readable = "+dac_read_search,+dac_override"  # whatever folder the interpreter lies in
    user = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
    user += [f"--inh-caps={readable}", f"--ambient-caps={readable}"]
    command = [*([] if root else user), "bash", "-c", 'ulimit -u 60; exec "$@"', "bash", sys.executable, "-c", COUNT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    limits, threads = json.loads(ended.stdout)
    if root:
        assert threads == 500
        assert "`ulimit -u`" not in {limit["name"] for limit in limits}
    else:
        assert limits[0]["name"] == "`ulimit -u`"
        assert limits[0]["left"] == threads == 60


def test_own_threads_are_not_counted_as_others() -> None:
    over = threading.Event()
    before = {limit.name: limit.others for limit in task_limits()}
    threads = [threading.Thread(target=over.wait) for _ in range(200)]
    for thread in threads:
        thread.start()
    after = {limit.name: limit.others for limit in task_limits()}
    over.set()
    assert before.keys() == after.keys()
    assert all(after[name] - before[name] < 150 for name in after), "other programs come and go"
