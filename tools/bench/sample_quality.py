"""Samples of our recipe after equal CPU time: train, sample and judge several seeds and volumes; print one table.

    vesuvius volume synth volumes/large.zarr --shape 128,512,512 --seed 3
    python tools/bench/sample_quality.py studies --volume phantom=volumes/large.zarr --seed 0
    python tools/bench/sample_quality.py studies --volume scroll=volumes/scroll.zarr@0 --seed 0 training.lr=1e-3
    python tools/bench/sample_quality.py studies --options "--residual-guidance 1.5"    # judge all runs so
    python tools/bench/sample_quality.py studies --judge none                           # only the table

The recipe is that of `configs/demo.yaml` without labels, with weights averaged over 500 steps.  The budget is the CPU
time of one single-threaded `vesuvius train`, with start-up, validation and checkpoints, so other load does not change
it.  An interrupted training continues, as does one that ended at a smaller budget.  `vesuvius evaluate` compares the
samples with held-out patches; the table has its figures: generated / held out, or the distance.  "error" is
`relative_error` of the last validation before (docs/model.md).  A run that has continued since is judged again once its
judged_* is removed.

In FOLDER: runs_NAME_SEED/{config.yaml, cpu_s, train.log, runs/run, judged_*}; runs trained otherwise are judged if they
are put there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
STOPPED = 75  # exit code after a signal, with a checkpoint
JUDGED = "judged_"


def main() -> None:
    """Train, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of all runs")
    parser.add_argument("--volume", metavar="NAME=PATH[@LEVEL]", help="volume to train on (default: train nothing)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1440, help="CPU seconds of a training")
    parser.add_argument("--judge", metavar="NAMES", help="runs to judge, by commas (default: the trained one, or all)")
    parser.add_argument("--count", type=int, default=128, help="samples of each run")
    parser.add_argument("--options", default="", help="more options of vesuvius evaluate, fixed beforehand")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the training's config")
    arguments = parser.parse_args()
    folder, names = arguments.folder.resolve(), arguments.judge
    if arguments.volume:
        name, _, volume = arguments.volume.partition("=")
        run = f"{name}_{arguments.seed}"
        train(folder / f"runs_{run}", volume, arguments.seed, arguments.seconds, arguments.keys)
        names = names or run
    for place in sorted(folder.glob("runs_*")):
        if names is None or place.name.removeprefix("runs_") in names.split(","):
            judge(place, arguments.count, shlex.split(arguments.options))
    for line in table(folder):
        print(line)


def config_of(volume: str, seed: int) -> dict[str, Any]:
    """Return the demo's config for another volume, without labels and without an end of its own."""
    path, _, level = volume.partition("@")
    config: dict[str, Any] = yaml.safe_load(DEMO.read_text())
    config |= {"name": "run", "seed": seed, "diffusion": {}}
    config["data"] = {
        "volumes": [{"path": str(Path(path).resolve()), "level": int(level or 0)}],
        "patch_size": config["data"]["patch_size"],
        "validation": {"fraction": 0.05},
    }
    config["training"] |= {"epochs": 10**4, "ema_decay": 0.998, "workers": 0, "recompute_norm": False}
    config["training"] |= {"save_every": 250, "keep_every": 1000, "preview_every": 0}
    config["training"] |= {"validate_every": 500, "validate_patches": 48}
    return config


def train(place: Path, volume: str, seed: int, budget_s: float, keys: list[str]) -> None:
    """Run `vesuvius train` until all its sessions together have used the CPU seconds."""
    place.mkdir(parents=True, exist_ok=True)
    spent = place / "cpu_s"
    before = used = float(spent.read_text()) if spent.exists() else 0.0
    if used >= budget_s:
        return
    (place / "config.yaml").write_text(yaml.safe_dump(config_of(volume, seed)))
    command = [sys.executable, "-m", "vesuvius.train", "--config", "config.yaml", *keys]
    command += ["--resume"] if (place / "runs").exists() else []
    with (place / "train.log").open("a") as log:
        process = psutil.Popen(command, cwd=place, env=os.environ | ONE_THREAD, stdout=log, stderr=log)
        is_stopping = False  # a second signal would end it without a checkpoint
        try:
            while process.poll() is None:
                times = process.cpu_times()
                used = max(used, before + times.user + times.system)
                spent.write_text(f"{used:.1f}")
                if used >= budget_s and not is_stopping:
                    process.terminate()
                    is_stopping = True
                time.sleep(0.2)
        except psutil.NoSuchProcess:  # between poll and cpu_times
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode not in (0, STOPPED):
        raise SystemExit(f"vesuvius train failed with {process.returncode}; see {place / 'train.log'}")


def judge(place: Path, count: int, options: list[str]) -> None:
    """Run `vesuvius evaluate`, unless its folder is there."""
    named = (option.strip("-").replace("/", "+") for option in options)
    out = place / "_".join([JUDGED.rstrip("_"), str(count), *named])
    command = [sys.executable, "-m", "vesuvius", "evaluate", "runs/run", f"--count={count}", "--batch-size=16"]
    if not out.exists():
        environment = os.environ | ONE_THREAD
        subprocess.run([*command, f"--out={out}", *options], check=True, cwd=place, env=environment, stdout=sys.stderr)


def table(folder: Path) -> list[str]:
    """Return a line for each evaluation, with the figures that it has."""
    rows: list[dict[str, str]] = []
    for path in sorted(folder.glob(f"runs_*/{JUDGED}*/evaluation.json")):
        place, found = path.parents[1], json.loads(path.read_text())
        row = {"run": place.name.removeprefix("runs_"), "samples, options": path.parent.name.removeprefix(JUDGED)}
        row |= {"step": found["facts"]["step"]}
        lines = (place / "runs/run/metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines if '"kind": "validation"' in line]
        errors = [each["relative_error"] for each in records if each["step"] <= int(row["step"])]
        row["error"] = f"{errors[-1]:.3f}" if errors else "-"
        for key, figure in found["figures"].items():
            values = [figure["values"][of] for of in ("generated", "held_out") if of in figure["values"]]
            shown = values or [figure["distance"]]
            row[key] = " / ".join("?" if value is None else f"{value:.3g}" for value in shown)
        rows.append(row)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    return [f"| {line} |" for line in (*lines, *(" | ".join(row.get(key, "-") for key in columns) for row in rows))]


if __name__ == "__main__":
    main()
