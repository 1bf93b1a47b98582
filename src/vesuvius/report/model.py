"""`vesuvius report`: the page of one run, or of several with what differs and one curve of each in a chart.

Sentences, tables and charts come from the records of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vesuvius.config.describe import flatten
from vesuvius.report.charts import build_charts, split_time
from vesuvius.report.curves import Chart
from vesuvius.report.page import (
    FOLDER,
    NOT_KNOWN,
    PARTS_NOTE,
    RunReport,
    Table,
    filled,
    made_by,
    new_folder,
    write_page,
)
from vesuvius.report.records import Column, RunRecords, figure, read_run
from vesuvius.runlog.records import Record
from vesuvius.runlog.run_dir import RunDir
from vesuvius.runlog.units import format_duration, format_number, format_percent, format_size, format_time, quantile

_OVERLAID = ("loss", "relative_error", "step_s", "ram", "vram")
_LAST_STEPS = 100
_MOST_EVENTS = 200
_QUIET = ("step", "ranks", "run_start", "run_end", "verdict", "validation", "preview", "checkpoint", "block")


def write_report(runs: Sequence[Path], out: Path | None, command: str) -> Path:
    """Write report.html of one or several runs, and return their folder.

    Args:
        out: the folder; None = one named by the time, below the first run's `reports/`.

    Raises:
        StorageError: it cannot be written.
    """
    folder = out or new_folder(runs[0] / FOLDER)
    reports = named_apart([build(read_run(run)) for run in runs])
    tables, charts = comparison(reports)
    write_page(folder, "report", reports, made_by(command), (), tables, charts)
    return folder


def named_apart(reports: Sequence[RunReport]) -> list[RunReport]:
    """The reports, those of equal names with their directory."""
    names = [report.name for report in reports]
    return [replace(r, name=f"{r.name} ({r.directory})") if names.count(r.name) > 1 else r for r in reports]


def comparison(reports: Sequence[RunReport]) -> tuple[tuple[Table, ...], tuple[Chart, ...]]:
    """Tables of what differs, and charts that every run has a curve for or only some.  Empty for a single run."""
    if len(reports) < 2:
        return (), ()
    names = tuple(report.name for report in reports)
    facts = [(label, *(report.facts.get(label, NOT_KNOWN) for report in reports)) for label in reports[0].facts]
    keys = dict.fromkeys(key for report in reports for key in report.config)
    config = [(key, *(report.config.get(key, NOT_KNOWN) for report in reports)) for key in keys]
    result = Table("What differs in result", ("", *names), _different(facts))
    return filled(result, Table("What differs in config", ("key", *names), _different(config))), _overlaid(reports)


def _different(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(row for row in rows if len(set(row[1:])) > 1)


def _overlaid(reports: Sequence[RunReport]) -> tuple[Chart, ...]:
    """The first curve of each chart, named by its run."""
    made = []
    for key in _OVERLAID:
        found = [(r.name, chart) for r in reports for chart in r.charts if chart.key == key]
        if found:
            series = tuple(replace(chart.series[0], label=name) for name, chart in found)
            log = all(chart.log for _, chart in found)
            made.append(replace(found[0][1], series=series, limits=(), log=log))
    return tuple(made)


def build(records: RunRecords) -> RunReport:
    """Gather the report of one run."""
    verdicts = records.of_kind("verdict")
    return RunReport(
        name=str(records.config.get("name") or records.path.name),
        directory=str(records.path),
        facts=_facts(records),
        verdict=_end_words(records.state) + _verdict_words(verdicts) + _next_words(verdicts, records.path),
        parts=split_time(records),
        charts=tuple(build_charts(records)),
        tables=filled(ranks_table(records), _sessions(records), _events(records)),
        previews=_previews(records),
        config=config_texts(records.config),
        config_text=records.config_text,
        parts_note=f"{PARTS_NOTE}  {_window_words(records)}." if records.changed else PARTS_NOTE,
    )


def _end_words(state: str) -> str:
    """Of a run that ended before its last step, how: it is the first thing to know."""
    if state.startswith("killed"):
        return f"the run was {state}. Its last verdict: "
    early = state.startswith("ended") and not state.startswith("ended with exit code 0")
    return f"the run {state}. Its last verdict: " if early else ""


def _window_words(records: RunRecords) -> str:
    """Which steps the figures of time are of."""
    numbers = records.columns["step"][records.timed]
    if not len(numbers):
        return NOT_KNOWN
    why = f", since {', '.join(records.changed[:3])} changed" if records.changed else ""
    return f"steps {numbers[0]:.0f} to {numbers[-1]:.0f}{why}"


def _facts(records: RunRecords) -> dict[str, str]:
    steps, env = records.columns, records.environment
    work = steps["step_s"] - steps["pause_s"]
    later = records.timed & ~records.first if (records.timed & ~records.first).any() else records.timed
    packages = env.get("packages") or {}
    known = later & np.isfinite(work) & np.isfinite(steps["samples"])
    work_s, samples = np.sum(work[known]), np.sum(steps["samples"][known])
    # The most that the monitor saw, or the steps where it has not recorded.
    used = [figure((record.get("used_bytes") or [None])[-1]) for record in records.system]
    ram = largest(np.array([*used, *steps["ram_used_bytes"]]))
    gpus = [str(gpu) for gpu in env.get("gpus") or []]
    return {
        "state": records.state,
        "steps": _steps(steps),
        "time left": _time_left(steps, records.state),
        "last checkpoint": _last_checkpoint(records.of_kind("checkpoint")),
        "sessions": str(sum(record["kind"] == "run_start" for record in records.sessions)),
        "running time": _or_unknown(_last(steps["total_s"]), format_duration),
        "figures of time": f"{_window_words(records)}; without pauses and the first step of each session",
        "samples/s": _or_unknown(float(samples / work_s) if work_s else None, format_number),
        "step, p50": _quantile(work[later], 0.5),
        "step, p95": _quantile(work[later], 0.95),
        f"loss, mean of the last {_LAST_STEPS} steps": _or_unknown(_mean(steps["loss"][-_LAST_STEPS:]), format_number),
        "best validation (error over that of the best linear filter)": _best(records.of_kind("validation")),
        "non-finite steps": str(sum(event.get("event") == "nonfinite" for event in records.of_kind("event"))),
        "processes that died": str(sum(died for *_, died in records.deaths)),
        "peak RAM": of_limit(ram, largest(steps["ram_limit_bytes"])),
        "largest reader": _or_unknown(largest(steps["worker_max_bytes"]), format_size),
        "peak VRAM": of_limit(largest(steps["vram_used_bytes"]), largest(steps["vram_limit_bytes"])),
        "model FLOPs utilisation": _or_unknown(_mean(steps["mfu"]), format_percent),
        "GPU": ", ".join(gpus) if gpus else "none" if "gpus" in env else NOT_KNOWN,
        "cores": str(env.get("cpus") or NOT_KNOWN),
        "torch / vesuvius": f"{packages.get('torch') or NOT_KNOWN} / {packages.get('vesuvius-diffusion') or NOT_KNOWN}",
        "commit": commit_text(env),
    }


def _verdict_words(verdicts: Sequence[Record]) -> str:
    if not verdicts:
        return "no verdict was recorded: too few steps, or monitor.verdict_every=0"
    last = verdicts[-1]
    kinds = [str(verdict.get("bound")) for verdict in verdicts]
    counts = ", ".join(f"{kind} {kinds.count(kind)}" for kind in dict.fromkeys(kinds))
    return f"{last.get('text')} (step {last.get('step')}; verdicts so far: {counts})"


def _next_words(verdicts: Sequence[Record], run: Path) -> str:
    """The command to type next, if the last verdict names something to try."""
    return f". Type next: {RunDir(run).tune_command}" if verdicts and verdicts[-1].get("overrides") else ""


def ranks_table(records: RunRecords) -> Table:
    """A row for each rank, over the steps that all told of; none of a run of one rank."""
    steps = [record for record in records.of_kind("ranks") if isinstance(record.get("times"), list)]
    rows = []
    for rank in range(max((len(step["times"]) for step in steps), default=0)):
        told = [step["times"][rank] for step in steps if rank < len(step["times"])]
        slowest = sum(step.get("slowest") == rank for step in steps)
        names = ("trainer_bytes", "step_s", "comm_s", "pause_s")
        held, step_s, comm_s, pause_s = (np.array([figure(times.get(name)) for times in told]) for name in names)
        rows.append(
            (
                str(rank),
                str(told[-1].get("node", NOT_KNOWN)),
                _or_unknown(largest(held), format_size),
                _quantile(step_s - comm_s - pause_s, 0.5),
                _or_unknown(_mean(comm_s), format_number),
                f"{slowest} of {len(told)}",
            )
        )
    columns = ("rank", "node (last)", "trainer, private memory", "step without waits, p50", "comm_s, mean", "slowest")
    return Table("Ranks", columns, tuple(rows))


def _sessions(records: RunRecords) -> Table:
    rows = []
    for place, start in enumerate(records.sessions):
        if start["kind"] != "run_start":
            continue
        after = records.sessions[place + 1] if place + 1 < len(records.sessions) else None
        reached, how = NOT_KNOWN, records.state if after is None else "killed: no end was recorded"
        if after is not None and after["kind"] == "run_end":
            reached = str(after.get("step", NOT_KNOWN))
            how = f"exit code {after.get('exit_code')}: {after.get('cause')}"
        began = _or_unknown(figure(start.get("time")), format_time)
        rows.append((str(start.get("session", NOT_KNOWN)), began, str(start["step"]), reached, how))
    return Table("Sessions", ("#", "began", "from step", "to step", "how it ended"), tuple(rows))


def _events(records: RunRecords) -> Table:
    rows = [
        (figure(r.get("time")), str(r.get("step", "")), str(r.get("event", r["kind"])), _event_text(r))
        for r in records.others
        if r["kind"] not in _QUIET
    ]
    rows += [(time, str(step), "death" if died else "end", words) for time, step, words, died in records.deaths]
    rows.sort(key=lambda row: row[0])
    note = f"the last {_MOST_EVENTS} of {len(rows)}" if len(rows) > _MOST_EVENTS else ""
    shown = tuple(
        (format_time(time) if np.isfinite(time) else NOT_KNOWN, *rest) for time, *rest in rows[-_MOST_EVENTS:]
    )
    return Table("Events", ("time", "step", "event", "what happened"), shown, note)


def _event_text(record: Record) -> str:
    if record.get("text"):
        return str(record["text"])
    fields = {k: v for k, v in record.items() if k not in ("kind", "time", "step", "event") and v is not None}
    return ", ".join(f"{name} {value}" for name, value in fields.items() if isinstance(value, str | int | float))


def _previews(records: RunRecords) -> tuple[tuple[int, str], ...]:
    found = records.of_kind("preview")
    return tuple(
        (int(r["step"]), str(r["picture"])) for r in found if isinstance(r.get("step"), int) and r.get("picture")
    )


def config_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Values of a config as text, by the keys of overrides."""
    return {key: "null" if value is None else str(value) for key, value in flatten(config).items()}


