"""The time left that a step line promises after a tenth of a run, against the time that was left.

Five real runs of a small network, with validations, previews and saves in other proportions and the last with a limit
of hours.  On a machine that others load too, its own pace changes within a run; the last figure of a line leaves that
out: what the error would be if steps, and what lies between them, had gone on at the pace known then.

    vesuvius volume synth volumes/demo.zarr --shape 128,256,256
    python tools/bench/eta.py [--volume volumes/demo.zarr] [--steps 400] [--batch 4]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from vesuvius.runlog.records import read_records

# So many validations, previews and saves in the whole run.
RUNS: dict[str, dict[str, int]] = {
    "steps": {},
    "validations": {"validate_every": 20},
    "saves": {"save_every": 80},
    "all": {"validate_every": 16, "preview_every": 13, "save_every": 26},
    "max_hours": {"validate_every": 20},
}
DEFAULTS = {"epochs": 1, "workers": 0, "warmup_steps": 10, "validate_patches": 4}
PACE_STEPS = 200  # of which the promise takes the mean
MODEL = "{channels: [16, 32], blocks_per_level: 1, full_res_channels: 8, attention_heads: 2, norm_groups: 4}"


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--volume", default="volumes/demo.zarr")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--max-hours", type=float, default=0.008, help="of the last run, which has 100 times the steps")
    arguments = parser.parse_args()
    volume = Path(arguments.volume).absolute()
    with tempfile.TemporaryDirectory() as directory:
        for name, counts in RUNS.items():
            every = {"validate_every": 0, "preview_every": 0, "save_every": 100 * arguments.steps}
            every |= {key: max(arguments.steps // count, 1) for key, count in counts.items()}
            training: dict[str, Any] = DEFAULTS | every | {"train_batch_size": arguments.batch}
            training |= {"steps_per_epoch": arguments.steps, "workers": 2 if name == "all" else 0}
            training |= {"max_hours": arguments.max_hours, "epochs": 100} if name == "max_hours" else {}
            print(_line(name, *_measured(Path(directory), name, volume, training)), flush=True)


def _measured(cwd: Path, name: str, volume: Path, training: dict[str, Any]) -> tuple[list[dict[str, Any]], int, float]:
    """The records of the steps, which of them is the first behind a tenth of the run, and when the run ended."""
    keys = "".join(f"  {key}: {value}\n" for key, value in training.items())
    config = cwd / f"{name}.yaml"
    config.write_text(
        f"name: {name}\ndata: {{volumes: [{{path: {volume}}}], patch_size: [8, 32, 32]}}\ntraining:\n{keys}"
        f"model: {MODEL}\ndiffusion: {{sampler_steps: 8}}\n"
    )
    command = [sys.executable, "-m", "vesuvius.train", "--config", str(config)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    end = time.time()
    if done.returncode not in (0, 75):  # 75: the hours are over
        sys.exit(done.stderr)
    records = [r for r in read_records(cwd / "runs" / name / "metrics.jsonl") if r["kind"] == "step"]
    began = records[0]["time"] - records[0]["session_s"]
    tenth = next(i for i, record in enumerate(records) if record["time"] - began >= 0.1 * (end - began))
    return records, tenth, end


def _line(name: str, records: list[dict[str, Any]], tenth: int, end: float) -> str:
    record, later = records[tenth], records[tenth + 1 :]
    left_s = end - record["time"]
    promised = f"{'>' if record['eta_at_least'] else ''}{record['eta_s']:.1f}"
    known = records[1 : tenth + 1][-PACE_STEPS:]
    steps_s = fmean(r["step_s"] - r["pause_s"] for r in known) * len(later)
    slower_s = sum(r["step_s"] - r["pause_s"] for r in later) - steps_s
    # A limit of hours ends a run whose steps are slower at the same time.
    own_s = record["eta_s"] - left_s + (0 if name == "max_hours" else slower_s)
    return (
        f"{name:12} step {record['step']:4} of {records[-1]['step']:4}: promised {promised:>6} s, was {left_s:6.1f} s, "
        f"{100 * (record['eta_s'] / left_s - 1):+.1f} %; at the same pace {100 * own_s / left_s:+.1f} %"
    )


if __name__ == "__main__":
    main()
