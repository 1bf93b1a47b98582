"""A planted leak: is there a warning in time, does the guard act, does the run go on?  And silence where all is well?

    vesuvius volume synth volumes/drill.zarr --shape 128,256,256
    python tests/support/memory_drill.py --volume volumes/drill.zarr --leak reader               # guard: act
    python tests/support/memory_drill.py --volume volumes/drill.zarr --leak reader --guard warn --cgroup
    python tests/support/memory_drill.py --volume volumes/drill.zarr --minutes 20 --limit-gib 6 --cgroup       # no leak

With `--leak reader` (or trainer) one such process of a real run takes `--mib-s` more every second and keeps it.  The
limit is `monitor.ram_limit_gib`, or with `--cgroup` that of a real cgroup, which kills (as root).  With `--guard warn`
nobody acts, so the time from the first warning to the kill is measured, not computed.  Without a leak, a neighbour in
the same cgroup reads and writes large files until the page cache fills it; a healthy run must not say a word.

Prints a table; exit code 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests use the same cgroups

from tests.support.real_cgroup import MemoryCgroup, memory_cgroup
from vesuvius.errors import EXIT_GUARD
from vesuvius.runlog.records import read_records
from vesuvius.runlog.rotated import iter_rotated
from vesuvius.runlog.units import GIB
from vesuvius.training.checkpoint.format import find_damage, list_checkpoints

Start = Callable[..., subprocess.Popen[Any]]

HYGIENE = re.compile("killed|oom|out of memory", re.IGNORECASE)
_WARNING = "risk of an out of memory kill"

# Loaded by every Python that starts with it on its path, before its own code; a lock lets one process leak at a time.
_LEAK = """
import fcntl, os, sys, threading, time

