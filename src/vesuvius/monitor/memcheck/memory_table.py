"""Renders an `Inspection` as memcheck's table, with rich.  Readable from 80 columns on.

Unknown figures are "-", never 0.  Page cache is not part of the total, and shared memory counts once.
"""

import os
from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vesuvius.monitor.memcheck.inspection import Inspection, Part
from vesuvius.monitor.memory.risk import Level
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.runlog.units import format_duration, format_gib, format_size, format_time

_LEVEL_STYLES = {Level.LOW: "bold green", Level.WARN: "bold yellow", Level.CRITICAL: "bold red"}
_STATE_STYLES = {"running": "green", "hung": "bold yellow", "died": "bold red"}
_SHOWN_READERS = 8
_SHOWN_LIMITS = 3


def memory_table(found: Inspection) -> RenderableType:
    """Return the full table: a heading, memory by part, then limits, risk and the machine."""
    heading = Text(found.name, style="bold")
    heading.append(f"  {found.state_text}" if found.state_text else "", style=_STATE_STYLES.get(found.state, "default"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")  # wraps long values
    for name, value in _facts(found):
        facts.add_row(name, Text(value) if isinstance(value, str) else value)  # rich would read markup in a string
    return Group(heading, *([_parts(found)] if found.sample else []), facts)


def _parts(found: Inspection) -> Table:
    table = Table("memory", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("now GiB" if found.is_live else "last GiB", "peak GiB"):
        table.add_column(name, justify="right")
    vram = found.sample.vram if found.sample else None
    limits = {"total": found.limit_bytes, "vram": vram.total_bytes if vram else None}
    for part in _shown(found.parts()):
        if part.part == "total":
            table.add_section()
        limit_bytes = limits.get(part.part)
        now = format_gib(part.now_bytes) + ("" if limit_bytes is None else f" of {format_gib(limit_bytes)}")
        style = {"total": "bold", "worker": "dim"}.get(part.part, "")
        table.add_row(Text(part.name), now, format_gib(part.peak_bytes), style=style)
    return table


def _shown(parts: list[Part]) -> Iterator[Part]:
    readers = [part for part in parts if part.part == "worker"]
    left = readers[_SHOWN_READERS:]
    for part in parts:
        if part not in left:
            yield from [part] if part.part != "workers" or len(readers) > 1 else []
        elif part is left[-1]:
            yield Part("worker", f"{len(left)} more", None, sum(each.now_bytes for each in left), None)


def _facts(found: Inspection) -> Iterator[tuple[str, str | Text]]:
    if found.level is not None:
        yield "risk", Text.assemble((found.level.name, _LEVEL_STYLES[found.level]), f"  {found.reason}")
    for name, lines in (("OOM kill", found.kills), ("death", found.deaths)):
        for line in lines:
            yield name, Text(line, style="bold red")
    for number, limit in enumerate(found.limits[:_SHOWN_LIMITS]):
        used = f"{format_size(limit.used_bytes)} used, {format_size(limit.left_bytes)} left"
        yield "then" if number else "first limit", f"{limit.name}: kills at {format_size(limit.limit_bytes)}; {used}"
    if found.machine is not None:
        yield from _machine_facts(found.machine)
    for gpu in found.gpus:
        share = "-" if gpu.busy is None else f"{100 * gpu.busy:.0f} %"
        used = f"{format_size(gpu.used_bytes)} of {format_size(gpu.total_bytes)}"
        yield f"GPU {gpu.index}", f"{used}, busy {share}, {gpu.name}"
    if found.no_gpus:
        yield "GPU", f"- ({found.no_gpus})"
    if found.steps is not None:
        age_s, p95 = found.steps["age_s"], found.steps["step_s_p95"]
        ago = "-" if age_s is None else f"{found.steps['step']}, {format_duration(age_s)} ago"
        yield "last step", ago + ("" if p95 is None else f"; 95 % of steps take less than {format_duration(p95)}")
        if found.steps["verdict"] is not None:
            yield "verdict", found.steps["verdict"]
    for remark in found.remarks:
        yield "note", remark
    if found.peaks_since is not None:
        yield "peaks", f"since {format_time(found.peaks_since)}"


def _machine_facts(sample: SystemSample) -> Iterator[tuple[str, str]]:
    machine = sample.machine
    used = f"{format_size(machine.used_bytes)} of {format_size(machine.total_bytes)} used by all processes"
    yield "machine", f"{used}, page cache {format_size(machine.page_cache_bytes)}"
    swap = f"{format_size(machine.swap_used_bytes)} of {format_size(machine.swap_total_bytes)}"
    yield "swap", swap if machine.swap_total_bytes else "none"
    cores, usable = len(machine.core_total_s), usable_cores(os.getpid())
    yield "cores", f"{cores}" + (f", {usable:g} of them usable here (cpuset, CPU quota)" if usable < cores else "")
