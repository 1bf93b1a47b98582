"""Compare a run that is killed repeatedly with an undisturbed one: curves, pictures and weights.

    vesuvius volume synth volumes/long_run.zarr --shape 128,256,256
    python tools/bench/long_run.py --volume volumes/long_run.zarr --minutes 30 --kills 20 --parallel --out runs/long_run

Trains one config twice under `--out`: once undisturbed, once with `--kills` SIGKILLs at random times, each followed
by `--resume`.  The number of steps is what fits into `--minutes`, estimated from a few steps (or `--steps`).
With `--parallel` both run at the same time, each with one torch thread.  Writes

    loss.png       training loss (mean over a window) and validation loss of both, and the steps at which one was killed
    previews.png   the last preview of each, side by side

and prints a table; exit code 1 if final weights, moments or averages differ in one bit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import yaml
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests kill runs in the same way

from tests.support.kill_harness import KillFigures, Session, final_difference, run_directory, steps_redone
from tests.support.recorded_runs import current_records

from vesuvius.runlog.records import read_records

Record = dict[str, Any]

_PACE_STEPS = 12
_CONFIG: Record = {
    "data": {"patch_size": [16, 48, 48]},
    "training": {
        "train_batch_size": 2,
        "accumulate_steps": 2,
        "workers": 0,
        "lr": 5e-4,
        "ema_decay": 0.995,
        "extra_ema_decays": [0.98],
        "validate_patches": 8,
    },
    "model": {"channels": [16, 32, 64], "full_res_channels": 8, "attention_heads": 4},
}


class Trainer:
    """Starts sessions of configs that it writes into one directory."""

    def __init__(self, base: Record, out: Path, parallel: bool) -> None:
        self._base = base
        self._out = out
        self._environment = {"OMP_NUM_THREADS": "1"} if parallel else {}

    def write(self, name: str, steps: int) -> Path:
        """Write the config of a run of `steps` steps: a hundred saves, twenty validations, ten previews."""
        rhythm = {
            "epochs": 1,
            "steps_per_epoch": steps,
            "warmup_steps": steps // 20,
            "save_every": max(steps // 100, 2),
            "validate_every": max(steps // 20, 2),
            "preview_every": max(steps // 10, 2),
        }
        path = self._out / f"{name}.yaml"
        training = self._base.get("training", {}) | rhythm
        path.write_text(yaml.safe_dump(self._base | {"name": name, "training": training}), encoding="utf-8")
        return path

    def run(self, config: Path) -> Path:
        """The directory of its run."""
        return run_directory(config, self._out)

    def start(self, config: Path, *arguments: str) -> Session:
        return Session(config, self._out, "--resume", *arguments, environment=self._environment)


def main(argv: Sequence[str] | None = None) -> int:
    """Train both, draw, print the table.  Returns the exit code."""
    arguments = _parser().parse_args(argv)
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True)
    trainer = Trainer(_base_config(arguments), out, arguments.parallel)
    steps = arguments.steps or round(0.8 * 60 * arguments.minutes / _step_s(trainer, 1 + arguments.parallel))
    undisturbed, killed = (trainer.write(name, steps) for name in ("undisturbed", "killed"))
    print(f"{steps} steps, at most {arguments.kills} kills", flush=True)
    with trainer.start(undisturbed) as session:
        if not arguments.parallel:
            _finish(session)
        figures = _train_with_kills(trainer, killed, arguments)
        _finish(session)
    runs = trainer.run(undisturbed), trainer.run(killed)
    difference = final_difference(*runs)
    _draw_losses(out / "loss.png", *runs)
    _join_previews(out / "previews.png", *runs)
    _print_table(*runs, figures, difference)
    return 0 if difference is None else 1


def _base_config(arguments: argparse.Namespace) -> Record:
    base: Record = yaml.safe_load(arguments.config.read_text(encoding="utf-8")) if arguments.config else _CONFIG
    volume = {"path": str(arguments.volume.absolute()), "level": arguments.level}
    return base | {"data": base.get("data", {}) | {"volumes": [volume]}}


def _step_s(trainer: Trainer, runs: int) -> float:
    """Seconds of a step, measured in this many parallel short runs."""
    configs = [trainer.write(f"pace_{number}", 10_000) for number in range(runs)]
    with ExitStack() as stack:
        for session in [stack.enter_context(trainer.start(c, f"training.max_steps={_PACE_STEPS}")) for c in configs]:
            _finish(session)
    return statistics.median(r["step_s"] for config in configs for r in _records(trainer.run(config), "step"))


def _finish(session: Session) -> None:
    """Wait for the end of a session, for days if need be."""
    exit_code = session.process.wait()
    assert exit_code == 0, session.text()


def _train_with_kills(trainer: Trainer, config: Path, arguments: argparse.Namespace) -> KillFigures:
    """Kill a run at random times, spread over its expected duration, and resume it each time."""
    rng, figures = random.Random(arguments.seed), KillFigures()
    mean_gap_s = 60 * arguments.minutes / (arguments.kills + 1)
    for _ in range(arguments.kills):
        with trainer.start(config) as session:
            until = time.monotonic() + rng.uniform(0, 2 * mean_gap_s)
            while time.monotonic() < until and session.process.poll() is None:
                time.sleep(0.01)
            if session.process.poll() is not None:
                break
            session.kill()
            figures.before_first_step += "Train step" not in session.text()
        figures.count(trainer.run(config))
        print(f"kill {figures.kills} at {_last_step(trainer.run(config))}", flush=True)
    with trainer.start(config) as session:
        _finish(session)
    figures.steps_redone = steps_redone(trainer.run(config))
    return figures


def _last_step(run: Path) -> str:
    steps = _records(run, "step") if (run / "metrics.jsonl").exists() else []
    return f"step {steps[-1]['step']}" if steps else "the start"


def _records(run: Path, kind: str) -> list[Record]:
    """The records of a kind, without those of steps that were rolled back."""
    return [record for record in current_records(read_records(run / "metrics.jsonl")) if record["kind"] == kind]


def _draw_losses(path: Path, undisturbed: Path, killed: Path) -> None:
    """Both loss curves in one chart, the undisturbed one wide and pale below."""
    mpl.use("Agg")
    figure, (training, validation) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for run, style in ((undisturbed, {"lw": 5, "alpha": 0.35}), (killed, {"lw": 1.2, "color": "black"})):
        steps = _records(run, "step")
        losses = np.array([record["loss"] for record in steps], float)
        window = max(len(losses) // 50, 1)
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        training.plot([record["step"] for record in steps][window - 1 :], smooth, label=run.name, **style)
        validations = _records(run, "validation")
        ema = [record["weights"]["ema"]["loss"] for record in validations]
        validation.plot([record["step"] for record in validations], ema, label=run.name, **style)
    for start in read_records(killed / "metrics.jsonl"):
        if start["kind"] == "run_start" and start["step"] > 0:
            training.axvline(start["step"], color="tab:red", lw=0.6, alpha=0.6)
    training.set(title=f"training loss, mean of {window} steps; red: resumed here", xlabel="step", yscale="log")
    validation.set(title="validation loss of the averaged weights", xlabel="step", yscale="log")
    for axes in (training, validation):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _join_previews(path: Path, undisturbed: Path, killed: Path) -> None:
    """The last preview of each, side by side."""
    pictures = [Image.open(run / _records(run, "preview")[-1]["picture"]) for run in (undisturbed, killed)]
    joined = Image.new("RGB", (sum(p.width for p in pictures) + 16, max(p.height for p in pictures)), "white")
    joined.paste(pictures[0], (0, 0))
    joined.paste(pictures[1], (pictures[0].width + 16, 0))
    joined.save(path)


def _print_table(undisturbed: Path, killed: Path, figures: KillFigures, difference: str | None) -> None:
    def of_both(name: str, values: Sequence[object]) -> str:
        return f"| {name} | {values[0]} | {values[1]} |"

    runs = (undisturbed, killed)
    every = [read_records(run / "metrics.jsonl") for run in runs]
    logs = [(run / "logs/train_full.log").read_text(encoding="utf-8") for run in runs]
    validations = [_records(run, "validation") for run in runs]
    lines = [
        "| | undisturbed | killed |",
        "| --- | --- | --- |",
        of_both("steps", [_records(run, "step")[-1]["step"] for run in runs]),
        of_both("minutes", [f"{(records[-1]['time'] - records[0]['time']) / 60:.1f}" for records in every]),
        of_both("sessions", [sum(r["kind"] == "run_start" for r in records) for records in every]),
        of_both("kills", [0, figures.kills]),
        of_both("before the first step of a session", [0, figures.before_first_step]),
        of_both("while a checkpoint was written", [0, figures.inside_save]),
        of_both("steps repeated", [0, figures.steps_redone]),
        of_both("checkpoints saved", [log.count(" INFO saved ") for log in logs]),
        of_both("checkpoints unreadable after a kill", [0, 0]),  # all were checked
        of_both("last validation loss", [f"{records[-1]['weights']['ema']['loss']:.6f}" for records in validations]),
        of_both("final weights, moments, averages", ["", difference or "identical bit by bit"]),
    ]
    print("\n" + "\n".join(lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--volume", type=Path, required=True, help="a zarr volume")
    parser.add_argument("--level", type=int, default=0, help="of the volume's pyramid")
    parser.add_argument("--config", type=Path, help="YAML file with all other keys than name, volumes and length")
    parser.add_argument("--minutes", type=float, default=30, help="approximate duration of the undisturbed run")
    parser.add_argument("--steps", type=int, help="length of the runs, instead of what fits into the minutes")
    parser.add_argument("--kills", type=int, default=20, help="SIGKILLs, fewer if the run ends earlier")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of the kills")
    parser.add_argument("--parallel", action="store_true", help="both runs at the same time, one thread each")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    return parser


if __name__ == "__main__":
    sys.exit(main())
