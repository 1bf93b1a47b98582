"""`vesuvius profile`: trains some steps in a folder below the run, and reports where their time goes.

An observer runs between two steps, so the loop, the clock and the records are those of training: it
counts the steps, traces some more, then ends the run.  The page is that of a run, limited to these steps.
"""

import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from vesuvius.accelerator import properties
from vesuvius.config import Config
from vesuvius.config.experiment import NEVER, trial_config
from vesuvius.errors import EXIT_OK, VesuviusError
from vesuvius.experiments.steady import Warmup
from vesuvius.monitor.verdict import Verdict
from vesuvius.report.charts import work_parts
from vesuvius.report.model import build, verdict_words
from vesuvius.report.page import RunReport, made_by, new_folder, render_html, write_page
from vesuvius.report.records import RunRecords, read_run
from vesuvius.runlog.run_dir import run_dir
from vesuvius.runlog.units import format_duration
from vesuvius.training.loop import TrainingLoop
from vesuvius.training.ranks.share import single_rank_config
from vesuvius.training.reporting.report import StepReporter
from vesuvius.training.request import Request
from vesuvius.training.run import train
from vesuvius.training.step.setup import parameter_count

_HIGHLIGHTS = ("samples/s", "step, p50", "step, p95", "full training", "peak RAM", "peak VRAM")
_FACTS = (*_HIGHLIGHTS, "model FLOPs utilization", "cores", "torch / vesuvius", "commit")
_NOTE = "Times of all counted steps; they add up to the step times.  Waits hidden behind computation count as 0."
MOST_WARM_STEPS = 40
_WARM_S = 10.0  # after which a trainer is slower than its readers
_TRACED_STEPS = 2
_OPERATORS = 25


@dataclass
class Observed:
    """Facts that are not in the records of the run; filled while it runs."""

    warm_steps: int = 0  # steps before the counted ones
    verdict: Verdict | None = None  # on the counted steps; None until all are made
    parameters: int = 0
    device: str = ""
    amp: str = ""


def observe(
    loop: TrainingLoop, reporter: StepReporter, observed: Observed, steps: int, trace: Path | None
) -> Iterator[None]:
    """Count `steps` steps, then trace some more into the file `trace`; yields before each step but the first."""
    run, on_gpu = loop.run, loop.run.device.type != "cpu"
    observed.parameters, observed.amp = parameter_count(loop.train_step.network), loop.train_step.amp
    observed.device = properties(run.device).name if on_gpu else "CPU"
    accumulate, batch = run.config.training.accumulate_steps, run.config.global_batch
    warmup, began = Warmup.of(loop.job.plan, loop.feed.stream.options, accumulate, batch), time.monotonic()
    warm = 1
    while warm < MOST_WARM_STEPS and not warmup.is_over(warm, time.monotonic() - began, _WARM_S):
        yield
        warm += 1
    observed.warm_steps = warm
    reporter.report(wait=True)
    reporter.verdicts.restart(run.progress.step)
    for _ in range(steps):
        yield
    reporter.report(wait=True)
    observed.verdict = reporter.verdicts.finish(min_steps=1)
    if trace is not None:  # it costs time, so these steps are not counted
        yield from _traced(trace, on_gpu)
    run.stop.request(EXIT_OK, "the profile has its steps")


def _traced(path: Path, on_gpu: bool) -> Iterator[None]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True)
    profiler.start()
    for _ in range(_TRACED_STEPS):
        yield
    profiler.stop()
    of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=of, row_limit=_OPERATORS, max_name_column_width=80)
    path.with_name("operators.txt").write_text(table, encoding="utf-8")
    profiler.export_chrome_trace(str(path))


