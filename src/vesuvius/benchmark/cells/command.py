"""Measures a cell by a command that writes JSON with `samples_s`, `start_s` and other figures into a file.

What it prints is no part of the result: libraries warn whenever they like, also after the last line of a program.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from vesuvius.benchmark.cells.loader import OURS, PEERS, setup_of
from vesuvius.benchmark.cells.training import Lab
from vesuvius.benchmark.grid import Cell
from vesuvius.benchmark.ledger import Measurement
from vesuvius.config import Config
from vesuvius.config.load import dump_config
from vesuvius.errors import ConfigError, one_line
from vesuvius.trials.ended import Ended
from vesuvius.trials.process import TrialProcess, last_words

_POLL_S = 0.1


def loader_cells(cells: Sequence[Cell], peers: Sequence[str]) -> tuple[list[Cell], tuple[str, ...]]:
    """Each cell by each loader, and loaders that are not installed; the baseline is zarr-python with a DataLoader.

    Args:
        peers: `NAME=COMMAND` of others.

    Raises:
        ConfigError: one has another form.
    """
    left_out = tuple(name for name, package in PEERS.items() if find_spec(package) is None)
    loaders = {f"torch DataLoader + {name}": _own(name) for name in PEERS if name not in left_out} | {OURS: _own(OURS)}
    for peer in peers:
        name, _, command = (part.strip() for part in peer.partition("="))
        if not name or not command:
            raise ConfigError(f"a peer must look like NAME=COMMAND; got {peer!r}")
        loaders[name] = tuple(shlex.split(command))
    shown = {cell: "" if not cell.overrides else f", {cell.label}" for cell in cells}
    return [
        replace(cell, label=f"{name}{shown[cell]}", command=command, loader=name)
        for cell in cells
        for name, command in loaders.items()
    ], left_out


def _own(system: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "vesuvius.benchmark.cells.loader", system)


def measure_command(lab: Lab, command: Sequence[str], config: Config, blank: Measurement) -> Measurement:
    """Run it once, ended with its children.  Raises TrialInterrupted or OSError."""
    if shutil.which(command[0]) is None:
        return replace(blank, ended="failed", cause=f"there is no program {command[0]}")
    lab.directory.mkdir(parents=True, exist_ok=True)
    source = lab.directory / f"{blank.cell:03d}-{blank.round}.yaml"
    source.write_text(dump_config(config), encoding="utf-8")
    setup, log, began = setup_of(config, lab.bounds.seconds), source.with_suffix(".log"), time.monotonic()
    result = source.with_suffix(".result.json")
    result.unlink(missing_ok=True)  # of an attempt that --retry-failed repeats
    options = ["--config", str(source)]
    if command[:3] != _own(OURS)[:3]:
        patch = ",".join(map(str, setup.patch_zyx))
        options = [f"--volume={setup.volume}", f"--level={setup.level}", f"--patch={patch}"]
        options += [f"--batch={setup.batch}", f"--workers={setup.workers}"]
    options += [f"--seconds={lab.bounds.seconds}", f"--result={result}"]
    with TrialProcess([*command, *options], log, {}, lab.lock_fd) as process:
        while not process.wait(_POLL_S):
            lab.check_stop()
            if time.monotonic() - began >= lab.bounds.limit_s:
                break
        code = process.code
    seconds = time.monotonic() - began
    if code is None:
        return replace(blank, ended="timeout", cause=f"no result within {seconds:.0f} s", seconds=seconds)
    figures: Any = {}
    try:
        figures = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
        rate, start_s = float(figures.pop("samples_s") if code == 0 else ""), figures.pop("start_s", None)
    except (ValueError, KeyError, TypeError, AttributeError):
        ended: Ended = "killed" if code < 0 else "failed"
        cause = figures.get("error") if isinstance(figures, dict) else None
        if cause is None:
            cause = last_words(log.read_text(encoding="utf-8", errors="replace"))
            cause = f"no samples_s in {result.name}; {cause}" if code == 0 else cause
        return replace(blank, ended=ended, cause=one_line(f"{cause} (exit code {code})", 400), seconds=seconds)
    return replace(blank, ended="ok", seconds=seconds, samples_s=rate, start_s=start_s, figures=figures)
