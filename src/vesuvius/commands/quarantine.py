"""`vesuvius quarantine RUN [--retry | --clear]`: the chunks that a run could not read and replaced."""

from __future__ import annotations

import argparse
import contextlib
import operator
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from vesuvius.commands.command import as_command, say
from vesuvius.config import ArrayConfig, Config
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_DATA, EXIT_OK, ConfigError, DataError, storage_errors
from vesuvius.runlog.find_run import find_run
from vesuvius.runlog.units import format_sizes
from vesuvius.stream.reading.notes import forget_crashes
from vesuvius.training.quarantine import Record, as_json, box_of, clear, read_quarantine
from vesuvius.volume_tools.verify import Reading, read_in_processes
from vesuvius.volumes.alignment import align
from vesuvius.volumes.box import format_box, is_inside
from vesuvius.volumes.missing import StoredChunks
from vesuvius.volumes.store.object_store import is_remote
from vesuvius.volumes.volume import Volume, open_volume


@as_command
def main(argv: list[str]) -> int:
    """Run `vesuvius quarantine ARGV`; the exit code.  A wrong command line raises SystemExit(2), as argparse does."""
    arguments = _parser().parse_args(argv)
    run = find_run(arguments.run)
    path = run / "quarantine.jsonl"
    records = read_quarantine(path)
    if arguments.clear:
        _clear(path, records)
        say(f"run {run.name}: {_count(records)} cleared; the next --resume reads them again")
        return EXIT_OK
    if arguments.retry:
        with contextlib.redirect_stdout(sys.stderr):
            causes = _still_broken(run, records)
        broken = [record | {"cause": causes[place]} for place, record in enumerate(records) if place in causes]
        whole = [record for place, record in enumerate(records) if place not in causes]
        _clear(path, whole)
        say(f"run {run.name}: {len(whole)} of {len(records)} can be read again and are cleared for the next --resume")
        records = broken
    if arguments.json:
        say(as_json(records))
    elif not arguments.retry or records:
        say("\n".join([f"run {run.name}: {_count(records)} in quarantine", *map(_line, records)]))
    return EXIT_DATA if arguments.retry and records else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vesuvius quarantine",
        description="List what a run could not read and replaced by other patches.  The next --resume reads "
        "cleared places again.  Exit code 6: --retry found some still broken.",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or the name of one below runs/")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--retry", action="store_true", help="read each place again and clear those that can be read")
    what.add_argument("--clear", action="store_true", help="clear all, whether readable or not")
    what.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _count(records: Sequence[Record]) -> str:
    return "1 place" if len(records) == 1 else f"{len(records)} places"


def _line(record: Record) -> str:
    chunk = f", chunk {record['chunk']}" if record.get("chunk") else ""
    return f"  {record['volume']}, {format_box(box_of(record))}{chunk}: {record['cause']}"


def _clear(path: Path, records: Sequence[Record]) -> None:
    """Clear records, and the notes of what crashed readers: else readers would not try it again."""
    if not records:
        return
    with storage_errors("the run directory must be writable", "free some space"):
        clear(path, records)
        forget_crashes(path.parent / "reading")


def _still_broken(run: Path, records: Sequence[Record]) -> dict[int, str]:
    """The places in the list of those records whose boxes cannot be read, each with the cause that was found now.

    Raises:
        ConfigError: the run's config does not name the volume of a record, or that is smaller now.
        DataError: a volume cannot be opened.
    """
    if not records:
        return {}
    config = read_config(run / "config.resolved.yaml")
    by_array: dict[tuple[int, str], dict[int, Record]] = {}
    for place, record in enumerate(records):
        by_array.setdefault((record["number"], record["volume"]), {})[place] = record
    causes: dict[int, str] = {}
    for (number, name), of_array in by_array.items():
        spec = _spec(config, number, name)
        if not is_remote(spec.path) and not Path(spec.path).exists():
            raise DataError(
                f"{spec.path} does not exist in the folder {Path.cwd()}; restore it, or run this in the folder where "
                "the run was started"
            )
        with closing(open_volume(spec, config.data.store)) as volume:
            if spec is config.data.volumes[number].condition:  # records count in voxels of the volume
                with closing(open_volume(config.data.volumes[number], config.data.store)) as fine:
                    inside = align(fine, volume, "the condition").array_box
                of_array = {place: record | {"box": inside(box_of(record))} for place, record in of_array.items()}
            _check_inside(volume, list(of_array.values()))
            nan = config.data.nan if spec is config.data.volumes[number] else config.data.condition_nan
            reading = Reading(spec, config.data.store, _must_be_stored(volume, list(of_array.values())), nan)
            tasks = [(place, list(volume.grid.chunks_of(box_of(record)))) for place, record in of_array.items()]
            with closing(read_in_processes(reading, volume, tasks, processes=1)) as reads:  # type: ignore[type-var]
                causes |= {place: broken[0].cause for place, _, broken in reads if broken}
    return causes


def _check_inside(volume: Volume, records: Sequence[Record]) -> None:
    for record in records:
        chunk, counts = record.get("chunk") or (0, 0, 0), volume.grid.counts_zyx
        inside = is_inside(box_of(record), volume.shape_zyx) and all(map(operator.lt, chunk, counts))
        if not inside:
            raise ConfigError(
                f"The box {format_box(box_of(record))} of the quarantine does not lie inside {volume.name} "
                f"({format_sizes(volume.shape_zyx)}), which was another one; clear it with --clear"
            )


def _must_be_stored(volume: Volume, records: Sequence[Record]) -> StoredChunks:
    """A chunk that is in quarantine was stored once: that it is absent does not make it whole.

    Where its whole shard is in quarantine and there again, the index was damaged: it now says which chunks there are.
    """
    stored = np.zeros(volume.grid.counts_zyx, bool)
    for record in records:
        if record.get("chunk"):
            z, y, x = record["chunk"]
            of_shard = box_of(record) != volume.grid.box_of((z, y, x))
            stored[z, y, x] = not (of_shard and volume.source.exists(volume.grid.key_of((z, y, x))))
    return StoredChunks.of(stored)


def _spec(config: Config, number: int, name: str) -> ArrayConfig:
    """The array of this number, or its condition, whichever has the name."""
    volumes = config.data.volumes
    if number >= len(volumes):
        raise ConfigError(
            f"Volume {number} ({name}) of the quarantine is not among the {len(volumes)} of the config; clear it with "
            "--clear"
        )
    condition = volumes[number].condition
    if condition is not None and name in (condition.path, f"{condition.path} level {condition.level}"):
        return condition
    return volumes[number]
