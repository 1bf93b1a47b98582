"""`vesuvius demo [key.path=value ...]`: write a synthetic scroll, train on it, generate a volume."""

from __future__ import annotations

import os
import shutil
from importlib.resources import files
from pathlib import Path

from vesuvius.commands import train, volume
from vesuvius.commands.cli import Parser, as_command, say
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_OK
from vesuvius.runlog.progress import Progress
from vesuvius.runlog.run_dir import run_dir

VOLUME = Path("volumes/demo.zarr")


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius demo",
        description=f"Write a synthetic scroll to {VOLUME} (unless it exists), train a tiny model on it, and generate "
        "64x128x128 voxels from held-out labels: about five minutes on two cores.  Replaces the run of an earlier "
        "demo.",
        examples=("vesuvius demo", "vesuvius demo training.max_steps=100"),
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="config keys to set, with YAML values")
    args = parser.parse_args(argv)
    source = str(files("vesuvius") / "demo.yaml")
    config = read_config(Path(source), args.overrides, os.environ)  # before anything is replaced
    if not VOLUME.is_dir() and (code := volume.main(["synth", str(VOLUME), "--shape", "192,256,256", "--seed", "0"])):
        return code
    run = run_dir(config).path
    shutil.rmtree(run, ignore_errors=True)
    if code := train.main(["--config", source, *args.overrides]):
        return code
    found = f"\nconfig      {source}\nlog         {run}/logs/train_full.log\nmetrics     {run}/metrics.jsonl\n"
    found += f"checkpoint  {max(run.glob('checkpoints/step_*'), default='none')}"
    if config.has_condition and config.data.validation.fraction:
        volume_out, picture = run / "samples/generated.zarr", run / "samples/generated.png"
        from vesuvius.generate.volume.picture import generate_held_out  # imports torch

        with Progress("generating a volume") as progress:
            generate_held_out(run, (64, 128, 128), volume_out, picture, progress.update)
        found += f"\nvolume      {volume_out}\npicture     {picture}"
    say(found)
    return EXIT_OK