def commit_text(environment: Mapping[str, Any]) -> str:
    """Of `env.json`, shortened; with a '+' where files differed from it."""
    if commit := str(environment.get("commit") or ""):
        return commit[:12] + commit[40:]
    version = (environment.get("packages") or {}).get("vesuvius-diffusion")
    return f"{NOT_KNOWN}, version {version}" if version else NOT_KNOWN


def _best(validations: Sequence[Record]) -> str:
    known = [(error, r.get("step")) for r in validations if np.isfinite(error := figure(r.get("relative_error")))]
    error, step = min(known, key=lambda each: each[0], default=(np.nan, None))
    return NOT_KNOWN if np.isnan(error) else f"{format_number(error)} at step {step}"


def _steps(steps: Mapping[str, Column]) -> str:
    done, asked = _last(steps["step"]), _last(steps["steps"])
    return NOT_KNOWN if done is None else f"{done:.0f}" + (f" of {asked:.0f}" if asked else "")


def _time_left(steps: Mapping[str, Column], state: str) -> str:
    """As the last step line of a run had it; of one that is over, none."""
    done, asked = _last(steps["step"]), _last(steps["steps"])
    if done is not None and asked is not None and done >= asked:
        return "none"
    if state.startswith(("ended", "killed")):
        left = "" if done is None or asked is None else f", {asked - done:.0f} steps before its last one"
        return f"none: the run is over{left}"
    return _or_unknown(float(steps["eta_s"][-1]) if len(steps["eta_s"]) else None, format_duration)


def _last_checkpoint(saved: Sequence[Record]) -> str:
    if not saved:
        return "none was recorded"
    return f"step {saved[-1].get('step')}, {_or_unknown(figure(saved[-1].get('saved_time')), format_time)}"


def of_limit(value: float | None, limit: float | None) -> str:
    if value is None:
        return NOT_KNOWN
    return format_size(value) + (f" of {format_size(limit)}" if limit else "")


def _or_unknown(value: float | None, words: Any) -> str:
    return NOT_KNOWN if value is None or not np.isfinite(value) else str(words(value))


def largest(values: Column) -> float | None:
    return _of_known(values, np.max)


def _mean(values: Column) -> float | None:
    return _of_known(values, np.mean)


def _last(values: Column) -> float | None:
    return _of_known(values, lambda known: known[-1])


def _quantile(values: Column, share: float) -> str:
    seconds = _of_known(values, lambda known: quantile(known.tolist(), share))
    return NOT_KNOWN if seconds is None else format_duration(seconds)


def _of_known(values: Column, figure_of: Callable[[Column], Any]) -> float | None:
    known = values[np.isfinite(values)]
    return float(figure_of(known)) if len(known) else None