def leak():
    lock = open(os.environ["DRILL_LOCK"], "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    time.sleep(float(os.environ["DRILL_AFTER_S"]))
    if not os.path.exists(os.environ["DRILL_LOCK"] + ".began"):
        open(os.environ["DRILL_LOCK"] + ".began", "w").write(str(time.time()))
    kept, chunk, began = [], 2**20, time.monotonic()
    while True:
        due = (time.monotonic() - began) * float(os.environ["DRILL_MIB_S"])
        while len(kept) < due:
            kept.append(b"x" * chunk)
        time.sleep(0.05)

def wait():
    while "vesuvius.stream.reading.reader" not in sys.modules:
        time.sleep(0.2)
    leak()

worker = any("default_worker" in part for part in sys.orig_argv)
trainer = "vesuvius.train" in sys.orig_argv
if {"reader": worker, "trainer": trainer}[os.environ["DRILL_IN"]]:
    threading.Thread(target=wait, daemon=True).start()
"""

_MODEL = {"channels": [16, 32], "full_res_channels": 8, "attention_heads": 4, "norm_groups": 4}


@dataclass(frozen=True)
class Drill:
    """What happened.

    Attributes:
        exit_code: of the run; None where the drill stopped it.
        warned_s, acted_s, ended_s: seconds from the start of the leak (of the run without one) to the first warning,
            the guard's first act and the end of the run, or the kernel's first kill; None = that did not come.
        ahead_s: seconds by which the first warning came before the kill, measured with `--guard warn`; else at the
            planted rate, from what was left when it came.
        acts: what the guard ordered, in order.
        peak_share: most that the first killer counted, as a share of where it kills.
        kills: by the cgroup.
        resumed: whether the run went on from its checkpoint afterwards; None = it was not asked to.
        checkpoint: the newest one, whole; None = there is none.
        alarms: warnings of the log, and lines that a grep for kills would find.
    """

    exit_code: int | None
    warned_s: float | None
    acted_s: float | None
    ended_s: float | None
    ahead_s: float | None
    acts: tuple[str, ...]
    peak_share: float
    kills: int
    resumed: bool | None
    checkpoint: str | None
    alarms: tuple[str, ...]


def parse(arguments: str) -> argparse.Namespace:
    """The options of a command line."""
    return _parser().parse_args(arguments.split())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill and print what happened.  Returns the exit code."""
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        drill = run_drill(arguments, Path(place))
    for name, value in asdict(drill).items():
        print(f"| {name} | {value if not isinstance(value, float) else f'{value:.2f}'} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(vars(arguments) | asdict(drill), indent=1, default=str) + "\n")
    problems = find_problems(drill, arguments)
    for problem in problems:
        print(f"NOT AS IT SHOULD BE: {problem}")
    return 1 if problems else 0


def find_problems(drill: Drill, arguments: argparse.Namespace) -> list[str]:
    """What is wrong with the outcome of a drill.  Pure."""
    problems = []
    if arguments.leak is None:
        if drill.alarms:
            problems.append(f"a healthy run gave alarms: {drill.alarms}")
        return problems
    if drill.ahead_s is None or drill.ahead_s < arguments.ahead_s:
        problems.append(f"the warning must come {arguments.ahead_s:g} s ahead; got {drill.ahead_s}")
    if arguments.guard == "act":
        if drill.exit_code != EXIT_GUARD or drill.kills or drill.peak_share >= 1:
            problems.append(f"the guard must end the run by {EXIT_GUARD} in time; got {drill.exit_code}")
        if not drill.checkpoint or not drill.resumed:
            problems.append("there must be a whole checkpoint to go on from")
    return problems


def run_drill(arguments: argparse.Namespace, place: Path) -> Drill:
    """Run a training with a leak, or without, and gather what its files say."""
    config = _write_config(arguments, place)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    leaking = environment | _leak_environment(arguments, place)
    limit_bytes = int(arguments.limit_gib * GIB)
    with memory_cgroup(limit_bytes) if arguments.cgroup else nullcontext() as group:
        start = group.popen if group is not None else subprocess.Popen
        began = time.time()
        exit_code, kill_time = _train(arguments, config, place, leaking, start, group)
        kills = group.kills() if group is not None else 0
    if arguments.leak:
        began = float((place / "lock.began").read_text())
    run = place / "runs" / "drill"
    checkpoints = list_checkpoints(run / "checkpoints")
    whole = checkpoints[-1].name if checkpoints and find_damage(checkpoints[-1]) is None else None
    resumed = None
    if exit_code == EXIT_GUARD and arguments.leak:
        more = [*_next_start(run), f"training.max_steps={int(str(whole).rpartition('_')[2]) + 3}"]
        resumed = _command(config, place, environment, subprocess.Popen, "--resume", *more).wait() == 0
    return _gather(arguments, run, began, exit_code, kill_time, kills, resumed, whole)


def _gather(
    arguments: argparse.Namespace,
    run: Path,
    start: float,
    exit_code: int | None,
    kill_time: float | None,
    kills: int,
    resumed: bool | None,
    whole: str | None,
) -> Drill:
    log = (run / "logs" / "train_full.log").read_text().splitlines()
    metrics, system = read_records(run / "metrics.jsonl"), list(iter_rotated(run / "system.jsonl"))
    acts = [record for record in metrics if record["kind"] == "event" and record["event"] == "guard"]
    ends = [record["time"] for record in metrics if record["kind"] == "run_end"]
    warnings = [line for line in log if _WARNING in line]
    warned = time.mktime(time.strptime(warnings[0][:19], "%Y-%m-%d %H:%M:%S")) if warnings else None
    ended = kill_time or (ends[0] if ends else None)
    return Drill(
        exit_code=exit_code,
        warned_s=None if warned is None else warned - start,
        acted_s=acts[0]["time"] - start if acts else None,
        ended_s=None if ended is None else ended - start,
        ahead_s=_ahead_s(arguments, warned, kill_time, system),
        acts=tuple(record["rung"] for record in acts),
        peak_share=max(r["killer"]["used_bytes"] / r["killer"]["kills_at_bytes"] for r in system),
        kills=kills,
        resumed=resumed,
        checkpoint=whole,
        alarms=tuple(line for line in log if HYGIENE.search(line) or " WARNING " in line or " ERROR " in line),
    )


def _ahead_s(
    arguments: argparse.Namespace, warned: float | None, kill_time: float | None, system: list[dict[str, Any]]
) -> float | None:
    if warned is None:
        return None
    if kill_time is not None:
        return kill_time - warned
    nearest = min(system, key=lambda record: abs(record["time"] - warned))
    left_bytes = nearest["killer"]["kills_at_bytes"] - nearest["killer"]["used_bytes"]
    since_warned_s = nearest["time"] - warned
    return float(left_bytes / (arguments.mib_s * 2**20) + since_warned_s)


def _train(
    arguments: argparse.Namespace,
    config: Path,
    place: Path,
    environment: dict[str, str],
    start: Start,
    group: MemoryCgroup | None,
) -> tuple[int | None, float | None]:
    """Until the run ends, the kernel kills or the time is up.  Returns the exit code and the time of the first kill."""
    process = _command(config, place, environment, start)
    deadline = time.monotonic() + 60 * arguments.minutes
    neighbour = _page_cache_filler(place, start) if arguments.leak is None else nullcontext()
    with neighbour:
        while process.poll() is None and time.monotonic() < deadline:
            if group is not None and group.kills():
                killed = time.time()
                time.sleep(20)  # the run says who died
                process.terminate()
                return process.wait(), killed
            time.sleep(0.1)
    if process.poll() is not None:
        return process.returncode, None
    process.terminate()
    process.wait()
    return None, None


def _command(config: Path, place: Path, environment: dict[str, str], start: Start, *more: str) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "vesuvius.train", "--config", str(config), *more]
    with (place / "output.txt").open("ab") as output:
        return start(command, cwd=place, env=environment, stdout=output, stderr=subprocess.STDOUT)


@contextmanager
def _page_cache_filler(place: Path, start: Start) -> Iterator[None]:
    """A process that writes files and reads them again, more than the limit holds."""
    code = (
        "import itertools, os\n"
        "for turn in itertools.count():\n"
        f"    path = {str(place)!r} + '/cached_%d' % (turn % 8)\n"
        "    with open(path, 'wb') as file:\n"
        "        for _ in range(1024): file.write(os.urandom(2**10) * 2**10)\n"
        "    for other in range(8):\n"
        f"        path = {str(place)!r} + '/cached_%d' % other\n"
        "        if os.path.exists(path):\n"
        "            with open(path, 'rb') as file:\n"
        "                while file.read(2**20): pass\n"
    )
    filler = start([sys.executable, "-c", code])
    try:
        yield
    finally:
        filler.kill()
        filler.wait()


def _leak_environment(arguments: argparse.Namespace, place: Path) -> dict[str, str]:
    if arguments.leak is None:
        return {}
    hook = place / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(_LEAK)
    return {
        "PYTHONPATH": os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
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
            "prefetch_factor": arguments.prefetch,
            "steps_per_epoch": 1_000_000,
            "save_every": 1_000_000,
            "validate_every": 100,
            "validate_patches": 4,
        },
        "model": _MODEL,
        "monitor": {"guard": arguments.guard} | ({} if arguments.cgroup else {"ram_limit_gib": arguments.limit_gib}),
    }
    path = place / "drill.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--volume", type=Path, required=True, help="zarr volume to train on")
    parser.add_argument("--leak", choices=["reader", "trainer"], help="which process leaks; none by default")
    parser.add_argument("--mib-s", type=float, default=50, help="MiB that it takes each second")
    parser.add_argument("--after-s", type=float, default=20, help="seconds before it begins")
    parser.add_argument(
        "--limit-gib", type=float, default=8, help="memory limit; a leak must last 105 s to be told 60 s ahead"
    )
    parser.add_argument("--cgroup", action="store_true", help="the limit is a real cgroup's, which kills")
    parser.add_argument("--guard", choices=["off", "warn", "act"], default="act")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20, help="longest time of the run")
    parser.add_argument("--ahead-s", type=float, default=60, help="how long before the kill the warning must come")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
