"""A planted leak in a real run: the warning comes in time, the guard acts, and the run continues.  Healthy runs stay
silent.

A reader or the trainer allocates more every second and keeps it.  The limit is `monitor.ram_limit_gib` or a real cgroup
(as root).  Without a leak, a process in the same cgroup reads and writes large files until the page cache fills it; a
healthy run must not warn.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import textured, write_array
from tests.support.memcheck_runs import HYGIENE
from tests.support.real_cgroup import memory_cgroup_or_skip, popen_in
from vesuvius.errors import EXIT_GUARD
from vesuvius.runlog.records import iter_records, read_records
from vesuvius.runlog.units import GIB
from vesuvius.training.checkpoint.format import find_damage, list_checkpoints, step_of

pytestmark = pytest.mark.long

# Loaded by every Python that starts with it on its path, before its own code; a lock lets one process leak at a time.
LEAK = """
import fcntl, os, sys, threading, time

def leak():
    while "vesuvius.stream.reading.reader" not in sys.modules:
        time.sleep(0.2)
    lock = open(os.environ["DRILL_LOCK"], "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    time.sleep(float(os.environ["DRILL_AFTER_S"]))
    kept, began = [], time.monotonic()
    while True:
        due = (time.monotonic() - began) * float(os.environ["DRILL_MIB_S"])
        while len(kept) < due:
            kept.append(b"x" * 2**20)
        time.sleep(0.05)

worker = any("default_worker" in part for part in sys.orig_argv)
trainer = "vesuvius.train" in sys.orig_argv
if {"reader": worker, "trainer": trainer}[os.environ["DRILL_IN"]]:
    threading.Thread(target=leak, daemon=True).start()
"""

FILL_THE_PAGE_CACHE = """
import itertools, os, sys
for turn in itertools.count():
    with open(f"{sys.argv[1]}/cached_{turn % 8}", "wb") as file:
        for _ in range(1024): file.write(os.urandom(2**10) * 2**10)
    for other in range(min(turn + 1, 8)):
        with open(f"{sys.argv[1]}/cached_{other}", "rb") as file:
            while file.read(2**20): pass
"""

RUN = Path("runs/drill")
Start = Callable[..., subprocess.Popen[Any]]


def write_config(workers: int, limit_gib: float | None) -> None:
    volume = write_array(Path("scroll.zarr").absolute(), textured((128, 128, 128)), chunk=64)
    training = {"train_batch_size": 4, "workers": workers, "steps_per_epoch": 1_000_000, "save_every": 1_000_000}
    config = {
        "name": "drill",
        "data": {"volumes": [{"path": str(volume)}], "patch_size": [32, 64, 64], "resident": 0},  # readers stay
        "training": training | {"validate_every": 100, "validate_patches": 4},
        "model": {"channels": [16, 32], "full_res_channels": 8, "attention_heads": 4},
        "monitor": {"ram_limit_gib": limit_gib} if limit_gib else {},
    }
    Path("drill.yaml").write_text(yaml.safe_dump(config))


def train(minutes: float, *arguments: str, start: Start = subprocess.Popen, **environment: str) -> int | None:
    """Run to the end; None = timeout."""
    command = [sys.executable, "-m", "vesuvius.train", "--config", "drill.yaml", *arguments]
    with Path("output.txt").open("ab") as output:
        process = start(command, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        return process.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        return None


def train_with_a_leak(where: str, minutes: float, mib_s: float, after_s: float) -> int | None:
    Path("hook").mkdir()
    Path("hook/sitecustomize.py").write_text(LEAK)
    path = [str(Path("hook").absolute()), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"IN": where, "MIB_S": str(mib_s), "AFTER_S": str(after_s), "LOCK": str(Path("lock").absolute())}
    settings = {f"DRILL_{name}": value for name, value in settings.items()}
    return train(minutes, PYTHONPATH=os.pathsep.join(path), **settings)


def alarms() -> list[str]:
    """Warnings in the log, and lines that a grep for kills would find."""
    log = (RUN / "logs/train_full.log").read_text().splitlines()
    return [line for line in log if HYGIENE.search(line) or " WARNING " in line or " ERROR " in line]


def acts() -> list[str]:
    """Orders of the guard, in sequence."""
    records = read_records(RUN / "metrics.jsonl")
    return [one["action"] for one in records if one["kind"] == "event" and one["event"] == "guard"]


def goes_on() -> bool:
    """Whether the newest checkpoint is intact, and the run resumes as its post-mortem proposes."""
    (*_, newest) = list_checkpoints(RUN / "checkpoints")
    assert find_damage(newest) is None
    remedy = read_records(RUN / "post_mortem.jsonl")[-1]["remedy"]
    overrides = [found.rstrip(".,;:`'\")") for found in re.findall(r"training\.\w+=\S+", remedy)]
    return train(10, "--resume", *overrides, f"training.max_steps={step_of(newest) + 3}") == 0


def seconds_ahead(mib_s: float) -> float:
    """Seconds from the first warning to the limit, at the planted rate."""
    (warning, *_) = [line for line in alarms() if "risk of an out of memory kill" in line]
    warned = time.mktime(time.strptime(warning[:19], "%Y-%m-%d %H:%M:%S"))
    nearest = min(iter_records(RUN / "system.jsonl"), key=lambda record: abs(float(record["time"]) - warned))
    limit = nearest["limits"][0]
    left_bytes = limit["limit_bytes"] - limit["used_bytes"]
    return float(left_bytes / (mib_s * 2**20) + nearest["time"] - warned)


def test_a_leaking_trainer_is_stopped_with_an_intact_checkpoint_and_resumes() -> None:
    write_config(workers=0, limit_gib=1.2)
    # Whether it is in time depends on what else this machine does: the drill of a reader asks for that.
    assert train_with_a_leak("trainer", minutes=3, mib_s=40, after_s=2) == EXIT_GUARD
    assert acts()[-1] == "exit"
    assert any("the memory guard" in line for line in alarms()), "a real event is found by grep"
    assert goes_on()


def test_a_leaking_reader_is_restarted_before_the_run_is_stopped() -> None:
    """A leak must last 105 s to be predicted 60 s ahead.  The next reader leaks as well: the run goes on with restarts
    while its steps are short, as on a fast machine."""
    write_config(workers=2, limit_gib=8)
    code = train_with_a_leak("reader", minutes=6, mib_s=50, after_s=20)
    limits = [record["limits"][0] for record in iter_records(RUN / "system.jsonl")]
    assert max(limit["used_bytes"] / limit["limit_bytes"] for limit in limits) < 1
    assert seconds_ahead(50) >= 60
    assert acts()[0] == "restart"
    assert len(acts()) > 1
    assert (code, acts()[-1]) in ((None, "restart"), (EXIT_GUARD, "exit"))
    assert find_damage(list_checkpoints(RUN / "checkpoints")[-1]) is None


def test_a_healthy_run_that_fills_the_page_cache_raises_no_alarm() -> None:
    write_config(workers=2, limit_gib=None)
    with ExitStack() as held:
        group = held.enter_context(memory_cgroup_or_skip(4 * GIB))
        filler = popen_in(group, [sys.executable, "-c", FILL_THE_PAGE_CACHE, os.getcwd()])
        held.callback(filler.wait)
        held.callback(filler.kill)
        assert train(3, start=partial(popen_in, group)) is None
    assert alarms() == []
