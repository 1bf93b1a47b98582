"""A profile as a report: the same page and tables, of some steps instead of a run.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from vesuvius.config import Config
from vesuvius.experiments.profile.observer import Observed
from vesuvius.monitor.quantile import quantile
from vesuvius.monitor.verdict import Verdict
from vesuvius.monitor.window import Thresholds
from vesuvius.report.content import NOT_KNOWN, RunReport, Table, filled
from vesuvius.report.model import build, ranks_table
from vesuvius.report.records import RunRecords, figure
from vesuvius.report.share import shared_out, targets_of, work_rows
from vesuvius.runlog.records import Record
from vesuvius.runlog.units import format_duration, number

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
    steps: Sequence[Record],
    observed: Observed,
    asked: int,
    next_command: str,
) -> RunReport:
    """The report of a profile.

    Args:
        records: of the run that was made for it.
        steps: the steps that count as they were recorded, with what readers and feeder did, and the one before them.
        observed: what the records do not say.
        asked: steps that were to count.
        next_command: what to type next.
    """
    chosen = counted(records, observed.after, asked)
    count, last = int(chosen.sum()), observed.after + asked
    only = replace(
        records,
        columns={name: column[chosen] for name, column in records.columns.items()},
        first=np.zeros(count, dtype=bool),
        timed=np.ones(count, dtype=bool),
        system=[each for each in records.system if observed.begin < figure(each.get("step")) <= last],
        others=[each for each in records.others if observed.after < figure(each.get("step")) <= last],
    )
    work_s = only.columns["step_s"] - only.columns["pause_s"]
    parts = shared_out(work_rows(records, chosen), float(work_s.sum()))
    run = build(only)
    whole_s = float(work_s.mean()) * config.horizon_steps
    facts = {key: run.facts[key] for key in _FACTS} | {
        "the whole training": f"{format_duration(whole_s)} for {config.horizon_steps} steps, without pauses",
        "device": f"{observed.device}, amp {observed.amp}",
        "network": f"{observed.parameters / 1e6:.2f} M parameters, channels {list(config.model.channels)}",
        "what to type next": next_command,
    }
    return replace(
        run,
        name=f"{config.name}: profile of {count} steps",
        facts=facts,
        verdict=observed.verdict.text if observed.verdict else NOT_KNOWN,
        parts=parts,
        targets=targets_of(parts, Thresholds()),
        charts=tuple(each for each in run.charts if each.key in ("parts", "step_s", "ram", "readers", "vram")),
        tables=filled(
            _to_try(observed.verdict),
            _behind(steps, config.training.workers),
            _operators(observed),
            ranks_table(only),
            _method(observed, count, asked),
        ),
        previews=(),
        parts_note=_NOTE,
    )


def counted(records: RunRecords, after: int, steps: int) -> Any:
    """Which of the recorded steps count: so many after one."""
    number_of = records.columns["step"]
    return (number_of > after) & (number_of <= after + steps)


def _to_try(verdict: Verdict | None) -> Table:
    """What the verdict asks for, and the most that it can give: a wait can be removed at most."""
    if verdict is None:
        return Table("What to try", (), ())
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
    if observed.left_out:
        note += f" The trace was too long: its {observed.left_out} shortest events are left out."
    columns = ("#", "operator", "calls a step", "own time, ms a step", "share")
    bars = tuple(each.self_ms for each in observed.operators)
    return Table(f"The {len(rows)} operators that take longest", columns, tuple(rows), note, bars)


def _method(observed: Observed, steps: int, asked: int) -> Table:
    texts = [
        f"{observed.warm_steps} steps {'come before' if observed.in_place else 'warm up'}: kernels are chosen, the "
        "batches that were ready at the start are used up, and the regions in flight are read. The next "
        f"{steps} count: {observed.after + 1} to {observed.after + steps}. They are steps of vesuvius train, with its "
        "loop, readers and clock.",
        "These are steps of the run itself. Pauses between them are left out."
        if observed.in_place
        else "Validation, previews and checkpoints are left out. The weights are thrown away.",
    ]
    if steps < asked:
        texts.append(f"The run ended before the remaining {asked - steps} steps to be measured.")
    judged = steps if observed.verdict is None else observed.verdict.window.steps
    if judged < steps:
        texts.append(f"Readers were replaced meanwhile: the verdict is based on the last {judged} steps only.")
    if observed.ranks > 1:
        texts.append(
            f"Rank 0 of {observed.ranks} was profiled; the table of ranks has the others."
            if observed.in_place
            else f"This is one rank of {observed.ranks}, without communication; vesuvius train --profile includes it."
        )
    return Table("Method", ("",), tuple((text,) for text in texts))