def profile(config: Config, source: Path, steps: int, trace: bool, command: str) -> RunReport:
    """Train `steps` steps after the warm-up, trace some more, write profile.html.  Raises VesuviusError as `train`."""
    ranks, config = config.training.ranks, single_rank_config(config)
    folder, observed = new_folder(run_dir(config).path / "profiles"), Observed()

    def make_tuner(loop: TrainingLoop, reporter: StepReporter) -> Callable[[], None]:
        return partial(
            next, observe(loop, reporter, observed, steps, folder / "trace.json.gz" if trace else None), None
        )

    asked = Request(profiled(config, folder.name, steps), source, False, make_tuner=make_tuner, directory=folder)
    try:
        code = train(asked)
    finally:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if observed.verdict is None:
        error = VesuviusError(f"the run ended before all steps were profiled: exit code {code}; see {folder}/logs")
        error.exit_code = code or error.exit_code
        raise error
    tune = shlex.join(["vesuvius", "tune", "--config", str(source)])
    report = build_profile(config, read_run(folder), observed, steps, ranks, tune)
    write_page(folder, "profile", render_html([report], made_by(command)))
    return report


def profiled(config: Config, name: str, steps: int) -> Config:
    """The config of the profiled run: that of the training without validation.  Pure."""
    training: dict[str, Any] = {"validate_every": 0}
    least = 2 * (MOST_WARM_STEPS + steps + _TRACED_STEPS)  # readers go on beyond the steps that count, as in a long run
    if config.stop_step < least:
        warmup = min(config.training.warmup_steps, least - 1)
        training |= {"steps_per_epoch": least, "epochs": 1, "max_steps": None, "warmup_steps": warmup}
    return trial_config(config, name, training, {"verdict_every": NEVER})


def build_profile(
    config: Config, records: RunRecords, observed: Observed, asked: int, ranks: int | Literal["auto"], next_command: str
) -> RunReport:
    """The report of a profile of `asked` steps; `ranks` are those of the training, of which one was profiled."""
    assert observed.verdict is not None, "all steps were made"
    verdict, after, last = observed.verdict, observed.warm_steps, observed.warm_steps + asked
    number_of = records.columns["step"]
    chosen = (number_of > after) & (number_of <= last)
    only = replace(
        records,
        columns={name: column[chosen] for name, column in records.columns.items()},
        peaks={},
        first=np.zeros(asked, dtype=bool),
        timed=np.ones(asked, dtype=bool),
        system=[each for each in records.system if each.step <= last],
        others=[],
    )
    work_s = only.columns["work_s"]
    run = build(only)
    full_s = float(work_s.mean()) * config.horizon_steps
    facts = {key: run.facts[key] for key in _FACTS if key in run.facts} | {
        "full training": f"{format_duration(full_s)} for {config.horizon_steps} steps",
        "device": f"{observed.device}, amp {observed.amp}",
        "network": f"{observed.parameters / 1e6:.2f} M parameters, channels {list(config.model.channels)}",
    }
    method = (
        f"{after} warm-up steps (kernels are chosen, the regions in flight are read), then steps {after + 1} to {last} "
        "count.  They run as in vesuvius train, but without validation, previews and checkpoints."
    )
    if verdict.window.steps < asked:
        method += f"  Workers were replaced: the verdict covers the last {verdict.window.steps} steps."
    if ranks != 1:
        method += "  One rank was measured, without communication; vesuvius bench --ranks measures that."
    is_idle = verdict.kind == "compute-bound" and not verdict.overrides and observed.device == "CPU"
    return replace(
        run,
        name=f"{config.name}: profile of {asked} steps",
        facts=facts,
        highlights=_HIGHLIGHTS,
        headline=verdict_words(verdict.record(), has_gpu=observed.device != "CPU"),
        commands=() if is_idle else (next_command,),
        tone="",
        parts=tuple(work_parts(records, chosen, float(work_s.sum()))),
        charts=tuple(each for each in run.charts if each.key in ("parts", "step_s", "ram", "workers", "vram")),
        tables=(),
        previews=(),
        parts_note=f"{_NOTE}  {method}",
    )
