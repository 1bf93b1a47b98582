"""A profile as a report: the same page and tables, of some steps instead of a run.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from vesuvius.config import Config
from vesuvius.experiments.profile.observer import Observed
from vesuvius.monitor.verdict import Verdict
from vesuvius.report.content import NOT_KNOWN, RunReport, Table, filled
from vesuvius.report.model import build
from vesuvius.report.records import RunRecords, figure
from vesuvius.report.share import shared_out, work_rows
from vesuvius.runlog.records import Record
from vesuvius.runlog.units import format_duration, number, quantile

_BEHIND = (
    ("readers: read from the store", "readers", "read_s"),
    ("readers: decode", "readers", "decode_s"),
    ("trainer: cut patches into batches", "feeder", "cut_s"),
    ("trainer: waits for readers", "feeder", "starved_s"),
    ("trainer: prefetch is full", "feeder", "full_s"),
)
_FACTS = ("samples/s", "step, p50", "step, p95", "peak RAM", "peak VRAM", "model FLOPs utilisation", "processors")
_NOTE = (
    "Seconds of all steps that count; they add up to the steps' own times. A wait that is hidden behind computing "
    "counts 0. What readers do meanwhile is in a separate table."
)


def build_profile(
    config: Config,
    records: RunRecords,
    recorded: Sequence[Record],
    observed: Observed,
    asked: int,
    ranks: int | Literal["auto"],
    next_command: str,
) -> RunReport:
    """The report of a profile.

    Args:
        records: of the run that was made for it.
        recorded: its steps as they were recorded, with what readers and feeder did.
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
        parts=shared_out(work_rows(records, chosen), float(work_s.sum())),
        charts=tuple(each for each in run.charts if each.key in ("parts", "step_s", "ram", "readers", "vram")),
        tables=filled(
            _to_try(verdict),
            _behind([each for each in recorded if after <= each["step"] <= last], config.training.workers),
            _operators(observed),
            Table("Method", ("",), tuple((text,) for text in method)),
        ),
        previews=(),
        parts_note=_NOTE,
    )


def counted(records: RunRecords, after: int, steps: int) -> Any:
    """Which of the recorded steps count: so many after one."""
    number_of = records.columns["step"]
    return (number_of > after) & (number_of <= after + steps)


def _to_try(verdict: Verdict) -> Table:
    """What the verdict asks for, and the most that it can give: a wait can be removed at most."""
    window = verdict.window
    waits = {"data-bound": window.data_share, "transfer-bound": window.h2d_share, "host-bound": window.host_share}
    wait = waits.get(verdict.kind, 0.0)
    gain = f"at most {1 / (1 - wait):.2f} times the speed" if 0 < wait < 1 else "vesuvius tune measures it"
    row = (verdict.advice, " ".join(verdict.overrides) or "no setting", gain if verdict.overrides else "none")
    return Table("What to try", ("what", "override", "gain"), (row,))


def _behind(steps: Sequence[Record], workers: int) -> Table:
    """What readers and feeder did beside the steps: differences of totals that only grow."""
    whole = math.fsum(figure(step["step_s"]) for step in steps[1:])
    rows = []
    for name, group, key in _BEHIND:
        totals = [figure((step.get(group) or {}).get(key)) for step in steps]
        if any(math.isnan(total) for total in totals) or len(totals) < 2:
            continue  # a disk: reading is part of decoding
        each = [after - before for before, after in pairwise(totals)]
        processes = max(workers, 1) if group == "readers" else 1
        share = f"{100 * math.fsum(each) / (whole * processes):.1f} %" if whole else NOT_KNOWN
        rows.append((name, number(1000 * math.fsum(each) / len(each)), share, number(1000 * quantile(each, 0.95))))
    note = (
        f"Milliseconds of a step, of all readers ({workers}) together, and the share of their time. They work in "
        "parallel with the steps and report a region at a time: single steps may have none. On a disk, decode includes "
        "reading."
    )
    return Table("Behind the data wait", ("part", "mean, ms", "share of its time", "p95, ms"), tuple(rows), note)


def _operators(observed: Observed) -> Table:
    rows = [
        (str(rank), each.name, number(each.calls), number(each.self_ms), f"{100 * each.share:.1f} %")
        for rank, each in enumerate(observed.operators, 1)
    ]
    where = "on the CPU" if observed.device == "CPU" else "on the GPU"
    note = f"Own time {where} of traced steps, which are slower than those that count."
    columns = ("#", "operator", "calls a step", "own time, ms a step", "share")
    bars = tuple(each.self_ms for each in observed.operators)
    return Table(f"The {len(rows)} operators that take longest", columns, tuple(rows), note, bars)
