"""A profile as a report: the same page and tables, of some steps instead of a run.  Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from vesuvius.config import Config
from vesuvius.monitor.quantile import quantile
from vesuvius.monitor.window import Thresholds
from vesuvius.profiling.observer import Observed
from vesuvius.profiling.recommend import Advice
from vesuvius.report.charts import build_charts
from vesuvius.report.content import NOT_KNOWN, RunReport, Table, filled
from vesuvius.report.curves import Chart, banded, chart
from vesuvius.report.model import config_texts, largest, of_limit, ranks_table
from vesuvius.report.records import RunRecords, figure
from vesuvius.report.share import Row, shared_out, targets_of, work_rows
from vesuvius.runlog.records import Record
from vesuvius.runlog.units import GIB, format_duration, format_sizes, number, size_text

_OPTIMIZER = "optimizer, clipping, EMA"
_EMA = "EMA of the weights, timed apart"
_BEHIND = (
    ("readers: read from the store", "I/O", "readers", "read_s"),
    ("readers: decode", "I/O", "readers", "decode_s"),
    ("trainer: cut patches into batches", "I/O", "feeder", "cut_s"),
    ("trainer: waits for readers", "I/O", "feeder", "starved_s"),
    ("trainer: prefetch is full", "I/O", "feeder", "full_s"),
)


def build_profile(
    config: Config,
    records: RunRecords,
    steps: Sequence[Record],
    observed: Observed,
    asked: int,
    advice: Sequence[Advice],
    alone: Sequence[str],
    inventory: Mapping[str, str],
) -> RunReport:
    """The report of a profile.

    Args:
        records: of the run that was made for it.
        steps: the steps that count as they were recorded, with what readers and feeder did, and the one before them.
        observed: what the records do not say.
        asked: steps that were to count.
        advice, alone: what to try, and what to leave alone.
        inventory: more of the machine and the volumes.
    """
    chosen = counted(records, observed.after, asked)
    count = int(chosen.sum())
    system = [each for each in records.system if observed.begin < figure(each.get("step")) <= observed.after + asked]
    only = replace(
        records,
        columns={name: column[chosen] for name, column in records.columns.items()},
        first=np.zeros(count, dtype=bool),
        timed=np.ones(count, dtype=bool),
        system=system,
        others=[each for each in records.others if observed.after < figure(each.get("step")) <= observed.after + asked],
    )
    columns = only.columns
    work_s = float((columns["step_s"] - columns["pause_s"]).sum())
    parts = shared_out(with_ema(work_rows(records, chosen), observed.ema_s, count), work_s)
    verdict = observed.verdict
    return RunReport(
        name=f"{config.name}: profile of {count} steps",
        directory=str(records.path),
        facts={**_facts(config, records, chosen, observed), **inventory},
        verdict=verdict.text if verdict else NOT_KNOWN,
        parts=parts,
        targets=targets_of(parts, Thresholds()),
        charts=(
            *(each for each in build_charts(only) if each.key in ("parts", "step_s", "ram", "readers", "vram")),
            *_memory(observed),
        ),
        tables=filled(
            _recommendations(advice),
            Table("No action needed", ("what",), tuple((text,) for text in alone)),
            _behind(steps, config.training.workers),
            _operators(observed),
            _layers(observed),
            ranks_table(only),
            _method(observed, count, asked),
        ),
        config=config_texts(records.config),
        config_text=records.config_text,
        parts_note=(
            "Seconds of all steps that count; they add up to the steps' own times. A wait that is hidden behind "
            "computing counts 0. What readers do meanwhile is in a separate table."
        ),
    )


def counted(records: RunRecords, after: int, steps: int) -> Any:
    """Which of the recorded steps count: so many after one."""
    number_of = records.columns["step"]
    return (number_of > after) & (number_of <= after + steps)


def with_ema(rows: Sequence[Row], ema_s: float, steps: int) -> list[Row]:
    """The averages' part taken out of the optimizer's, never more than that has, and put after all others."""
    made = list(rows)
    place = [name for name, *_ in rows].index(_OPTIMIZER)
    _, kind, total, p50, p95 = rows[place]
    each = min(ema_s, p50)
    ema = min(each * steps, total)
    made[place] = ("optimizer, clipping", kind, total - ema, p50 - each, p95 - each)
    return [*made, (_EMA, kind, ema, each, math.nan)]  # one figure, no distribution


def _facts(config: Config, records: RunRecords, chosen: Any, observed: Observed) -> dict[str, str]:
    columns, env, training = records.columns, records.environment, config.training
    work = (columns["step_s"] - columns["pause_s"])[chosen].tolist()
    p50 = quantile(work, 0.5)
    mean = math.fsum(work) / len(work)
    epoch = format_duration(mean * config.training.steps_per_epoch)
    left = f"{format_duration(mean * config.horizon_steps)} for {config.horizon_steps} steps"
    left += f" ({epoch} an epoch of {config.training.steps_per_epoch}), without pauses"
    packages: Mapping[str, Any] = env.get("packages") or {}
    mfu = columns["mfu"][chosen]
    return {
        "step, mean": f"{number(1000 * mean)} ms",
        "step, p50 / p95": f"{number(1000 * p50)} / {number(1000 * quantile(work, 0.95))} ms",
        "samples/s": number(config.global_batch / mean),
        "the whole training": left,
        "device": f"{observed.device}, amp {observed.amp}",
        "model FLOPs utilisation": NOT_KNOWN if not np.isfinite(mfu).any() else f"{100 * np.nanmean(mfu):.1f} %",
        "VRAM reserved": of_limit(largest(columns["vram_used_bytes"]), largest(columns["vram_limit_bytes"])),
        "RAM": of_limit(largest(columns["ram_used_bytes"]), largest(columns["ram_limit_bytes"])),
        "network": f"{observed.parameters / 1e6:.2f} M parameters, channels {list(config.model.channels)}",
        "patch": format_sizes(config.data.patch_size),
        "batch": f"{training.train_batch_size} x {training.accumulate_steps} = {config.global_batch} samples a step",
        "readers": f"{training.workers}, prefetch factor {training.prefetch_factor}",
        "settings": f"{training.optimizer}, compile {training.compile}, channels_last {training.channels_last}".lower(),
        "processors": str(env.get("cpus") or NOT_KNOWN),
        "system": str(env.get("platform") or NOT_KNOWN),
        "torch / CUDA": f"{packages.get('torch') or NOT_KNOWN} / {env.get('cuda') or 'none'}",
    }


def _recommendations(advice: Sequence[Advice]) -> Table:
    rows = [
        (str(rank), each.what, " ".join(each.overrides) or "no setting", each.gain, each.risk)
        for rank, each in enumerate(advice, 1)
    ]
    note = "One at a time, each measured again; vesuvius tune does that automatically."
    return Table("What to try, in this order", ("#", "what", "override", "gain", "risk"), tuple(rows), note)


def _behind(steps: Sequence[Record], workers: int) -> Table:
    """What readers and feeder did beside the steps: differences of totals that only grow."""
    whole = math.fsum(figure(step["step_s"]) for step in steps[1:])
    rows = []
    for name, kind, group, key in _BEHIND:
        totals = [figure((step.get(group) or {}).get(key)) for step in steps]
        if any(math.isnan(total) for total in totals) or len(totals) < 2:
            continue  # a disk: reading is part of decoding
        each = [after - before for before, after in pairwise(totals)]
        processes = max(workers, 1) if group == "readers" else 1
        mean = math.fsum(each) / len(each)
        rows.append(
            (
                name,
                kind,
                number(1000 * mean),
                f"{100 * math.fsum(each) / (whole * processes):.1f} %" if whole else NOT_KNOWN,
                number(1000 * quantile(each, 0.5)),
                number(1000 * quantile(each, 0.95)),
            )
        )
    note = (
        f"Milliseconds of a step, of all readers ({workers}) together, and the share of their time. They work in "
        "parallel with the steps and report a region at a time: single steps may have none. On a disk, decode includes "
        "reading."
    )
    columns = ("part", "class", "mean, ms", "share of its time", "p50, ms", "p95, ms")
    return Table("Behind the data wait", columns, tuple(rows), note)


def _memory(observed: Observed) -> list[Chart]:
    memory = observed.memory
    name, unit = ("GiB", GIB) if max(memory.allocated_bytes, default=0.0) >= GIB else ("MiB", 2**20)
    series = [banded("allocated", memory.ms, [size / unit for size in memory.allocated_bytes])]
    if any(memory.reserved_bytes):
        series.append(banded("reserved", memory.ms, [size / unit for size in memory.reserved_bytes]))
    note = "" if any(memory.reserved_bytes) else "above what was allocated when the trace began"
    title = "Memory of tensors in the traced steps"
    return chart("tensors", title, name, series, x_label="ms", note=note)


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


def _layers(observed: Observed) -> Table:
    rows = [
        (
            layer.name,
            layer.kind,
            f"{layer.parameters:,}",
            number(1000 * layer.forward_s),
            number(layer.flops / 1e9),
            size_text(layer.saved_bytes),
        )
        for layer in observed.layers
    ]
    columns = ("layer", "module", "parameters", "forward, ms", "forward, GFLOP", "kept for backward")
    note = (
        "Of one step. Watching itself costs time: compare layers with each other. Norms have no FLOP here; a "
        "tensor that two layers keep counts for the first."
    )
    return Table("Layers", columns, tuple(rows), note, tuple(layer.forward_s for layer in observed.layers))


def _method(observed: Observed, steps: int, asked: int) -> Table:
    before = "come before" if observed.in_place or observed.begin else "warm up"
    texts = [
        f"{observed.warm_steps} steps {before}: kernels are chosen, and the batches that were ready at the start are "
        f"used up. The next {steps} count: {observed.after + 1} to {observed.after + steps}. They are steps of "
        "vesuvius train, with its loop, readers and clock; between two of them a counter is raised.",
        "On a GPU, events on the device's own clock are read later: the host waits for nothing because of them. On a "
        "CPU, the host's clock.",
        "These are steps of the run itself. Pauses between them are left out."
        if observed.in_place
        else "Validation, previews and checkpoints are left out. The weights are thrown away.",
    ]
    if steps < asked:
        texts.append(f"The run ended before the remaining {asked - steps} steps to be measured.")
    judged = steps if observed.verdict is None else observed.verdict.window.steps
    if judged < steps:
        texts.append(f"Readers were replaced meanwhile: the verdict is based on the last {judged} steps only.")
    if observed.ranks > 1 and observed.in_place:
        texts.append(f"Rank 0 of {observed.ranks} was profiled; the table of ranks has the others.")
    elif observed.ranks > 1:
        texts.append(
            f"This is one rank of {observed.ranks}, without communication; vesuvius train --profile includes it."
        )
    if observed.begin:
        texts.append(f"It continued from the run's checkpoint of step {observed.begin}.")
    if observed.operators:
        texts.append("Trace and layers are from further steps, which do not count.")
    if observed.left_out:
        texts.append(f"The trace was too long: its {observed.left_out} shortest events are left out.")
    return Table("Method", ("",), tuple((text,) for text in texts))
