"""A planted leak: is there a warning in time, does the guard act, does the run go on?  And silence where all is well?

With `--leak reader` (or trainer) one such process of a real run takes `--mib-s` more every second and keeps it.  The
limit is `monitor.ram_limit_gib`, or with `--cgroup` that of a real cgroup (as root).  Without a leak, a neighbour in
the same cgroup reads and writes large files until the page cache fills it; a healthy run must not say a word.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.real_cgroup import memory_cgroup
from vesuvius.errors import EXIT_GUARD
from vesuvius.runlog.records import iter_rotated, read_records
from vesuvius.runlog.units import GIB
from vesuvius.training.checkpoint.format import find_damage, list_checkpoints

Start = Callable[..., subprocess.Popen[Any]]

HYGIENE = re.compile("killed|oom|out of memory", re.IGNORECASE)

# Loaded by every Python that starts with it on its path, before its own code; a lock lets one process leak at a time.
_LEAK = """
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

_FILL = """
import itertools, os, sys
for turn in itertools.count():
    with open(f"{sys.argv[1]}/cached_{turn % 8}", "wb") as file:
        for _ in range(1024): file.write(os.urandom(2**10) * 2**10)
    for other in range(min(turn + 1, 8)):
        with open(f"{sys.argv[1]}/cached_{other}", "rb") as file:
            while file.read(2**20): pass
"""


@dataclass(frozen=True)
class Drill:
    """What happened.

    Attributes:
        exit_code: of the run; None where the drill stopped it.
        ahead_s: seconds from the first warning to the limit, at the planted rate; None = no warning.
        acts: what the guard ordered, in order.
        peak_share: most that the nearest memory limit counted, as a share of where it kills.
        resumed: whether the run went on from its checkpoint afterwards; None = it was not asked to.
        checkpoint: the newest one, whole; None = there is none.
        alarms: warnings of the log, and lines that a grep for kills would find.
    """

    exit_code: int | None
    ahead_s: float | None
    acts: tuple[str, ...]
    peak_share: float
    resumed: bool | None
    checkpoint: str | None
    alarms: tuple[str, ...]


