"""`vesuvius init VOLUME`: writes a first config that fits the volume and this machine."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path

from vesuvius.commands.cli import as_command, natural, naturals, say
from vesuvius.config import ArrayConfig
from vesuvius.config.load import parse_config
from vesuvius.errors import EXIT_OK, ConfigError, storage_errors
from vesuvius.runlog.find_run import runs_root
from vesuvius.volumes.store.objects import is_remote, last_name


@as_command
def main(argv: list[str]) -> int:
    """Parse the command line, look at volume and machine, write the config.  Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vesuvius init",
        description="Look at a volume and at this machine and write a config that fits both: a first run of about half "
        "an hour, as far as the machine allows.",
    )
    parser.add_argument(
        "volume", metavar="VOLUME", help="zarr group or array: a folder, or https://, s3://, gs://, az:// or hf://"
    )
    parser.add_argument(
        "--level",
        type=natural,
        help="level of an OME-Zarr pyramid, 0 = finest (default: the finest whose patches show 0.3 mm on this machine)",
    )
    parser.add_argument(
        "--select", type=naturals, default=(), metavar="I,...", help="indices that fix the other axes than z, y, x"
    )
    parser.add_argument("--name", help="name of the run (default: made of the volume's)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (default: configs/NAME.yaml)")
    args = parser.parse_args(argv)
    name = args.name or default_name(args.volume)
    out = args.out or Path("configs") / f"{name}.yaml"
    _check_new(name, out)
    from vesuvius.training.forecast.first_config import first_config  # imports torch

    spec = ArrayConfig(path=args.volume, level=args.level or 0, select=args.select)
    text, words = first_config(name, spec, level_given=args.level is not None)
    _write(out, text)
    run = shlex.quote(name)
    say(
        "\n".join(
            [
                *words,
                f"written    {out}",
                "",
                f"train      vesuvius train --config {shlex.quote(str(out))}",
                f"watch      tail -f runs/{run}/logs/train_full.log    vesuvius memcheck {run} --watch 2",
                f"sample     vesuvius sample --checkpoint {run}",
            ]
        )
    )
    return EXIT_OK


def default_name(volume: str) -> str:
    """A run's name of the last part of an address: `s3://bucket/scroll 1.zarr/` -> `scroll-1`."""
    last = last_name(volume) if is_remote(volume) else Path(volume).resolve().name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", re.sub(r"(\.ome)?\.zarr$", "", last)).strip("-.")
    return name or "first"


def _check_new(name: str, out: Path) -> None:
    """Raises ConfigError where a config or a run of this name is there."""
    parse_config(f"name: {name!r}\ndata: {{volumes: [{{path: volume}}]}}", source="--name")
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists, and init does not replace files; choose another --out or --name")
    if (runs_root() / name).exists():
        raise ConfigError(f"The run {name} exists; choose another --name")


def _write(out: Path, text: str) -> None:
    with storage_errors(f"the config {out}", "choose another file with --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
