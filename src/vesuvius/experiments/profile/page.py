"""A profile as a report: the same page and tables, of some steps instead of a run.  Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from vesuvius.config import Config
from vesuvius.experiments.profile.observer import Observed
from vesuvius.report.content import RunReport, Table, filled
from vesuvius.report.model import build
from vesuvius.report.records import RunRecords, figure
from vesuvius.report.share import work_parts
from vesuvius.runlog.units import format_duration

_FACTS = ("samples/s", "step, p50", "step, p95", "peak RAM", "peak VRAM", "model FLOPs utilisation", "processors")
_NOTE = (
    "Seconds of all steps that count; they add up to the steps' own times. A wait that is hidden behind computing "
    "counts 0."
)


def build_profile(
    config: Config,
    records: RunRecords,
    observed: Observed,
    asked: int,
    ranks: int | Literal["auto"],
    next_command: str,
) -> RunReport:
    """The report of a profile.

    Args:
        records: of the run that was made for it.
        observed: what the records do not say.
        asked: steps that count.
        ranks: of the run that is asked about, one of which was profiled.
        next_command: what to type next.
    """
    assert observed.verdict is not None, "all steps were made"
    verdict, after, last = observed.verdict, observed.warm_steps, observed.warm_steps + asked
    chosen = counted(records, after, asked)
    only = replace(
        records,
        columns={name: column[chosen] for name, column in records.columns.items()},
        first=np.zeros(asked, dtype=bool),
        timed=np.ones(asked, dtype=bool),
        system=[each for each in records.system if figure(each.get("step")) <= last],
        others=[],
    )
    work_s = only.columns["step_s"] - only.columns["pause_s"]
    run = build(only)
    whole_s = float(work_s.mean()) * config.horizon_steps
    facts = {key: run.facts[key] for key in _FACTS} | {
        "the whole training": f"{format_duration(whole_s)} for {config.horizon_steps} steps, without pauses",
        "device": f"{observed.device}, amp {observed.amp}",
        "network": f"{observed.parameters / 1e6:.2f} M parameters, channels {list(config.model.channels)}",
        "what to type next": next_command,
    }
    method = (
        f"{after} steps warm up: kernels are chosen, the batches that were ready at the start are used up, and the "
        f"regions in flight are read. The next {asked} count: {after + 1} to {last}. They are steps of vesuvius train, "
        "with its loop, readers and clock. Validation, previews and checkpoints are left out.",
        *(
            [f"Readers were replaced: the verdict is of the last {verdict.window.steps} steps."]
            if verdict.window.steps < asked
            else []
        ),
        *(["This is one rank, without communication; vesuvius bench --ranks measures that."] if ranks != 1 else []),
    )
    return replace(
        run,
        name=f"{config.name}: profile of {asked} steps",
        facts=facts,
        verdict=verdict.text,
        parts=tuple(work_parts(records, chosen, float(work_s.sum()))),
        charts=tuple(each for each in run.charts if each.key in ("parts", "step_s", "ram", "readers", "vram")),
        tables=filled(
            Table("Method", ("",), tuple((text,) for text in method)),
        ),
        previews=(),
        parts_note=_NOTE,
    )


def counted(records: RunRecords, after: int, steps: int) -> Any:
    """Which of the recorded steps count: so many after one."""
    number_of = records.columns["step"]
    return (number_of > after) & (number_of <= after + steps)
