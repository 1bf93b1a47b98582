"""The time left according to a step line after a tenth of a session, against the time that was really left.

Five real runs of a small network with different shares of validations, previews and saves, the last with `max_hours`.
A short run before them finds how many steps fill their time.  Needs a quiet machine, as other programs change a run's
pace:

    python tools/bench/eta.py [--seconds 240]

takes about six times as long (25 minutes), and prints a line for each run.  A tenth of a run should be longer than the
20 s in which Ray still starts processes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from vesuvius.runlog.records import read_records

# How many validations, previews and saves a run has.
RUNS: dict[str, dict[str, int]] = {
    "validations": {"validate_every": 20},
    "few validations": {"validate_every": 4},
    "saves": {"validate_every": 5, "save_every": 60},
    "all, readers": {"validate_every": 16, "preview_every": 13, "save_every": 26},
    "max_hours": {"validate_every": 10, "save_every": 8},
}
DEFAULTS = {"epochs": 1, "warmup_steps": 10, "validate_patches": 4, "train_batch_size": 4}
MODEL = "{channels: [16, 32], blocks_per_level: 1, full_res_channels: 8, attention_heads: 2, norm_groups: 4}"
STEPS_SHARE = 0.7  # of a run's time; the rest is for what lies between the steps


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240.0, help="that each run is to take")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as directory:
        cwd = Path(directory)
        _vesuvius(cwd, "volume", "synth", "v.zarr", "--shape", "64,128,128")
        steps, _ = _trained(cwd, "pace", {"steps_per_epoch": 30})
        step_s = median(record["step_s"] for record in steps[15:])
        count = max(int(STEPS_SHARE * seconds / step_s), 20)
        print(f"{step_s:.3f} s a step: {count} steps a run", flush=True)
        for name, counts in RUNS.items():
            every = {key: max(count // times, 1) for key, times in counts.items()}
            more = {"max_hours": seconds / 3600, "epochs": 100} if name == "max_hours" else {}
            readers = {"workers": 2} if "readers" in name else {}
            print(_line(name, *_trained(cwd, name, {"steps_per_epoch": count} | every | more | readers)), flush=True)


def _trained(cwd: Path, name: str, training: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
    """The records of the steps, and when the session ended."""
    training = DEFAULTS | {"workers": 0, "validate_every": 0, "preview_every": 0, "save_every": 10**6} | training
    keys = "".join(f"  {key}: {value}\n" for key, value in training.items())
    name = "".join(filter(str.isalnum, name))
    (cwd / f"{name}.yaml").write_text(
        f"name: {name}\ndata: {{volumes: [{{path: v.zarr}}], patch_size: [8, 32, 32]}}\ntraining:\n{keys}"
        f"model: {MODEL}\ndiffusion: {{sampler_steps: 8}}\n"
    )
    _vesuvius(cwd, "train", "--config", f"{name}.yaml")
    records = read_records(cwd / "runs" / name / "metrics.jsonl")
    (end,) = (record["time"] for record in records if record["kind"] == "run_end")
    return [record for record in records if record["kind"] == "step"], end


def _vesuvius(cwd: Path, command: str, *arguments: str) -> None:
    line = [sys.executable, "-m", "vesuvius", command, *arguments]
    done = subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 75):  # 75: the hours are over
        sys.exit(done.stderr)


def _line(name: str, steps: list[dict[str, Any]], end: float) -> str:
    began = steps[0]["time"] - steps[0]["session_s"]
    record = next(step for step in steps if step["time"] - began >= 0.1 * (end - began))
    left_s, promised = end - record["time"], f"{'>' if record['eta_at_least'] else ''}{record['eta_s']:.1f}"
    return (
        f"{name:16} {end - began:5.0f} s: at step {record['step']:4} of {steps[-1]['step']:4} promised {promised:>6}, "
        f"was {left_s:5.1f} s, {100 * (record['eta_s'] / left_s - 1):+.1f} %"
    )


if __name__ == "__main__":
    main()
