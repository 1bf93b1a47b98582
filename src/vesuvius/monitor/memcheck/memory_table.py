"""The table that memcheck shows: an `Inspection` for people, drawn with rich.  Readable from 80 columns on.

What is not known is "-", never 0.  Page cache is shown but is no part of the total, and shared memory counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vesuvius.monitor.memcheck.inspection import Inspection, Row
from vesuvius.monitor.memory.risk import Level
from vesuvius.monitor.probes.gpus import GpuUse
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.runlog.units import GIB, format_duration, format_time, gib

_LEVEL_STYLES = {Level.LOW: "bold green", Level.WARN: "bold yellow", Level.CRITICAL: "bold red"}
_STATE_STYLES = {"running": "green", "hung": "bold yellow", "killed": "bold red"}
_SHOWN_SINGLES = 8
_SHOWN_KILLERS = 3

_Fact = tuple[str, str | Text]
"""Name and value."""


def memory_table(found: Inspection) -> RenderableType:
    """The whole of it: a heading, the parts, and below them what limits and threatens them."""
    blocks: list[RenderableType] = [_heading(found)]
    if found.rows:
        blocks.append(_parts(found))
    blocks.append(_facts(found))
    return Group(*blocks)


def slope_text(row: Row) -> str:
    """GiB an hour where growth or shrinking is beyond doubt; '-' where too little was seen to say."""
    if row.trend is not None:
        return f"{row.trend.bytes_per_s * 3600 / GIB:+.2f}"
    return "-" if row.seen_s is None else "no trend"


def _heading(found: Inspection) -> Text:
    heading = Text(found.name, style="bold", no_wrap=True, overflow="ellipsis")
    if found.state_text:
        heading.append("  ")
        heading.append(found.state_text, style=_STATE_STYLES.get(found.state, ""))
    heading.no_wrap = False
    return heading


def _parts(found: Inspection) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=False)
    table.add_column("memory")
    table.add_column("now GiB" if found.sample else "last GiB", justify="right")
    table.add_column("peak GiB", justify="right")
    table.add_column("slope GiB/h", justify="right")
    sums = sum(row.part == "reader" for row in found.rows) > 1
    for row in _shown(found.rows):
        is_total = row.part == "total"
        if is_total:
            table.add_section()
        is_below = row.part == "reader" and sums
        name = ("  " if is_below else "") + row.name
        now = gib(row.now_bytes)
        if is_total and found.limit_bytes is not None:
            now += f" of {gib(found.limit_bytes)}"
        style = "bold" if is_total else "dim" if is_below else ""
        table.add_row(Text(name), now, gib(row.peak_bytes), slope_text(row), style=style)
    if found.vram is not None:
        now = gib(found.vram.now_bytes)
        now += f" of {gib(found.vram_limit_bytes)}" if found.vram_limit_bytes is not None else ""
        table.add_row("VRAM of the trainer", now, gib(found.vram.peak_bytes), slope_text(found.vram))
    return table


def _shown(rows: Sequence[Row]) -> Iterator[Row]:
    """The largest single processes, and the rest of them as one row; one alone needs no sum above it."""
    singles = [row for row in rows if row.part == "reader"]
    if len(singles) == 1:
        rows = [row for row in rows if row.part != "readers"]
    left = {row.pid for row in singles[_SHOWN_SINGLES:]} if len(singles) > _SHOWN_SINGLES + 1 else set()
    for row in rows:
        if row.part == "reader" and row.pid in left:
            if row.pid == singles[_SHOWN_SINGLES].pid:
                size = sum(each.now_bytes or 0 for each in singles[_SHOWN_SINGLES:])
                yield Row("reader", f"{len(left)} more", None, size)
            continue
        yield row


def _facts(found: Inspection) -> Table:
    """Name and value, a line each; long values are broken."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _fact_lines(found):
        table.add_row(name, Text(value) if isinstance(value, str) else value)  # rich would read markup in a string
    return table


def _fact_lines(found: Inspection) -> Iterator[_Fact]:
    if found.level is not None:
        risk = Text(found.level.name, style=_LEVEL_STYLES[found.level])
        risk.append(f"  {found.reason}", style="default")
        yield "risk", risk
    elif found.reason:
        yield "first killer", found.reason
    for line in found.kills:
        yield "kill seen", Text(line, style="bold red")
    for number, killer in enumerate(found.killers[:_SHOWN_KILLERS]):
        counted = f"it counts {gib(killer.used_bytes)}, {gib(killer.left_bytes)} are left"
        yield "then" if number else "first killer", f"{killer.name} at {gib(killer.kills_at_bytes)} GiB; {counted}"
    if found.sample is not None:
        yield from _machine_lines(found, found.sample)
    yield from _gpu_lines(found)
    yield from _step_lines(found)
    for remark in found.remarks:
        yield "note", remark
    if found.peaks_since is not None and found.rows:
        yield "peaks", f"since {format_time(found.peaks_since)}"


def _machine_lines(found: Inspection, sample: SystemSample) -> Iterator[_Fact]:
    machine = sample.machine
    cache = "" if found.page_cache_bytes is None else f", page cache {gib(found.page_cache_bytes)} GiB"
    yield "machine", f"{gib(machine.used_bytes)} of {gib(machine.total_bytes)} GiB used by everything on it{cache}"
    total = machine.swap_total_bytes
    swap = f"{gib(machine.swap_used_bytes)} of {gib(total)} GiB" if total else "none"
    ours = sum(process.swap_bytes for process in sample.processes)
    yield "swap", swap + (f", {gib(ours)} GiB of it this run's" if ours else "")
    cores = f"{len(machine.core_total_s)}"
    if found.rates is not None:
        busy, own = sum(found.rates.core_busy), sum(found.rates.process_cores.values())
        cores += f", {busy:.1f} of them busy"
        cores += f": {own:.1f} by this, {max(busy - own, 0.0):.1f} by other programs" if sample.processes else ""
    yield "cores", cores


def _gpu_lines(found: Inspection) -> Iterator[_Fact]:
    gpus = found.sample.gpus if found.sample else ()
    for gpu in gpus:
        yield f"GPU {gpu.index}", _gpu_text(gpu)
    if not gpus and found.sample is not None:
        silent_s = found.sample.gpus_silent_s
        reason = f"NVML has not answered for {silent_s:.0f} s" if silent_s else found.no_gpus
        yield "GPU", f"- ({reason})" if reason else "-"


def _gpu_text(gpu: GpuUse) -> str:
    busy = "-" if gpu.busy is None else f"{100 * gpu.busy:.0f} %"
    text = f"{gib(gpu.used_bytes)} of {gib(gpu.total_bytes)} GiB, busy {busy}"
    text += "" if gpu.power_w is None else f", {gpu.power_w:.0f} W"
    text += "" if gpu.temperature_c is None else f", {gpu.temperature_c:.0f} °C"
    return f"{text}, {gpu.name}"


def _step_lines(found: Inspection) -> Iterator[_Fact]:
    steps = found.steps
    if steps is None:
        return
    if steps.step is None or steps.age_s is None:
        yield "last step", "-"
    else:
        p95 = "" if steps.step_s_p95 is None else f"; 95 % of steps take less than {steps.step_s_p95:.2f} s"
        yield "last step", f"{steps.step}, {format_duration(steps.age_s)} ago{p95}"
    if steps.verdict is not None:
        yield "verdict", steps.verdict
