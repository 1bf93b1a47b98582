"""`vesuvius init VOLUME`: write a first config for a volume and this machine."""

import os
import re
import shlex
from pathlib import Path

from vesuvius.commands.cli import Parser, as_command, full_path, naturals, option, say
from vesuvius.commands.sample import level
from vesuvius.config import ArrayConfig
from vesuvius.config.load import parse_config
from vesuvius.config.patterns import name_of
from vesuvius.errors import EXIT_OK, ConfigError, storage_errors
from vesuvius.runlog.find_run import runs_root
from vesuvius.volumes.store.objects import is_remote, last_name


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius init",
        description="Write a config that fits a volume and this machine: a first run of about half an hour, if the "
        "machine allows it.",
        examples=(
            "vesuvius init volumes/scroll.zarr",
            "vesuvius init https://host/scroll.zarr --level 2 --name scroll-l2",
        ),
    )
    option(parser, "volume VOLUME", "zarr group or array: a folder, or https://, s3://, gs://, az:// or hf://")
    levels = "level of a pyramid, 0 = finest, or its voxel size: 7.91um (default: the finest whose patches span 300 µm)"
    option(parser, "--level LEVEL", levels, level)
    option(parser, "--select I,...", "index for each axis other than z, y, x", naturals, ())
    option(parser, "--name NAME", "name of the run (default: derived from the volume's name)")
    option(parser, "--out FILE", "file to write (default: configs/NAME.yaml)", full_path)
    args = parser.parse_args(argv)
    name = args.name or default_name(args.volume)
    out = args.out or Path("configs") / f"{name}.yaml"
    _check_new(name, out)
    from vesuvius.commands.first_config import first_config  # imports torch

    spec = ArrayConfig(path=args.volume, select=args.select, **(args.level or {}))
    text, words = first_config(name, spec, level_given=args.level is not None)
    _write(out, text)
    run = shlex.quote(name)
    logged = shlex.quote(str(runs_root() / name / "logs/train_full.log").removeprefix(f"{os.getcwd()}/"))
    lines = [
        *words,
        f"written    {out}",
        "",
        f"train      vesuvius train --config {shlex.quote(str(out))}",
        f"watch      tail -f {logged}    vesuvius memcheck {run} --watch 2",
        f"sample     vesuvius sample --checkpoint {run}",
    ]
    say("\n".join(lines))
    return EXIT_OK


def default_name(volume: str) -> str:
    """Return the name of a run for an address: `s3://bucket/scroll 1.zarr/` -> `scroll-1`."""
    last = last_name(volume) if is_remote(volume) else Path(volume).resolve().name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name_of(last)).strip("-.")
    return name or "first"


def _check_new(name: str, out: Path) -> None:
    parse_config(f"name: {name!r}\ndata: {{volumes: [{{path: volume}}]}}", source="--name")
    if os.path.lexists(out):
        raise ConfigError(f"{out} already exists; choose another --out or --name")
    if (runs_root() / name).exists():
        raise ConfigError(f"Run {name} exists; choose another --name")


def _write(out: Path, text: str) -> None:
    with storage_errors(f"the config {out}", "free some space or choose another file with --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.open("x", encoding="utf-8")
        try:
            with file:
                file.write(text)
        except OSError:
            out.unlink()  # an incomplete config must not be in the way
            raise
