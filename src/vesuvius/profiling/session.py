"""`vesuvius profile`: trains some steps in a folder of its own below the run, and writes what they came to.

`vesuvius train --profile` writes the same of the run's own steps, while it trains.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vesuvius.config import Config
from vesuvius.config.trial import NEVER, trial_config
from vesuvius.doctor.device import seen_by_driver
from vesuvius.errors import EXIT_OK, ConfigError, VesuviusError, one_line
from vesuvius.monitor.probes.files import read_text
from vesuvius.monitor.window import Thresholds
from vesuvius.profiling.observer import MOST_STEPS_BESIDE, MOST_WARM_STEPS, Observed, Observer
from vesuvius.profiling.page import build_profile
from vesuvius.profiling.recommend import leave_alone, recommend
from vesuvius.report.content import NOT_KNOWN
from vesuvius.report.page import made_by, new_folder, write_pages
from vesuvius.report.records import read_run
from vesuvius.runlog.records import current_records, iter_records, run_starts
from vesuvius.runlog.run_dir import run_dir
from vesuvius.runlog.units import format_sizes
from vesuvius.stream.options import StreamOptions
from vesuvius.training.checkpoint.format import list_checkpoints, step_of
from vesuvius.training.loop import MakeTuner, TrainingLoop, Tuner, make_autotuner
from vesuvius.training.ranks.part import one_rank
from vesuvius.training.reporting.report import StepReporter
from vesuvius.training.reporting.verdicts import knobs_of
from vesuvius.training.request import Request
from vesuvius.training.run import train
from vesuvius.training.step.step import choose_device
from vesuvius.volume_tools.info import codec_words
from vesuvius.volumes.volume import open_volume

log = logging.getLogger(__name__)

FOLDER = "profiles"
TRACE = "trace.json.gz"


@dataclass(frozen=True)
class ProfileRequest:
    """What is asked for."""

    config: Config
    source: Path  # the YAML file of the config
    steps: int  # that count, after the warm-up
    trace: bool  # also trace some steps, and look at each layer
    command: str  # for the page
    at_step: int | None = None  # profile the steps around this one of the run; None = the first ones of a new run

    @property
    def after(self) -> int:
        """Steps up to this one do not count."""
        return 0 if self.at_step is None else max(self.at_step - self.steps // 2, 0)


def profile(request: ProfileRequest) -> Path:
    """Train the steps and write profile.html and profile.md; returns their folder.

    Raises:
        VesuviusError: as `train`.
        ConfigError: `at_step`, and the run has no checkpoint at or before it, or several ranks.
    """
    ranks, config, run = request.config.training.ranks, one_rank(request.config), run_dir(request.config)
    if request.at_step is not None and ranks not in (1, "auto"):
        raise ConfigError(
            f"--at-step needs training.ranks=1; got {ranks}; `vesuvius train --resume --profile N` profiles such a run"
        )
    folder = new_folder(run.path / FOLDER)
    if request.at_step is not None:
        lend(checkpoint_before(run.checkpoints, request.at_step, request.after), folder / run.checkpoints.name)
    observed = Observed(ranks=1 if ranks == "auto" else ranks)
    trace = folder / TRACE if request.trace else None

    def make_tuner(loop: TrainingLoop, reporter: StepReporter) -> Tuner:
        stop = partial(loop.run.stop.adopt, EXIT_OK, "the profile has its steps")
        return Observer(loop, reporter, observed, request.steps, request.after, trace, stop)

    before = os.environ.get("VESUVIUS_RUNS")
    os.environ["VESUVIUS_RUNS"] = str(folder.parent.absolute())
    try:
        profiled_config = profiled(config, folder.name, request.steps, request.after)
        code = train(Request(profiled_config, request.source, request.at_step is not None, make_tuner=make_tuner))
    finally:
        os.environ.pop("VESUVIUS_RUNS")
        if before is not None:
            os.environ["VESUVIUS_RUNS"] = before
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # of weights that are worth nothing
    if not observed.complete:
        error = VesuviusError(
            f"a profile must have its steps; the run ended earlier with exit code {code}; see its log in {folder}/logs"
        )
        error.exit_code = code or error.exit_code
        raise error
    return _write(config, request.steps, request.command, folder, folder, observed)


def profile_in_place(steps: int, after: int, command: str) -> MakeTuner:
    """For `train`: rank 0's own steps after `after`; their page is written once they are made, or the run ends.

    What goes wrong with the page is logged and does not end the run.
    """

    def make(loop: TrainingLoop, reporter: StepReporter) -> Tuner:
        observed = Observed(in_place=True, ranks=loop.run.part.world)

        def write() -> None:
            config, run = loop.run.config, loop.run.directory.path
            try:
                folder = _write(config, steps, command, run, new_folder(run / FOLDER), observed)
                log.info("profile of steps after step %d: %s", observed.after, folder / "profile.html")
            except Exception as error:
                log.warning("the profile was not written: %s", one_line(error))

        return Observer(loop, reporter, observed, steps, after, None, write, make_autotuner(loop, reporter))

    return make


def checkpoint_before(checkpoints: Path, at_step: int, after: int) -> Path:
    """The newest one that leaves room to warm up before step `after`; else the oldest that is not after `at_step`.

    Raises:
        ConfigError: there is none.
    """
    there = list_checkpoints(checkpoints)
    found = [path for path in there if step_of(path) <= at_step]
    if not found:
        steps = ", ".join(str(step_of(path)) for path in there) or "none"
        raise ConfigError(
            f"--at-step needs a checkpoint of the run at or before that step; got {at_step}, and in {checkpoints} "
            f"those of steps {steps}; keep more with training.keep_every, or omit --at-step"
        )
    early = [path for path in found if step_of(path) <= after - MOST_WARM_STEPS]
    return early[-1] if early else found[0]


def lend(checkpoint: Path, folder: Path) -> None:
    """Put a checkpoint into a folder as well, by hard links where the disk has them: the run keeps its own."""
    shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def profiled(config: Config, name: str, steps: int, after: int = 0) -> Config:
    """The config of the run that is profiled: that of the training, but for what is not a step.  Pure."""
    training: dict[str, Any] = {"validate_every": 0}
    least = after + 2 * (steps + MOST_STEPS_BESIDE)  # readers go on beyond the steps that count, as in a long run
    if config.stop_step < least:
        training |= {"steps_per_epoch": least, "epochs": 1, "max_steps": None}
    monitor = {"verdict_every": NEVER, "write_every_s": max(1.0, config.monitor.sample_every_s)}
    return trial_config(config, name, training, monitor)


def _write(config: Config, asked: int, command: str, run: Path, folder: Path, observed: Observed) -> Path:
    """Write the pages from what a run has recorded; returns their folder.

    Raises:
        VesuviusError: there is no verdict.
    """
    verdict, first, last = observed.verdict, observed.after + 1, observed.after + asked
    if verdict is None:
        raise VesuviusError(f"steps {first} to {last} must be made without new readers; the run made too few of them")
    thresholds = Thresholds()
    options = StreamOptions.from_config(config.training, config.cluster)
    knobs = knobs_of(config, choose_device(), options, verdict.window, memory_is_short=False)
    numbers = range(first - 1, last + 1)
    metrics = run / "metrics.jsonl"
    recorded = current_records(iter_records(metrics, numbers), run_starts(metrics))
    steps = [record for record in recorded if record["kind"] == "step" and record["step"] in numbers]
    report = build_profile(
        config,
        read_run(run, range(first - 1 if observed.in_place else observed.begin, last + 1)),
        steps,
        observed,
        asked,
        recommend(verdict, knobs, thresholds),
        leave_alone(verdict, thresholds),
        inventory(config),
    )
    write_pages(folder, "profile", [report], made_by(command))
    return folder


def inventory(config: Config) -> dict[str, str]:
    """What the records do not say of the machine and the volumes.  Reads metadata, and waits for no outage."""
    model = re.search(r"^model name\s*: (.+)$", read_text("/proc/cpuinfo") or "", re.MULTILINE)
    _, driver = seen_by_driver()
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    found = {"processor": model[1] if model else NOT_KNOWN, "driver / cuDNN": f"{driver or 'none'} / {cudnn or 'none'}"}
    store = config.data.store.model_copy(update={"outage_minutes": 0.05, "cache_dir": None})
    for number, spec in enumerate(config.data.volumes):
        try:
            volume = open_volume(spec, store)
        except VesuviusError as error:
            words = one_line(error)
        else:
            sizes = (format_sizes(size) for size in (volume.shape_zyx, volume.chunk_zyx))
            words = f"{volume.name}: {' in chunks of '.join(sizes)}, {volume.dtype}, {codec_words(volume.array)}"
            volume.close()
        found[f"volume {number}" if number else "volume"] = words
    return found
