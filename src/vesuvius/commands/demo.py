"""`vesuvius demo [key.path=value ...]`: write a synthetic scroll, train on it, generate a volume."""

import os
import tempfile
from importlib.resources import files
from pathlib import Path

from vesuvius.commands import train, volume
from vesuvius.commands.cli import Parser, add_overrides, as_command, say
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_OK, ConfigError, needs_extra
from vesuvius.runlog.progress import Progress
from vesuvius.runlog.run_dir import SOURCE, RunDir, run_dir

VOLUME = Path("volumes/demo.zarr")
NAME = "demo"
_MARK = b"# The next `vesuvius demo` replaces this run.\n"
"""First line of the config that a demo trains with, and so of its run's `config.source.yaml` until it is resumed."""


@as_command
def main(argv: list[str]) -> int:
    parser = Parser(
        prog="vesuvius demo",
        description=f"Write a synthetic scroll to {VOLUME} (unless it exists), train a tiny model on it, and generate "
        f"64x128x128 voxels from held-out labels: about five minutes on two cores.  The run is named {NAME}, and "
        "replaces that of an earlier demo, but no other.",
        examples=("vesuvius demo", "vesuvius demo training.max_steps=100"),
    )
    add_overrides(parser)
    args = parser.parse_args(argv)
    with needs_extra("`vesuvius demo`", "safetensors"):  # before anything is written
        pass
    source = Path(str(files("vesuvius") / "demo.yaml"))
    config = read_config(source, args.overrides, os.environ)  # before anything is replaced
    if config.name != NAME or config.training.resume != "never":
        wanted = f"name {config.name}" if config.name != NAME else f"training.resume={config.training.resume}"
        remedy = f"remove it here and from the environment (VESUVIUS_...), or use `vesuvius train --config {source}`"
        raise ConfigError(f"A demo does not take {wanted}: its run is always new and named {NAME}; {remedy}")
    run = run_dir(config)
    _refuse_others(run)
    if not VOLUME.is_dir() and (code := volume.main(["synth", str(VOLUME), "--shape", "192,256,256", "--seed", "0"])):
        return code
    if run.exists():
        with run.locked(new=False):
            _refuse_others(run)
            with run.writing():
                run.clear()
    with tempfile.TemporaryDirectory() as folder:
        marked = Path(folder, source.name)
        marked.write_bytes(_MARK + source.read_bytes())
        if code := train.main(["--config", str(marked), *args.overrides]):
            return code
    text = f"\nconfig      {source}\nlog         {run.log}\nmetrics     {run.metrics}\n"
    text += f"checkpoint  {max(run.checkpoints.glob('step_*'), default='none')}"
    if config.has_condition and config.data.validation.fraction:
        volume_out, picture = run.samples / "generated.zarr", run.samples / "generated.png"
        from vesuvius.generate.volume.picture import generate_held_out  # imports torch

        with Progress("generating a volume") as progress:
            generate_held_out(run.path, (64, 128, 128), volume_out, picture, progress.update)
        text += f"\nvolume      {volume_out}\npicture     {picture}"
    say(text)
    return EXIT_OK


def _refuse_others(run: RunDir) -> None:
    """Raise ConfigError if there is a run, unless a demo began it, nothing resumed it, and it holds no other files."""
    if not run.exists():
        return
    try:
        is_linked = any(path.is_symlink() for path in (run.path, *run.path.iterdir()))
        is_own = not is_linked and not run.others() and (run.path / SOURCE).read_bytes().startswith(_MARK)
    except OSError:
        is_own = False
    if not is_own:
        raise ConfigError(
            f"{run.path.absolute()} is not only the run of a demo: another command or version trained or resumed it, "
            "or it has other files or links; move it away or delete it, or set VESUVIUS_RUNS to another folder"
        )