def parse(arguments: str) -> argparse.Namespace:
    """The options of a drill."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--volume", type=Path, required=True, help="zarr volume to train on")
    parser.add_argument("--leak", choices=["reader", "trainer"], help="which process leaks; none by default")
    parser.add_argument("--mib-s", type=float, default=50, help="MiB that it takes each second")
    parser.add_argument("--after-s", type=float, default=20, help="seconds before it begins")
    parser.add_argument("--limit-gib", type=float, default=8, help="a leak must last 105 s to be told 60 s ahead")
    parser.add_argument("--cgroup", action="store_true", help="the limit is a real cgroup's, which kills")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20, help="longest time of the run")
    parser.add_argument("--ahead-s", type=float, default=60, help="how long before the kill the warning must come")
    return parser.parse_args(arguments.split())


def find_problems(drill: Drill, arguments: argparse.Namespace) -> list[str]:
    """What is wrong with the outcome of a drill with a leak.  Pure."""
    problems = []
    if drill.ahead_s is None or drill.ahead_s < arguments.ahead_s:
        problems.append(f"the warning came {drill.ahead_s} s ahead")
    if drill.exit_code != EXIT_GUARD or drill.peak_share >= 1:
        problems.append(f"the guard did not end the run in time: {drill.exit_code}")
    if not drill.checkpoint or not drill.resumed:
        problems.append("there is no whole checkpoint to go on from")
    return problems


def run_drill(arguments: argparse.Namespace, place: Path) -> Drill:
    """Run a training with a leak, or without, and gather what its files say."""
    config = _write_config(arguments, place)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with memory_cgroup(int(arguments.limit_gib * GIB)) if arguments.cgroup else nullcontext() as group:
        start = group.popen if group is not None else subprocess.Popen
        exit_code = _train(arguments, config, place, environment | _leak_environment(arguments, place), start)
    run = place / "runs" / "drill"
    checkpoints = list_checkpoints(run / "checkpoints")
    whole = checkpoints[-1].name if checkpoints and find_damage(checkpoints[-1]) is None else None
    resumed = None
    if exit_code == EXIT_GUARD and arguments.leak:
        more = [*_next_start(run), f"training.max_steps={int(str(whole).rpartition('_')[2]) + 3}"]
        resumed = _command(config, place, environment, subprocess.Popen, "--resume", *more).wait() == 0
    log = (run / "logs" / "train_full.log").read_text().splitlines()
    metrics, system = read_records(run / "metrics.jsonl"), list(iter_rotated(run / "system.jsonl"))
    guarded = [record for record in metrics if record["kind"] == "event" and record["event"] == "guard"]
    return Drill(
        exit_code=exit_code,
        ahead_s=_ahead_s(arguments, log, system),
        acts=tuple(record["rung"] for record in guarded),
        peak_share=max(r["killer"]["used_bytes"] / r["killer"]["kills_at_bytes"] for r in system),
        resumed=resumed,
        checkpoint=whole,
        alarms=tuple(line for line in log if HYGIENE.search(line) or " WARNING " in line or " ERROR " in line),
    )


def _ahead_s(arguments: argparse.Namespace, log: list[str], system: list[dict[str, Any]]) -> float | None:
    warnings = [line for line in log if "risk of an out of memory kill" in line]
    if not warnings:
        return None
    warned = time.mktime(time.strptime(warnings[0][:19], "%Y-%m-%d %H:%M:%S"))
    nearest = min(system, key=lambda record: abs(record["time"] - warned))
    left_bytes = nearest["killer"]["kills_at_bytes"] - nearest["killer"]["used_bytes"]
    return float(left_bytes / (arguments.mib_s * 2**20) + nearest["time"] - warned)


def _train(
    arguments: argparse.Namespace, config: Path, place: Path, environment: dict[str, str], start: Start
) -> int | None:
    """Until the run ends, or the time is up: None."""
    process = _command(config, place, environment, start)
    with _page_cache_filler(place, start) if arguments.leak is None else nullcontext():
        try:
            return process.wait(60 * arguments.minutes)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return None


def _command(config: Path, place: Path, environment: dict[str, str], start: Start, *more: str) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "vesuvius.train", "--config", str(config), *more]
    with (place / "output.txt").open("ab") as output:
        return start(command, cwd=place, env=environment, stdout=output, stderr=subprocess.STDOUT)


@contextmanager
def _page_cache_filler(place: Path, start: Start) -> Iterator[None]:
    """A process that writes files and reads them again, more than the limit holds."""
    filler = start([sys.executable, "-c", _FILL, str(place)])
    try:
        yield
    finally:
        filler.kill()
        filler.wait()


def _leak_environment(arguments: argparse.Namespace, place: Path) -> dict[str, str]:
    if arguments.leak is None:
        return {}
    (place / "hook").mkdir()
    (place / "hook" / "sitecustomize.py").write_text(_LEAK)
    return {
        "PYTHONPATH": os.pathsep.join([str(place / "hook"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "DRILL_IN": arguments.leak,
        "DRILL_MIB_S": str(arguments.mib_s),
        "DRILL_AFTER_S": str(arguments.after_s),
        "DRILL_LOCK": str(place / "lock"),
    }


def _next_start(run: Path) -> list[str]:
    """The overrides that the post-mortem proposes."""
    found = re.findall(r"training\.\w+=\S+", read_records(run / "post_mortem.jsonl")[-1]["remedy"])
    return [override.rstrip(".,;:`'\")") for override in found]


def _write_config(arguments: argparse.Namespace, place: Path) -> Path:
    config = {
        "name": "drill",
        "data": {"volumes": [{"path": str(arguments.volume.absolute())}], "patch_size": [32, 64, 64]},
        "training": {
            "train_batch_size": 4,
            "workers": arguments.workers,
            "steps_per_epoch": 1_000_000,
            "save_every": 1_000_000,
            "validate_every": 100,
            "validate_patches": 4,
        },
        "model": {"channels": [16, 32], "full_res_channels": 8, "attention_heads": 4},
        "monitor": {} if arguments.cgroup else {"ram_limit_gib": arguments.limit_gib},
    }
    path = place / "drill.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
