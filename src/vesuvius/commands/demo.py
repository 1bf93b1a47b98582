"""`vesuvius demo [key.path=value ...]`: write a synthetic scroll, train on it for a few minutes, say where all is."""

from __future__ import annotations

import argparse
import os
import shutil
from importlib.resources import files
from pathlib import Path

from vesuvius.commands import train, volume
from vesuvius.commands.cli import as_command, say
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_OK

VOLUME, RUN = Path("volumes/demo.zarr"), Path("runs/demo")


@as_command
def main(argv: list[str]) -> int:
    """Parse the command line, write the scroll if it is not there, and train.  Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vesuvius demo",
        description=f"Write a synthetic scroll to {VOLUME}, unless it is there, and train a tiny model on it, a few "
        f"minutes on two cores.  {RUN} of an earlier demo is replaced.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="config keys to set, with YAML values")
    args = parser.parse_args(argv)
    config = str(files("vesuvius") / "demo.yaml")
    read_config(Path(config), args.overrides, os.environ)  # before anything is replaced
    if not VOLUME.is_dir() and (code := volume.main(["synth", str(VOLUME), "--shape", "128,256,256", "--seed", "0"])):
        return code
    shutil.rmtree(RUN, ignore_errors=True)
    if code := train.main(["--config", config, *args.overrides]):
        return code
    say(
        f"\nconfig      {config}\nlog         {RUN}/logs/train_full.log\nmetrics     {RUN}/metrics.jsonl\n"
        f"checkpoint  {_last('checkpoints/step_*')}\npicture     {_last('samples/*.png')}"
    )
    return EXIT_OK


def _last(pattern: str) -> str:
    return str(max(RUN.glob(pattern), default="none"))
